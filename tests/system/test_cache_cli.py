"""`bluejay cache`: every verb through the entry point, on a program that is compiled once; the journey of a program to
another home through real processes."""

from __future__ import annotations

import ctypes
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bluejay.cli import run
from bluejay.compile import EntryInfo, Fingerprint, Store, compile
from bluejay.compile.store import parse_manifest, seal
from bluejay.config import CompileSpec, digest

Answer = tuple[int, str, str]  # exit code, standard output, standard error
Cli = Callable[..., Answer]
ENTRY_FIELDS = {"fingerprint", "label", "num_bytes", "compile_seconds", "last_used", "problem"}

# The same program in a process of its own: it says what it computed and how many compilations that took.
USE = """
import json, torch
from pathlib import Path
from bluejay.compile import Store, compile
from bluejay.config import CompileSpec
from bluejay.machine import default_cache_folder
torch.manual_seed(0)
linear, row = torch.nn.Linear(4, 3), torch.arange(8.0).reshape(2, 4)
store = Store(default_cache_folder())
executable = compile(linear, (row,), CompileSpec(threads=1), store)
print(json.dumps([store.compilations, executable.bind(linear)(row)[0].tolist()]))
"""


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[float]]]:
    """A store of one program, and what the program computes. The one compilation of this file."""
    folder = tmp_path_factory.mktemp("made")
    torch.manual_seed(0)
    linear, row = nn.Linear(4, 3), torch.arange(8.0).reshape(2, 4)
    store = Store(folder)
    executable = compile(linear, (row,), CompileSpec(threads=1), store, label="a [bold]tiny[/] linear")
    assert store.compilations == 1
    return folder, executable.bind(linear)(row)[0].tolist()


@pytest.fixture
def folder(made: tuple[Path, list[list[float]]], tmp_path: Path) -> Path:
    """A store of one program, to be changed."""
    return Path(shutil.copytree(made[0], tmp_path / "store"))


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """`bluejay cache` in this process, not at a terminal."""
    monkeypatch.setenv("COLUMNS", "80")

    def call(*arguments: str | Path, stdin: io.StringIO | None = None) -> Answer:
        monkeypatch.setattr(sys, "stdin", stdin or io.StringIO())
        capsys.readouterr()
        code = run(["cache", *map(str, arguments)])
        return (code, *capsys.readouterr())

    return call


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def entries(folder: Path) -> list[EntryInfo]:
    """The programs of a store, every byte checked."""
    return Store(folder).entries(verify=True)


def only(folder: Path) -> Path:
    """The folder of a store's one entry."""
    (entry,) = (folder / "entries").iterdir()
    return entry


def add(folder: Path, name: str, *, label: str = "", used: float | None = None, **changes: Any) -> str:
    """Put a copy of the store's first program in under another identity and other fields; returns its fingerprint."""
    source = next((folder / "entries").iterdir())
    manifest = parse_manifest((source / "manifest.json").read_bytes())
    fields = json.loads(json.dumps(manifest["fields"])) | {"identity": {"name": name}}
    for path, value in changes.items():
        group, _, field = path.partition("__")
        fields[group] = {**fields[group], field: value} if field else value
    wanted = Fingerprint.of(fields)
    told = {key: value for key, value in manifest.items() if key not in ("checksum", "files", "created")}
    work = folder.parent / f"work-{name}"
    work.mkdir()
    for file in manifest["files"]:
        shutil.copy(source / file, work)
    sealed = seal({**told, "label": label or name, "fingerprint": wanted.digest, "fields": wanted.fields}, work)
    entry = Store(folder).put(work, sealed)
    if used is not None:
        os.utime(entry / "manifest.json", (used, used))
    return wanted.digest


def flip_a_byte(file: Path, at: int = -100) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def is_for_people(text: str) -> bool:
    """Fits 80 columns, but for lines that end in a path, and holds no control codes."""
    return "\x1b" not in text and all(len(line) <= 80 or "/" in line.split()[-1] for line in text.splitlines())


# ---- list and show -------------------------------------------------------------------------------------------------


