"""compile_all around its workers: what it checks before it starts any, and that no job is lost whatever they do."""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bluejay
from bluejay.compile import Job, Store, compile, compile_all, driver, inductor, workers
from bluejay.compile.fingerprinting import Fingerprint
from bluejay.config import CompileSpec
from bluejay.errors import MachineError
from bluejay.events import Event
from bluejay.machine import Compiler

SOURCE = Path(bluejay.__file__).parents[1]
SPEC = CompileSpec(threads=1)


def jobs(*modules: nn.Module) -> list[Job]:
    return [Job(module, (torch.ones(2, 8),), label=type(module).__name__) for module in modules]


@pytest.fixture
def compiled_here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Labels of the jobs that come to this process, which has a compiler and does not run it."""
    labels: list[str] = []
    monkeypatch.setattr(workers, "compile", lambda *arguments, label, **others: labels.append(label))
    for place in (workers, driver):
        monkeypatch.setattr(place, "cxx_compiler", lambda preferred="": Compiler("c++", "c++ 1"))
    monkeypatch.setattr(inductor, "compiler_problem", lambda cxx: "")
    return labels


def no_process(spec: CompileSpec, store: Store) -> Any:
    pytest.fail("a worker was started")


def test_without_a_compiler_no_worker_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches two processes of seconds each that only find out what was known before."""
    monkeypatch.setattr(workers, "_start", no_process)
    spec = CompileSpec(threads=1, cxx="no-such-compiler")
    with pytest.raises(MachineError, match="no-such-compiler"):
        compile_all(jobs(nn.Tanh(), nn.ReLU()), spec, Store(tmp_path), workers=2)
    assert compile_all([], spec, Store(tmp_path)) == 0


@pytest.mark.parametrize("count", [1, 2])
def test_a_store_that_cannot_be_written_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled_here: list[str], count: int
) -> None:
    """Catches programs compiled by workers, lost, and compiled again by their user, with a warning from each."""
    monkeypatch.setattr(workers, "_start", no_process)
    (tmp_path / "file").touch()
    events: list[Event] = []
    store = Store(tmp_path / "file" / "store")
    assert compile_all(jobs(nn.Tanh(), nn.ReLU())[:count], SPEC, store, events.append, workers=2) == 0
    assert compiled_here == []

    def build(work: Path) -> dict[str, Any]:
        return {"label": "", "compile_seconds": 0.0}

    _, _, built = store.obtain(Fingerprint.of({}), build, lambda folder, manifest: True, events.append)
    assert built
    assert store.compilations == 1
    assert [event.name for event in events] == ["warning"]


def test_the_trial_of_a_store_leaves_nothing(tmp_path: Path) -> None:
    """Catches remains that later look like programs."""
    store = Store(tmp_path)
    assert store.can_keep()
    assert store.entries() == []
    assert [file for file in tmp_path.rglob("*") if file.parent != tmp_path] == []


class CannotBeCopied(nn.Module):
    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        raise RuntimeError("one of a kind")


def speaks(*lines: str) -> Callable[[CompileSpec, Store], Any]:
    """A worker that answers each job with these lines."""
    code = f"import sys\nfor job in sys.stdin.buffer:\n    print({chr(10).join(lines)!r}, flush=True)"

    def start(spec: CompileSpec, store: Store) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    return start


def write_line(packed: bytes, stream: Any) -> None:
    stream.write(b"job\n")


STARTED, DONE = json.dumps({"event": "compile.start", "fields": {}}), json.dumps({"done": True})


@pytest.mark.parametrize(
    ("lines", "lost"),
    [((STARTED, DONE), []), (("nonsense",), ["Tanh", "ReLU"]), (("[]",), ["Tanh", "ReLU"])],
)
def test_a_worker_that_talks_nonsense_loses_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled_here: list[str], lines: tuple[str, ...], lost: list[str]
) -> None:
    """Catches a job that goes with the thread that served it."""
    monkeypatch.setattr(workers, "_start", speaks(*lines))
    monkeypatch.setattr(workers.pickle, "dump", write_line)
    compile_all(jobs(nn.Tanh(), nn.ReLU()), SPEC, Store(tmp_path), workers=2)
    assert sorted(compiled_here) == sorted(lost)


