"""Two operations written so that the code generator does them well when a program has one row or one query.

Both are memory-bound there: each weight and each cached key is used once. A library call reads them through a general
matrix product, after copies that blank unused cache slots; written as a multiply and a sum, the generator fuses the
blanking, the activation and the residual into the one loop that reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


def linear_of_one_row(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` for a single row, accumulated in fp32 or wider.

    Shapes:
        x: [..., K] with one row   weight: [N, K]   bias: [N]   returns: [..., N]
    """
    wide = _accumulator(x)
    y = (x.reshape(1, -1).to(wide) * weight.to(wide)).sum(-1)
    if bias is not None:
        y = y + bias.to(wide)
    return y.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])


def attention_of_one_query(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """`F.scaled_dot_product_attention` for one query per row and head, scaled before the product.

    A row that sees nothing gets the mean of all values: finite, as long as the values are.

    Shapes:
        q: [B, H, 1, D]   k, v: [B, H, S, D]   visible: [B, 1 or H, 1, S] bool   returns: [B, H, 1, D]
    """
    wide = _accumulator(q)
    scores = (q.to(wide) * q.shape[-1] ** -0.5 * k.to(wide)).sum(-1, keepdim=True)  # [B, H, S, 1]
    scores = scores.masked_fill(~visible.transpose(-1, -2), torch.finfo(wide).min)
    return (scores.softmax(-2) * v.to(wide)).sum(-2, keepdim=True).to(v.dtype)


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class OneRow(TorchFunctionMode):
    """While active, `F.linear` of one row and attention of one query take the forms above; all else is untouched."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.linear and args[0].shape[:-1].numel() == 1 and args[0].is_floating_point():
            return linear_of_one_row(*args, **kwargs)
        if func is F.scaled_dot_product_attention and _is_masked_single_query(args, kwargs):
            return attention_of_one_query(args[0], args[1], args[2], kwargs["attn_mask"])
        return func(*args, **kwargs)


def _is_masked_single_query(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    mask = kwargs.get("attn_mask")
    plain = not kwargs.get("is_causal") and not kwargs.get("dropout_p") and kwargs.get("scale") is None
    same_heads = len(args) == 3 and args[0].dim() == 4 and args[0].shape[:2] == args[1].shape[:2]
    return same_heads and args[0].shape[2] == 1 and plain and mask is not None and mask.dtype == torch.bool
