"""The work on one replica's micro-batches, spread over stages and tensor parallel devices: loss and gradients.

Losses are sums times a scale that the caller chooses (1 / targets of the whole global batch), so gradients of
micro-batches, passes and replicas simply add up, however many targets each has.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from bluejay.errors import ConfigError, MachineError
from bluejay.events import Event, Observer, ignore
from bluejay.models import GPTJ
from bluejay.parallel.collectives import IGNORED, Group, cross_entropy_sum
from bluejay.parallel.cut import CutHead
from bluejay.parallel.mesh import group_of
from bluejay.parallel.peers import Replicas
from bluejay.parallel.plan import Plan

# The names of torch's classes. They are imported where they are used: half a second that planning does without.
_SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
}


class Rows(Protocol):
    """A micro-batch.

    Shapes:
        inputs, targets, segments: [B, T] int64, targets IGNORED (-100) where nothing is predicted
    """

    @property
    def inputs(self) -> Tensor: ...
    @property
    def targets(self) -> Tensor: ...
    @property
    def segments(self) -> Tensor | None: ...


class _Forward(nn.Module):
    """A piece's forward pass: ids or vectors in, vectors out, or the loss where a piece is the whole model.

    Args:
        number: of the piece in the model; no two draw the same dropout.
    """

    def __init__(self, piece: GPTJ, number: int, recompute: bool, smoothing: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.piece, self.number, self.recompute = piece, number, recompute
        self.smoothing, self.dtype = smoothing, dtype

    def forward(
        self,
        x: Tensor,
        segments: Tensor | None = None,
        seeds: Tensor | None = None,
        targets: Tensor | None = None,
        scale: Tensor | float = 1.0,
    ) -> Tensor:
        """Shapes: x: [B, T] ids or [B, T, E]   segments, targets: [B, T]   seeds: [1]   returns: [B, T, E] or scalar"""
        piece = self.piece
        if seeds is not None:
            torch.manual_seed(int(seeds[0]) + self.number)
        grid = x if x.dim() == 2 else x[..., 0].long()
        where = piece.locate(grid, None, None, segments)
        if piece.transformer.wte is not None:
            x = piece.embed(x).to(self.dtype)
        recompute = self.recompute and torch.is_grad_enabled()
        for block in piece.transformer.h:
            x = checkpoint(block, x, where, None, use_reentrant=False) if recompute else block(x, where, None)
        if targets is not None:
            return self.loss(x, targets) * scale
        # torch detaches the last stage's output in place, except a view: gradients of weights may be yet to come.
        return x if piece.lm_head is None else x.view_as(x)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Sum of the losses: [B, T, E] and [B, T] to a scalar."""
        head: Any = self.piece.lm_head
        hidden = self.piece.transformer.ln_f(x).flatten(0, 1)
        smoothing = self.smoothing if self.training else 0.0
        if isinstance(head, CutHead):
            logits, first, group = head.part(hidden), head.first, head.ranks.group
            return cross_entropy_sum(logits, targets.flatten(), first, group, smoothing, head.vocab_size)
        # A head that is shared, or shared out, is in fp32.
        logits = F.linear(hidden, *(parameter.to(hidden.dtype) for parameter in (head.weight, head.bias)))
        return cross_entropy_sum(logits, targets.flatten(), smoothing=smoothing)


