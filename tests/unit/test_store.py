"""The store of programs, with builds that take no compiler: what it believes, what it makes again, what it survives."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import bluejay.compile.store as room
from bluejay.compile import Environment, Fingerprint, Store, StoreError, export_programs, import_programs
from bluejay.config import canonical, digest
from bluejay.events import Event

HERE = Environment("Linux x86_64", "2.13.0", "g++ 12", ("avx2",), "AVX2", "", "", "")
SOURCES = {"bluejay.compile": "c0de", "bluejay.models": "f00d"}


def wanted(name: str = "decode", environment: Environment = HERE) -> Fingerprint:
    fields = {"name": name, "threads": 2, "environment": environment, "sources": SOURCES}
    return Fingerprint.of(canonical(fields))


class User:
    """Someone who asks a store for programs: counts builds, keeps warnings, and 'loads' by reading the file."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder)
        self.builds = 0
        self.events: list[Event] = []

    def build(self, folder: Path) -> dict[str, Any]:
        self.builds += 1
        (folder / "program-0.so").write_bytes(b"machine code " * 100)
        return {"label": "decode 1 row", "compile_seconds": 1.5, "plan": {"calls": [[0, [0], [1]]]}}

    def load(self, folder: Path, manifest: Mapping[str, Any]) -> bytes:
        return (folder / "program-0.so").read_bytes()

    def ask(self, fingerprint: Fingerprint | None = None) -> bool:
        """Whether it had to be built; the program must be right in any case."""
        loaded, manifest, built = self.store.obtain(fingerprint or wanted(), self.build, self.load, self.events.append)
        assert loaded == b"machine code " * 100
        assert manifest["label"] == "decode 1 row"
        return built

    @property
    def warnings(self) -> list[str]:
        return [event.fields["text"] for event in self.events if event.name == "warning"]


@pytest.fixture
def user(tmp_path: Path) -> User:
    return User(tmp_path / "store")


@pytest.fixture
def entry(user: User) -> Path:
    """An entry of the store, made by an earlier run."""
    assert User(user.store.folder).ask()
    return user.store.folder / "entries" / wanted().digest


def test_made_once_found_ever_after(user: User) -> None:
    """Catches a store that never hits, or that says so without the program."""
    assert [user.ask(), user.ask(), user.ask(wanted("prefill"))] == [True, False, True]
    assert not User(user.store.folder).ask()
    assert user.builds == user.store.compilations == 2
    assert user.warnings == []


def test_nothing_but_entries_stays_behind(user: User, entry: Path) -> None:
    """Catches temporary files and locks that pile up."""
    files = sorted(file.relative_to(user.store.folder) for file in user.store.folder.rglob("*") if file.is_file())
    assert files == [entry.relative_to(user.store.folder) / name for name in ("manifest.json", "program-0.so")]


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def not_json(file: Path) -> None:
    file.write_bytes(b"\x80\x04\x95 a pickle")


def other_json(file: Path) -> None:
    file.write_text("[" * 5000)


def a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def test_a_file_in_the_place_of_an_entry_is_replaced(user: User, entry: Path) -> None:
    """Catches a stray file that makes every start fail, or that is left lying in the store."""
    shutil.rmtree(entry)
    entry.touch()
    assert user.ask()
    assert not user.ask()
    assert list((user.store.folder / "staging").iterdir()) == []


@pytest.mark.parametrize("file", ["manifest.json", "program-0.so"])
@pytest.mark.parametrize("damage", [truncate, empty, flip, not_json, other_json, a_folder, Path.unlink])
def test_a_damaged_entry_is_made_again_with_one_warning(
    user: User, entry: Path, file: str, damage: Callable[[Path], None]
) -> None:
    """Catches a half-written or rotten entry that is loaded, or that crashes every start from then on. B-50."""
    damage(entry / file)
    assert user.ask()
    assert len(user.warnings) == 1
    assert wanted().digest[:12] in user.warnings[0]
    assert not user.ask()
    assert len(user.warnings) == 1


def test_a_changed_plan_is_noticed(user: User, entry: Path) -> None:
    """Catches a checksum that leaves something out: programs called in another order give another answer. B-50."""
    manifest = json.loads((entry / "manifest.json").read_text())
    manifest["plan"]["calls"][0][1] = [1]
    (entry / "manifest.json").write_text(json.dumps(manifest))
    assert user.ask()
    assert "manifest has changed" in user.warnings[0]


