"""How the native kernels are built, kept and done without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bluejay import kernels
from bluejay.compile import Store
from bluejay.config.compile import KERNELS
from bluejay.kernels import native
from bluejay.machine import cxx_compiler

# Builds or finds the kernels, says what happened, and computes by the best path.
TRY = """
import json, sys, torch
from pathlib import Path
from bluejay import kernels
from bluejay.errors import MachineError

events, errors = [], []
cache, cxx, force = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "force"
for _ in range(2):
    try:
        paths = kernels.ensure(cache, lambda event: events.append([event.name, event.fields.get("text", "")]),
                               cxx=cxx, force=force)
    except MachineError as error:
        errors.append(error.found)
one = torch.ones(1, 2, 16, dtype=torch.int32), torch.ones(1, 1, 16).half(), torch.zeros(1, 1, 16).half()
y = kernels.int4_linear(torch.ones(1, 16), *one, None, 16, 16)
try:
    kernels.int4_linear(torch.ones(1, 16), *one, None, 16, 16, "portable")
except MachineError as error:
    errors.append(error.found)
answer = {"events": events, "errors": errors, "paths": kernels.available_paths(), "y": y.tolist()}
print(json.dumps({**answer, "reason": kernels.unavailable_reason()}))
"""


def start(cache: Path, cxx: str = "", force: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", TRY, str(cache), cxx, force], stdout=subprocess.PIPE, text=True)


def answer_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    answer: dict[str, Any] = json.loads(output)
    assert answer["y"] == [[2.0] * 16]
    return answer


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A folder in which two processes at once wanted the kernels, and what each of them saw."""
    cache = tmp_path_factory.mktemp("kernels")
    return cache, [answer_of(process) for process in [start(cache), start(cache)]]


def library(cache: Path) -> Path:
    (file,) = cache.glob(f"entries/*/{native.LIBRARY}")
    return file


def test_one_of_two_processes_builds(built: tuple[Path, list[dict[str, Any]]]) -> None:
    """Catches two processes that both build, or one that loads what the other is still writing (B-50)."""
    cache, answers = built
    names = sorted(name for answer in answers for name, _ in answer["events"] if "wait" not in name)
    assert names == ["compile.done", "compile.start"]
    assert all(answer["paths"][0] != "torch" and not answer["reason"] for answer in answers)
    (info,) = Store(cache).entries(verify=True)
    assert not info.problem
    assert [file.suffix for file in library(cache).parent.iterdir() if file.suffix != ".json"] == [".so"]


def compiler_script(folder: Path, body: str) -> str:
    """A compiler that is a shell script; `{real}` is the machine's own, whose version it says."""
    compiler = cxx_compiler()
    assert compiler is not None
    script = folder / "c++"
    text = f'#!/bin/sh\n[ "$1" = --version ] && exec {compiler.path} --version\n{body}\n'
    script.write_text(text.replace("{real}", compiler.path))
    script.chmod(0o755)
    return str(script)


def stand_in(folder: Path, finished: Path) -> str:
    """A compiler that hands out what the machine's made before."""
    body = f'for last; do :; done\nif [ "$1" = -shared ]; then cp {finished} "$3"; else : > "$last"; fi'
    return compiler_script(folder, body)


def test_a_broken_library_is_made_again(built: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    """Catches half a library that is loaded, or that stops the run (B-50): it is a miss, said once."""
    cache, _ = built
    good = library(cache)
    finished = tmp_path / "finished.so"
    finished.write_bytes(good.read_bytes())
    cxx = stand_in(tmp_path, finished)
    good.write_bytes(finished.read_bytes()[:1000])
    names = [name for name, _ in answer_of(start(cache, cxx))["events"]]
    assert names == ["warning", "compile.start", "compile.done"]
    assert library(cache).read_bytes() == finished.read_bytes()


def test_a_compiler_that_knows_no_tiles_builds_the_rest(tmp_path: Path) -> None:
    """Catches an older compiler or assembler that loses every kernel to the newest instructions."""
    body = 'for flag; do [ "$flag" = -mamx-int8 ] && echo "error: no $flag" && exit 1; done\nexec {real} "$@"'
    answer = answer_of(start(tmp_path / "cache", compiler_script(tmp_path, body)))
    assert [name for name, _ in answer["events"]] == ["compile.start", "compile.done"]
    assert "portable" in answer["paths"]
    assert "amx" not in answer["paths"]


def test_without_a_compiler_torch_computes(tmp_path: Path) -> None:
    """Catches a missing compiler that ends the run, is said at every layer or never; and a forced native path that is
    silently another."""
    plain = start(tmp_path / "plain", "no-such-compiler")
    forced = start(tmp_path / "forced", "no-such-compiler", "force")
    answer = answer_of(plain)
    ((name, text),) = answer["events"]
    assert name == "warning"
    assert "no-such-compiler" in text
    assert answer["paths"] == ["torch", "reference"]
    assert "no-such-compiler" in answer["reason"]
    assert ["no-such-compiler" in error for error in answer["errors"]] == [True]
    assert len(answer_of(forced)["errors"]) == 3  # twice from ensure, once from the forced path


def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    """Catches a build whose failure is not told, or leaves something in the store."""
    answer = answer_of(start(tmp_path / "cache", compiler_script(tmp_path, 'echo "error: no luck"; exit 1')))
    names = [name for name, _ in answer["events"]]
    assert names == ["compile.start", "compile.failed", "warning", "compile.start", "compile.failed"]
    assert "no luck" in answer["reason"]
    assert not Store(tmp_path / "cache").entries()


def test_every_source_is_compiled() -> None:
    """Catches a file of an instruction set that no build compiles."""
    compiled = {name for files in native._ARCHITECTURE.values() for name in files} | set(native._COMMON)
    assert {file.name for file in native.SOURCES.glob("*.cpp")} == compiled


def test_a_run_can_name_every_path() -> None:
    """Catches a path that no setting reaches, and a setting that means none."""
    assert set(KERNELS) == {"auto", *native.NATIVE_PATHS, *native.PLAIN_PATHS}


def test_plain_paths_are_always_there() -> None:
    """Catches a reference that needs a build."""
    assert kernels.available_paths()[-2:] == ("torch", "reference")
    codes = torch.zeros(1, 1, 16, dtype=torch.int32)
    scales, biases = torch.ones(1, 1, 16).half(), torch.full((1, 1, 16), 0.5).half()
    y = kernels.reference(torch.ones(2, 5), codes, scales, biases, None, 3, -1)
    assert y.tolist() == [[2.5] * 3] * 2