def test_list_tells_the_last_used_first(cli: Cli, folder: Path) -> None:
    """A wrong order or sum; a field that is lost on the way to JSON; brackets of a label eaten as markup."""
    old = add(folder, "an old one", used=1e9)
    code, out, err = cli("list", "--cache", folder, "--json")
    assert (code, err) == (0, "")
    record = json.loads(out)
    assert set(record) == {"folder", "num_bytes", "parts_bytes", "programs"}
    assert record["folder"] == str(folder)
    assert all(set(program) == ENTRY_FIELDS for program in record["programs"])
    newest, oldest = record["programs"]
    assert (oldest["fingerprint"], oldest["last_used"]) == (old, 1e9)
    assert newest["compile_seconds"] > 0
    assert newest["num_bytes"] + oldest["num_bytes"] == record["num_bytes"]
    assert newest["num_bytes"] == sum(
        file.stat().st_size for file in Store(folder).find(newest["fingerprint"]).iterdir()
    )

    code, out, err = cli("list", "--cache", folder)
    assert (code, err) == (0, "")
    assert is_for_people(out)
    assert out.index(newest["fingerprint"][:12]) < out.index(old[:12])
    assert "a [bold]tiny[/] linear" in out
    assert f"2 programs, {record['num_bytes'] / 1024:.3g} KiB in {folder}" in out
    assert "1 part" not in out

    shutil.copytree(folder / "entries", folder / "parts" / "entries")
    assert json.loads(cli("list", "--cache", folder, "--json")[1]) == {**record, "parts_bytes": record["num_bytes"]}
    out = cli("list", "--cache", folder)[1]
    assert is_for_people(out)
    assert f"2 parts, {record['num_bytes'] / 1024:.3g} KiB, to compile" in out


def test_long_labels_are_told_in_full(cli: Cli, folder: Path) -> None:
    """A label cut to make it fit, which is the only part that tells two programs apart."""
    words = [f"word{i}" for i in range(40)]
    add(folder, "long", label=" ".join(words))
    code, out, _ = cli("list", "--cache", folder)
    assert code == 0
    assert is_for_people(out)
    assert all(word in out.split() for word in words)


@pytest.mark.parametrize("verb", ["list", "verify", "prune"])
def test_an_absent_store_is_an_empty_one(verb: str, cli: Cli, tmp_path: Path) -> None:
    """A crash on a machine that has compiled nothing yet; a folder made by whoever only looks."""
    code, out, err = cli(verb, "--cache", tmp_path / "absent")
    assert (code, err) == (0, "")
    assert str(tmp_path / "absent") in out
    assert not (tmp_path / "absent").exists()


