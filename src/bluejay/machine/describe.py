"""One report of the machine: versions, processor, devices, compiler, ceilings, and what is missing."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from bluejay.machine.compiler import Compiler, cxx_compiler, how_to_install_compiler
from bluejay.machine.measure import measure_gemm, measure_read_bandwidth
from bluejay.machine.processor import Cpu, available_memory_bytes, cpu, total_memory_bytes

_PACKAGES = ("bluejay", "torch", "numpy", "safetensors", "tokenizers", "huggingface_hub")
_MEASURED_DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Device:
    """A GPU that torch can use: its name for torch, its model, its memory, its compute capability."""

    name: str
    model: str
    memory_bytes: int
    capability: str


@dataclass(frozen=True)
class Missing:
    """Something this machine lacks: what, why it matters, how to get it."""

    what: str
    why: str
    how: str


@dataclass(frozen=True)
class MachineReport:
    """What this machine is, has and can do.

    Attributes:
        versions: of Python, Bluejay and the packages whose version can change a result.
        read_bytes_per_second: measured memory reading speed; None when not measured.
        gemm_flops: measured FLOP/s of a matrix product by dtype; empty when not measured.
    """

    system: str
    versions: dict[str, str]
    cpu: Cpu
    num_threads: int
    memory_bytes: int
    available_memory_bytes: int
    devices: tuple[Device, ...]
    compiler: Compiler | None
    read_bytes_per_second: float | None
    gemm_flops: dict[str, float]
    cache_folder: str
    free_disk_bytes: int
    missing: tuple[Missing, ...]

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data, for `--json` and benchmark records."""
        return asdict(self)


def describe(cache_folder: Path, *, measure: bool = True, preferred_compiler: str = "") -> MachineReport:
    """A report of this machine. With `measure`, about three seconds are spent on the two ceilings."""
    compiler = cxx_compiler(preferred_compiler)
    existing = next(folder for folder in (cache_folder, *cache_folder.absolute().parents) if folder.exists())
    return MachineReport(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        versions={"python": platform.python_version(), **dict(_package_versions())},
        cpu=cpu(),
        num_threads=torch.get_num_threads(),
        memory_bytes=total_memory_bytes(),
        available_memory_bytes=available_memory_bytes(),
        devices=devices(),
        compiler=compiler,
        read_bytes_per_second=measure_read_bandwidth() if measure else None,
        gemm_flops={str(d).removeprefix("torch."): measure_gemm(d) for d in _MEASURED_DTYPES} if measure else {},
        cache_folder=str(cache_folder),
        free_disk_bytes=shutil.disk_usage(existing).free,
        missing=tuple(_missing(compiler, preferred_compiler, existing)),
    )


def devices() -> tuple[Device, ...]:
    """The GPUs that torch can use here."""
    if not torch.cuda.is_available():
        return ()
    found = [(index, torch.cuda.get_device_properties(index)) for index in range(torch.cuda.device_count())]
    return tuple(
        Device(f"cuda:{index}", gpu.name, gpu.total_memory, f"{gpu.major}.{gpu.minor}") for index, gpu in found
    )


def _package_versions() -> Iterator[tuple[str, str]]:
    for package in _PACKAGES:
        try:
            # torch's own word tells the build as well, which the package's does not always.
            yield package, torch.__version__ if package == "torch" else metadata.version(package)
        except metadata.PackageNotFoundError:
            yield package, "not installed"


def _missing(compiler: Compiler | None, preferred_compiler: str, existing: Path) -> Iterator[Missing]:
    if compiler is None:
        yield Missing(
            what=f"a C++ compiler named {preferred_compiler}" if preferred_compiler else "a C++ compiler",
            why="compiling a model to native code needs one; without it models run eagerly, with the same results",
            how=how_to_install_compiler(),
        )
    if shutil.which("nvidia-smi") and torch.version.cuda is None:
        yield Missing(
            what="a torch build with CUDA",
            why="this machine has NVIDIA tools, and the installed torch can only use the CPU",
            how=f"install the CUDA build of torch {torch.__version__.partition('+')[0]} (see PyTorch's install page)",
        )
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        yield Missing(
            what=f"a cache folder that can be written ({existing})",
            why="compiled programs are kept there and found again by the next run",
            how="set BLUEJAY_CACHE to a folder of yours",
        )