def rewrite(entry: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest and seal it again, as an older or other version would have written it."""
    manifest = json.loads((entry / "manifest.json").read_text())
    del manifest["checksum"]
    change(manifest)
    (entry / "manifest.json").write_text(json.dumps({**manifest, "checksum": digest(manifest)}))


@pytest.mark.parametrize("name", ["torch", "cpu_features", "compiler", "gpu"])
def test_another_stamp_is_a_miss_and_never_loaded(user: User, entry: Path, name: str) -> None:
    """Catches an artifact of another torch, processor or compiler, loaded because its folder's name fits. B-49."""
    loads = []
    user.load = lambda folder, manifest: loads.append(manifest) or User.load(user, folder, manifest)  # type: ignore
    rewrite(entry, lambda manifest: manifest["fields"]["environment"].update({name: "other"}))
    assert user.ask()
    assert [manifest["fields"] for manifest in loads] == [wanted().fields]
    assert len(user.warnings) == 1


def test_another_format_or_a_file_elsewhere_is_a_miss(user: User, entry: Path) -> None:
    """Catches an entry of tomorrow's layout read with today's eyes, and a name that leads out of the folder. B-49."""
    rewrite(entry, lambda manifest: manifest.update(format=2))
    assert user.ask()
    rewrite(entry, lambda manifest: manifest["files"].update({"../../secret": {"bytes": 0, "sha256": ""}}))
    assert user.ask()
    rewrite(entry, lambda manifest: manifest.pop("label"))
    assert "outside its folder" in user.warnings[1]
    assert [info.problem for info in user.store.entries()] == ["its manifest has no label"]
    assert user.ask()
    assert len(user.warnings) == 3


def test_an_entry_that_cannot_be_loaded_is_made_again(user: User, entry: Path) -> None:
    """Catches a library that this machine's loader refuses and that is offered again at every start. B-49."""
    fails = iter([True, True, False, False])

    def load(folder: Path, manifest: Mapping[str, Any]) -> bytes:
        if next(fails):
            raise RuntimeError("invalid ELF header")
        return b"machine code " * 100

    user.load = load  # type: ignore[method-assign]
    assert user.ask()
    assert ["invalid ELF header" in text for text in user.warnings] == [True]
    assert not user.ask()


def test_remains_of_a_killed_writer_are_no_entry(user: User, entry: Path) -> None:
    """Catches temporary files that are read as entries, and a writer's death that locks its entry for good. B-50."""
    shutil.copytree(entry, user.store.folder / "staging" / f"{wanted('prefill').digest}.0123")
    (user.store.folder / "locks" / wanted("prefill").digest).touch()
    (user.store.folder / "entries" / "notes.txt").touch()
    assert user.ask(wanted("prefill"))
    assert len(user.store.entries()) == 2
    user.store.prune(2**30)
    assert list((user.store.folder / "staging").iterdir()) == list((user.store.folder / "locks").iterdir()) == []
    assert len(user.store.entries()) == 2


def test_the_folder_may_be_deleted_at_any_time(user: User, entry: Path) -> None:
    """Catches a cache cleared while in use that ends the run. B-50."""
    assert not user.ask()
    shutil.rmtree(user.store.folder)
    assert user.ask()
    assert not user.ask()
    assert user.warnings == []


def test_a_file_in_the_place_of_the_folder_costs_one_warning(tmp_path: Path) -> None:
    """Catches a store that cannot be written and stops the run, or complains for every program. B-50."""
    (tmp_path / "store").touch()
    user = User(tmp_path / "store")
    assert [user.ask(), user.ask(), user.ask(wanted("prefill"))] == [True, True, True]
    assert len(user.warnings) == 1
    assert str(user.store.folder) in user.warnings[0]
    assert user.store.compilations == 3


def test_a_full_disk_costs_one_warning_and_leaves_nothing(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a disk that fills up while an entry is written: half an entry, or a dead run. B-50."""
    write = room._write

    def full(target: Path, content: bytes) -> None:
        write(target, content[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(room, "_write", full)
        assert [user.ask(), user.ask()] == [True, True]
    assert user.warnings == [f"programs are not kept: {user.store.folder} cannot be written (No space left on device)"]
    assert [file for file in user.store.folder.rglob("*") if file.is_file()] == []
    assert user.ask()
    assert not user.ask()


def test_a_read_only_store_is_read(user: User, entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a shared store that nobody but its owner can use. B-50."""

    def refuse(*arguments: Any, **named: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("mkdir", "open", "utime", "rename", "unlink"):
        monkeypatch.setattr(os, name, refuse)
    assert not user.ask()
    assert user.warnings == []


def test_a_failed_build_keeps_nothing_and_lets_the_next_try(user: User) -> None:
    """Catches an error that leaves an empty entry or a lock behind."""
    build = user.build

    def broken(folder: Path) -> dict[str, Any]:
        build(folder)
        raise ZeroDivisionError

    user.build = broken  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        user.ask()
    assert user.store.entries() == []
    user.build = build  # type: ignore[method-assign]
    assert user.ask()


def test_threads_build_once(user: User) -> None:
    """Catches a lock that holds processes apart and not threads."""
    users = [User(user.store.folder) for _ in range(6)]
    threads = [threading.Thread(target=other.ask) for other in users]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(other.builds for other in users) == 1


def test_a_hit_looks_at_one_entry_only(user: User, entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a store that reads the whole folder to find one program: 500 entries must cost a hit nothing. B-51."""
    for number in range(500):
        shutil.copytree(entry, entry.parent / digest(number))
    touched: set[str] = set()
    openers = {name: getattr(os, name) for name in ("scandir", "listdir", "open", "stat")}

    def watch(name: str) -> Callable[..., Any]:
        def watched(path: Any = ".", *arguments: Any, **named: Any) -> Any:
            touched.add(f"{name} {path}")
            return openers[name](path, *arguments, **named)

        return watched

    for name in openers:
        monkeypatch.setattr(os, name, watch(name))
    assert not user.ask()
    assert [call for call in touched if call.startswith(("scandir", "listdir"))] == []
    assert [call for call in touched if str(entry.parent) in call and str(entry) not in call] == []


def test_list_show_and_verify(user: User, entry: Path) -> None:
    """Catches a list that hides damage, or dies of it."""
    assert user.ask(wanted("prefill"))
    os.utime(entry / "manifest.json", (1, 1))
    old, new = sorted(user.store.entries(), key=lambda info: info.last_used)
    assert (old.fingerprint, old.label, old.compile_seconds, old.last_used) == (entry.name, "decode 1 row", 1.5, 1)
    assert old.num_bytes == sum(file.stat().st_size for file in entry.iterdir())
    assert user.store.entries()[0] == new
    assert user.store.show(entry.name[:10])["fields"]["name"] == "decode"
    flip(entry / "program-0.so")
    assert [info.problem for info in user.store.entries()] == ["", ""]
    assert user.store.entries(verify=True)[1].problem == "program-0.so has changed since it was written"
    for prefix in ("", "zz"):
        with pytest.raises(StoreError):
            user.store.show(prefix)


def test_use_is_remembered_and_the_longest_unused_go_first(user: User) -> None:
    """Catches pruning by age of making, which removes what is used every day; and a manifest rewritten at each use."""
    names = ["a", "b", "c", "d"]
    for name in names:
        user.ask(wanted(name))
    folders = {name: user.store.folder / "entries" / wanted(name).digest for name in names}
    for age, name in enumerate(names):
        os.utime(folders[name] / "manifest.json", (1000 + age, 1000 + age))
    before = (folders["a"] / "manifest.json").read_bytes()
    assert not user.ask(wanted("a"))
    assert (folders["a"] / "manifest.json").read_bytes() == before
    truncate(folders["c"] / "program-0.so")
    size = user.store.entries()[0].num_bytes
    removed = user.store.prune(2 * size + size // 2)
    assert {info.fingerprint for info in removed} == {wanted("c").digest, wanted("b").digest}
    assert not user.ask(wanted("a"))
    assert not user.ask(wanted("d"))
    user.store.clear()
    assert user.store.entries() == []


def test_parts_take_what_entries_leave(user: User) -> None:
    """Catches parts that pile up beyond the size a person allowed, or that push out programs."""
    user.ask(wanted("a"))
    (size,) = (info.num_bytes for info in user.store.entries())
    parts = User(user.store.parts.folder)
    parts.ask(wanted("part"))
    assert len(user.store.entries()) == len(user.store.parts.entries()) == 1
    user.store.prune(2 * size + size // 2)
    assert len(user.store.parts.entries()) == 1
    assert user.store.prune(size + size // 2) == []
    assert (len(user.store.entries()), user.store.parts.entries()) == (1, [])
    parts.ask(wanted("part"))
    user.store.clear()
    assert user.store.entries() == user.store.parts.entries() == []


def test_an_old_program_is_not_kept_because_it_is_small(user: User) -> None:
    """Catches pruning that fills gaps: what was unused for longest goes, though it would fit where another did not."""
    for age, (name, padding) in enumerate([("old", 0), ("large", 10**6), ("new", 0)]):
        build = user.build

        def padded(folder: Path, build: Any = build, padding: int = padding) -> dict[str, Any]:
            (folder / "padding").write_bytes(bytes(padding))
            return build(folder)

        user.store.obtain(wanted(name), padded, user.load)
        os.utime(user.store.folder / "entries" / wanted(name).digest / "manifest.json", (age, age))
    removed = user.store.prune(10**6)
    assert {info.fingerprint for info in removed} == {wanted("old").digest, wanted("large").digest}


def test_a_lock_has_one_holder_though_its_file_comes_and_goes(user: User) -> None:
    """Catches two builders at once: one got the lock of a deleted file, the other that of the new file. B-50."""
    held, release, waits = threading.Event(), threading.Event(), threading.Event()

    def second() -> None:
        with user.store._locked("x", lambda event: waits.set()):
            held.set()
            release.wait(60)

    thread = threading.Thread(target=second)
    with user.store._locked("x"):
        thread.start()
        assert waits.wait(60)
        time.sleep(0.05)  # from saying that it waits to waiting
    assert held.wait(60)
    with pytest.raises(BlockingIOError), user.store._locked("x", wait=False):
        pass
    release.set()
    thread.join()
    with user.store._locked("x", wait=False):
        pass


# ---- programs on the road ----------------------------------------------------------------------------------------


def test_exported_programs_are_found_on_a_machine_of_the_same_kind(user: User, entry: Path, tmp_path: Path) -> None:
    """Catches an import that has to compile after all."""
    exported = export_programs(user.store, tmp_path / "programs.zip")
    there = User(tmp_path / "elsewhere")
    report = import_programs(there.store, tmp_path / "programs.zip", HERE, SOURCES)
    assert report.imported == exported == (entry.name,)
    assert report.refused == {}
    assert report.threads == (2,)
    assert not there.ask()
    assert there.store.compilations == 0


@pytest.mark.parametrize("compiler", ["", "clang 19"])
def test_who_compiled_does_not_matter_to_who_runs(user: User, entry: Path, tmp_path: Path, compiler: str) -> None:
    """Catches shipped programs that a machine without a compiler, which needs them most, cannot find."""
    export_programs(user.store, tmp_path / "programs.zip")
    there, environment = User(tmp_path / "elsewhere"), replace(HERE, compiler=compiler)
    assert len(import_programs(there.store, tmp_path / "programs.zip", environment, SOURCES).imported) == 1
    assert not there.ask(wanted(environment=environment))


def test_another_kind_of_machine_is_told_what_differs(user: User, entry: Path, tmp_path: Path) -> None:
    """Catches a program of AVX-512 imported where it would die of an illegal instruction. B-49."""
    export_programs(user.store, tmp_path / "programs.zip")
    there = Store(tmp_path / "elsewhere")
    other = replace(HERE, cpu_features=("avx2", "sse4"), torch="2.14.0")
    report = import_programs(there, tmp_path / "programs.zip", other, {**SOURCES, "bluejay.models": "beef"})
    differences = {d.field: (d.theirs, d.ours) for d in report.refused[entry.name]}
    assert differences == {
        "environment.cpu_features": ("avx2", "avx2 sse4"),
        "environment.torch": ("2.13.0", "2.14.0"),
        "sources.bluejay.models": ("f00d", "beef"),
    }
    assert there.entries() == []


def test_a_damaged_or_foreign_archive_is_refused_whole(user: User, entry: Path, tmp_path: Path) -> None:
    """Catches half an import, a path that leads out of the store, and a file that is no archive at all."""
    file = tmp_path / "programs.zip"
    export_programs(user.store, file)
    whole = file.read_bytes()
    there = Store(tmp_path / "elsewhere")
    bad = [b"", whole[: len(whole) // 2], b"PK" + whole[2:-40], b"not a zip"]
    for content in bad:
        file.write_bytes(content)
        with pytest.raises(StoreError):
            import_programs(there, file, HERE, SOURCES)
    file.write_bytes(whole)
    with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../../escaped", b"")
    with pytest.raises(StoreError, match="escaped"):
        import_programs(there, file, HERE, SOURCES)
    assert there.entries() == []
    assert not (tmp_path / "escaped").exists()


def test_export_leaves_out_damage_and_refuses_nothing(user: User, entry: Path, tmp_path: Path) -> None:
    """Catches an archive with a rotten program in it, and an archive of nothing."""
    flip(entry / "program-0.so")
    with pytest.raises(StoreError):
        export_programs(user.store, tmp_path / "programs.zip")
    assert list(tmp_path.glob("*.zip*")) == []
    user.ask(wanted("prefill"))
    assert export_programs(user.store, tmp_path / "programs.zip") == (wanted("prefill").digest,)
