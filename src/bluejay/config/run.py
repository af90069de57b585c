"""What a run is made of: which model, where, in which dtype, for how many rows and which shapes."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from bluejay.config.checks import refusal
from bluejay.config.compile import CompileSpec
from bluejay.config.model import DTYPES
from bluejay.config.parallel import Layout
from bluejay.config.quant import QuantSpec

LOOPS = ("host", "device", "unrolled")


@dataclass(frozen=True)
class RunConfig:
    """Everything `build` needs to assemble an engine.

    Attributes:
        model: `nano`, a directory, or a hub id.
        dtype: float32, bfloat16 or float16; "" keeps the checkpoint's.
        layout: how the model lies on several devices; one rank of torch.distributed for each.
        quantize: pack the checkpoint's linear layers to four bits while loading; None leaves them as they are.
        device: cpu, cuda, cuda:N; "auto" takes CUDA where there is one.
        context: tokens a row may hold; 0 is the model's whole window.
        max_rows: rows that run at once; more requests wait.
        prefill_buckets: padded prompt-chunk lengths, ascending.
        batch_buckets: padded numbers of rows, ascending; `max_rows` is added.
        slot_buckets: cache lengths that have programs, ascending; the whole context is added. Empty: a quarter of it.
        compile: how programs are made.
        fallback: without a C++ compiler, run eagerly with a warning (False: refuse).
        cache: folder of compiled programs; "" is the platform's usual place.
        loop: how the generation loop closes. "host": one step a call; "device": `iterations` steps a call; "unrolled":
            the whole answer in one call. All give the same ids.
        iterations: steps a call of the device loop.
        strict: a missing tensor is an error (False: a missing bias is zero, with a warning).
        verify: look for NaN and infinite weights while loading.
        offline: never ask the network for a hub id.
    """

    model: str
    dtype: str = ""
    layout: Layout = field(default_factory=Layout)
    quantize: QuantSpec | None = None
    device: str = "auto"
    context: int = 0
    max_rows: int = 8
    prefill_buckets: tuple[int, ...] = (16, 64, 256)
    batch_buckets: tuple[int, ...] = (1, 2, 4, 8)
    slot_buckets: tuple[int, ...] = ()
    compile: CompileSpec = field(default_factory=CompileSpec)
    fallback: bool = False
    cache: str = ""
    loop: Literal["host", "device", "unrolled"] = "host"
    iterations: int = 8
    strict: bool = True
    verify: bool = True
    offline: bool = False

    def __post_init__(self) -> None:
        if not self.model:
            raise _refuse("model", self.model, "a name, a directory or a hub id")
        if self.dtype not in ("", *DTYPES):
            raise _refuse("dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        if not isinstance(self.layout, Layout):
            raise _refuse("layout", self.layout, "a Layout")
        if not (self.quantize is None or isinstance(self.quantize, QuantSpec)):
            raise _refuse("quantize", self.quantize, "a QuantSpec, such as QuantSpec.parse('int4-g64')")
        if type(self.context) is not int or self.context < 0:
            raise _refuse("context", self.context, "0 (the whole window) or a number of tokens")
        if type(self.max_rows) is not int or self.max_rows < 1:
            raise _refuse("max_rows", self.max_rows, "a whole number from 1")
        for name in ("prefill_buckets", "batch_buckets", "slot_buckets"):
            buckets = getattr(self, name)
            whole = isinstance(buckets, tuple) and all(type(b) is int and b >= 1 for b in buckets)
            if not whole or list(buckets) != sorted(set(buckets)) or (not buckets and name != "slot_buckets"):
                raise _refuse(name, buckets, "a tuple of ascending whole numbers from 1")
        if not isinstance(self.compile, CompileSpec):
            raise _refuse("compile", self.compile, "a CompileSpec")
        if not isinstance(self.cache, str):
            raise _refuse("cache", self.cache, "a folder's path")
        if self.loop not in LOOPS:
            raise _refuse("loop", self.loop, f"one of {', '.join(LOOPS)}")
        if type(self.iterations) is not int or self.iterations < 1:
            raise _refuse("iterations", self.iterations, "a whole number from 1")
        for name in ("fallback", "strict", "verify", "offline"):
            if type(getattr(self, name)) is not bool:
                raise _refuse(name, getattr(self, name), "true or false")


_refuse = partial(refusal, "a run")
