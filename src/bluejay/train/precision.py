"""What the model computes in, what the optimizer updates, and how the two stay together.

The model's parameters have the compute dtype. Their gradients are summed over micro-batches in fp32. The optimizer sees
fp32 master weights, which are rounded back into the model after each update. In fp32 a parameter is its own master.
Without masters, a master exists only while its one parameter is updated, and is rounded back stochastically: rounded to
the nearest, updates below half a step of bf16 would be lost every time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from bluejay.parallel import own_values

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Trained:
    """A trainable parameter: as the model computes with it, and as the optimizer sees it.

    Attributes:
        kept: the master exists all the time.
    """

    def __init__(self, name: str, parameter: nn.Parameter, dtype: torch.dtype, keep: bool) -> None:
        self.name, self.parameter, self.kept = name, parameter, keep
        self._sum: Tensor | None = None
        if own_values(parameter) is not parameter:  # shared out: a master already, and a copy (`PlannedStep`)
            self.master = parameter
            return
        # Always a copy: loaded weights may be mapped from their file, and are written to from now on.
        if dtype == torch.float32:
            parameter.data = parameter.data.to(dtype, copy=True)
            self.master = parameter
            return
        self.master = nn.Parameter(
            parameter.data.to(torch.float32, copy=True) if keep else torch.empty((0,) * parameter.dim())
        )
        parameter.data = parameter.data.to(dtype, copy=True)
        parameter.register_post_accumulate_grad_hook(self._collect)

    def _collect(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        if self._sum is None:
            self._sum = parameter.grad.float()
        else:
            self._sum.add_(parameter.grad)
        parameter.grad = None

    @property
    def gradient(self) -> Tensor | None:
        """In fp32, summed over the micro-batches so far."""
        return self.parameter.grad if self.master is self.parameter else self._sum

    def forget_gradient(self) -> None:
        self.parameter.grad = self.master.grad = self._sum = None

    @property
    def value(self) -> Tensor:
        """The weight in the best precision there is."""
        return (self.master if self.kept else self.parameter).data


class Weights:
    """The trainable parameters of a model, cast for computing; so are the frozen ones.

    The embedding stays in fp32 where masters are kept, shared with the head or not: its gradient adds up one row for
    every occurrence of a token, and a sum in bf16 stops growing after some hundred terms. So do weights of layers that
    round them on their own.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, masters: bool) -> None:
        full = {
            m.weight
            for m in model.modules()
            if isinstance(m, nn.Embedding) or getattr(m, "keeps_full_precision", False)
        }
        keep = masters or dtype == torch.float32
        self.trained: list[Trained] = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                in_full = keep and parameter in full
                self.trained.append(Trained(name, parameter, torch.float32 if in_full else dtype, keep))
            else:
                parameter.data = parameter.data.to(dtype)

    def __iter__(self) -> Iterator[Trained]:
        return iter(self.trained)

    def gradients(self) -> dict[str, Tensor]:
        """The fp32 gradients by name, after a backward pass; of what is shared out, this process's part."""
        found = {}
        for one in self.trained:
            assert one.gradient is not None, f"the backward pass left {one.name} without a gradient"
            found[one.name] = own_values(one.gradient)
        return found

    def forget_gradients(self) -> None:
        for one in self.trained:
            one.forget_gradient()

    def values(self) -> dict[str, Tensor]:
        """By name, every trainable weight in the best precision there is; not copies."""
        return {one.name: one.value for one in self.trained}

    @torch.no_grad()
    def set(self, values: dict[str, Tensor]) -> None:
        """Put values of all trainable parameters in, masters and model alike."""
        for one in self.trained:
            one.parameter.copy_(values[one.name])
            if one.kept:
                one.master.copy_(values[one.name])


@contextmanager
def updating(members: Sequence[Trained], generator: torch.Generator) -> Iterator[None]:
    """Masters with their gradients, for an optimizer to step on; what it made of them is then in the model.

    Args:
        generator: of stochastic rounding.
    """
    with torch.no_grad():
        for one in members:
            if not one.kept:
                one.master.data = one.parameter.data.float()
            if one.master is not one.parameter:
                one.master.grad = one.gradient
        yield
        for one in members:
            if one.master is one.parameter:
                continue
            one.master.grad = None
            if one.kept:
                one.parameter.copy_(one.master)
            else:
                one.parameter.copy_(round_stochastically(one.master.data, generator))
                one.master.data = torch.empty((0,) * one.master.dim())


def round_stochastically(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """fp32 to bf16, up or down with a probability that makes the mean right.

    The lower half of an fp32 number's bits is what bf16 drops: a random number is added to it before it is cut off.
    """
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    bits = (x.view(torch.int32) + noise) & ~0xFFFF
    return torch.where(x.isfinite(), bits.view(torch.float32), x).to(torch.bfloat16)


class LossScaler:
    """fp16's dynamic loss scaling: halved when gradients overflow, doubled after a long time without.

    Attributes:
        scale: what the loss is multiplied with before its gradient is taken.
        num_skipped: updates that were left out because their gradients overflowed.
    """

    GROWTH_INTERVAL = 2000

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.num_skipped = 0
        self.num_good = 0

    def update(self, overflowed: bool) -> None:
        """Take note of one update's gradients."""
        if overflowed:
            self.scale, self.num_good = self.scale / 2, 0
            self.num_skipped += 1
            return
        self.num_good += 1
        if self.num_good % self.GROWTH_INTERVAL == 0:
            self.scale *= 2

    def state(self) -> dict[str, float]:
        return {"scale": self.scale, "num_skipped": self.num_skipped, "num_good": self.num_good}

    def load(self, state: dict[str, float]) -> None:
        self.scale = float(state["scale"])
        self.num_skipped, self.num_good = int(state["num_skipped"]), int(state["num_good"])
