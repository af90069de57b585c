"""The work on one batch of one replica, spread over stages and tensor parallel devices: loss and gradients.

Losses are sums times a scale that the caller chooses (1 / targets of the whole global batch), so gradients of
micro-batches, passes and replicas simply add up, however many targets each has.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from bluejay.errors import ConfigError
from bluejay.models import GPTJ
from bluejay.parallel.collectives import Group, cross_entropy_sum
from bluejay.parallel.cut import CutHead
from bluejay.parallel.mesh import group_of
from bluejay.parallel.plan import Plan

T = TypeVar("T")

# The names of torch's classes. They are imported where they are used: half a second that planning does without.
_SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B"}


class Replicas:
    """The other copies of the model, each with its own rows of the global batch."""

    def __init__(self, mesh: DeviceMesh, shard: bool = False) -> None:
        self.count, self.index = mesh.size(0), mesh.get_local_rank("replica")
        self._group, self._shard = group_of(mesh, "replica"), shard

    def total(self, values: Tensor) -> Tensor:
        """The sum of a tensor over all replicas."""
        if self._group is not None:
            values = values.clone()
            dist.all_reduce(values, group=self._group)
        return values

    def gather(self, value: T) -> list[T]:
        """Every replica's value, in their order; any picklable object."""
        values: list[Any] = [value] * self.count
        if self._group is not None:
            dist.all_gather_object(values, value, group=self._group)
        return values

    def sum_gradients(self, gradients: list[Tensor]) -> None:
        """Replace each replica's gradients by their sum, in place; those that are shared out are summed already."""
        if self._group is None or self._shard:
            return
        works = [dist.all_reduce(gradient, group=self._group, async_op=True) for gradient in gradients]
        for work in works:
            work.wait()


