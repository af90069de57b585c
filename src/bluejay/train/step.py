"""The work on micro-batches: loss and gradients, compiled or eager. What the loop is built around."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

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
from bluejay.train.precision import DTYPES

T = TypeVar("T")


class Step(Protocol):
    """What the loop asks of a model, however it is spread out."""

    def gradients(self, batches: Sequence[Batch], scale: Tensor, seeds: Sequence[int]) -> Tensor:
        """Add the gradients of `scale` times the loss of an update's micro-batches; returns the sum of the loss over
        all their targets.

        Args:
            seeds: of each micro-batch's dropout, so that nothing random needs to be kept in a checkpoint.
        """

    def loss(self, batch: Batch) -> Tensor:
        """The sum of the loss over the batch's targets, without dropout and smoothing."""


class Ranks(Protocol):
    """The processes that train one model together. Each calls every method, all of them in the same order.

    Attributes:
        count, index: replicas of the model, and which of them this process belongs to: each has its own rows.
        is_first: this process writes.
    """

    count: int
    index: int
    is_first: bool

    def total(self, values: Tensor) -> Tensor:
        """The sum of a tensor over all replicas."""

    def sum_gradients(self, gradients: list[Tensor]) -> None:
        """Replace each replica's gradients by their sum, in place."""

    def norm(self, gradients: Mapping[str, Tensor]) -> float:
        """The norm of the whole model's gradient."""

    def num_elements(self, parameters: Mapping[str, Tensor]) -> int:
        """Elements of these parameters in the whole model."""

    def whole(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every process's tensors, by parameter, put together on the first; the others get nothing."""

    def own(self, name: str, whole: Tensor) -> Tensor:
        """This process's part of a whole tensor that belongs to parameter `name`."""

    def highest(self, value: int) -> int:
        """The largest of all processes' values."""

    def first(self, work: Callable[[], T]) -> T:
        """Let the first process do it; all get what it returns, or raise what it raised."""


class Alone:
    """One process with a whole model."""

    count, index, is_first = 1, 0, True

    def total(self, values: Tensor) -> Tensor:
        return values

    def sum_gradients(self, gradients: list[Tensor]) -> None:
        """Nothing to add."""

    def norm(self, gradients: Mapping[str, Tensor]) -> float:
        norms = torch._foreach_norm(list(gradients.values()), 2)
        return float(torch.linalg.vector_norm(torch.stack([norm.double() for norm in norms])))

    def num_elements(self, parameters: Mapping[str, Tensor]) -> int:
        return sum(parameter.numel() for parameter in parameters.values())

    def whole(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(parts)

    def own(self, name: str, whole: Tensor) -> Tensor:
        return whole

    def highest(self, value: int) -> int:
        return value

    def first(self, work: Callable[[], T]) -> T:
        return work()


class LocalStep:
    """The step of a whole model on one device.

    Attributes:
        compile_seconds: spent in the first call for each shape, which traces, compiles and runs it.
    """

    def __init__(self, built: Built, config: TrainConfig, observe: Observer = ignore) -> None:
        self.compile_seconds = 0.0
        self._model, self._config, self._observe = built.model, config, observe
        self._shapes: set[Any] = set()
        self._compute_dtype = DTYPES[config.precision]
        self._compiled: Callable[..., tuple[Tensor, Tensor]] | None = None
        self._in_tiles = built.device.type == "cpu" and self._compute_dtype == torch.bfloat16
        if config.compile != "eager":
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)  # one for each shape
            # Without it a graph with a gradient of its own is traced anew by every process; both parts are in its key.
            torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
            self._compiled = torch.compile(self._forward, dynamic=False)

    def gradients(self, batches: Sequence[Batch], scale: Tensor, seeds: Sequence[int]) -> Tensor:
        self._model.train()
        total = torch.zeros((), dtype=torch.float64, device=scale.device)
        has_targets = any(batch.num_targets for batch in batches)
        for batch, seed in zip(batches, seeds, strict=True):
            # The last update of an epoch may not fill all micro-batches. Where all are empty gradients are still made:
            # other replicas have some to add.
            if batch.num_targets or not has_targets:
                torch.manual_seed(seed)
                total += self._gradients(batch, scale).double()
        return total

    def _gradients(self, batch: Batch, scale: Tensor) -> Tensor:
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


def _is_missing_compiler(error: BaseException | None) -> bool:
    """Whether torch's compiler, or what raised it, says that there is no C++ compiler."""
    while error is not None:
        if type(error).__name__ in ("InvalidCxxCompiler", "CppCompileError"):
            return type(error).__name__ == "InvalidCxxCompiler"
        error = getattr(error, "inner_exception", None) or error.__cause__
    return False