def test_the_folder_comes_from_the_environment(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A default other than that of `bluejay generate`."""
    monkeypatch.setenv("BLUEJAY_CACHE", str(folder))
    assert json.loads(cli("list", "--json")[1])["folder"] == str(folder)


def test_show_tells_all_fields(cli: Cli, folder: Path) -> None:
    """JSON other than the manifest; a field of the fingerprint that people are not told."""
    entry = only(folder)
    manifest = json.loads((entry / "manifest.json").read_text())
    code, out, err = cli("show", entry.name[:7], "--cache", folder, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == manifest

    code, out, err = cli("show", entry.name, "--cache", folder)
    assert (code, err) == (0, "")
    assert is_for_people(out)
    environment = manifest["fields"]["environment"]
    told = [entry.name, "a [bold]tiny[/] linear", "torch.nn.modules.linear.Linear", "cpu, 1 thread", "blocks auto"]
    told += ["weight float32[3, 4]", "float32[2, 3]", "bluejay.compile"]
    told += [environment["compiler"], environment["torch"], environment["cpu_capability"], *environment["cpu_features"]]
    text = " ".join(out.split())
    assert [part for part in told if part not in text] == []


def test_show_asks_for_one_program(cli: Cli, folder: Path) -> None:
    """The first of several programs shown for a prefix that means both; an absent one met with a traceback."""
    other = add(folder, "other")
    code, out, err = cli("show", "", "--cache", folder)
    assert (code, out) == (1, "")
    assert "2 entries begin so" in err
    assert other[:12] in err
    code, out, err = cli("show", "zz", "--cache", folder, "--json")
    assert code == 1
    assert json.loads(out)["error"]["code"] == "store"
    assert "zz" in err


# ---- verify and prune ----------------------------------------------------------------------------------------------

FAULTS: dict[str, Callable[[Path], None]] = {
    "a byte of the program": lambda entry: flip_a_byte(entry / "program-0.so"),
    "a shorter program": lambda entry: os.truncate(entry / "program-0.so", 1000),
    "no program": lambda entry: (entry / "program-0.so").unlink(),
    "a byte of the manifest": lambda entry: flip_a_byte(entry / "manifest.json"),
    "an empty manifest": lambda entry: os.truncate(entry / "manifest.json", 0),
    "no manifest": lambda entry: (entry / "manifest.json").unlink(),
    "another name": lambda entry: os.rename(entry, entry.with_name("0" * 64)),
}


def test_verify_of_sound_programs(cli: Cli, folder: Path) -> None:
    """An alarm about programs that are as they were written."""
    add(folder, "other")
    assert json.loads(cli("verify", "--cache", folder, "--json")[1]) == {
        "folder": str(folder),
        "checked": 2,
        "damaged": [],
    }
    code, out, err = cli("verify", "--cache", folder)
    assert (code, err) == (0, "")
    assert "2 programs" in out
    assert "nothing is damaged" in out


@pytest.mark.parametrize("fault", FAULTS)
def test_verify_names_what_is_damaged(fault: str, cli: Cli, folder: Path) -> None:
    """Damage that is not seen or ends the search; exit code 0 all the same; a sound program accused (B-50)."""
    sound = add(folder, "sound")
    (before,) = (entry for entry in (folder / "entries").iterdir() if entry.name != sound)
    FAULTS[fault](before)
    (after,) = (entry.name for entry in (folder / "entries").iterdir() if entry.name != sound)
    code, out, err = cli("verify", "--cache", folder, "--json")
    assert (code, err) == (1, "")
    record = json.loads(out)
    assert record["checked"] == 2
    (damaged,) = record["damaged"]
    assert damaged["fingerprint"] == after
    assert damaged["problem"]

    code, out, _ = cli("verify", "--cache", folder)
    assert code == 1
    assert is_for_people(out)
    assert after[:12] in out
    assert sound[:12] not in out
    assert "1 of 2 programs damaged" in out


def test_prune_removes_damaged_programs_and_no_others(cli: Cli, folder: Path) -> None:
    """The way out that error messages name, `bluejay cache prune`, closed, or removing more than was broken."""
    damaged, sound = only(folder).name, add(folder, "sound")
    flip_a_byte(folder / "entries" / damaged / "program-0.so")
    code, out, err = cli("prune", "--cache", folder)
    assert (code, err) == (0, "")
    assert is_for_people(out)
    assert damaged[:12] in out
    assert "has changed since it was written" in " ".join(out.split())
    assert sound[:12] not in out
    assert [info.fingerprint for info in entries(folder)] == [sound]


def test_prune_keeps_the_last_used_up_to_the_size(cli: Cli, folder: Path) -> None:
    """The newest removed instead of the oldest; a size read as another unit; what went not told."""
    newest = only(folder).name
    middle, oldest = add(folder, "middle", used=1e9), add(folder, "oldest", used=1e8)
    sizes = {info.fingerprint: info.num_bytes for info in entries(folder)}
    two = sizes[newest] + sizes[middle]
    most = two // 1024 + 1
    code, out, err = cli("prune", "--max-size", f"{most} KiB", "--cache", folder, "--json")
    assert (code, err) == (0, "")
    record = json.loads(out)
    assert set(record) == {"folder", "max_bytes", "removed_bytes", "kept_bytes", "removed", "kept"}
    assert [(info["fingerprint"], info["label"]) for info in record["removed"]] == [(oldest, "oldest")]
    assert (record["removed_bytes"], record["kept_bytes"], record["kept"]) == (sizes[oldest], two, 2)
    assert record["max_bytes"] == most * 1024
    assert {info.fingerprint for info in entries(folder)} == {newest, middle}

    code, out, err = cli("prune", "--max-size=1", "--cache", folder)
    assert code == 0
    assert middle[:12] in out
    assert "removed 2 programs" in out
    assert "the last used program too" in err
    assert entries(folder) == []


@pytest.mark.parametrize("size", ["many", "-1", "1 apple", ""])
def test_prune_refuses_what_is_no_size(size: str, cli: Cli, folder: Path) -> None:
    """Everything deleted because of a typing error."""
    code, out, err = cli("prune", "--max-size", size, "--cache", folder)
    assert (code, out) == (2, "")
    assert "[config]" in err
    assert "2GiB" in err
    assert len(entries(folder)) == 1


# ---- clear ---------------------------------------------------------------------------------------------------------


def test_clear_without_a_terminal_needs_yes(cli: Cli, folder: Path) -> None:
    """A script that deletes by accident, or waits for an answer that cannot come."""
    code, out, err = cli("clear", "--cache", folder)
    assert (code, out) == (2, "")
    assert "--yes" in err
    assert len(entries(folder)) == 1

    fingerprint = only(folder).name
    code, out, err = cli("clear", "--yes", "--cache", folder, "--json")
    assert (code, err) == (0, "")
    record = json.loads(out)
    assert set(record) == {"folder", "removed_bytes", "removed"}
    assert [info["fingerprint"] for info in record["removed"]] == [fingerprint]
    assert record["removed_bytes"] == record["removed"][0]["num_bytes"] > 0
    assert entries(folder) == []
    assert cli("clear", "--yes", "--cache", folder)[:2] == (0, f"removed 0 programs from {folder}\n")


@pytest.mark.parametrize("answer", ["n\n", "\n", "", "yesterday\n"])
def test_clear_takes_only_yes_for_yes(answer: str, cli: Cli, folder: Path) -> None:
    """Deleted although the answer was no, nothing, or the end of input."""
    code, out, err = cli("clear", "--cache", folder, stdin=Terminal(answer))
    assert (code, out) == (1, "")
    assert f"from {folder}? [y/N]" in err
    assert "nothing was removed" in err
    assert len(entries(folder)) == 1


@pytest.mark.parametrize("answer", ["y\n", "YES\n"])
def test_clear_at_a_terminal_asks(answer: str, cli: Cli, folder: Path) -> None:
    """A question mixed into JSON; one that does not say how much is at stake; a yes that changes nothing."""
    code, out, err = cli("clear", "--cache", folder, "--json", stdin=Terminal(answer))
    assert code == 0
    assert len(json.loads(out)["removed"]) == 1
    assert err.startswith("remove 1 program, ")
    assert entries(folder) == []


# ---- export and import ---------------------------------------------------------------------------------------------


def test_a_program_travels(cli: Cli, made: tuple[Path, list[list[float]]], tmp_path: Path) -> None:
    """A program compiled again where it arrived, or one that computes something else there. The new home has no
    compiler, so that compiling again would also fail."""
    folder, outputs = made
    file = tmp_path / "travel" / "programs.zip"
    code, out, err = cli("export", file, "--cache", folder, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "file": str(file),
        "num_bytes": file.stat().st_size,
        "programs": [only(folder).name],
        "skipped": [],
    }
    home = tmp_path / "home"
    home.mkdir()
    elsewhere = {k: v for k, v in os.environ.items() if k not in ("BLUEJAY_CACHE", "XDG_CACHE_HOME", "CXX")}
    elsewhere |= {"HOME": str(home), "PATH": str(tmp_path / "nothing")}

    def there(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=elsewhere, cwd=home)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    record = json.loads(there("-m", "bluejay", "cache", "import", str(file), "--json"))
    assert set(record) == {"file", "folder", "imported", "refused", "threads"}
    assert (len(record["imported"]), record["refused"], record["threads"]) == (1, {}, [1])
    assert Path(record["folder"]).is_relative_to(home)
    assert json.loads(there("-c", USE)) == [0, outputs]


def test_import_for_people(cli: Cli, folder: Path, tmp_path: Path) -> None:
    """An import that changes programs, or leaves anything beside them; one that cannot be done twice."""
    file, there = tmp_path / "programs.zip", tmp_path / "there"
    add(folder, "other")
    code, out, err = cli("export", file, "--cache", folder)
    assert (code, err) == (0, "")
    assert out.startswith("2 programs, ")
    assert str(file) in out
    for _ in range(2):
        assert cli("import", file, "--cache", there) == (0, f"imported 2 programs into {there}\n", "")
    infos = entries(there)
    assert [info.problem for info in infos] == ["", ""]
    assert {info.fingerprint for info in infos} == {info.fingerprint for info in entries(folder)}
    assert [path for path in there.rglob("*") if path.is_file() and path.parents[1].name != "entries"] == []
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_import_tells_of_other_threads(cli: Cli, folder: Path, tmp_path: Path) -> None:
    """Programs that nobody will ask for here, imported without a word."""
    one = only(folder)
    add(folder, "eight", threads=8)
    shutil.rmtree(one)
    file = tmp_path / "programs.zip"
    cli("export", file, "--cache", folder)
    code, out, err = cli("import", file, "--cache", tmp_path / "there", "--json")
    assert code == 0
    assert json.loads(out)["threads"] == [8]
    assert "OMP_NUM_THREADS=8" in err


def test_export_replaces_a_file_only_on_request(cli: Cli, folder: Path, tmp_path: Path) -> None:
    """A checkpoint overwritten by a slip of the keyboard; a folder met with a traceback."""
    file = tmp_path / "precious"
    file.write_text("mine")
    code, _, err = cli("export", file, "--cache", folder)
    assert code == 2
    assert "--overwrite" in err
    assert file.read_text() == "mine"
    assert cli("export", file, "--overwrite", "--cache", folder)[0] == 0
    assert zipfile.is_zipfile(file)
    code, _, err = cli("export", tmp_path, "--overwrite", "--cache", folder)
    assert code == 2
    assert "a folder" in err


def test_export_leaves_damaged_programs_out_and_says_so(cli: Cli, folder: Path, tmp_path: Path) -> None:
    """A broken program shipped, or dropped without a word; an empty archive where nothing is left."""
    damaged, sound = only(folder).name, add(folder, "sound")
    flip_a_byte(folder / "entries" / damaged / "program-0.so")
    code, out, err = cli("export", tmp_path / "a.zip", "--cache", folder, "--json")
    assert code == 0
    record = json.loads(out)
    assert record["programs"] == [sound]
    assert [info["fingerprint"] for info in record["skipped"]] == [damaged]
    assert damaged[:12] in err

    shutil.rmtree(folder / "entries" / sound)
    code, out, err = cli("export", tmp_path / "b.zip", "--cache", folder)
    assert (code, out) == (1, "")
    assert "no program" in err
    assert not (tmp_path / "b.zip").exists()


OTHER_MACHINES: dict[str, tuple[Any, str, str]] = {
    "environment__torch": ("2.12.0+cpu abcdef", "environment.torch", "2.12.0+cpu abcdef"),
    "environment__cpu_features": (["neon", "sve"], "environment.cpu_features", "neon sve"),
    "environment__gpu": ("NVIDIA H200 9.0", "environment.gpu", "NVIDIA H200 9.0"),
    "environment__system": ("Darwin arm64", "environment.system", "Darwin arm64"),
    "sources__bluejay.generate": ("0" * 64, "sources.bluejay.generate", "0" * 64),
}


@pytest.mark.parametrize("change", OTHER_MACHINES)
def test_another_machine_is_told_what_differs(change: str, cli: Cli, folder: Path, tmp_path: Path) -> None:
    """A program of another machine taken, or refused without the field that differs; the programs beside it refused
    with it (B-49)."""
    value, field, theirs = OTHER_MACHINES[change]
    ours, foreign = only(folder).name, add(folder, "foreign", **{change: value})
    both, alone, there = tmp_path / "both.zip", tmp_path / "alone.zip", tmp_path / "there"
    cli("export", both, "--cache", folder)
    shutil.rmtree(folder / "entries" / ours)
    cli("export", alone, "--cache", folder)

    code, out, err = cli("import", alone, "--cache", there, "--json")
    assert (code, err) == (1, "")
    record = json.loads(out)
    assert record["imported"] == []
    (difference,) = record["refused"][foreign]
    assert set(difference) == {"field", "theirs", "ours"}
    assert (difference["field"], difference["theirs"]) == (field, theirs)
    assert not there.exists()

    code, out, err = cli("import", both, "--cache", there)
    assert (code, err) == (0, "")
    assert is_for_people(out)
    assert "imported 1 program" in out
    assert foreign[:12] in out
    assert field in out
    assert theirs[:20] in out
    assert [info.fingerprint for info in entries(there)] == [ours]


def test_no_damage_of_an_archive_gets_in(cli: Cli, folder: Path, tmp_path: Path) -> None:
    """A traceback, or part of a program in the store, for an archive that the journey has changed."""
    file, there = tmp_path / "programs.zip", tmp_path / "there"
    cli("export", file, "--cache", folder)
    whole = file.read_bytes()
    step = len(whole) // 24
    damaged = [whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :] for at in range(11, len(whole), step)]
    damaged += [whole[: len(whole) // 2], whole[:-30], b"", b"not a zip", whole[1000:]]
    for content in damaged:
        file.write_bytes(content)
        code, out, err = cli("import", file, "--cache", there, "--json")
        if code == 0:  # a byte that means nothing, such as a date
            assert [info.problem for info in entries(there)] == [""]
            shutil.rmtree(there)
            continue
        assert (code, json.loads(out)["error"]["code"]) == (1, "store"), err
        assert str(file) in err
        assert not there.exists()


def test_a_program_changed_inside_a_sound_zip_is_refused(cli: Cli, folder: Path, tmp_path: Path) -> None:
    """Trust in the zip file's own checksum, which whoever packs the archive again writes anew."""
    file, there = tmp_path / "programs.zip", tmp_path / "there"
    entry = only(folder)
    flip_a_byte(entry / "program-0.so")
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bluejay-programs.json", json.dumps({"format": 1, "programs": [entry.name]}))
        for member in ("manifest.json", "program-0.so"):
            archive.write(entry / member, f"{entry.name}/{member}")
    code, out, err = cli("import", file, "--cache", there)
    assert (code, out) == (1, "")
    assert "program-0.so" in err
    assert entry.name[:12] in err
    assert not there.exists()


@pytest.mark.parametrize("name", ["../evil", "/evil", "{entry}/../../evil", "{entry}/evil"])
def test_a_member_that_no_program_names_is_refused(name: str, cli: Cli, folder: Path, tmp_path: Path) -> None:
    """A file written outside the store, or any that the manifest does not vouch for."""
    file, there = tmp_path / "programs.zip", tmp_path / "inner" / "there"
    cli("export", file, "--cache", folder)
    member = name.format(entry=only(folder).name)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr(member, "evil", zipfile.ZIP_DEFLATED)
    code, _, err = cli("import", file, "--cache", there)
    assert code == 1
    assert member in err
    assert not there.exists()
    assert not list(tmp_path.rglob("evil"))


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "a/b", ".hidden", ".."])
def test_a_manifest_that_names_a_path_is_refused(name: str, cli: Cli, folder: Path, tmp_path: Path) -> None:
    """A file name taken for a path, in a manifest whose checksums all agree."""
    file, there = tmp_path / "programs.zip", tmp_path / "inner" / "there"
    entry = only(folder)
    manifest = json.loads((entry / "manifest.json").read_text())
    manifest["files"][name] = manifest["files"]["program-0.so"]
    del manifest["checksum"]
    manifest["checksum"] = digest(manifest)  # as the store's own seal would be
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bluejay-programs.json", json.dumps({"format": 1, "programs": [entry.name]}))
        archive.writestr(f"{entry.name}/manifest.json", json.dumps(manifest))
        for member in manifest["files"]:
            archive.write(entry / "program-0.so", f"{entry.name}/{member}")
    code, out, err = cli("import", file, "--cache", there, "--json")
    assert (code, json.loads(out)["error"]["code"]) == (1, "store")
    assert "outside its folder" in err
    assert not there.exists()
    assert not list(tmp_path.rglob("evil"))


