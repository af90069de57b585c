"""A planned model that generates: a stage whose forward pass receives, computes and sends, and one choice for all.

Every rank runs the same engine on the same requests. What a rank computes differs; what is chosen is the same on all,
because the first device of the last stage says it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from bluejay.models import GPTJ, KVCache
from bluejay.parallel.collectives import Ranks
from bluejay.parallel.mesh import group_of


class StageOfGPTJ(GPTJ):
    """One stage of a model. Rows go through the stages in as many groups as there are stages, so that they overlap."""

    stage: int
    num_stages: int
    ranks: Ranks

    def place(self, mesh: DeviceMesh) -> None:
        """Say which stage this is, and who the others are."""
        self.ranks, self.stage = Ranks(group_of(mesh, "stage")), mesh.get_local_rank("stage")
        self.num_stages = mesh.size(1)

    def forward(
        self, ids: Tensor, positions: Tensor | None = None, cache: KVCache | None = None, last: Tensor | None = None
    ) -> Tensor:
        """As `GPTJ.forward` on the last stage; zeros of that shape on the others.

        Shapes: as `GPTJ.forward`
        """
        num_rows, width = ids.shape
        logits: list[Tensor] = []
        sends: list[dist.Work | None] = []
        sent: list[Tensor] = []  # alive until they have left
        for rows in torch.arange(num_rows).tensor_split(min(num_rows, self.num_stages)):
            own = slice(int(rows[0]), int(rows[-1]) + 1)
            held = None if cache is None or not cache.keys else cache.view(own.start, len(rows))
            x = self._incoming(ids[own])
            if len(self.transformer.h):
                where = self.locate(ids[own], None if positions is None else positions[own], held)
                for i, block in enumerate(self.transformer.h):
                    x = block(x, where, None if held is None else held.layer(i))
            if self.stage == self.num_stages - 1:
                logits.append(self.logits(x, None if last is None else last[own]))
            else:
                sent.append(x.contiguous())
                sends.append(dist.isend(sent[-1], group=self.ranks.group, group_dst=self.stage + 1))
        for send in sends:
            if send is not None:
                send.wait()
        if logits:
            return torch.cat(logits)
        shape = (num_rows, self.config.vocab_size) if last is not None else (num_rows, width, self.config.vocab_size)
        return torch.zeros(shape, device=ids.device)

    def _incoming(self, ids: Tensor) -> Tensor:
        """Vectors of these tokens: looked up on the first stage, received on the others."""
        if self.stage == 0:
            return self.embed(ids)
        dtype = next(self.parameters()).dtype
        x = torch.empty((*ids.shape, self.config.n_embd), dtype=dtype, device=ids.device)
        dist.recv(x, group=self.ranks.group, group_src=self.stage - 1)
        return x


def agreement(mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    """Gives every rank of a replica the tensor of the first device of its last stage."""
    tensor, stages, last = group_of(mesh, "tensor"), group_of(mesh, "stage"), mesh.size(1) - 1

    def agree(value: Tensor) -> Tensor:
        value = value.contiguous()
        for group, source in ((tensor, 0), (stages, last)):
            if group is not None:
                dist.broadcast(value, group=group, group_src=source)
        return value

    return agree
