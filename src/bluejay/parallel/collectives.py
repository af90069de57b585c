"""Collectives that autograd understands, and the loss over a vocabulary that several devices share.

"group" is the tensor parallel group; None is one device, where all of these do nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

IGNORED = -100  # a target that is nobody's to predict

Group = dist.ProcessGroup | None


class Ranks:
    """A group as a module keeps it: copies of the module are on the same ranks."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self


class _CopyIn(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _SumOut(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherLast(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.width, ctx.index = x.shape[-1], dist.get_rank(group)
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.narrow(-1, ctx.index * ctx.width, ctx.width), None


def copy_in(x: Tensor, group: Group) -> Tensor:
    """What every device goes on from; each computes a part, so the gradients that come back are added up."""
    return x if group is None else _CopyIn.apply(x, group)


def sum_out(x: Tensor, group: Group) -> Tensor:
    """The sum of every device's part, in place; the gradient of the sum is the gradient of each part."""
    return x if group is None else _SumOut.apply(x, group)


def gather_last(x: Tensor, group: Group) -> Tensor:
    """Every device's part, side by side along the last dim.

    Only for what is the same on all devices afterwards: its gradient is taken from the device's own copy.
    """
    return x if group is None else _GatherLast.apply(x, group)


class _CrossEntropy(Function):
    """Sum of the losses, and softmax for its gradient; every device knows only its columns."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, group: Group) -> Tensor:
        scores = logits.float()
        highest = scores.amax(-1)
        if group is not None:
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        probabilities = (scores - highest[:, None]).exp_()
        column = targets - first
        is_here = (column >= 0) & (column < scores.shape[1])
        column = column.clamp(0, scores.shape[1] - 1)
        chosen = (scores.gather(1, column[:, None])[:, 0] - highest).masked_fill(~is_here, 0)
        sums = torch.stack((probabilities.sum(-1), chosen))
        if group is not None:
            dist.all_reduce(sums, group=group)
        counted = targets != IGNORED
        probabilities /= sums[0][:, None]
        ctx.save_for_backward(probabilities, column, is_here & counted, counted)
        ctx.dtype = logits.dtype
        return ((sums[0].log() - sums[1]) * counted).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, column, is_here, counted = ctx.saved_tensors
        result = probabilities * (grad * counted)[:, None]
        result.scatter_add_(1, column[:, None], -(grad * is_here)[:, None])
        return result.to(ctx.dtype), None, None, None


def cross_entropy_sum(logits: Tensor, targets: Tensor, first: int = 0, group: Group = None) -> Tensor:
    """Sum over tokens of -log softmax(logits)[target], in fp32, the same on all devices of the group.

    Shapes:
        logits: [N, V/t], columns `first` to `first + V/t`   targets: [N], IGNORED where nothing is predicted
        returns: scalar

    Source: Narayanan et al. 2021, section 2.3 (parallel output layer).
    """
    total: Tensor = _CrossEntropy.apply(logits, targets, first, group)
    return total
