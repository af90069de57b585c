"""The work on one micro-batch: loss and gradients, compiled or eager. What the loop is built around."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bluejay.build import Built
from bluejay.config import TrainConfig
from bluejay.errors import MachineError
from bluejay.events import Event, Observer, ignore
from bluejay.train.attention import attend_in_tiles
from bluejay.train.loss import linear_cross_entropy
from bluejay.train.packing import Batch


class Step(Protocol):
    """What the loop asks of a model, however it is spread out."""

    def gradients(self, batch: Batch, scale: Tensor, seed: int) -> Tensor:
        """Add the gradients of `scale` times the batch's loss; returns the sum of the loss over its targets."""

    def loss(self, batch: Batch) -> Tensor:
        """The sum of the loss over the batch's targets, without dropout and smoothing."""


class Replicas(Protocol):
    """The other copies of the model, each with its own rows of the global batch."""

    count: int
    index: int

    def total(self, values: Tensor) -> Tensor:
        """The sum of a tensor over all replicas."""

    def sum_gradients(self, gradients: list[Tensor]) -> None:
        """Replace each replica's gradients by their sum, in place."""


class Alone:
    """One copy of the model."""

    count, index = 1, 0

    def total(self, values: Tensor) -> Tensor:
        return values

    def sum_gradients(self, gradients: list[Tensor]) -> None:
        """Nothing to add."""


class LocalStep:
    """The step of a whole model on one device.

    Attributes:
        compile_seconds: spent in the first call for each shape, which traces, compiles and runs it.
    """

    def __init__(self, built: Built, config: TrainConfig, observe: Observer = ignore) -> None:
        self.compile_seconds = 0.0
        self._model, self._config, self._observe = built.model, config, observe
        self._shapes: set[Any] = set()
        self._compute_dtype = dtype_of_blocks(built.model)
        self._compiled: Callable[..., tuple[Tensor, Tensor]] | None = None
        self._in_tiles = built.device.type == "cpu" and self._compute_dtype == torch.bfloat16
        if config.compile != "eager":
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)  # one for each shape
            self._compiled = torch.compile(self._forward, dynamic=False)

    def gradients(self, batch: Batch, scale: Tensor, seed: int) -> Tensor:
        # Dropout is a function of the seed, so that nothing random needs to be kept in a checkpoint.
        torch.manual_seed(seed)
        self._model.train()

        def run(forward: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
            scaled, total = forward(batch.inputs, batch.targets, batch.segments, scale, self._config.label_smoothing)
            scaled.backward()
            return total.detach()

        return self._run(run, ("gradients", batch.inputs.shape, batch.segments is None))

    @torch.no_grad()
    def loss(self, batch: Batch) -> Tensor:
        self._model.eval()
        one = torch.ones((), device=batch.inputs.device)

        def run(forward: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
            return forward(batch.inputs, batch.targets, batch.segments, one, 0.0)[1]

        return self._run(run, ("loss", batch.inputs.shape, batch.segments is None))

    def _run(self, run: Callable[[Callable[..., tuple[Tensor, Tensor]]], Tensor], shape: Any) -> Tensor:
        if self._compiled is None:
            return run(self._forward)
        if shape in self._shapes:
            with self._attention():
                return run(self._compiled)
        fields = {"shape": list(shape[1]), "what": shape[0]}
        self._observe(Event("train.compiling", fields))
        started = time.perf_counter()
        try:
            with self._attention():
                result = run(self._compiled)
        except Exception as error:
            if not _is_missing_compiler(error):
                raise
            found = str(error).strip().splitlines()[0]
            if self._config.compile == "inductor":
                raise MachineError(
                    asked="a compiled training step", found=found, fix="install a C++ compiler, or set compile=auto"
                ) from error
            self._observe(Event("warning", {"text": f"training without a compiled step, slower: {found}"}))
            self._compiled = None
            return run(self._forward)
        seconds = time.perf_counter() - started
        self._shapes.add(shape)
        self.compile_seconds += seconds
        self._observe(Event("train.compile", {**fields, "seconds": seconds}))
        return result

    @contextmanager
    def _attention(self) -> Iterator[None]:
        """Attention in tiles while a compiled step runs; an instance that held it would be another program."""
        blocks: Any = self._model.transformer.h if self._in_tiles else ()
        for block in blocks:
            block.attn.attend = attend_in_tiles
        try:
            yield
        finally:
            for block in blocks:
                del block.attn.attend

    def _forward(
        self, inputs: Tensor, targets: Tensor, segments: Tensor | None, scale: Tensor, smoothing: float
    ) -> tuple[Tensor, Tensor]:
        model = self._model
        where = model.locate(inputs, None, None, segments)
        x = model.embed(inputs).to(self._compute_dtype)
        recompute = self._config.recompute and model.training
        for block in model.transformer.h:
            x = checkpoint(block, x, where, None, use_reentrant=False) if recompute else block(x, where, None)
        hidden = model.transformer.ln_f(x).flatten(0, 1)  # [N, E]
        weight, bias = head_weights(model.lm_head)
        weight = weight.to(hidden.dtype)
        if not torch.is_grad_enabled():
            weight, bias = weight.detach(), None if bias is None else bias.detach()
        return linear_cross_entropy(hidden, weight, bias, targets.flatten(), scale, smoothing)


def head_weights(head: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight and bias that a linear layer, or what stands in its place, multiplies with."""
    effective = getattr(head, "effective_weight", None)
    weight = effective() if effective is not None else head.weight
    return weight, head.bias  # type: ignore[return-value]


def dtype_of_blocks(model: Any) -> torch.dtype:
    """What the blocks compute in: the embedding may be kept in another dtype."""
    dtype: torch.dtype = model.transformer.ln_f.weight.dtype
    return dtype


def _is_missing_compiler(error: BaseException | None) -> bool:
    """Whether torch's compiler, or what raised it, says that there is no C++ compiler."""
    while error is not None:
        if type(error).__name__ in ("InvalidCxxCompiler", "CppCompileError"):
            return type(error).__name__ == "InvalidCxxCompiler"
        error = getattr(error, "inner_exception", None) or error.__cause__
    return False
