"""Cross entropy straight from hidden states, a chunk of tokens at a time: logits never fill the memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bluejay.train.packing import IGNORED

CHUNK_TOKENS = 1024  # of a 50,400-entry vocabulary in fp32: 200 MB of logits at once


class _LinearCrossEntropy(torch.autograd.Function):
    """The gradient is made together with the loss, while a chunk's logits are at hand; nothing is computed twice.

    Weight gradients are summed over chunks in fp32, whatever the weights' dtype.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scale: Tensor, smoothing: float
    ) -> tuple[Tensor, Tensor]:
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if wants_bias and bias is not None else None
        d_hidden = []
        for x, target in zip(hidden.split(CHUNK_TOKENS), targets.split(CHUNK_TOKENS), strict=True):
            logits = F.linear(x, weight, bias).float()  # [n, V]
            log_total = logits.logsumexp(-1, keepdim=True)
            counted = (target != IGNORED)[:, None]
            index = target.clamp_min(0)[:, None]
            loss = log_total - logits.gather(-1, index)
            if smoothing:
                loss = (1 - smoothing) * loss + smoothing * (log_total - logits.mean(-1, keepdim=True))
            total = total + torch.where(counted, loss, 0).sum()
            # softmax - onehot, in the logits' own memory. The factor comes in before the cast: fp16 has no 1e-8.
            columns = torch.arange(logits.shape[-1], device=logits.device)
            logits.sub_(log_total).exp_().add_(columns == index, alpha=smoothing - 1)
            if smoothing:
                logits.sub_(smoothing / logits.shape[-1])
            d_logits = logits.mul_(scale).masked_fill_(~counted, 0).to(hidden.dtype)
            if wants_hidden:
                d_hidden.append(d_logits @ weight)
            if d_weight is not None:
                d_weight += d_logits.t() @ x
            if d_bias is not None:
                d_bias += d_logits.float().sum(0)
        ctx.save_for_backward(
            torch.cat(d_hidden) if d_hidden else None,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None or bias is None else d_bias.to(bias.dtype),
        )
        ctx.mark_non_differentiable(total)
        return total * scale, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight, d_bias = (None if d is None else d * grads[0] for d in ctx.saved_tensors)
        return d_hidden, d_weight, d_bias, None, None, None


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scale: Tensor, smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Sum over targets of the cross entropy of `hidden @ weight.T + bias`: times `scale`, and as it is, in fp32 nats.

    Only the first carries gradients.

    Args:
        scale: what the sum is multiplied with: 1 / targets of the global batch, times the loss scale.
        smoothing: probability that the wanted distribution gives to all tokens alike.

    Shapes:
        hidden: [N, E]   weight: [V, E]   bias: [V]   targets: [N] int64, `IGNORED` to leave out   returns: two scalars
    """
    scaled, total = _LinearCrossEntropy.apply(hidden, weight, bias, targets, scale, smoothing)
    return scaled, total
