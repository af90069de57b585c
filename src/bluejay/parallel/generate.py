"""A planned model that generates: a stage whose forward pass receives, computes and sends, and one choice for all.

Every rank runs the same engine on the same requests. What a rank computes differs; what is chosen is the same on all,
because the first device of the last stage says it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from bluejay.compile import HostFunctions
from bluejay.models import GPTJ, KVCache
from bluejay.parallel.partition import rows_at_once
from bluejay.parallel.ranks import Ranks


class StageOfGPTJ(GPTJ):
    """One stage of a model."""

    stages: Ranks

    def place(self, mesh: DeviceMesh) -> None:
        """Say which stage this is, and who the others are."""
        self.stages = Ranks.along(mesh, "stage")

    def forward(
        self, ids: Tensor, positions: Tensor | None = None, cache: KVCache | None = None, last: Tensor | None = None
    ) -> Tensor:
        """As `GPTJ.forward` on the last stage. The others send on what they computed, and return an empty tensor.

        Shapes: as `GPTJ.forward`
        """
        if self.transformer.wte is not None:
            x = self.embed(ids)
        else:
            dtype = next(self.parameters()).dtype
            x = self.stages.receive((*ids.shape, self.config.n_embd), dtype, ids.device)
        if len(self.transformer.h):
            where = self.locate(ids, positions, cache)
            for i, block in enumerate(self.transformer.h):
                x = block(x, where, None if cache is None else cache.layer(i))
        return self.logits(x, last) if self.lm_head is not None else self.stages.send(x)


class Meeting:
    """What the ranks of a replica settle between their programs.

    Attributes:
        index, count: which of the job's ranks this is, and how many there are.
        chooses: whether this rank's programs end in a choice of tokens: those of the last stage do.
        part: what of the model this rank's programs are for, in words.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._tensor, self._stages = Ranks.along(mesh, "tensor"), Ranks.along(mesh, "stage")
        self.index, self.count = mesh.get_rank(), mesh.size()
        self.chooses = self._stages.index == self._stages.count - 1
        stage = f"stage {self._stages.index + 1} of {self._stages.count}"
        cut = f"layers cut in {self._tensor.count}"
        self.part = ", ".join([stage] * (self._stages.count > 1) + [cut] * (self._tensor.count > 1)) or "whole layers"

    def host_functions(self) -> HostFunctions:
        """What programs leave to the host, by name."""
        return {**self._tensor.host_functions(), **self._stages.host_functions()}

    def rows_at_once(self, num_rows: int) -> int:
        """Rows that go through the stages together, when `num_rows` are to."""
        return rows_at_once(num_rows, self._stages.count)

    def begin(self, values: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Give every rank the tensors of the first device of the last stage.

        Returns: a function that waits for them. Ranks go on with other rows until they need them.
        """
        agreed = [value.contiguous() for value in values]
        under_way: list[dist.Work] = []
        for value in agreed:
            if self.chooses and self._tensor.group is not None:
                work = dist.broadcast(value, group=self._tensor.group, group_src=0, async_op=True)
                if self._tensor.index > 0:
                    work.wait()  # it is this one's to send on
                else:
                    under_way.append(work)
            if self._stages.group is not None:
                last = self._stages.count - 1
                under_way.append(dist.broadcast(value, group=self._stages.group, group_src=last, async_op=True))

        def wait() -> list[Tensor]:
            for work in under_way:
                work.wait()
            return agreed

        return wait

    def all_hold(self, holds: bool, device: torch.device) -> bool:
        """Whether `holds` is true on every rank, on every rank."""
        count = torch.tensor(int(holds), device=device)
        for ranks in (self._tensor, self._stages):
            if ranks.group is not None:
                dist.all_reduce(count, dist.ReduceOp.MIN, group=ranks.group)
        return bool(count)

    def agree(self, value: Tensor) -> Tensor:
        """The tensor of the first device of the last stage, on every rank."""
        return self.begin([value])()[0]
