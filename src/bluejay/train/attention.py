"""Causal attention of a compiled step on a CPU: a tile of queries at a time, out of matrix products.

torch's own kernel for a CPU multiplies small blocks at a tenth of the rate that its matrix products in bf16 reach.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_TILE, _MOST_TILES = 128, 8  # queries; every tile is code of its own


def attend_in_tiles(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None, is_causal: bool, dropout_p: float
) -> Tensor:
    """What `F.scaled_dot_product_attention` computes for tokens that see none after them: each tile of queries meets
    the keys up to its end only. Scores are rounded to the products' dtype, as in attention under autocast; softmax is
    taken in fp32.

    Args:
        attn_mask, is_causal: a mask that lets no query see what comes after it, or True.

    Shapes:
        q, k, v: [B, H, T, D]   attn_mask: [B, 1, T, T] bool   returns: [B, H, T, D]
    """
    T = q.shape[2]
    size = max(_TILE, -(-T // _MOST_TILES))
    factor = q.shape[-1] ** -0.5
    mixed = []
    for start in range(0, T, size):
        end = min(start + size, T)
        if attn_mask is None:
            seen = torch.ones(end - start, end, dtype=torch.bool, device=q.device).tril(start)
        else:
            seen = attn_mask[:, :, start:end, :end]
        scores = (q[:, :, start:end] @ k[:, :, :end].transpose(-1, -2)).float() * factor  # [B, H, size, end]
        shares = scores.masked_fill(~seen, float("-inf")).softmax(-1).to(v.dtype)
        mixed.append(F.dropout(shares, dropout_p) @ v[:, :, :end])
    return torch.cat(mixed, 2)