def test_a_listener_that_fails_loses_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled_here: list[str]
) -> None:
    """Catches an observer's exception that ends a thread of ours, and its job with it."""

    def fail(event: Event) -> None:
        raise ValueError(event)

    monkeypatch.setattr(workers, "_start", speaks(STARTED, DONE))
    monkeypatch.setattr(workers.pickle, "dump", write_line)
    compile_all(jobs(nn.Tanh(), nn.ReLU()), SPEC, Store(tmp_path), fail, workers=2)
    assert sorted(compiled_here) == ["ReLU", "Tanh"]


def test_a_module_that_cannot_be_copied_is_compiled_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled_here: list[str]
) -> None:
    """Catches a job dropped because it cannot travel, and a worker given up for it."""
    monkeypatch.setattr(workers, "_start", speaks(DONE))
    monkeypatch.setattr(workers.pickle, "dump", write_line)
    modules = (CannotBeCopied(), CannotBeCopied(), CannotBeCopied(), nn.Tanh(), nn.ReLU())
    compile_all(jobs(*modules), SPEC, Store(tmp_path), workers=2)
    assert compiled_here == ["CannotBeCopied"] * 3


class OnlyHere(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x,)


def test_a_worker_survives_a_class_that_it_cannot_import(tmp_path: Path) -> None:
    """Catches a worker that ends, with a traceback on the terminal, at the class of another main file."""
    unknown = pickle.dumps(jobs(OnlyHere())[0]).replace(__name__.encode(), b"x" * len(__name__))
    stream = io.BytesIO()
    pickle.dump((CompileSpec(backend="eager"), tmp_path), stream)
    pickle.dump(unknown, stream)
    pickle.dump(pickle.dumps(jobs(nn.Tanh())[0]), stream)
    command = [sys.executable, "-c", "from bluejay.compile.workers import work; work()"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    ended = subprocess.run(command, input=stream.getvalue(), capture_output=True, env=environment, check=True)
    assert [json.loads(line) for line in ended.stdout.splitlines()] == [{"done": False}, {"done": True}]
    assert b"Traceback" not in ended.stderr


def broken_compiler(folder: Path) -> str:
    compiler = folder / "broken"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo broken 1.0 && exit\n'
        "echo In file included from program.cpp:1: >&2\necho program.cpp:1:10: fatal error: cmath: No such file >&2\n"
        "echo compilation terminated. >&2\nexit 1\n"
    )
    compiler.chmod(0o755)
    return str(compiler)


def test_a_compiler_that_builds_nothing_is_found_out_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches half a minute of attempts, in workers and then here, before a run falls back to eager."""
    monkeypatch.setattr(workers, "_start", no_process)
    spec, events = CompileSpec(threads=1, cxx=broken_compiler(tmp_path)), list[Event]()
    with pytest.raises(MachineError, match=r"program\.cpp:1:10: fatal error: cmath: No such file\n"):
        compile_all(jobs(nn.Tanh(), nn.ReLU()), spec, Store(tmp_path / "store"), events.append, workers=2)
    with pytest.raises(MachineError, match="fatal error: cmath"):
        compile(nn.Tanh(), (torch.ones(2, 8),), spec, None, events.append)
    assert events == []


def test_a_compiler_that_cannot_build_a_program_is_a_fault_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches Inductor's own error, on which no run falls back to eager; the compiler's first error is what helps."""
    monkeypatch.setattr(inductor, "_trial", lambda cxx: "")
    spec, events = CompileSpec(threads=1, cxx=broken_compiler(tmp_path)), list[Event]()
    with pytest.raises(MachineError) as raised:
        compile(nn.LayerNorm(8), (torch.ones(2, 8),), spec, Store(tmp_path / "store"), events.append, label="a norm")
    assert raised.value.found.endswith("program.cpp:1:10: fatal error: cmath: No such file")
    assert spec.cxx in raised.value.asked
    assert [event.name for event in events] == ["compile.start", "compile.part", "compile.failed"]
    assert {event.fields["label"] for event in events} == {"a norm"}
    assert len({event.fields["fingerprint"] for event in events}) == 1
    with pytest.raises(MachineError, match="cmath"):  # known now: the next program is not even begun
        compile(nn.Tanh(), (torch.ones(2, 8),), spec, Store(tmp_path / "store"), events.append)
    assert len(events) == 3
