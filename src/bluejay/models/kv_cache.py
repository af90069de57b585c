"""Keys and values of the tokens seen so far: static shapes, written in place, one row per sequence."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from bluejay.config import ModelConfig


def aligned_rows(
    num_rows: int, shape: tuple[int, ...], value: float, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """[num_rows, *shape] filled with `value`, every row at an address that is a multiple of 16 bytes.

    Compiled GPU programs copy an input that is not so aligned, and then what they write to it is lost.
    """
    width = 1 if not shape else shape[0]
    padded = -(-width * dtype.itemsize // 16) * 16 // dtype.itemsize
    table = torch.full((num_rows, padded), value, dtype=dtype, device=device)
    return table[:, :width] if shape else table[:, 0]


class LayerCache(NamedTuple):
    """One layer's keys and values, and what it must know to read them.

    Shapes:
        keys, values: [B, H, 1 + S, D]   lengths: [B], the tokens being written included
    """

    keys: Tensor
    values: Tensor
    lengths: Tensor

    def write(self, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values in place; returns all slots in use, with zeros in the others.

        Slots beyond a row's length may hold anything, even NaN, and 0 * NaN is NaN: they are blanked on the way out.

        Shapes:
            keys, values: [B, H, T, D]   positions: [B, T], -1 for padding   returns: two of [B, H, S, D]
        """
        rows = torch.arange(positions.shape[0], device=positions.device)[:, None]
        self.keys[rows, :, positions + 1] = keys.transpose(1, 2)
        self.values[rows, :, positions + 1] = values.transpose(1, 2)
        keys, values = self.keys[:, :, 1:], self.values[:, :, 1:]
        slots = torch.arange(keys.shape[2], device=keys.device)
        unused = (slots >= self.lengths[:, None])[:, None, :, None]
        return keys.masked_fill(unused, 0), values.masked_fill(unused, 0)


class KVCache(nn.Module):
    """Static key/value storage. A token at position p of its row lives in slot p + 1; slot 0 swallows padding.

    That one convention removes three faults at once: padded tokens have position -1 and so fall into slot 0, which
    nobody reads; the slot of a token never depends on how its batch was padded; and no write can run off the end
    as long as positions are below `num_slots`.

    Shapes (N rows, H heads, S slots, D head_dim):
        keys[i], values[i]: [N, H, 1 + S, D] for layer i
        lengths: [N] int64, tokens held by each row
    """

    lengths: Tensor

    def __init__(
        self,
        config: ModelConfig,
        num_rows: int,
        num_slots: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        num_layers: int | None = None,
        num_heads: int | None = None,
    ) -> None:
        """A cache for all of a model's layers and heads, or for the part of them that a device holds."""
        super().__init__()
        num_layers = config.n_layer if num_layers is None else num_layers
        num_heads = config.n_head if num_heads is None else num_heads
        # Left uninitialized: memory is only committed where tokens are written, and unused slots are never read.
        shape = (num_rows, num_heads, 1 + num_slots, config.head_dim)
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.register_buffer("lengths", aligned_rows(num_rows, (), 0, torch.int64, device), persistent=False)

    @property
    def num_rows(self) -> int:
        return self.lengths.shape[0]

    @property
    def num_slots(self) -> int:
        return self.keys[0].shape[2] - 1

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

    def reset(self, row: int | None = None) -> None:
        """Forget one row, or all. Contents are not cleared: what lies beyond a row's length is never read."""
        if row is None:
            self.lengths.zero_()
        else:
            self.lengths[row] = 0

    @classmethod
    def of(cls, keys: list[Tensor], values: list[Tensor], lengths: Tensor) -> KVCache:
        """A cache over existing storage: a view of another cache, or the tensors a program was given."""
        cache = cls.__new__(cls)
        nn.Module.__init__(cache)
        cache.keys, cache.values = keys, values
        cache.register_buffer("lengths", lengths, persistent=False)
        return cache

    def view(self, first_row: int, num_rows: int, num_slots: int | None = None) -> KVCache:
        """A cache over `num_rows` of these rows and the first `num_slots` slots, sharing storage."""
        stop = 1 + (self.num_slots if num_slots is None else num_slots)
        rows = slice(first_row, first_row + num_rows)
        return KVCache.of(
            [k[rows, :, :stop] for k in self.keys], [v[rows, :, :stop] for v in self.values], self.lengths[rows]
        )

    def copy_rows(self, sources: list[int], targets: list[int], first_slot: int = 0) -> None:
        """Row `targets[i]` becomes what row `sources[i]` was. Slots below `first_slot` (a shared prompt) stay.

        Sources are read before targets are written, so rows may trade places.
        """
        if not sources:
            return
        used = 1 + int(self.lengths[sources].max())
        for tensor in (*self.keys, *self.values):
            tensor[targets, :, 1 + first_slot : used] = tensor[sources, :, 1 + first_slot : used]
        self.lengths[targets] = self.lengths[sources]

    def layer(self, index: int) -> LayerCache:
        """Layer `index`'s share of this cache."""
        return LayerCache(self.keys[index], self.values[index], self.lengths)
