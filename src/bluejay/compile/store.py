"""The folder of compiled programs: one entry per fingerprint, found without looking at any other.

    entries/<fingerprint>/manifest.json, program-0.so, ...      complete, or not there
    locks/<fingerprint>                                         held while that entry is being made
    staging/<fingerprint>.<random>/                             an entry on its way in
    parts/                                                      the same again, of parts that programs have in common

An entry comes in by one rename and goes out by one rename. Whatever is found inside is believed only if the manifest's
own checksum, every file's checksum and every field of the fingerprint agree; anything else is a miss and is made again.
Nothing is ever unpickled. An entry is whole by itself: it holds copies of its parts, which only save compiling.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bluejay.compile.fingerprinting import Fingerprint
from bluejay.config import canonical, digest
from bluejay.errors import BluejayError
from bluejay.events import Event, Observer, ignore
from bluejay.files import flush, temporary_folder

FORMAT = 1
MANIFEST = "manifest.json"
_REQUIRED = {"fingerprint", "fields", "files", "label", "compile_seconds"}
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

Loaded = TypeVar("Loaded")
# Writes files into a folder and returns what the manifest should say of them, as plain data.
Build = Callable[[Path], dict[str, Any]]


class StoreError(BluejayError):
    """An entry or an archive that is absent, damaged, or not ours."""

    code = "store"


@dataclass(frozen=True)
class EntryInfo:
    """One entry of the store, for lists. `problem` is empty for a sound one.

    Attributes:
        label: what it was made for, in words.
        last_used: seconds since the epoch.
    """

    fingerprint: str
    label: str
    num_bytes: int
    compile_seconds: float
    last_used: float
    problem: str = ""


class Store:
    """Programs kept in one folder, shared by any number of processes.

    Attributes:
        compilations: programs made through this object, kept or not. A warm start leaves it at 0.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.compilations = 0
        self._warned = False

    # ---- finding and making ----------------------------------------------------------------------------------------

    def obtain(
        self,
        wanted: Fingerprint,
        build: Build,
        load: Callable[[Path, Mapping[str, Any]], Loaded],
        observe: Observer = ignore,
    ) -> tuple[Loaded, Mapping[str, Any], bool]:
        """Load the entry of a fingerprint, making it first if it is not there.

        Of several processes that ask at once, one builds and the others wait for it. A folder that cannot be written
        costs one warning, and the program is used without being kept.

        Returns: what `load` made of the entry's folder, its manifest, and whether it was built now.
        """
        found = self._load(wanted, load, observe)
        if found is not None:
            return *found, False
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._locked(wanted.digest, observe))
            except OSError as error:
                self._warn(error, observe)
            else:
                found = self._load(wanted, load, ignore)  # another process may have made it while we waited
                if found is not None:
                    return *found, False
            work = stack.enter_context(temporary_folder())
            manifest = make_entry(wanted, build, work)
            self.compilations += 1
            try:
                folder = self._put(work, manifest)
            except OSError as error:
                self._warn(error, observe)
                folder = work  # what is loaded stays loaded when the folder is deleted
            return load(folder, manifest), manifest, True

    def _load(
        self, wanted: Fingerprint, load: Callable[[Path, Mapping[str, Any]], Loaded], observe: Observer
    ) -> tuple[Loaded, Mapping[str, Any]] | None:
        folder = self._entry(wanted.digest)
        try:
            manifest = read_entry(folder)
            loaded = load(folder, manifest)
        except (FileNotFoundError, NotADirectoryError):
            if folder.exists():
                self._say_broken(folder, "a file is absent", observe)
            return None
        except (StoreError, OSError, RuntimeError, LookupError, TypeError, AttributeError, ValueError) as error:
            # A manifest that is sealed and yet lacks a key or has the wrong kind of value there was not written by us.
            self._say_broken(folder, error.found if isinstance(error, StoreError) else repr(error), observe)
            return None
        with contextlib.suppress(OSError):  # a store that cannot be written has no order of use
            os.utime(folder / MANIFEST)
        return loaded, manifest

    def has(self, wanted: Fingerprint) -> bool:
        """Whether a sound entry of this fingerprint is there. Nothing is loaded, and nobody is told."""
        try:
            read_entry(self._entry(wanted.digest))
        except (StoreError, OSError):
            return False
        return True

    def can_keep(self, observe: Observer = ignore) -> bool:
        """Whether entries can be written here, tried with a lock and a small file. If not, the one warning is given."""
        try:
            with self._locked("probe"):
                for name in ("staging", "entries"):
                    (self.folder / name).mkdir(exist_ok=True)
                    with tempfile.TemporaryDirectory(prefix="probe.", dir=self.folder / name) as folder:
                        _write(Path(folder, "probe"), b"probe")
        except OSError as error:
            self._warn(error, observe)
            return False
        return True

    def put(self, work: Path, manifest: Mapping[str, Any]) -> Path:
        """Copy the files of a sealed entry in under its fingerprint, replacing what is there; returns its folder.

        Raises:
            OSError: the store cannot be written.
        """
        with self._locked(manifest["fingerprint"]):
            return self._put(work, manifest)

    @property
    def parts(self) -> Store:
        """Parts of programs, kept by the same rules for the next program that has one in common with them."""
        return Store(self.folder / "parts")

    # ---- looking after ---------------------------------------------------------------------------------------------

    def entries(self, *, verify: bool = False) -> list[EntryInfo]:
        """All entries, last used first. With `verify` every file is read, otherwise only manifests."""
        infos = [self._info(folder, verify) for folder in self._folders()]
        return sorted((info for info in infos if info), key=lambda info: info.last_used, reverse=True)

    def show(self, prefix: str) -> Mapping[str, Any]:
        """The manifest of the entry whose fingerprint begins with `prefix`.

        Raises:
            StoreError: none or several do, or the entry is damaged.
        """
        return read_entry(self.find(prefix))

    def find(self, prefix: str) -> Path:
        """The folder of the entry whose fingerprint begins with `prefix`.

        Raises:
            StoreError: none or several do.
        """
        found = [folder for folder in self._folders() if folder.name.startswith(prefix)]
        if len(found) != 1:
            names = ", ".join(sorted(folder.name[:12] for folder in found))
            raise StoreError(
                asked=f"the program {prefix or '(no name)'}",
                found=f"{len(found)} entries begin so{': ' + names if names else ''} in {self.folder}",
                fix="give enough of a fingerprint that `bluejay cache list` shows",
            )
        return found[0]

    def prune(self, max_bytes: int) -> list[EntryInfo]:
        """Remove damaged entries, remains of killed writers, and the longest unused until the rest fits `max_bytes`.

        They go in that order and no gap is filled, so the last used goes only if it alone is larger than `max_bytes`,
        and then it goes after all others. Parts get what the entries leave. Returns the entries removed.
        """
        self._sweep()
        removed = []
        kept_bytes, full = 0, False
        for info in self.entries(verify=True):
            full = full or (not info.problem and kept_bytes + info.num_bytes > max_bytes)
            if info.problem or full:
                self._remove(self._entry(info.fingerprint))
                removed.append(info)
            else:
                kept_bytes += info.num_bytes
        if self.parts.folder.is_dir():
            self.parts.prune(max_bytes - kept_bytes)
        return removed

    def clear(self) -> list[EntryInfo]:
        """Remove every entry. Programs in use stay usable."""
        return self.prune(-1)

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _put(self, work: Path, manifest: Mapping[str, Any]) -> Path:
        """`put` for who holds the entry's lock."""
        entry = self._entry(manifest["fingerprint"])
        staging = self.folder / "staging"
        entry.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir(exist_ok=True)
        for remains in staging.glob(f"{entry.name}.*"):  # of writers that were killed: we hold their lock
            _delete(remains)
        incoming = staging / f"{entry.name}.{secrets.token_hex(8)}"
        incoming.mkdir()
        try:
            for name in manifest["files"]:
                _write(incoming / name, (work / name).read_bytes())
            _write(incoming / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True).encode())
            flush(incoming)
            self._remove(entry)
            incoming.rename(entry)
            flush(entry.parent)
        except OSError:
            shutil.rmtree(incoming, ignore_errors=True)
            raise
        return entry

    def _entry(self, fingerprint: str) -> Path:
        return self.folder / "entries" / fingerprint

    def _folders(self) -> list[Path]:
        parent = self.folder / "entries"
        return [folder for folder in parent.iterdir() if _DIGEST.fullmatch(folder.name)] if parent.is_dir() else []

    def _info(self, folder: Path, verify: bool) -> EntryInfo | None:
        label, compile_seconds, problem = "", 0.0, ""
        try:
            manifest = read_entry(folder, content=verify)
            label, compile_seconds = manifest["label"], manifest["compile_seconds"]
        except FileNotFoundError:
            problem = "a file is absent"
        except (StoreError, OSError) as error:
            problem = error.found if isinstance(error, StoreError) else str(error)
        try:
            stats = {file.name: file.stat() for file in folder.iterdir()}
            last_used = stats[MANIFEST].st_mtime if MANIFEST in stats else folder.stat().st_mtime
        except FileNotFoundError:
            return None  # removed by another process meanwhile
        num_bytes = sum(stat.st_size for stat in stats.values())
        return EntryInfo(folder.name, label, num_bytes, compile_seconds, last_used, problem)

    def _say_broken(self, folder: Path, problem: str, observe: Observer) -> None:
        text = f"the stored program {folder.name[:12]} cannot be used ({problem}); it is compiled again"
        observe(Event("warning", {"text": text}))

    def _warn(self, error: OSError, observe: Observer) -> None:
        if not self._warned:
            self._warned = True
            text = f"programs are not kept: {self.folder} cannot be written ({error.strerror or error})"
            observe(Event("warning", {"text": text}))

    def _remove(self, entry: Path) -> None:
        """Take an entry away in one step, then delete it at leisure."""
        gone = self.folder / "staging" / f"{entry.name}.{secrets.token_hex(8)}"
        gone.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            entry.rename(gone)
            _delete(gone)

    def _sweep(self) -> None:
        """Delete what writers that were killed left in staging. Those at work hold the lock of their entry."""
        for name in ("staging", "locks"):
            folder = self.folder / name
            for remains in list(folder.iterdir()) if folder.is_dir() else []:
                with contextlib.suppress(BlockingIOError), self._locked(remains.name.partition(".")[0], wait=False):
                    _delete(remains)

    @contextlib.contextmanager
    def _locked(self, fingerprint: str, observe: Observer = ignore, *, wait: bool = True) -> Iterator[None]:
        """Hold the lock of an entry. The system gives it back when its holder dies, however it dies.

        Raises:
            OSError: the folder cannot be written.  BlockingIOError: `wait` is false and another process holds it.
        """
        path = self.folder / "locks" / fingerprint
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if not wait:
                        raise
                    observe(Event("compile.wait", {"fingerprint": fingerprint}))
                    try:
                        fcntl.flock(descriptor, fcntl.LOCK_EX)
                    finally:
                        observe(Event("compile.waited", {"fingerprint": fingerprint}))
                # The last holder deleted the file before letting go: if that was ours, the lock holds nobody back.
                if not _is_same_file(descriptor, path):
                    continue
                try:
                    yield
                finally:
                    with contextlib.suppress(OSError):
                        path.unlink()
                return
            finally:
                os.close(descriptor)


