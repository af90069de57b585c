"""How the native library is built, kept in the store of executables, and loaded. Once loaded it stays."""

from __future__ import annotations

import ctypes
import platform
import shlex
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bluejay.errors import MachineError
from bluejay.events import Event, Observer, ignore
from bluejay.kernels.int4 import NATIVE_PATHS, PLAIN_PATHS

if TYPE_CHECKING:
    from bluejay.compile import Store

SOURCES = Path(__file__).parent / "csrc"
LIBRARY = "int4.so"
LABEL = "four-bit kernels"

_TILES = ("-mamx-tile", "-mamx-int8")  # a compiler that knows no such flag builds everything else
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c")

# One file per instruction set: only the file whose path was chosen by the processor's features is ever entered.
_ARCHITECTURE = {
    "x86_64": {
        "int4_avx2.cpp": ("-mavx2", "-mfma", "-mf16c"),
        "int4_avx512.cpp": _AVX512,
        "int4_avx512_vnni.cpp": (*_AVX512, "-mavx512vnni"),
        "int4_amx.cpp": (*_AVX512, "-mavx512vnni", *_TILES),
    }
}
_COMMON = {"int4.cpp": (), "int4_portable.cpp": ()}
_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden")
# What bluejay_int4_features() answers, bit by bit.
_FEATURES = {"avx2": 1, "avx512": 2, "x8": 4, "amx": 8}

_loaded: ctypes.CDLL | None = None
_reason = "it was not asked for: bluejay.kernels.ensure builds and loads it"


def available_paths() -> tuple[str, ...]:
    """The paths of `int4_linear` that work now: those that "auto" chooses from, best first, then the others."""
    if _loaded is None:
        return PLAIN_PATHS
    features = _loaded.bluejay_int4_features()
    native = [path for path in NATIVE_PATHS if path not in _FEATURES or features & _FEATURES[path]]
    return (*native, *PLAIN_PATHS)


def unavailable_reason() -> str:
    """Why there are no native kernels; "" when there are."""
    return "" if _loaded is not None else _reason


def check_path(path: str, device: torch.device) -> None:
    """See to it that a path is there for tensors on a device.

    Raises:
        MachineError: it is not.
    """
    if path not in ("auto", *PLAIN_PATHS) and (path not in available_paths() or device.type != "cpu"):
        raise refuse(path, device)


def refuse(path: str, device: torch.device) -> MachineError:
    """The error of who forces a path that is not there."""
    if path not in NATIVE_PATHS:
        found, fix = "no such path", f"one of auto, {', '.join(available_paths())}"
    elif device.type != "cpu":
        found, fix = f"a tensor on {device}; native paths are for the CPU", "leave the path at auto"
    elif _loaded is None:
        found, fix = f"no native kernels: {_reason}", "leave the path at auto, which then computes with torch"
    else:
        found = "a processor, or a system, that does not offer these instructions"
        fix = f"one of auto, {', '.join(available_paths())}"
    return MachineError(asked=f"int4_linear by the path {path!r}", found=found, fix=fix)


