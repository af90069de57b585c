"""The two ceilings of this machine: bytes it can read per second, and multiply-adds it can do per second."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from bluejay.machine.processor import available_memory_bytes, cpu

_MIN_BUFFER_BYTES = 256 * 2**20


def measure_read_bandwidth(device: str = "cpu", *, num_bytes: int | None = None, passes: int = 7) -> float:
    """Bytes/s at which this machine reads memory with all its threads: the ceiling of decode at batch 1.

    The median of several passes over a buffer four times the largest cache (at least 256 MiB, at most a quarter of the
    memory that is free), so that no pass finds its bytes in the cache.
    """
    if num_bytes is None:
        num_bytes = max(_MIN_BUFFER_BYTES, 4 * cpu().last_cache_bytes)
        num_bytes = min(num_bytes, available_memory_bytes() // 4)
    # A sum of integers: one add per eight bytes, and unlike a sum of floats nothing that costs more than the reading.
    buffer = torch.zeros(max(num_bytes // 8, 1), dtype=torch.int64, device=device)
    return buffer.nbytes / _median_seconds(buffer.sum, device, passes)


def measure_gemm(
    dtype: torch.dtype = torch.float32, device: str = "cpu", *, size: int = 2048, passes: int = 5
) -> float:
    """FLOP/s of a square matrix product in `dtype` with all threads: the ceiling of prefill and training."""
    square = torch.ones(size, size, dtype=dtype, device=device)
    return 2 * size**3 / _median_seconds(lambda: F.linear(square, square), device, passes)


def _median_seconds(work: Callable[[], object], device: str, passes: int) -> float:
    seconds = []
    for _ in range(1 + passes):  # the first pass pays for page faults and threads, and is dropped
        start = time.perf_counter()
        work()
        if torch.device(device).type != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