def make_entry(wanted: Fingerprint, build: Build, work: Path) -> dict[str, Any]:
    """Build into `work`; returns the manifest of what is there then."""
    return seal({"format": FORMAT, "fingerprint": wanted.digest, "fields": wanted.fields, **build(work)}, work)


def seal(manifest: dict[str, Any], work: Path) -> dict[str, Any]:
    """The manifest with the checksum of every file in `work`, and one of itself."""
    files = {file.name: _file_record(file) for file in sorted(work.iterdir()) if file.is_file()}
    complete = canonical({**manifest, "files": files, "created": time.time()})
    return {**complete, "checksum": digest(complete)}


def read_entry(folder: Path, *, content: bool = True) -> Mapping[str, Any]:
    """The manifest of an entry, once everything about it has been checked (`content`: its files' bytes too).

    Raises:
        FileNotFoundError: no such entry, or a file of it is absent.
        StoreError: a checksum, the format or the name does not agree.
    """
    manifest = parse_manifest((folder / MANIFEST).read_bytes())
    if manifest["fingerprint"] != folder.name:
        raise _damaged(f"its manifest is that of {manifest['fingerprint'][:12]}")
    for name, record in manifest["files"].items():
        if content and _file_record(folder / name) != record:
            raise _damaged(f"{name} has changed since it was written")
    return manifest


