"""Law 8, the other half: what is in no fingerprint shapes no program. Every option and variable of torch's compiler."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bluejay.compile.pristine import PLACES, STEERING, config_modules, pristine

# What else torch's compiler reads, and why it may.
ELSEWHERE = {
    "ATEN_CPU_CAPABILITY": "torch reads it once and tells what came of it: Environment.cpu_capability",
    **dict.fromkeys(("CONDA_EXE", "CONDA_PREFIX", "OMP_PREFIX", "ONEAPI_ROOT"), "where headers and libraries lie"),
    **dict.fromkeys(("CUDA_HOME", "CUDACXX", "CPLUS_INCLUDE_PATH", "LEVEL_ZERO_V1_SDK_PATH"), "where tools lie"),
    **dict.fromkeys(("PATH", "LD_LIBRARY_PATH", "WINDOWS_CUDA_HOME"), "where tools lie"),
    "CXX": "the option cpp.cxx is always set, from CompileSpec.cxx",
    "CUBLAS_WORKSPACE_CONFIG": "how much memory cuBLAS takes while it runs",
    "KMP_DUPLICATE_LIB_OK": "set, never read",
    **dict.fromkeys(("MAST_HPC_JOB_NAME", "ROLE_RANK"), "names of jobs in caches that only just-in-time programs use"),
    **dict.fromkeys(("JAX_PLATFORMS", "TVM_SCHEDULER"), "of back-ends that we do not use"),
}
_READ = re.compile(
    r"""(?:environ(?:\.get\(|\[|\.setdefault\(|\.pop\()|getenv\(|env_name_\w+=\[?|_env_\w+\()\s*f?["']([A-Z_][A-Z_0-9]+)"""
)
_ROOMS = (
    "_inductor",
    "_dynamo",
    "_functorch",
    "_export",
    "export",
    "_higher_order_ops",
    "_subclasses",
    "compiler",
    "fx",
)


def variables_read() -> set[str]:
    """Names of variables in the sources of torch's compiler."""
    root = Path(torch.__file__).parent
    return {name for room in _ROOMS for file in (root / room).rglob("*.py") for name in _READ.findall(file.read_text())}


def is_hidden(name: str) -> bool:
    return name.startswith(STEERING) and name not in PLACES


def test_every_variable_that_torch_reads_is_hidden_or_has_a_reason() -> None:
    """Catches a variable of torch's next version that shapes programs and is in no key. B-47."""
    found = variables_read()
    assert len(found) > 200  # it did find them
    assert {name for name in found if not is_hidden(name)} - ELSEWHERE.keys() - PLACES == set()


def options() -> dict[str, Any]:
    """Every option of torch's compiler, spelled."""
    return {
        f"{module.__name__}.{name}": re.sub(r" at 0x\w+", "", repr(sorted(value) if isinstance(value, set) else value))
        for module in config_modules()
        for name, value in module.get_config_copy().items()
    }


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    with pristine():
        return options()


def test_no_option_set_in_code_counts(plain: dict[str, Any]) -> None:
    """Catches an option of a user's script that shapes programs and is in no key: each of them is flipped. B-47."""
    entries = [entry for module in config_modules() for entry in vars(module)["_config"].values()]
    before = [entry.user_override.get() for entry in entries]
    try:
        for entry in entries:
            if entry.alias is None:
                entry.user_override.set("flipped")
        flipped = options()
        with pristine():
            assert options() == plain
        assert options() == flipped
    finally:
        for entry, value in zip(entries, before, strict=True):
            entry.user_override.set(value)
    assert len(plain) > 600
    assert sum(flipped[name] != value for name, value in plain.items()) > 600


SHOW = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch, torch._inductor.config
from test_pristine import options, pristine
before = options()
with pristine():
    print(json.dumps([before, options()]))
"""


def test_no_variable_of_the_environment_counts(plain: dict[str, Any]) -> None:
    """Catches a variable read while torch is imported, long before anything is built: all are set at once. B-47."""
    chosen = {name: "1" for name in variables_read() if is_hidden(name) and "LOG" not in name and name != "TORCH_TRACE"}
    environment = {**os.environ, **chosen, "TORCHINDUCTOR_WORKER_START": "fork"}
    command = [sys.executable, "-c", SHOW, str(Path(__file__).parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    set_by_variables, found = json.loads(done.stdout.splitlines()[-1])
    shared = plain.keys() & found.keys()  # what other tests made this process import is not all in the new one
    assert len(shared) > 600
    assert sum(set_by_variables[name] != plain[name] for name in shared) > 50
    assert {name: found[name] for name in shared} == {name: plain[name] for name in shared}


class Step(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return (nn.functional.linear(x, w) + torch.zeros(2), torch.arange(2.0))


@pytest.fixture
def odd_state() -> Iterator[None]:
    """torch's switches as few people have them."""
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("medium")
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    with torch.autocast("cpu"):
        yield
        assert torch.get_default_dtype() == torch.float64
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_float32_matmul_precision() == "medium"
        assert not torch.backends.mkldnn.enabled
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    torch.backends.mkldnn.enabled = True  # type: ignore[assignment]


def spelling() -> list[tuple[str, ...]]:
    from bluejay.compile.graph import trace

    with pristine():
        traced = trace(
            Step(),
            (torch.ones(16, 2, dtype=torch.float32), torch.ones(2, 2, dtype=torch.float32)),
            ("x", "w"),
            "cpu",
            "auto",
        )
    return [part.spelling for part in traced.parts]


@pytest.fixture
def usual_spelling() -> list[tuple[str, ...]]:
    return spelling()


def test_switches_of_this_process_do_not_count(usual_spelling: list[tuple[str, ...]], odd_state: None) -> None:
    """Catches a program made under autocast, or another default dtype, that answers for one made without."""
    assert spelling() == usual_spelling
