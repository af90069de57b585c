"""How programs are made: which back-end, and the few choices it leaves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from bluejay.config.checks import refusal

COMPILE_BACKENDS = ("inductor", "eager")
BLOCK_MODES = ("auto", "inline", "shared")
KERNELS = ("auto", "amx", "avx512", "avx2", "portable", "x8", "torch", "reference")


@dataclass(frozen=True)
class CompileSpec:
    """What shapes a program besides the module and its inputs.

    Attributes:
        backend: `inductor` makes native code ahead of time; `eager` runs the module as it is, without a compiler.
        blocks: `inline` puts all layers into one program; `shared` compiles one layer and calls it for each (builds in
            a time that does not grow with the number of layers, costs microseconds per layer and call); `auto` takes
            `shared` where a call runs nine layers or more (an unrolled loop runs them once per token).
        kernel: the path of four-bit products (docs/kernels.md); `auto` takes the machine's best, and never `x8`, which
            rounds inputs to 8 bits.
        threads: CPU threads a program is made for; 0 takes torch's number at that moment.
        cxx: the C++ compiler's command; "" takes the first one found.
    """

    backend: Literal["inductor", "eager"] = "inductor"
    blocks: Literal["auto", "inline", "shared"] = "auto"
    kernel: Literal["auto", "amx", "avx512", "avx2", "portable", "x8", "torch", "reference"] = "auto"
    threads: int = 0
    cxx: str = ""

    def __post_init__(self) -> None:
        if self.backend not in COMPILE_BACKENDS:
            raise _refuse("backend", self.backend, f"one of {', '.join(COMPILE_BACKENDS)}")
        if self.blocks not in BLOCK_MODES:
            raise _refuse("blocks", self.blocks, f"one of {', '.join(BLOCK_MODES)}")
        if self.kernel not in KERNELS:
            raise _refuse("kernel", self.kernel, f"one of {', '.join(KERNELS)}")
        if type(self.threads) is not int or self.threads < 0:
            raise _refuse("threads", self.threads, "0 (torch's number) or a whole number of threads")
        if not isinstance(self.cxx, str):
            raise _refuse("cxx", self.cxx, "a command such as g++")


_refuse = partial(refusal, "a program")
