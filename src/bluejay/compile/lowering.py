"""Two operations written so that the code generator does them well when a program has few rows, or one query.

Both are memory-bound there: each weight and each cached key is used once or a few times. A library call reads them
through a general matrix product, after copies that blank unused cache slots; written as a multiply and a sum, the
generator fuses the blanking, the activation and the residual into the one loop that reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Rows up to which the sum beats the library's matrix product (measured at widths 256 and 4096; docs/decisions/0012).
FEW_ROWS = {torch.float32: 8, torch.bfloat16: 1, torch.float16: 1}


def linear_of_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` as one sum per row, accumulated in fp32. The generator reads each weight once for all rows.

    Shapes:
        x: [..., K]   weight: [N, K]   bias: [N]   returns: [..., N]
    """
    wide = _wide(weight)
    rows = [(row * wide).sum(-1) for row in _wide(x.reshape(-1, x.shape[-1])).unbind()]
    y = torch.stack(rows) if len(rows) > 1 else rows[0]
    if bias is not None:
        y = y + _wide(bias)
    return y.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])


def attention_of_one_query(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """`F.scaled_dot_product_attention` for one query per row and head, scaled before the product.

    A row that sees nothing gets the mean of all values: finite, as long as the values are.

    Shapes:
        q: [B, H, 1, D]   k, v: [B, H, S, D]   visible: [B, 1 or H, 1, S] bool   returns: [B, H, 1, D]
    """
    scores = (q.float() * q.shape[-1] ** -0.5 * k.float()).sum(-1, keepdim=True)  # [B, H, S, 1]
    scores = scores.masked_fill(~visible.transpose(-1, -2), torch.finfo(scores.dtype).min)
    return (scores.softmax(-2) * v.float()).sum(-2, keepdim=True).to(v.dtype)


def _wide(tensor: Tensor) -> Tensor:
    """In fp32. A conversion that changes nothing would still be a link in the graph, one more at every use of a weight,
    and equal layers would no longer look equal."""
    return tensor if tensor.dtype == torch.float32 else tensor.float()


class FewRows(TorchFunctionMode):
    """While active, `F.linear` of few rows and attention of one query take the forms above; all else is untouched."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.linear and 0 < args[0].shape[:-1].numel() <= FEW_ROWS.get(args[0].dtype, 0):
            return linear_of_few_rows(*args, **kwargs)
        if func is F.scaled_dot_product_attention and _is_masked_single_query(args, kwargs):
            return attention_of_one_query(args[0], args[1], args[2], kwargs["attn_mask"])
        return func(*args, **kwargs)


def _is_masked_single_query(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    mask = kwargs.get("attn_mask")
    plain = not kwargs.get("is_causal") and not kwargs.get("dropout_p") and kwargs.get("scale") is None
    if len(args) != 3 or not plain or mask is None or mask.dtype != torch.bool:
        return False
    q, k = args[:2]
    return q.dim() == 4 and q.shape[2] == 1 and q.shape[:2] == k.shape[:2] and q.dtype in FEW_ROWS
