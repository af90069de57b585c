"""What one device holds and moves, in bytes: of a planned model as it runs eagerly. `tests/parity/test_plan_bytes.py`
holds the formulas to what a run takes.

Letters: E n_embd, F inner width, H heads, R rotary_dim, V vocabulary, t tensor parallel degree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import NamedTuple

from bluejay.config import Layout, ModelConfig, Workload
from bluejay.models import EMBEDDING, HEAD, QUANTIZED, parameter_shapes, part_shape
from bluejay.parallel.partition import rows_at_once
from bluejay.parallel.schedule import in_flight

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# The sampler sorts in fp32 and weighs in fp64: scores, their order (int64), and five fp64 or fp32 tables of V a row.
SAMPLER_BYTES = 48
# Tokens whose logits exist at once where one device trains the whole head (`train.loss`).
CHUNK_TOKENS = 1024


@dataclass(frozen=True)
class Memory:
    """Bytes on one device when it holds most, by what they are for.

    Attributes:
        gradients: in fp32, whatever the weights are.
        optimizer: its state, and the fp32 masters of weights that are computed with in half precision.
        activations: what the schedule keeps for backward passes.
        buffers: what is received from other stages, and the rows' state in generation.
        workspace: temporary tensors of the work that is done at that time.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    kv_cache: int = 0
    buffers: int = 0
    workspace: int = 0

    @property
    def total(self) -> int:
        return sum(self.items().values())

    def items(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True)
class Traffic:
    """Bytes that one device hands to collectives and sends: per decode step, or per weight update when training."""

    tensor: int = 0
    pipeline: int = 0
    data: int = 0


class Part(NamedTuple):
    """A device's part of one parameter.

    Attributes:
        num_bytes: as it is computed with.
        is_full: it is its own fp32 master.
    """

    name: str
    elements: int
    num_bytes: int
    is_full: bool


class _Moment(NamedTuple):
    """What a device holds beside weights and optimizer state at one time of an update."""

    gradients: float
    activations: float
    workspace: float


