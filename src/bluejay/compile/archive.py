"""Programs on the road: entries of a store in one zip file, and from there into the store of another machine."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bluejay.compile.fingerprinting import Environment, Fingerprint
from bluejay.compile.store import MANIFEST, Store, StoreError, parse_manifest, read_entry, seal
from bluejay.config import canonical
from bluejay.files import replacing, temporary_folder

INDEX = "bluejay-programs.json"
FORMAT = 1


@dataclass(frozen=True)
class Difference:
    """A field in which an entry and this machine differ."""

    field: str
    theirs: str
    ours: str


@dataclass(frozen=True)
class ImportReport:
    """What an import did.

    Attributes:
        imported: fingerprints now in the store.
        refused: of each entry made by or for another kind of machine, the fields that differ.
        threads: numbers of CPU threads that the imported programs were made for.
    """

    imported: tuple[str, ...]
    refused: Mapping[str, tuple[Difference, ...]]
    threads: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def export_programs(store: Store, file: Path, fingerprints: Iterable[str] | None = None) -> tuple[str, ...]:
    """Write entries (all sound ones unless named) into one zip file; returns their fingerprints.

    Raises:
        StoreError: a named entry is absent or damaged, or there is nothing to write.
    """
    if fingerprints is None:
        fingerprints = [info.fingerprint for info in store.entries(verify=True) if not info.problem]
    folders = [store.find(fingerprint) for fingerprint in fingerprints]
    if not folders:
        raise StoreError(
            asked=f"export programs to {file}",
            found=f"no program in {store.folder}",
            fix="run `bluejay compile MODEL` first",
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as stream, zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        index = {"format": FORMAT, "programs": [folder.name for folder in folders]}
        archive.writestr(INDEX, json.dumps(index, indent=1))
        for folder in folders:
            for name in (MANIFEST, *read_entry(folder)["files"]):
                archive.write(folder / name, f"{folder.name}/{name}")
    return tuple(folder.name for folder in folders)


def import_programs(store: Store, file: Path, environment: Environment, sources: Mapping[str, str]) -> ImportReport:
    """Put the entries of an archive into the store, if they are for this kind of machine.

    Which C++ compiler made a program does not matter to who runs it, so that alone is no difference: such an entry is
    filed under the fingerprint that this machine will ask for, with or without a compiler of its own.

    Args:
        environment: this machine's (`environment(device, compiler)`).
        sources: digests of our own code by room (`room_digests()`).

    Raises:
        StoreError: not an archive of ours, or a damaged one; nothing of it is imported then.
    """
    entries = _read_archive(file)
    imported: list[str] = []
    refused: dict[str, tuple[Difference, ...]] = {}
    threads: set[int] = set()
    for manifest, contents in entries:
        differences = _differences(manifest["fields"], environment, sources)
        if differences:
            refused[manifest["fingerprint"]] = differences
            continue
        fields = dict(manifest["fields"])
        fields["environment"] = {**fields["environment"], "compiler": environment.compiler}
        here = Fingerprint.of(fields)
        with temporary_folder() as work:
            for name, content in contents.items():
                (work / name).write_bytes(content)
            told = {key: value for key, value in manifest.items() if key not in ("checksum", "files", "created")}
            store.put(work, seal({**told, "fingerprint": here.digest, "fields": here.fields}, work))
        imported.append(here.digest)
        threads |= {fields["threads"]} if "threads" in fields else set()  # kernels take any number
    return ImportReport(tuple(imported), refused, tuple(sorted(threads)))


def _read_archive(file: Path) -> list[tuple[Mapping[str, Any], dict[str, bytes]]]:
    """Every entry with its files' content, checked. Names in the archive are looked up, never used as paths."""

    def damaged(found: str) -> StoreError:
        return StoreError(
            asked=f"import programs from {file}",
            found=found,
            rule="an archive is what `bluejay cache export` wrote, byte for byte",
            fix="export it again",
        )

    raw = io.BytesIO(file.read_bytes())  # so that an OSError is the disk's, never a wrong offset in the archive
    try:
        with zipfile.ZipFile(raw) as archive:
            if any(member.compress_type != zipfile.ZIP_DEFLATED for member in archive.infolist()):
                raise damaged("it is not packed as an export is")
            index = json.loads(archive.read(INDEX))
            if index["format"] != FORMAT:
                raise damaged(f"format {index['format']}, this version reads {FORMAT}")
            entries = []
            expected = {INDEX}
            for fingerprint in index["programs"]:
                manifest = parse_manifest(archive.read(f"{fingerprint}/{MANIFEST}"))
                names = list(manifest["files"])
                expected |= {f"{fingerprint}/{name}" for name in (MANIFEST, *names)}
                contents = {name: archive.read(f"{fingerprint}/{name}") for name in names}
                entries.append((manifest, contents))
            if strange := sorted(set(archive.namelist()) - expected):
                raise damaged(f"it holds {strange[0]!r}, which no program names")
    except StoreError as error:
        raise damaged(error.found) from None
    except (zipfile.BadZipFile, zlib.error, KeyError, ValueError, TypeError, EOFError, RuntimeError) as error:
        raise damaged(f"it cannot be read ({error})") from None
    for manifest, contents in entries:
        for name, content in contents.items():
            if _record(content) != manifest["files"][name]:
                raise damaged(f"{name} of {manifest['fingerprint'][:12]} has changed since it was exported")
    return entries


def _record(content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _differences(
    fields: Mapping[str, Any], environment: Environment, sources: Mapping[str, str]
) -> tuple[Difference, ...]:
    theirs = {f"environment.{name}": value for name, value in fields["environment"].items()}
    ours = {f"environment.{name}": value for name, value in canonical(environment).items()}
    theirs |= {f"sources.{name}": value for name, value in fields["sources"].items() if name in sources}
    ours |= {f"sources.{name}": value for name, value in sources.items() if name in fields["sources"]}
    names = sorted((set(theirs) | set(ours)) - {"environment.compiler"})
    return tuple(
        Difference(name, _text(theirs.get(name)), _text(ours.get(name)))
        for name in names
        if theirs.get(name) != ours.get(name)
    )


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
