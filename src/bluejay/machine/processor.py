"""The processor and its memory, read from the operating system (Linux and macOS)."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# x86 flags that name instructions a code generator may use. The others (timers, virtualization) differ between hosts
# that run the same program equally well, and would make two equal machines look different.
_X86_INSTRUCTIONS = tuple(
    "abm adx aes amx avx bmi f16c fma gfni lzcnt movbe pclmul popcnt sha sse ssse vaes vpclmul".split()
)
_CGROUP = Path("/sys/fs/cgroup")
_DEFAULT_LAST_CACHE_BYTES = 64 * 2**20
_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


@dataclass(frozen=True)
class Cpu:
    """A processor: its model name, the cores this process may use, the bytes of its largest cache, its features."""

    model: str
    num_cores: int
    last_cache_bytes: int
    features: tuple[str, ...]


def cpu() -> Cpu:
    """The processor of this machine."""
    return Cpu(
        model=_model_name(), num_cores=_num_cores(), last_cache_bytes=_last_cache_bytes(), features=cpu_features()
    )


def cpu_features() -> tuple[str, ...]:
    """Sorted instruction sets of this processor, such as `avx512_bf16`: what a native build may use."""
    if sys.platform == "darwin":
        prefix = "hw.optional."
        flags = [key.removeprefix(prefix).lower() for key, value in _sysctl(prefix[:-1]).items() if value == "1"]
        return tuple(sorted(flag.removeprefix("arm.feat_") for flag in flags))
    x86 = {flag for flag in _proc_cpuinfo("flags").split() if flag.startswith(_X86_INSTRUCTIONS)}
    return tuple(sorted(x86 or set(_proc_cpuinfo("Features").split())))


def peak_memory_bytes() -> int:
    """Largest number of bytes this process has had in memory so far, mapped files included."""
    # ru_maxrss is inherited from the parent across fork and exec on Linux; VmHWM is this program's own.
    peak = _proc_field(Path("/proc/self/status"), "VmHWM")
    if peak:
        return int(peak.split()[0]) * 1024
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def total_memory_bytes() -> int:
    """Bytes of memory this process could ever use: the machine's, or its container's limit if that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total, _container_limit_bytes() or total)


def available_memory_bytes() -> int:
    """Bytes of memory that can be used now without swapping."""
    free = _proc_field(Path("/proc/meminfo"), "MemAvailable")
    if not free:
        return total_memory_bytes()
    available = int(free.split()[0]) * 1024
    limit = _container_limit_bytes()
    if limit is None:
        return available
    used = int((_CGROUP / "memory.current").read_text())
    stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    return min(available, max(limit - used + int(stat["inactive_file"]), 0))  # cached files give way


def give_back_freed_memory() -> None:
    """Have freed blocks of a MiB and more returned to the system at once, where the C library is glibc.

    It would come to keep blocks of up to 32 MiB once it has seen one freed: 0.6 GB after a prompt of 2,048 tokens.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, 2**20)


def _container_limit_bytes() -> int | None:
    file = _CGROUP / "memory.max"
    text = file.read_text().strip() if file.is_file() else "max"
    return None if text == "max" else int(text)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _model_name() -> str:
    if sys.platform == "darwin":
        return _sysctl("machdep.cpu.brand_string").get("machdep.cpu.brand_string", platform.machine())
    return _proc_cpuinfo("model name", "Model") or platform.processor() or platform.machine()


def _last_cache_bytes() -> int:
    if sys.platform == "darwin":
        sizes = _sysctl("hw")
        return int(sizes.get("hw.l3cachesize") or sizes.get("hw.l2cachesize") or _DEFAULT_LAST_CACHE_BYTES)
    files = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    units = {"K": 2**10, "M": 2**20}
    found = [(text[:-1], text[-1]) for text in (file.read_text().strip() for file in files) if text]
    return max((int(number) * units[unit] for number, unit in found), default=_DEFAULT_LAST_CACHE_BYTES)


def _proc_cpuinfo(*names: str) -> str:
    return next((value for name in names if (value := _proc_field(Path("/proc/cpuinfo"), name))), "")


def _proc_field(file: Path, name: str) -> str:
    """The first `name: value` of a /proc file, or nothing."""
    if not file.is_file():
        return ""
    for line in file.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _sysctl(name: str) -> dict[str, str]:
    output = subprocess.run(["sysctl", name], capture_output=True, text=True, check=False).stdout
    pairs = (line.partition(": ") for line in output.splitlines())
    return {key: value.strip() for key, _, value in pairs}


def default_cache_folder() -> Path:
    """Where this platform keeps what can be made again: the folder of compiled programs, unless another is named."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "bluejay"
    return Path.home() / ".cache" / "bluejay"
