"""Memory in pages of 2 MiB, for what is read from end to end for every token.

A processor looks up the place of every page that it reads. In pages of 4 KiB that costs a seventh of the bandwidth;
docs/kernels.md has the measurement.
"""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import torch
from torch import Tensor

_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PAGE_BYTES = 2**21
_ALIGNMENT = 64


def has_large_pages() -> bool:
    """Whether the system gives large pages to who asks for them."""
    return hasattr(mmap, "MADV_HUGEPAGE") and _SWITCH.is_file() and "[never]" not in _SWITCH.read_text()


class LargePages:
    """Room for tensors, one after the other. It takes memory where it is written, and goes when they have all gone."""

    def __init__(self, num_bytes: int, num_tensors: int) -> None:
        size = num_bytes + num_tensors * _ALIGNMENT + _PAGE_BYTES
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._next = -ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) % _PAGE_BYTES

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor of zeros, from a multiple of 64 bytes on."""
        made = torch.frombuffer(self._memory, dtype=dtype, count=shape.numel(), offset=self._next).view(shape)
        self._next += -(-made.nbytes // _ALIGNMENT) * _ALIGNMENT
        return made
