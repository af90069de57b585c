"""torch's compiler as it comes: while a program is built, nothing steers it but what the program's fingerprint holds.

Its six hundred options can be set by variables of the environment, most of them read when it is imported, and by any
code of this process. To look at them for a fingerprint would cost a second of imports, which a program found in the
store never needs. So none may count: options are at the defaults of their source files, and the variables are hidden.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType

import torch
from torch.utils._config_module import ConfigModule

# How the names of variables begin that torch's compiler reads.
STEERING = (
    *("AOT", "CI", "CUTEDSL_", "CUTLASS_", "DUMP_AOTI_", "ENABLE_", "FAKE_", "FX_", "HALIDE_", "INDUCTOR_", "LOG_"),
    *("PARTITIONER_", "PT2_", "PYTORCH_", "TENSORIFY_", "TORCH", "TRITON_", "UNSAFE_", "_SPLITTER_", "_TORCH"),
)
# Those of them that only say where something lies.
PLACES = frozenset({"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_LIBDEVICE_PATH", "TRITON_PTXAS_PATH"})

_HEADERS = Path(__file__).with_name("include")
_HEADER_PATH = "CPLUS_INCLUDE_PATH"  # looked at before the places of the compiler's own headers


@contextmanager
def pristine() -> Iterator[None]:
    """torch's compiler at its defaults, whatever the environment and this process ask of it; all is as before after."""
    with ExitStack() as stack:
        stack.enter_context(_environment())

        for module in config_modules():
            stack.enter_context(_fresh(module))
        stack.enter_context(_plain_state())
        yield


def config_modules() -> list[ConfigModule]:
    """The modules of options that torch has loaded."""
    return [module for _, module in sorted(sys.modules.items()) if isinstance(module, ConfigModule)]


@contextmanager
def _environment() -> Iterator[None]:
    """The environment without what steers torch, and with our headers before those of the C++ compiler."""
    steering = [name for name in os.environ if name.startswith(STEERING) and name not in PLACES]
    hidden = {name: os.environ.pop(name) for name in (*steering, _HEADER_PATH) if name in os.environ}
    os.environ[_HEADER_PATH] = os.pathsep.join([str(_HEADERS), *filter(None, [hidden.get(_HEADER_PATH)])])
    try:
        yield
    finally:
        del os.environ[_HEADER_PATH]
        os.environ.update(hidden)


@contextmanager
def _fresh(module: ConfigModule) -> Iterator[None]:
    """A module of options as its source file has them."""
    members = vars(module)
    chosen, members["_config"] = members["_config"], vars(_read_again(module))["_config"]
    _forget_derived(module)
    try:
        yield
    finally:
        members["_config"] = chosen
        _forget_derived(module)


def _read_again(module: ModuleType) -> ModuleType:
    """The module made from its file once more, under another name."""
    assert module.__file__ is not None
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_as_it_comes", module.__file__)
    assert spec is not None
    assert spec.loader is not None
    again = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(again)
    finally:
        del sys.modules[spec.name]
    return again


def _forget_derived(module: ConfigModule) -> None:
    """What a module keeps of the values of its options is computed again."""
    module._hash_dirty_var.set(True)
    module._get_dict_dirty_keys_var.set(None)


@contextmanager
def _plain_state() -> Iterator[None]:
    """torch's own switches that decide which operations a module is traced to."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            stack.callback(torch.set_autocast_enabled, kind, torch.is_autocast_enabled(kind))
            torch.set_autocast_enabled(kind, False)
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
        torch.use_deterministic_algorithms(False)
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("highest")
        stack.callback(setattr, torch.backends.mkldnn, "enabled", torch.backends.mkldnn.enabled)
        torch.backends.mkldnn.enabled = True  # type: ignore[assignment]
        # Where in which file an operation stands is for debuggers, and takes a quarter of the time of tracing.
        stack.callback(setattr, torch.fx.config, "do_not_emit_stack_traces", torch.fx.config.do_not_emit_stack_traces)
        torch.fx.config.do_not_emit_stack_traces = True
        yield