class PlannedStep:
    """This rank's share of a planned model, ready to train.

    Attributes:
        pieces: its parts of the model; their parameters carry the gradients, under the whole model's names.
        replicas: who else works on the global batch.
        bubble: fraction of a pass in which stages wait for each other, by the schedule's formula.
        compile_seconds: spent in the first call for each shape, where layers are compiled.

    Args:
        smoothing: probability that the wanted distribution gives to all tokens alike, in training.
        compile: "auto" compiles layers where that works, and says so where it does not; "inductor" insists.

    Raises:
        ConfigError, MachineError: compiled layers are insisted on, and do not work.
    """

    def __init__(
        self,
        pieces: Sequence[GPTJ],
        plan: Plan,
        mesh: DeviceMesh,
        smoothing: float = 0.0,
        compile: str = "eager",
        observe: Observer = ignore,
    ) -> None:
        self.pieces, self.plan, self.bubble = list(pieces), plan, plan.bubble
        layout = plan.layout
        self.compile_seconds = 0.0
        self.replicas = Replicas(mesh, layout.shard)
        self._stages: Group = group_of(mesh, "stage")
        self._stage, self._num_pieces = mesh.get_local_rank("stage"), layout.num_stages * layout.chunks
        self._dtype: torch.dtype = getattr(torch, plan.workload.dtype)
        numbers = range(self._stage, self._num_pieces, layout.num_stages)
        recompute = plan.workload.recompute
        self._forwards = [
            _Forward(piece, number, recompute, smoothing, self._dtype)
            for piece, number in zip(pieces, numbers, strict=True)
        ]
        self._device = torch.device(mesh.device_type)
        self._schedules: dict[tuple[int, int], Any] = {}
        self._scale: Tensor | float = 1.0
        self._observe = observe
        self._shapes: set[Any] = set()
        self._shared_out: list[Any] = []
        self._compiles = compile != "eager" and self._compile(compile == "inductor")
        if layout.shard:
            self._share_out(mesh)

    def gradients(self, batches: Sequence[Rows], scale: Tensor | float, seeds: Sequence[int]) -> Tensor:
        """Add the gradients of `scale` times the sum of the losses; returns that sum without the scale, on all stages.

        Each replica calls this with its own micro-batches. With stages they go through in passes of the plan's
        `micro_batches`, padded to the widest; all have equally many rows, because stages receive into fixed buffers.

        Args:
            seeds: of each micro-batch's dropout.

        Raises:
            ConfigError: the micro-batches do not divide into passes.
        """
        self._set_training(True)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        if self._stages is None:
            for batch, seed in zip(batches, seeds, strict=True):
                with _Timed(self, "gradients", batch.inputs):
                    given = batch.inputs, batch.segments, torch.tensor([seed]), batch.targets, scale
                    loss = self._forwards[0](*given)
                    loss.backward()
                total += loss.detach().double() / scale
            return total
        micro = self.plan.layout.micro_batches
        if len(batches) % micro:
            fitting = max(n for n in range(1, micro + 1) if len(batches) % n == 0)
            raise ConfigError(
                asked=f"{len(batches)} micro-batches",
                found=f"passes of {micro}; {len(batches)} over {micro} leaves {len(batches) % micro}",
                rule="passes through the stages are equal",
                fix=f"give a multiple of {micro} micro-batches, or use micro_batches={fitting}",
            )
        self._scale = scale
        width = max(batch.inputs.shape[1] for batch in batches)
        for start in range(0, len(batches), micro):
            chosen = slice(start, start + micro)
            total += self._pass(batches[chosen], seeds[chosen], width)
        dist.all_reduce(total, group=self._stages)
        return total

    def _pass(self, batches: Sequence[Rows], seeds: Sequence[int], width: int) -> Tensor:
        """Micro-batches through all stages, forward and backward; the sum of their losses, on the last stage."""
        ids = torch.cat([F.pad(b.inputs, (0, width - b.inputs.shape[1])) for b in batches])
        given: dict[str, Any] = {"seeds": torch.tensor(seeds)}
        segments = [b.segments for b in batches if b.segments is not None]
        if segments:
            given["segments"] = torch.cat([F.pad(s, (0, width - s.shape[1])) for s in segments])
        losses: list[Tensor] = []
        if self._stage == self.plan.layout.num_stages - 1:
            wanted = [F.pad(b.targets, (0, width - b.targets.shape[1]), value=IGNORED) for b in batches]
            given |= {"target": torch.cat(wanted), "losses": losses}
        inputs = (ids,) if self._stage == 0 else ()
        with _Timed(self, "gradients", ids):
            self._schedule(len(ids) // len(batches), width).step(*inputs, **given, return_outputs=False)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        return total + sum(loss.detach().double() for loss in losses) / self._scale

    @torch.no_grad()
    def loss(self, batch: Rows) -> Tensor:
        """The sum of the losses over the rows' targets, on all stages, without gradients, dropout and smoothing."""
        self._set_training(False)
        with _Timed(self, "loss", batch.inputs):
            if self._stages is None:
                whole: Tensor = self._forwards[0](batch.inputs, batch.segments, None, batch.targets)
                self._let_go()
                return whole
            x = self._through(batch.inputs, batch.segments)
            total = torch.zeros((), device=self._device)
            if x is not None:
                total = self._forwards[-1].loss(x, batch.targets)
            self._let_go()
        dist.all_reduce(total, group=self._stages)
        return total

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """All logits [B, T, V] of a batch, on every rank of the replica."""
        self._set_training(False)
        x = self._through(ids, None)
        shape = (*ids.shape, self.plan.model.vocab_size)
        if x is not None:
            logits = self.pieces[-1].logits(x).float().contiguous()
        else:
            logits = torch.empty(shape, device=ids.device)
        if self._stages is not None:
            dist.broadcast(logits, group=self._stages, group_src=self.plan.layout.num_stages - 1)
        self._let_go()
        return logits

    def _let_go(self) -> None:
        """Forget what was gathered for a forward pass that no backward pass follows: weights may change before another.

        After a backward pass what is shared out lets go by itself.
        """
        if self.plan.layout.shard:
            for module in self._shared_out:
                module.reshard()

    def _set_training(self, training: bool) -> None:
        for forward in self._forwards:
            forward.train(training)

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

    def _schedule(self, rows: int, width: int) -> Any:
        """torch's schedule for micro-batches of this shape; its stages keep buffers for what they receive."""
        from torch.distributed import pipelining

        layout = self.plan.layout
        if (rows, width) not in self._schedules:
            shape = (rows, width, self.plan.model.n_embd)
            hidden = torch.empty(shape, dtype=self._dtype, device="meta", requires_grad=True)
            first = torch.empty(rows, width, dtype=torch.int64, device="meta")

            class Stage(pipelining.PipelineStage):
                """One whose gradients of weights meet their hooks where a backward pass in two parts makes them.

                That pass writes them without autograd's accumulation, which calls the hooks otherwise.
                """

                def backward_weight_one_chunk(self, *args: Any, **options: Any) -> None:
                    super().backward_weight_one_chunk(*args, **options)
                    for weight in self.submod.parameters():
                        if weight.grad is not None:
                            for hook in (weight._post_accumulate_grad_hooks or {}).values():
                                hook(weight)

            stages = [
                Stage(
                    forward,
                    forward.number,
                    self._num_pieces,
                    self._device,
                    input_args=first if forward.number == 0 else hidden,
                    output_args=hidden,
                    group=self._stages,
                )
                for forward in self._forwards
            ]
            made = getattr(pipelining, _SCHEDULES[layout.schedule])
            self._schedules[rows, width] = made(
                stages if layout.schedule in ("interleaved", "zero-bubble") else stages[0],
                layout.micro_batches,
                loss_fn=lambda x, targets: self._forwards[-1].loss(x, targets) * self._scale,
                scale_grads=False,  # they carry their scale already
            )
        return self._schedules[rows, width]

    def _compile(self, insist: bool) -> bool:
        """Compile the layers' forward and backward passes, one program for all of them; whether that works here."""
        layout = self.plan.layout
        if layout.tensor > 1 or layout.schedule == "zero-bubble":
            several = "layers with collectives inside" if layout.tensor > 1 else "a backward pass in two parts"
            error: ConfigError | MachineError = ConfigError(
                asked=f"a compiled training step with parallel.tensor={layout.tensor}, {layout.schedule}",
                found=several,
                rule="what is compiled is one device's forward pass, or one backward pass",
                fix="set compile=eager, or use stages and replicas with another schedule",
            )
        elif (missing := _missing_compiler()) is not None:
            error = MachineError(
                asked="a compiled training step", found=missing, fix="install a C++ compiler, or set compile=eager"
            )
        else:
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 32)  # one for each shape
            for piece in self.pieces:
                for block in piece.transformer.h:
                    block.forward = torch.compile(block.forward, dynamic=False)
            return True
        if insist:
            raise error
        self._observe(Event("warning", {"text": f"training without a compiled step, slower: {error.found}"}))
        return False

    def _share_out(self, mesh: DeviceMesh) -> None:
        """Replicas keep a part of each parameter, gather a layer's while it works, and sum gradients into the parts.

        Parts and gradients are fp32 masters and sums; layers are gathered in the dtype that is computed in. Embedding
        and head, which the outermost module gathers, stay in fp32 (see `train.precision` for the embedding).

        Between stages weights are gathered once for all micro-batches of a pass, and gradients summed at its end.

        Source: Rajbhandari et al. 2020 (ZeRO); Zhao et al. 2023 (FSDP).
        """
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(self._dtype, torch.float32, cast_forward_inputs=False)
        group, lets_go = mesh["replica"], self._stages is None
        for forward in self._forwards:
            norm = forward.piece.transformer.ln_f
            for module in (*forward.piece.transformer.h, *([] if norm is None else [norm])):
                fully_shard(module, mesh=group, mp_policy=policy, reshard_after_forward=lets_go)
            fully_shard(forward, mesh=group, reshard_after_forward=False)
        self._shared_out = [m for f in self._forwards for m in f.modules() if isinstance(m, FSDPModule)]
        for module in self._shared_out:
            module.set_gradient_divide_factor(1.0)  # sums: the scale says what they are a share of
            module.set_force_sum_reduction_for_comms(True)


class _Timed:
    """Around the first call of a compiled step for each shape: says that it compiles, and how long that took."""

    def __init__(self, step: PlannedStep, what: str, ids: Tensor) -> None:
        self._step, self._key = step, (what, tuple(ids.shape))
        self._is_first = step._compiles and self._key not in step._shapes
        self._fields = {"shape": list(ids.shape), "what": what}

    def __enter__(self) -> None:
        if self._is_first:
            self._step._observe(Event("train.compiling", self._fields))
        self._started = time.perf_counter()

    def __exit__(self, kind: object, *error: object) -> None:
        if self._is_first and kind is None:
            seconds = time.perf_counter() - self._started
            self._step._shapes.add(self._key)
            self._step.compile_seconds += seconds
            self._step._observe(Event("train.compile", {**self._fields, "seconds": seconds}))


def _missing_compiler() -> str | None:
    """What torch says of a C++ compiler that is not there."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        return str(error).strip().splitlines()[0]
    return None
