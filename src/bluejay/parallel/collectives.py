"""Collectives that autograd understands, and the loss over a vocabulary that several devices share.

"group" is the tensor parallel group; None is one device, where all of these do nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

EXCHANGED_BYTES = 1 << 16  # more goes faster in gloo's pieces (benchmarks/parallel.py meeting)
IGNORED = -100  # a target that is nobody's to predict

Group = dist.ProcessGroup | None


def _are_two(x: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether two CPU ranks simply exchange what they have: a third of the time of gloo's collectives, for little."""
    return x.device.type == "cpu" and x.nbytes <= EXCHANGED_BYTES and dist.get_world_size(group) == 2


def _of_other(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The other rank's `x`, of a group of two that both call this."""
    other = 1 - dist.get_rank(group)
    mine, theirs = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    sending = dist.isend(mine, group=group, group_dst=other)
    dist.recv(theirs, group=group, group_src=other)
    assert sending is not None
    sending.wait()
    return theirs


def _add_up(x: Tensor, group: dist.ProcessGroup) -> None:
    """Put the sum over all ranks into `x`, with the same bits on each."""
    if _are_two(x, group):
        x += _of_other(x, group)
    else:
        dist.all_reduce(x, group=group)


class _CopyIn(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        _add_up(grad, ctx.group)
        return grad, None


class _SumOut(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.mark_dirty(x)
        _add_up(x, group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherLast(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.width, ctx.index = x.shape[-1], dist.get_rank(group)
        if _are_two(x, group):
            theirs = _of_other(x, group)
            return torch.cat((theirs, x) if ctx.index else (x, theirs), dim=-1)
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
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, first: int, group: Group, smoothing: float, vocab_size: int
    ) -> Tensor:
        scores = logits.float()
        highest = scores.amax(-1)
        if group is not None:
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        scores = scores - highest[:, None]
        column = targets - first
        is_here = (column >= 0) & (column < scores.shape[1])
        column = column.clamp(0, scores.shape[1] - 1)
        chosen = scores.gather(1, column[:, None])[:, 0].masked_fill(~is_here, 0)
        num_columns = min(scores.shape[1], max(vocab_size - first, 0))  # the rest is padding
        spread = scores[:, :num_columns].sum(-1) if smoothing else torch.zeros_like(chosen)
        probabilities = scores.exp_()
        sums = torch.stack((probabilities.sum(-1), chosen, spread))
        if group is not None:
            dist.all_reduce(sums, group=group)
        counted = targets != IGNORED
        probabilities /= sums[0][:, None]
        ctx.save_for_backward(probabilities, column, is_here & counted, counted)
        ctx.dtype, ctx.smoothing, ctx.num_columns, ctx.vocab_size = logits.dtype, smoothing, num_columns, vocab_size
        losses = sums[0].log() - (1 - smoothing) * sums[1] - smoothing * sums[2] / vocab_size
        return torch.where(counted, losses, 0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        probabilities, column, is_here, counted = ctx.saved_tensors
        share = (grad * counted)[:, None]
        result = probabilities * share
        result.scatter_add_(1, column[:, None], -(grad * (1 - ctx.smoothing) * is_here)[:, None])
        if ctx.smoothing:
            result[:, : ctx.num_columns] -= share * (ctx.smoothing / ctx.vocab_size)
        return result.to(ctx.dtype), None, None, None, None, None


def cross_entropy_sum(
    logits: Tensor,
    targets: Tensor,
    first: int = 0,
    group: Group = None,
    smoothing: float = 0.0,
    vocab_size: int = 0,
) -> Tensor:
    """Sum over tokens of -log softmax(logits)[target], in fp32, the same on all devices of the group.

    Args:
        smoothing: probability that the wanted distribution gives to all tokens alike.
        vocab_size: columns of all devices without padding; 0 is those of `logits`.

    Shapes:
        logits: [N, V/t], columns `first` to `first + V/t`   targets: [N], IGNORED where nothing is predicted
        returns: scalar

    Source: Narayanan et al. 2021, section 2.3 (parallel output layer).
    """
    vocab_size = vocab_size or logits.shape[-1]
    total: Tensor = _CrossEntropy.apply(logits, targets, first, group, smoothing, vocab_size)
    return total