# ---- folders that cannot be used -----------------------------------------------------------------------------------


@contextmanager
def bound_by_permissions() -> Iterator[None]:
    """Root of Linux without its right to pass over the permissions of files; other users have none to give up."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # the layout of version 3; this thread
    held = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice
    assert libc.capget(header, held) == 0
    fewer = (ctypes.c_uint32 * 6)(*held)
    fewer[0] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    assert libc.capset(header, fewer) == 0
    try:
        yield
    finally:
        assert libc.capset(header, held) == 0


@pytest.fixture
def read_only(folder: Path) -> Iterator[Path]:
    """A store that may be read and not changed."""
    parts = [folder, *folder.rglob("*")]
    for part in parts:
        part.chmod(0o555 if part.is_dir() else 0o444)
    with bound_by_permissions():
        yield folder
    for part in parts:
        part.chmod(0o755)


def test_a_read_only_store_can_be_looked_at(cli: Cli, read_only: Path) -> None:
    """A look that needs the right to write."""
    fingerprint = only(read_only).name
    for arguments in (["list"], ["show", fingerprint[:9]], ["verify"]):
        code, out, err = cli(*arguments, "--cache", read_only)
        assert (code, err) == (0, "")
        assert out


def test_a_read_only_store_stays_as_it_is(cli: Cli, read_only: Path, tmp_path: Path) -> None:
    """A traceback, or code 0, where nothing could be done; a program that is half gone (B-50)."""
    archive = tmp_path / "programs.zip"
    assert cli("export", archive, "--cache", read_only)[0] == 0
    for arguments in (["prune", "--max-size", "0"], ["clear", "--yes"], ["import", str(archive)]):
        code, out, err = cli(*arguments, "--cache", read_only, "--json")
        assert (code, json.loads(out)["error"]["code"]) == (1, "machine"), err
        assert str(read_only) in err
        assert "Permission denied" in err
    code, out, err = cli("export", read_only / "a.zip", "--cache", read_only, "--json")
    assert (code, json.loads(out)["error"]["code"]) == (1, "machine")
    assert [info.problem for info in entries(read_only)] == [""]


@pytest.mark.parametrize("verb", ["list", "verify", "prune", "clear"])
def test_a_file_is_no_store(verb: str, cli: Cli, tmp_path: Path) -> None:
    """An empty store told of a path that is no folder at all."""
    file = tmp_path / "file"
    file.write_text("")
    code, out, err = cli(verb, *(["--yes"] if verb == "clear" else []), "--cache", file)
    assert (code, out) == (2, "")
    assert str(file) in err


def test_an_absent_archive_is_wrong_use(cli: Cli, tmp_path: Path) -> None:
    """A traceback for a misspelled name, or a folder taken for an archive."""
    for path in (tmp_path / "absent.zip", tmp_path):
        code, out, err = cli("import", path, "--cache", tmp_path / "there")
        assert (code, out) == (2, "")
        assert str(path) in err
        assert not (tmp_path / "there").exists()


# ---- the parser ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argv", [["cache"], ["cache", "lst"], ["cache", "list", "--nope"], ["cache", "show"]])
def test_wrong_use_is_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake inside a group of verbs answered by a traceback, by code 1, or without the verbs there are."""
    assert run(argv) == 2
    out, err = capsys.readouterr()
    assert "list" in out + err or "show" in out + err
    assert "Traceback" not in err


@pytest.mark.parametrize("argv", [["cache", "--help"], ["cache", "import", "--help"], ["cache", "prune", "--max-size"]])
def test_help_and_mistakes_answer_without_torch(argv: list[str]) -> None:
    """A group of verbs that imports the compiler at its top, which makes every help text wait."""
    code = f"import sys; from bluejay.cli import run; run({argv!r}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "False"
