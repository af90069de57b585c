"""Several processes and one store: they build once, survive each other's death, and find each other's work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bluejay.compile import Job, Store, compile, compile_all
from bluejay.config import CompileSpec
from bluejay.errors import ConfigError
from bluejay.events import Event

SOURCE = Path(__file__).parents[2] / "src"

# Asks the store for one program. Says when it builds, and then takes as long as it is told; says what it got.
ASK = """
import json, sys, time
from pathlib import Path
from bluejay.compile import Fingerprint, Store

folder, seconds, size = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])

def build(work):
    print("building", flush=True)
    time.sleep(seconds)
    (work / "program-0.so").write_bytes(b"x" * size)
    return {"label": "test", "compile_seconds": seconds}

def load(entry, manifest):
    return (entry / "program-0.so").read_bytes() == b"x" * size

warnings = []
store = Store(folder)
right, _, built = store.obtain(Fingerprint.of({"name": "decode"}), build, load, lambda e: warnings.append(e.name))
print(json.dumps({"right": right, "built": built, "compilations": store.compilations, "events": warnings}), flush=True)
"""


def ask(folder: Path, seconds: float = 0.0, size: int = 1000) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", ASK, str(folder), str(seconds), str(size)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def answer(process: subprocess.Popen[str]) -> dict[str, object]:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return json.loads(output.splitlines()[-1])


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    """What a test starts; none survives it."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_four_at_once_make_one_entry(tmp_path: Path, processes: list[subprocess.Popen[str]]) -> None:
    """Catches processes that all compile the same program, or mix their files. B-50."""
    processes += [ask(tmp_path, seconds=1.0) for _ in range(4)]
    answers = [answer(process) for process in processes]
    assert all(each["right"] for each in answers)
    assert sorted(str(each["built"]) for each in answers) == ["False", "False", "False", "True"]
    assert sum(int(str(each["compilations"])) for each in answers) == 1
    assert len(list((tmp_path / "entries").iterdir())) == 1
    assert list((tmp_path / "locks").iterdir()) == list((tmp_path / "staging").iterdir()) == []


def test_a_builder_that_is_killed_hands_over(tmp_path: Path, processes: list[subprocess.Popen[str]]) -> None:
    """Catches a lock that outlives its holder: the next process must build at once, not wait for ever. B-50."""
    builder = ask(tmp_path, seconds=600)
    processes.append(builder)
    assert builder.stdout is not None
    assert builder.stdout.readline() == "building\n"
    waiter = ask(tmp_path)
    processes.append(waiter)
    while not _holds_open(waiter.pid, tmp_path / "locks"):  # it has come to the lock
        assert waiter.poll() is None
        time.sleep(0.05)
    builder.send_signal(signal.SIGKILL)
    result = answer(waiter)
    assert (result["right"], result["built"]) == (True, True)
    assert answer(ask(tmp_path))["built"] is False


def test_kill_while_writing_leaves_a_store_that_works(tmp_path: Path, processes: list[subprocess.Popen[str]]) -> None:
    """Catches a torn entry: killed at any moment of a large write, the store serves the next process rightly. B-50."""
    size = 200_000_000
    for delay in (0.0, 0.05, 0.2):
        writer = ask(tmp_path, size=size)
        processes.append(writer)
        staging = tmp_path / "staging"
        while not (staging.is_dir() and any(staging.iterdir())):
            assert writer.poll() is None
            time.sleep(0.002)
        time.sleep(delay)
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        entries = tmp_path / "entries"
        complete = [entry for entry in entries.iterdir() if (entry / "manifest.json").exists()]
        if complete:  # it was quicker than the signal: what it left must then be whole
            assert answer(ask(tmp_path, size=size)) == {
                "right": True, "built": False, "compilations": 0, "events": []
            }  # fmt: skip
            for entry in complete:
                (entry / "manifest.json").unlink()
    result = answer(ask(tmp_path, size=size))
    assert (result["right"], result["built"]) == (True, True)
    assert list((tmp_path / "staging").iterdir()) == []


def _holds_open(pid: int, folder: Path) -> bool:
    descriptors = Path(f"/proc/{pid}/fd")
    if not descriptors.is_dir():  # no such place on this system: give it the time it takes to come there
        time.sleep(5)
        return True
    targets = []
    for link in descriptors.iterdir():
        try:
            targets.append(os.readlink(link))
        except FileNotFoundError:
            continue
    return any(target.startswith(str(folder)) for target in targets)


# ---- workers -------------------------------------------------------------------------------------------------------


def jobs(*modules: nn.Module) -> list[Job]:
    return [Job(module, (torch.ones(2, 8),), label=type(module).__name__) for module in modules]


class Local(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x + 1,)


def test_workers_fill_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches programs that workers make under another key, so that the run compiles them once more."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)  # workers have their own idea of it
    events: list[Event] = []
    store, spec, modules = Store(tmp_path), CompileSpec(), (nn.LayerNorm(8), nn.Softmax(-1))
    assert compile_all(jobs(*modules), spec, store, events.append, workers=2) == 2
    assert store.compilations == 2
    labels = {event.fields["label"] for event in events if event.name == "compile.done"}
    assert labels == {"LayerNorm", "Softmax"}
    assert [event for event in events if event.name == "warning"] == []
    for module in modules:
        executable = compile(module, (torch.ones(2, 8),), spec, store)
        assert not executable.was_compiled
        x = torch.randn(2, 8)
        torch.testing.assert_close(executable.bind(module)(x)[0], module(x))
    assert compile_all(jobs(*modules), spec, store, workers=2) == 0


def test_what_a_worker_cannot_do_is_done_or_explained_here(tmp_path: Path) -> None:
    """Catches a failure that stays in a worker: a class it cannot import, and a module that cannot be compiled."""
    store, spec = Store(tmp_path), CompileSpec(threads=1)

    class Table(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (x + torch.tensor([1.0]),)

    with pytest.raises(ConfigError, match="constant tensor"):
        compile_all(jobs(Local(), Table()), spec, store, workers=2)
    assert store.compilations == 1