def parse_manifest(raw: bytes) -> Mapping[str, Any]:
    """A manifest that agrees with its own checksum and with the fingerprint of its fields.

    Raises:
        StoreError: it does not.
    """
    try:
        manifest = json.loads(raw)
        checksum = manifest.pop("checksum")
        sound = checksum == digest(manifest)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise _damaged("its manifest cannot be read") from None
    if not sound:
        raise _damaged("its manifest has changed since it was written")
    if manifest.get("format") != FORMAT:
        raise _damaged(f"its format is {manifest.get('format')}, this version reads {FORMAT}")
    if not manifest.keys() >= _REQUIRED:
        raise _damaged(f"its manifest has no {', '.join(sorted(_REQUIRED - manifest.keys()))}")
    if manifest["fingerprint"] != digest(manifest["fields"]):
        raise _damaged("its fingerprint is not that of its fields")
    if not all(_FILE_NAME.fullmatch(name) for name in manifest["files"]):
        raise _damaged("it names a file outside its folder")
    return {**manifest, "checksum": checksum}


def _damaged(found: str) -> StoreError:
    return StoreError(asked="read a stored program", found=found, fix="run `bluejay cache prune`, which removes it")


def _file_record(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        return {"bytes": os.fstat(stream.fileno()).st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def _delete(path: Path) -> None:
    """Delete a file or a folder; what cannot be deleted is swept up by a later prune."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _write(target: Path, content: bytes) -> None:
    target.write_bytes(content)
    flush(target)


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        there, ours = path.stat(), os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)