def ensure(cache: Path | Store, observe: Observer = ignore, *, cxx: str = "", force: bool = False) -> tuple[str, ...]:
    """Load the native kernels, building them first if the store does not have them; returns `available_paths`.

    Without a compiler that works one warning is given, and `int4_linear` computes with torch. Called again it does
    nothing once they are loaded.

    Args:
        cache: the store, which counts what it had to build and warns once, or its folder.
        cxx: the C++ compiler; "" takes the machine's.
        force: no compiler is an error.

    Raises:
        MachineError: `force`, and the kernels can be neither found nor built.
    """
    global _loaded, _reason
    # The store and what it needs: a third of a second that calling a loaded kernel does not cost.
    from bluejay.compile import Fingerprint, Store, environment, room_digests
    from bluejay.machine import cxx_compiler, how_to_install_compiler

    if _loaded is not None:
        return available_paths()
    compiler = cxx_compiler(cxx)
    wanted = Fingerprint.of(
        {
            "kind": "kernels",
            "device": "cpu",
            "flags": {name: [*_FLAGS, *flags] for name, flags in _sources().items()},
            "sources": {"bluejay.kernels": room_digests()["bluejay.kernels"]},
            "environment": environment(torch.device("cpu"), compiler),
        }
    )

    def tell(name: str, **fields: Any) -> None:
        observe(Event(name, {**fields, "label": LABEL, "fingerprint": wanted.digest}))

    def build(folder: Path) -> dict[str, Any]:
        if compiler is None:
            raise MachineError(
                asked="build the four-bit kernels",
                found=f"no working C++ compiler named {cxx}" if cxx else "no C++ compiler on this machine",
                fix=f"install one ({how_to_install_compiler()})",
            )
        started = time.perf_counter()
        tell("compile.start")
        try:
            _build(compiler.path, folder)
        except BaseException:
            tell("compile.failed")
            raise
        seconds = time.perf_counter() - started
        tell("compile.done", seconds=seconds)
        return {"label": LABEL, "compile_seconds": seconds}

    def load(folder: Path, manifest: Mapping[str, Any]) -> ctypes.CDLL:
        return ctypes.CDLL(str(folder / LIBRARY))

    try:
        store = cache if isinstance(cache, Store) else Store(cache)
        _loaded, _, _ = store.obtain(wanted, build, load, lambda event: tell(event.name, **event.fields))
    except MachineError as error:
        if force:
            raise
        if error.found != _reason:
            text = f"four-bit matrix products are computed by torch, many times slower: {error.found}; {error.fix}"
            observe(Event("warning", {"text": text}))
        _reason = error.found
    return available_paths()


def _sources() -> dict[str, tuple[str, ...]]:
    """Files to compile, each with the flags of its instruction set."""
    return {**_COMMON, **_ARCHITECTURE.get(platform.machine(), {})}


def _build(cxx: str, folder: Path) -> None:
    """Compile all files at once, link them, and leave only the library in `folder`."""
    package = Path(torch.__file__).parent
    objects = [folder / f"{name}.o" for name in _sources()]
    unknown = () if _knows_tiles(cxx, folder / "probe.o") else _TILES
    commands = [
        [
            cxx,
            *_FLAGS,
            *(flag for flag in flags if flag not in unknown),
            f"-I{package / 'include'}",
            "-c",
            str(SOURCES / name),
            "-o",
            str(target),
        ]
        for (name, flags), target in zip(_sources().items(), objects, strict=True)
    ]
    _run(commands)
    libraries = [f"-L{package / 'lib'}", "-ltorch_cpu", "-ltorch", "-lc10"]
    _run([[cxx, "-shared", "-o", str(folder / LIBRARY), *map(str, objects), *libraries]])
    for file in objects:
        file.unlink()


def _knows_tiles(cxx: str, target: Path) -> bool:
    """Whether compiler and assembler know AMX."""
    command = [cxx, *_TILES, "-x", "c++", "-c", "-", "-o", str(target)]
    run = subprocess.run(command, input=b'void f() { asm("tilerelease"); }', capture_output=True, check=False)
    target.unlink(missing_ok=True)
    return run.returncode == 0


def _run(commands: list[list[str]]) -> None:
    """Run compilers side by side.

    Raises:
        MachineError: one failed.
    """
    running = [
        subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        for c in commands
    ]
    answers = [process.communicate()[0] for process in running]
    for command, process, answer in zip(commands, running, answers, strict=True):
        if process.returncode:
            raise MachineError(
                asked="build the four-bit kernels",
                found=f"the compiler failed: {_first_error(answer)}",
                rule="they are C++20 and need a compiler with its standard library",
                fix=f"repair {command[0]}; it was called as {shlex.join(command)}",
            )


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), (lines or ["it does not say why"])[0])
