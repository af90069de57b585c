"""Keys and values of the tokens seen so far: static shapes, written in place, one row per sequence."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bluejay.config import ModelConfig


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
    ) -> None:
        super().__init__()
        shape = (num_rows, config.n_head, 1 + num_slots, config.head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.n_layer)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.n_layer)]
        self.register_buffer("lengths", torch.zeros(num_rows, dtype=torch.int64, device=device), persistent=False)

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

    def view(self, first_row: int, num_rows: int, num_slots: int | None = None) -> KVCache:
        """A cache over `num_rows` of these rows and the first `num_slots` slots, sharing storage."""
        view = KVCache.__new__(KVCache)
        nn.Module.__init__(view)
        stop = 1 + (self.num_slots if num_slots is None else num_slots)
        rows = slice(first_row, first_row + num_rows)
        view.keys = [k[rows, :, :stop] for k in self.keys]
        view.values = [v[rows, :, :stop] for v in self.values]
        view.register_buffer("lengths", self.lengths[rows], persistent=False)
        return view

    def copy_row(self, source: int, target: int) -> None:
        """Make row `target` equal to row `source`, copying only the slots in use."""
        used = 1 + int(self.lengths[source])
        for tensor in (*self.keys, *self.values):
            tensor[target, :, 1:used] = tensor[source, :, 1:used]
        self.lengths[target] = self.lengths[source]

    def reorder(self, first_row: int, parents: Tensor, first_slot: int = 0) -> None:
        """Row `first_row + i` becomes row `first_row + parents[i]`. Slots below `first_slot` (a shared prompt) stay.

        Shapes:
            parents: [n] int64 on the cache's device
        """
        rows = slice(first_row, first_row + parents.shape[0])
        used = 1 + int(self.lengths[rows].max())
        for tensor in (*self.keys, *self.values):
            part = tensor[rows, :, 1 + first_slot : used]
            part.copy_(part[parents])
        self.lengths[rows] = self.lengths[rows][parents]

    def write(self, layer: int, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values in place; returns the layer's whole storage without the padding slot.

        Shapes:
            keys, values: [B, H, T, D]   positions: [B, T], -1 for padding   returns: two of [B, H, S, D]
        """
        rows = torch.arange(positions.shape[0], device=positions.device)[:, None]
        self.keys[layer][rows, :, positions + 1] = keys.transpose(1, 2)
        self.values[layer][rows, :, positions + 1] = values.transpose(1, 2)
        return self.keys[layer][:, :, 1:], self.values[layer][:, :, 1:]