@dataclass(frozen=True)
class Held:
    """One device's part of the model, and what it takes in bytes."""

    config: ModelConfig
    layout: Layout
    workload: Workload
    index: int
    num_layers: int
    has_embedding: bool
    has_head: bool

    @property
    def item(self) -> int:
        return ITEM_BYTES[self.workload.dtype]

    @property
    def cut_vocab(self) -> int:
        return -(-self.config.vocab_size // self.layout.tensor)

    @property
    def is_whole(self) -> bool:
        """Whether the device trains on its own: with all layers, uncut, and the head's loss chunk by chunk."""
        return self.layout.num_stages == self.layout.tensor == 1 and not self.layout.shard

    @cached_property
    def units(self) -> list[list[Part]]:
        """The device's parameters, grouped as replicas share them out: embedding, each layer, head."""
        layer: list[Part] = []
        embedding: list[Part] = []
        head: list[Part] = []
        # A head that shares the embedding's matrix is there twice where that is elsewhere, and where it is packed.
        shared = self.config.tie_word_embeddings and self.has_embedding and not self.workload.quantize
        for name, whole in parameter_shapes(replace(self.config, n_layer=1)).items():
            part = self._part(name, part_shape(name, whole, self.layout.tensor))
            if name.startswith(EMBEDDING):
                embedding.append(part)
            elif not name.startswith(HEAD):
                layer.append(part)
            elif not (shared and name == "lm_head.weight"):
                head.append(part)
        return [embedding] * self.has_embedding + [layer] * self.num_layers + [head] * self.has_head

    def _part(self, name: str, shape: tuple[int, ...]) -> Part:
        work = self.workload
        if work.quantize and name.endswith(QUANTIZED):
            return Part(name, math.prod(shape), packed_bytes(shape[0], shape[1], work.group_size), False)
        if self.layout.shard:
            shape = (-(-shape[0] // self.layout.replicas), *shape[1:])
        # Where masters are kept the embedding is its own, and so is all that replicas share out.
        keeps = work.job == "train" and work.master_weights
        is_full = self.item == 4 or (keeps and (self.layout.shard or name.startswith(EMBEDDING)))
        return Part(name, math.prod(shape), math.prod(shape) * (4 if is_full else self.item), is_full)

    # ---- training --------------------------------------------------------------------------------------------------

    def training(self) -> Memory:
        parts = [part for unit in self.units for part in unit]
        highest = max(self._moments(), key=sum)
        hidden = self._tokens * self.config.n_embd * self.item
        return Memory(
            weights=sum(part.num_bytes for part in parts),
            gradients=round(highest.gradients),
            optimizer=sum(self._state_bytes(part) for part in parts),
            activations=round(highest.activations),
            buffers=self._stage_buffers(hidden),
            workspace=round(highest.workspace),
        )

    @property
    def _tokens(self) -> int:
        return self.workload.rows * self.workload.context

    def _state_bytes(self, part: Part) -> int:
        work = self.workload
        by_muon = work.optimizer == "muon" and ".h." in part.name and part.name.endswith(QUANTIZED)
        master = 4 if work.master_weights and not part.is_full else 0
        return part.elements * (master + (4 if by_muon else 8))

    def _moments(self) -> list[_Moment]:
        """The times at which a device may hold most: any of them can be the one."""
        work, layout, units = self.workload, self.layout, self.units
        flight = last = 1  # micro-batches whose activations are kept, counted in chunks; those of the last chunk
        if layout.num_stages > 1:
            place = layout.schedule, layout.num_stages, layout.micro_batches, self.index, layout.chunks
            flight, last = in_flight(*place), in_flight(*place, chunk=layout.chunks - 1)
        pieces = layout.chunks
        parts = [part for unit in units for part in unit]
        all_gradients = 4 * sum(part.elements for part in parts)
        adds_up = work.gradient_accumulation > flight / pieces  # there are gradients when the most is in flight
        hidden = self._tokens * self.config.n_embd * self.item
        layer = self._layer_activation_bytes()
        kept = hidden if work.recompute else layer
        chunk = self.num_layers / pieces * kept + hidden  # its layers, and what it hands on
        tables = (hidden + self._kept_by_head()) * self.has_head
        at_layer = self._layer_workspace(layer) if self.num_layers else 0
        begun = _Moment(
            all_gradients if adds_up else 4 * sum(part.elements for unit in units[-1:] for part in unit),
            flight * chunk + last * tables,
            max(at_layer, self._head_workspace()),
        )
        others = (flight - 1) * chunk + max(0, last - 1) * tables  # of micro-batches whose turn is still to come
        ended = _Moment(
            all_gradients,
            others + (kept if self.num_layers else 0),
            max(at_layer, self._embedding_workspace(), self._head_workspace() if flight > 1 else 0),
        )
        updated = _Moment(all_gradients, 0, max(map(self._update_workspace, parts), default=0))
        return [begun, ended, updated]

    def _layer_activation_bytes(self) -> float:
        """Bytes of a micro-batch that one layer keeps for its backward pass."""
        config, item, tensor = self.config, self.item, self.layout.tensor
        whole = 2 * config.n_embd * item + 8  # input and its norm, with mean and deviation
        rotated = config.n_embd if item == 4 else config.n_head * config.rotary_dim  # kept in fp32 for the rotation
        cut = 2 * rotated * 4 + 4 * config.n_embd * item + 2 * config.inner_dim * item + 4 * config.n_head
        return self._tokens * (whole + cut / tensor)

    def _layer_workspace(self, layer: float) -> float:
        """Of one layer's backward pass: gradients of the residual, of the norm and of one of the MLP's inner tensors
        (that of the other takes the place of what was kept), and of one matrix."""
        config, work = self.config, self.workload
        inner = config.inner_dim / self.layout.tensor
        rows = self._tokens * self.item * (2 * config.n_embd + inner)
        matrix = self._gradient_bytes(config.n_embd * inner, self.item)
        again = layer - self._tokens * config.n_embd * self.item if work.recompute else 0
        if self.layout.shard:  # this layer's weights, the next one's, and gradients, which are summed in fp32
            ends, head, one = self._whole_elements()
            matrix = 4 * ends + 4 * head + (2 * self.item + 4 + self.item % 4) * one
        return rows + matrix + again

    def _gradient_bytes(self, elements: float, item: int) -> float:
        """Of a gradient while it is added to the sum in fp32: itself, and its copy in fp32."""
        return elements * (4 if item == 4 else item + 4)

    def _kept_by_head(self) -> float:
        """Beside its input: the vectors' norms, and their gradient where the loss makes it, or else probabilities."""
        hidden = self._tokens * self.config.n_embd * self.item
        if self.is_whole:
            return hidden
        return self._tokens * 4 * self.cut_vocab

    def _head_workspace(self) -> float:
        """Of the loss and of its backward pass."""
        if not self.has_head:
            return 0
        low = self.item % 4  # a table in half precision beside its fp32 form; 0 where there is one form only
        matrix = self.cut_vocab * self.config.n_embd
        cast = matrix * low if self.layout.shard or self.config.tie_word_embeddings else 0
        table = self._tokens * self.cut_vocab
        if not self.is_whole:
            last = table * (self.item - 4) + self._gradient_bytes(matrix, self.item)
            gathered = 4 * self._whole_elements()[0] if self.layout.shard else 0
            return max(table * (4 + low), last) + cast + gathered
        table = min(self._tokens, CHUNK_TOKENS) * self.cut_vocab
        several = self._tokens > CHUNK_TOKENS
        alone = 2 * (4 + low) if several else 5 + 2.5 * low
        return cast + max((4 + self.item) * matrix + (4 + low) * table, 4 * matrix + alone * table)

    def _embedding_workspace(self) -> float:
        if not self.has_embedding:
            return 0
        part = self.units[0][0]
        width = self._tokens * self.config.n_embd * (self.item + 4)
        if self.layout.shard:
            return width + 8 * self._whole_elements()[0]
        matrix = self._gradient_bytes(self.cut_vocab * self.config.n_embd, 4 if part.is_full else self.item)
        return width + matrix * (self.workload.gradient_accumulation > 1)

    def _whole_elements(self) -> tuple[int, int, int]:
        """Where replicas share out state: elements of both ends, which are gathered for a whole micro-batch in fp32,
        of the head, whose gradient stays as long, and of a layer."""
        units = [sum(part.elements for part in unit) * self.layout.replicas for unit in self.units]
        head = units[-1] * self.has_head
        layers = units[self.has_embedding : self.has_embedding + self.num_layers]
        return units[0] * self.has_embedding + head, head, max(layers, default=0)

    def _update_workspace(self, part: Part) -> float:
        """Of one parameter's update."""
        if self.item == 2 and not self.workload.master_weights:
            return 22 * part.elements
        return 0

    def _stage_buffers(self, hidden: int) -> int:
        """Received tensors: torch keeps one for each micro-batch and direction for the whole run."""
        pieces = range(self.index, self.layout.num_stages * self.layout.chunks, self.layout.num_stages)
        last = self.layout.num_stages * self.layout.chunks - 1
        ends = sum((piece > 0) + (piece < last) for piece in pieces)
        return ends * self.layout.micro_batches * hidden

    # ---- generation ------------------------------------------------------------------------------------------------

    def generation(self) -> Memory:
        config, work, tensor = self.config, self.workload, self.layout.tensor
        cut = config.n_embd // tensor
        cache = 2 * self.num_layers * work.rows * (1 + work.context) * cut * self.item
        rows = rows_at_once(work.rows, self.layout.num_stages)
        tokens = rows * work.prompt_tokens
        visible = tokens * work.context
        rotating = tokens * (
            self.item * (2 * config.n_embd + 2 * cut) + 18 * config.n_head * config.rotary_dim // tensor
        )
        # One layer's keys and values with the unused slots blanked, and who may see whom as the kernel wants it.
        attending = tokens * self.item * (2 * config.n_embd + 2 * cut)
        attending += 2 * rows * work.context * cut * self.item + visible * self.item
        inner = tokens * self.item * (3 * config.n_embd + 2 * config.inner_dim // tensor)
        at_layers = max(rotating, attending, inner) + visible + tokens * config.rotary_dim * 4
        logits = rows * config.vocab_size * (self.item + SAMPLER_BYTES) * self.has_head
        sent = 0 if self.index == self.layout.num_stages - 1 else 2 * tokens * config.n_embd * self.item
        return Memory(
            weights=sum(part.num_bytes for unit in self.units for part in unit),
            kv_cache=cache,
            buffers=work.rows * (config.vocab_size + 1) + sent,
            workspace=max(at_layers if self.num_layers else 0, logits),
        )

    # ---- what is moved ---------------------------------------------------------------------------------------------

    def traffic(self) -> Traffic:
        config, work, layout = self.config, self.workload, self.layout
        train, several = work.job == "train", layout.tensor > 1
        tokens = work.rows * (work.context if train else 1)
        hidden = tokens * config.n_embd * self.item
        # What is computed again ends before the layer's sum: nothing that comes after it is kept.
        passes = (2 if train else 1) * self.num_layers + self.has_embedding + (train and self.has_head)
        tensor = passes * hidden * several
        if several and self.has_head:
            tensor += 3 * tokens * 4 if train else tokens * self.cut_vocab * self.item
        last = layout.num_stages * layout.chunks - 1
        pieces = range(self.index, last + 1, layout.num_stages)
        sends = sum((piece < last) + (train and piece > 0) for piece in pieces)
        repeats = work.gradient_accumulation if train else 1
        pipeline = sends * hidden
        if not train and layout.num_stages > 1 and self.has_head:
            pipeline += work.rows * 8  # the chosen tokens, for the other stages
        data = 0
        if train and layout.replicas > 1:
            sizes = [sum(part.num_bytes for part in unit) for unit in self.units]
            held, layers = sum(sizes), sum(sizes[1 : 1 + self.num_layers])
            data = held
            # Shared out, for every micro-batch: both ends are gathered once, layers for each pass, and gradients are
            # summed from whole ones. Between stages all is gathered, and summed, once for all that are in a pass.
            if layout.shard and layout.num_stages > 1:
                data = repeats // layout.micro_batches * (1 + layout.replicas) * held
            elif layout.shard:
                data = repeats * (held + layers + layout.replicas * held)
        return Traffic(round(tensor * repeats), pipeline * repeats, data)


def packed_bytes(num_outputs: int, num_inputs: int, group_size: int) -> int:
    """Bytes of a matrix in 4-bit groups: outputs padded to 16, inputs to 8, an fp16 scale and bias per group."""
    padded_outputs = -(-num_outputs // 16) * 16
    num_groups = 1 if group_size == -1 else -(-num_inputs // group_size)
    return padded_outputs * (-(-num_inputs // 8) * 4 + num_groups * 4)