class _Forward(nn.Module):
    """A piece's forward pass: ids or vectors in, vectors out, or the loss where a piece is the whole model."""

    def __init__(self, piece: GPTJ, recompute: bool) -> None:
        super().__init__()
        self.piece, self.recompute = piece, recompute

    def forward(
        self, x: Tensor, segments: Tensor | None = None, targets: Tensor | None = None, scale: Tensor | float = 1.0
    ) -> Tensor:
        """Shapes: x: [B, T] ids or [B, T, E]   segments, targets: [B, T]   returns: [B, T, E], or a scalar"""
        piece = self.piece
        grid = x if x.dim() == 2 else x[..., 0].long()
        where = piece.locate(grid, None, None, segments)
        if piece.transformer.wte is not None:
            x = piece.embed(x)
        recompute = self.recompute and torch.is_grad_enabled()
        for block in piece.transformer.h:
            x = checkpoint(block, x, where, None, use_reentrant=False) if recompute else block(x, where, None)
        return x if targets is None else self.loss(x, targets) * scale

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Sum of the losses: [B, T, E] and [B, T] to a scalar."""
        head: nn.Module = self.piece.lm_head
        hidden = self.piece.transformer.ln_f(x).flatten(0, 1)
        if isinstance(head, CutHead):
            return cross_entropy_sum(head.part(hidden), targets.flatten(), head.first, head.ranks.group)
        return cross_entropy_sum(head(hidden), targets.flatten())


class PlannedStep:
    """This rank's share of a planned model, ready to train.

    Attributes:
        pieces: its parts of the model; their parameters carry the gradients, under the whole model's names.
        replicas: who else works on the global batch.
        bubble: fraction of a pass in which stages wait for each other, by the schedule's formula.
    """

    def __init__(self, pieces: list[GPTJ], plan: Plan, mesh: DeviceMesh) -> None:
        self.pieces, self.plan, self.bubble = pieces, plan, plan.bubble
        layout = plan.layout
        self.replicas = Replicas(mesh, layout.shard)
        self._stages: Group = group_of(mesh, "stage")
        self._stage, self._num_pieces = mesh.get_local_rank("stage"), layout.num_stages * layout.chunks
        self._forwards = [_Forward(piece, plan.workload.recompute) for piece in pieces]
        self._device = torch.device(mesh.device_type)
        self._schedules: dict[tuple[Any, ...], Any] = {}
        self._scale: Tensor | float = 1.0
        if layout.shard:
            self._share_out(mesh)

    def gradients(self, ids: Tensor, targets: Tensor, scale: Tensor | float, segments: Tensor | None = None) -> Tensor:
        """Add the gradients of `scale` times the sum of the losses; returns that sum without the scale, on all stages.

        With stages, the rows are divided into the plan's micro-batches; each replica calls this with its own rows.

        Shapes:
            ids, targets, segments: [B, T] int64, targets IGNORED (-100) where nothing is predicted   returns: scalar

        Raises:
            ConfigError: the rows do not divide into the plan's micro-batches.
        """
        if self._stages is None:
            loss = self._forwards[0](ids, segments, targets, scale)
            loss.backward()
            return loss.detach() / scale
        self._scale = scale
        losses: list[Tensor] = []
        given = {} if segments is None else {"segments": segments}
        inputs = (ids,) if self._stage == 0 else ()
        last = {"target": targets, "losses": losses} if self._stage == self.plan.layout.num_stages - 1 else {}
        self._schedule(ids).step(*inputs, **given, **last, return_outputs=False)
        total = torch.stack(losses).sum().detach() / scale if losses else torch.zeros((), device=ids.device)
        dist.all_reduce(total, group=self._stages)
        return total

    @torch.no_grad()
    def loss(self, ids: Tensor, targets: Tensor, segments: Tensor | None = None) -> Tensor:
        """The sum of the losses over the rows' targets, on all stages, without gradients."""
        if self._stages is None:
            whole: Tensor = self._forwards[0](ids, segments, targets)
            return whole
        x = self._through(ids, segments)
        total = torch.zeros((), device=ids.device) if x is None else self._forwards[-1].loss(x, targets)
        dist.all_reduce(total, group=self._stages)
        return total

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """All logits [B, T, V] of a batch, on every rank of the replica."""
        x = self._through(ids, None)
        shape = (*ids.shape, self.plan.model.vocab_size)
        if x is not None:
            logits = self.pieces[-1].logits(x).float().contiguous()
        else:
            logits = torch.empty(shape, device=ids.device)
        if self._stages is not None:
            dist.broadcast(logits, group=self._stages, group_src=self.plan.layout.num_stages - 1)
        return logits

    def _through(self, ids: Tensor, segments: Tensor | None) -> Tensor | None:
        """One batch through all pieces in order; the vectors after the last one, where this rank has that."""
        x: Tensor | None = ids
        for number in range(self._num_pieces):
            stage = number % self.plan.layout.num_stages
            chunk = number // self.plan.layout.num_stages
            if stage != self._stage:
                continue
            if number > 0 and self._stages is not None:
                x = ids.new_empty((*ids.shape, self.plan.model.n_embd), dtype=self._dtype)
                dist.recv(x, group=self._stages, group_src=(stage - 1) % self.plan.layout.num_stages)
            x = self._forwards[chunk](x, segments)
            if number < self._num_pieces - 1 and self._stages is not None:
                assert x is not None
                dist.send(x.contiguous(), group=self._stages, group_dst=(stage + 1) % self.plan.layout.num_stages)
        return x if self._stage == self.plan.layout.num_stages - 1 else None

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.pieces[0].parameters()).dtype

    def _schedule(self, ids: Tensor) -> Any:
        """torch's schedule for batches of this shape; its stages keep buffers for what they receive."""
        from torch.distributed import pipelining

        layout = self.plan.layout
        num_rows, width = ids.shape
        if num_rows % layout.micro_batches:
            raise ConfigError(
                asked=f"a pass of {num_rows} rows",
                found=f"{layout.micro_batches} micro-batches; {num_rows} over {layout.micro_batches} leaves "
                f"{num_rows % layout.micro_batches}",
                rule="micro-batches are equal, because stages receive into fixed buffers",
                fix=f"pass a multiple of {layout.micro_batches} rows, or use "
                f"{max(n for n in range(1, layout.micro_batches + 1) if num_rows % n == 0)} micro-batches",
            )
        key = (num_rows, width, self._dtype)
        if key not in self._schedules:
            rows = num_rows // layout.micro_batches
            shape = (rows, width, self.plan.model.n_embd)
            hidden = torch.empty(shape, dtype=self._dtype, device="meta", requires_grad=True)
            first = torch.empty(rows, width, dtype=torch.int64, device="meta")
            stages = [
                pipelining.PipelineStage(
                    forward,
                    chunk * layout.num_stages + self._stage,
                    self._num_pieces,
                    self._device,
                    input_args=first if chunk == 0 and self._stage == 0 else hidden,
                    output_args=hidden,
                    group=self._stages,
                )
                for chunk, forward in enumerate(self._forwards)
            ]
            made = getattr(pipelining, _SCHEDULES[layout.schedule])
            self._schedules[key] = made(
                stages if layout.chunks > 1 else stages[0],
                layout.micro_batches,
                loss_fn=lambda x, targets: self._forwards[-1].loss(x, targets) * self._scale,
                scale_grads=False,  # they carry their scale already
            )
        return self._schedules[key]

    def _share_out(self, mesh: DeviceMesh) -> None:
        """Replicas keep a part of each parameter, gather a layer's while it works, and sum gradients into the parts.

        Source: Rajbhandari et al. 2020 (ZeRO); Zhao et al. 2023 (FSDP).
        """
        from torch.distributed.fsdp import FSDPModule, fully_shard

        whole = self._forwards[0]
        for block in whole.piece.transformer.h:
            fully_shard(block, mesh=mesh["replica"])
        fully_shard(whole, mesh=mesh["replica"])
        for module in whole.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # sums: the scale says what they are a share of
                module.set_force_sum_reduction_for_comms(True)
