"""The planner: from numbers to who holds what, how large. A pure function; no weight is read, no device touched.

Letters: E n_embd, F inner width, H heads, R rotary_dim, V vocabulary, t tensor parallel degree. A device's bytes are
those of the eager model and of `parallel.apply`; `tests/parity/test_parallel_bytes.py` holds them to a run's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from bluejay.config import Layout, ModelConfig, Workload
from bluejay.errors import BluejayError, ConfigError, MachineError
from bluejay.models import EMBEDDING, HEAD, QUANTIZED, costs, parameter_shapes, part_shape
from bluejay.parallel.partition import balance, even_shares, share_layers
from bluejay.parallel.schedule import bubble, in_flight
from bluejay.units import format_bytes

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# The sampler sorts in fp32 and weighs in fp64: scores, their order (int64), and five fp64 or fp32 tables of V a row.
SAMPLER_BYTES = 48


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, by what they are for.

    Attributes:
        activations: what the schedule keeps for backward passes at its peak.
        buffers: what is received from other stages, and the rows' state in generation.
        workspace: temporary tensors of the largest operation in flight.
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


@dataclass(frozen=True)
class Stage:
    """What each device of one stage holds (all its tensor parallel devices and replicas hold equally much).

    Attributes:
        pieces: (first layer, layer after the last) of each chunk.
        cost: its share of the model's time.
    """

    index: int
    pieces: tuple[tuple[int, int], ...]
    has_embedding: bool
    has_head: bool
    cost: float
    memory: Memory
    traffic: Traffic

    @property
    def num_layers(self) -> int:
        return sum(stop - first for first, stop in self.pieces)


@dataclass(frozen=True)
class Plan:
    """Who holds what, how large: pure data.

    Attributes:
        layout, workload: as asked, with every "0" and "auto" replaced by what it came to.
        padded_vocab_size: rows of embedding and head over all tensor parallel devices.
        bubble: fraction of the time that stages wait for each other, equal stages assumed.
        device_memory: bytes that each device offers; 0 is not asked.
    """

    model: ModelConfig
    layout: Layout
    workload: Workload
    stages: tuple[Stage, ...]
    padded_vocab_size: int
    bubble: float
    device_memory: int = 0

    @property
    def num_devices(self) -> int:
        return self.layout.num_devices

    @property
    def fullest(self) -> Stage:
        return max(self.stages, key=lambda stage: stage.memory.total)

    @property
    def balance(self) -> float:
        """Mean time of the stages over that of the slowest: 1 when none waits for another."""
        slowest = max(stage.cost for stage in self.stages)
        return sum(stage.cost for stage in self.stages) / len(self.stages) / slowest

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain data, for `--json` and records."""
        stages = [{**asdict(s), "num_layers": s.num_layers, "total_bytes": s.memory.total} for s in self.stages]
        return {
            "num_devices": self.num_devices,
            "layout": asdict(self.layout),
            "workload": asdict(self.workload),
            "padded_vocab_size": self.padded_vocab_size,
            "bubble": self.bubble,
            "balance": self.balance,
            "device_memory_bytes": self.device_memory,
            "stages": stages,
        }


def plan(config: ModelConfig, layout: Layout, workload: Workload, device_memory: int = 0) -> Plan:
    """Place a model on devices.

    Args:
        device_memory: bytes of each device; 0 does not ask whether it fits.

    Raises:
        ConfigError: the layout contradicts the model, with the nearest one that does not.
        MachineError: a device would overflow, with its largest items and what would shrink them.
    """
    workload = _resolve(config, workload)
    layout = _checked(config, layout, workload)
    pieces = _pieces(config, layout, workload, device_memory)
    draft = [
        _stage(config, layout, workload, index, tuple(pieces[index :: layout.num_stages]))
        for index in range(layout.num_stages)
    ]
    total = sum(stage.cost for stage in draft)
    stages = tuple(replace(stage, cost=stage.cost / total) for stage in draft)
    counts = tuple(stage.num_layers for stage in stages)
    made = Plan(
        model=config,
        layout=layout if layout.chunks > 1 else replace(layout, layers_per_device=counts, stages=len(counts)),
        workload=workload,
        stages=stages,
        padded_vocab_size=-(-config.vocab_size // layout.tensor) * layout.tensor,
        bubble=_bubble(layout, workload),
        device_memory=device_memory,
    )
    if device_memory and made.fullest.memory.total > device_memory:
        raise _overflow(made)
    return made


def propose(config: ModelConfig, num_devices: int, workload: Workload, device_memory: int = 0) -> Plan:
    """The plan for `num_devices` that takes least time for each row, of those that fit.

    Time is the slowest stage's share of the model over its devices, with the bubble. At equal times, what moves fewer
    bytes comes first: replicas, then stages, then tensor parallelism; and sharing out state only where it must be.

    Raises:
        MachineError: none fits; the error is that of the one that comes closest.
    """
    workload = _resolve(config, workload)
    fitting: list[tuple[tuple[float, ...], Plan]] = []
    closest: tuple[float, BluejayError] | None = None
    for layout in _candidates(config, num_devices, workload):
        made = plan(config, layout, workload)
        made = replace(made, device_memory=device_memory)
        over = made.fullest.memory.total - device_memory
        if device_memory and over > 0:
            try:  # an even split may overflow where another does not
                made = plan(config, replace(layout, layers_per_device=()), workload, device_memory)
            except BluejayError as error:
                if closest is None or over < closest[0]:
                    closest = (over, error)
                continue
        time = max(stage.cost for stage in made.stages) / layout.tensor / (1 - made.bubble) / layout.replicas
        rank = (round(time, 9), -layout.replicas, float(layout.shard), layout.tensor, layout.num_stages)
        fitting.append((rank, made))
    if fitting:
        return min(fitting, key=lambda pair: pair[0])[1]
    assert closest is not None, "one device of everything is always a candidate"
    raise closest[1]


def _candidates(config: ModelConfig, num_devices: int, workload: Workload) -> Iterable[Layout]:
    counts = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    for tensor, stages in itertools.product(counts, counts):
        if num_devices % (tensor * stages) or tensor not in _degrees(config) or stages > config.n_layer:
            continue
        if tensor > 1 and not _cuts_on_groups(config, workload, tensor):
            continue
        if stages > 1 and workload.job == "train" and config.tie_word_embeddings:
            continue
        replicas = num_devices // tensor // stages
        for shard in (False, True) if workload.job == "train" and replicas > 1 and stages == 1 else (False,):
            yield Layout(stages=stages, tensor=tensor, replicas=replicas, shard=shard)


# ---- what is asked, checked ----------------------------------------------------------------------------------------


def _resolve(config: ModelConfig, workload: Workload) -> Workload:
    context = config.context(workload.context)
    prompt_tokens = min(workload.prompt_tokens, context)
    dtype = workload.dtype or config.dtype or "float32"
    return replace(workload, dtype=dtype, context=context, prompt_tokens=prompt_tokens)


def _checked(config: ModelConfig, layout: Layout, workload: Workload) -> Layout:
    """The layout with its micro-batches resolved, or the error that says why it cannot be."""
    tensor, stages, accumulation = layout.tensor, layout.num_stages, workload.gradient_accumulation
    if tensor not in _degrees(config):
        blocking = "heads" if config.n_head % tensor else "inputs of the MLP's second matrix"
        count = config.n_head if config.n_head % tensor else config.inner_dim
        raise ConfigError(
            asked=f"a tensor parallel degree of {tensor}",
            found=f"{count} {blocking}",
            rule=f"every device holds equally many; {count} over {tensor} leaves {count % tensor}",
            fix=f"use one of {', '.join(map(str, _degrees(config)))}",
        )
    if workload.quantize and not _cuts_on_groups(config, workload, tensor):
        width = config.n_embd if config.n_embd // tensor % workload.group_size else config.inner_dim
        tensor_name = "attn.out_proj.weight" if width == config.n_embd else "mlp.fc_out.weight"
        fitting = [d for d in _degrees(config) if _cuts_on_groups(config, workload, d)]
        raise ConfigError(
            asked=f"{tensor_name} in groups of {workload.group_size} over {tensor} devices",
            found=f"{width} inputs, {width // tensor} a device",
            rule="a group of inputs shares one scale and cannot be cut",
            fix=f"use a degree of {', '.join(map(str, fitting)) or '1'}, or a smaller group",
        )
    if not layout.layers_per_device and stages > config.n_layer:
        raise ConfigError(
            asked=f"{stages} stages",
            found=f"{config.n_layer} layers",
            rule="a stage holds at least one layer",
            fix=f"use at most {config.n_layer} stages, and replicas or tensor parallelism for the other devices",
        )
    if workload.job == "train" and config.tie_word_embeddings and stages > 1:
        raise ConfigError(
            asked=f"training over {stages} stages",
            found="embedding and head share one matrix (tie_word_embeddings)",
            rule="the first stage holds the embedding and the last the head",
            fix="use one stage, with replicas or tensor parallelism",
        )
    dropout = max(config.resid_pdrop, config.attn_pdrop)
    if workload.job == "train" and tensor > 1 and dropout:
        raise ConfigError(
            asked=f"training over {tensor} tensor parallel devices with a dropout of {dropout:g}",
            found=f"resid_pdrop={config.resid_pdrop:g}, attn_pdrop={config.attn_pdrop:g}",
            rule="devices that share a layer add up what each would drop on its own",
            fix="set both to 0, or use stages and replicas",
        )
    if layout.shard and (stages > 1 or workload.job != "train"):
        raise ConfigError(
            asked="shard=True",
            found=f"{stages} stages, job {workload.job!r}",
            rule="sharing out state is for training in one stage: a stage would gather its weights per micro-batch",
            fix="use more stages or tensor parallelism instead",
        )
    micro = layout.micro_batches or accumulation
    if workload.job == "train" and accumulation % micro:
        divisors = [n for n in range(1, accumulation + 1) if accumulation % n == 0]
        raise ConfigError(
            asked=f"{micro} micro-batches in a pass of the pipeline",
            found=f"{accumulation} micro-batches per weight update",
            rule=f"passes are equal; {accumulation} over {micro} leaves {accumulation % micro}",
            fix=f"use one of {', '.join(map(str, divisors))}, or another gradient accumulation",
        )
    if layout.chunks > 1:
        if workload.job != "train":
            raise ConfigError(
                asked=f"{layout.chunks} chunks a device for generation",
                found="no backward pass to interleave",
                rule="chunks shorten the bubble of training",
                fix="use chunks=1",
            )
        if micro % stages:
            nearest = max(stages, micro // stages * stages)
            raise ConfigError(
                asked=f"an interleaved schedule of {micro} micro-batches over {stages} stages",
                found=f"{micro} over {stages} leaves {micro % stages}",
                rule="each device takes its chunks in rounds of as many micro-batches as there are stages",
                fix=f"use {nearest} micro-batches",
            )
        if config.n_layer < stages * layout.chunks:
            raise ConfigError(
                asked=f"{stages} stages of {layout.chunks} chunks",
                found=f"{config.n_layer} layers",
                rule="a chunk holds at least one layer",
                fix=f"use at most {config.n_layer // stages} chunks",
            )
    if layout.schedule == "1f1b" and micro < stages:  # nothing to alternate: all go forward, then all backward
        layout = replace(layout, schedule="gpipe")
    return replace(layout, micro_batches=micro)


def _degrees(config: ModelConfig) -> list[int]:
    """Tensor parallel degrees that divide the heads and the MLP."""
    heads = range(1, config.n_head + 1)
    return [d for d in heads if config.n_head % d == 0 and config.inner_dim % d == 0]


def _cuts_on_groups(config: ModelConfig, workload: Workload, tensor: int) -> bool:
    if not workload.quantize or tensor == 1:
        return True
    group = workload.group_size
    return group > 0 and all(n % tensor == 0 and n // tensor % group == 0 for n in _inner_widths(config))


def _inner_widths(config: ModelConfig) -> tuple[int, int]:
    """Inputs of the two matrices that are cut along their inputs."""
    return config.n_embd, config.inner_dim


# ---- who holds what ------------------------------------------------------------------------------------------------


def _pieces(config: ModelConfig, layout: Layout, workload: Workload, device_memory: int) -> list[tuple[int, int]]:
    """(first layer, layer after the last) of every piece of the model, in order."""
    if layout.layers_per_device:
        shares = share_layers(config.n_layer, layout.layers_per_device)
    elif layout.num_stages == 1 or layout.chunks > 1:
        shares = even_shares(config.n_layer, layout.num_stages * layout.chunks)
    else:
        shares = _balanced(config, layout, workload, device_memory)
    stops = list(itertools.accumulate(shares))
    return [(stop - share, stop) for share, stop in zip(shares, stops, strict=True)]


def _balanced(config: ModelConfig, layout: Layout, workload: Workload, device_memory: int) -> tuple[int, ...]:
    layer, embedding, head = _unit_costs(config, workload)
    last = layout.num_stages - 1
    extras = [embedding * (i == 0) + head * (i == last) for i in range(layout.num_stages)]
    most = [config.n_layer] * layout.num_stages
    if device_memory:

        def total(index: int, num_layers: int) -> int:
            return _stage(config, layout, workload, index, ((0, num_layers),)).memory.total

        fits = [[n for n in range(config.n_layer + 1) if total(i, n) <= device_memory] for i in range(last + 1)]
        most = [max(counts, default=0) for counts in fits]
    shares = balance(config.n_layer, layer, extras, most)
    if shares is None or 0 in shares[1:-1]:  # nothing fits; the even split says best by how much
        return even_shares(config.n_layer, layout.num_stages)
    return shares


def _unit_costs(config: ModelConfig, workload: Workload) -> tuple[float, float, float]:
    """Costs of a layer, of the embedding and of the head, in bytes read per decode step or in FLOPs per trained row."""
    item = ITEM_BYTES[workload.dtype]
    if workload.job == "generate":
        matrices, head = costs.block_matrix_elements(config), config.n_embd * config.vocab_size
        cache = workload.rows * workload.context * 2 * config.n_embd * item
        group = config.n_embd if workload.group_size == -1 else workload.group_size
        per_element = 0.5 + 4 / group if workload.quantize else item
        return matrices * per_element + cache, workload.rows * config.n_embd * item, head * per_element
    tokens = workload.context
    layer = costs.prefill_flops(replace(config, n_layer=1), tokens, num_logits=0)
    return float(layer), float(tokens * config.n_embd), float(tokens * 2 * config.n_embd * config.vocab_size)


def _stage(
    config: ModelConfig, layout: Layout, workload: Workload, index: int, pieces: tuple[tuple[int, int], ...]
) -> Stage:
    has_embedding, has_head = index == 0, index == layout.num_stages - 1
    num_layers = sum(stop - first for first, stop in pieces)
    layer, embedding, head = _unit_costs(config, workload)
    held = _Held(config, layout, workload, index, num_layers, has_embedding, has_head)
    return Stage(
        index=index,
        pieces=pieces,
        has_embedding=has_embedding,
        has_head=has_head,
        cost=num_layers * layer + embedding * has_embedding + head * has_head,
        memory=held.training() if workload.job == "train" else held.generation(),
        traffic=held.traffic(),
    )


@dataclass(frozen=True)
class _Held:
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

    def units(self) -> list[list[tuple[int, int]]]:
        """(elements, bytes) of the device's parameters, grouped as replicas share them out: embedding, layers, head."""
        layer, embedding, head = [], [], []
        tied = self.config.tie_word_embeddings and self.has_embedding
        for name, whole in parameter_shapes(replace(self.config, n_layer=1)).items():
            shape = part_shape(name, whole, self.layout.tensor)
            if self.layout.shard:
                shape = (-(-shape[0] // self.layout.replicas), *shape[1:])
            num_bytes = self._parameter_bytes(name, shape)
            if name.startswith(EMBEDDING):
                embedding.append((math.prod(shape), num_bytes))
            elif not name.startswith(HEAD):
                layer.append((math.prod(shape), num_bytes))
            elif not (tied and name == "lm_head.weight"):
                head.append((math.prod(shape), num_bytes))
        return [embedding] * self.has_embedding + [layer] * self.num_layers + [head] * self.has_head

    def _parameter_bytes(self, name: str, shape: tuple[int, ...]) -> int:
        tied_head = name == "lm_head.weight" and self.config.tie_word_embeddings
        if self.workload.quantize and name.endswith(QUANTIZED) and not tied_head:
            return packed_bytes(shape[0], shape[1], self.workload.group_size)
        return math.prod(shape) * self.item

    def training(self) -> Memory:
        config, work = self.config, self.workload
        units = self.units()
        elements = sum(n for unit in units for n, _ in unit)
        weights = sum(num_bytes for unit in units for _, num_bytes in unit)
        per_element = 8 if work.optimizer == "adamw" else 0
        if work.master_weights and work.dtype != "float32":
            per_element += 4
        tokens = work.rows * work.context
        flight = in_flight(
            self.layout.schedule, self.layout.num_stages, self.layout.micro_batches, self.index, self.layout.chunks
        )
        hidden = tokens * config.n_embd * self.item
        layer = tokens * self._layer_activation_bytes()
        # A micro-batch in flight keeps its layers, and between stages what was sent; the head keeps probabilities.
        kept_layers = self.num_layers / self.layout.chunks * (hidden if work.recompute else layer)
        ends = (hidden if not self.has_head else tokens * (2 * config.n_embd * self.item + 4 * self.cut_vocab)) or 0
        activations = flight * (kept_layers + ends)
        workspace = self._backward_workspace(tokens) + (layer if work.recompute else 0)
        if self.layout.shard:  # the unit at work is gathered whole, and its gradient before it is shared out
            workspace += 2 * self.layout.replicas * max(sum(num_bytes for _, num_bytes in unit) for unit in units)
        return Memory(
            weights=weights,
            gradients=weights,
            optimizer=elements * per_element,
            activations=round(activations),
            buffers=self._stage_buffers(hidden),
            workspace=round(workspace),
        )

    def _layer_activation_bytes(self) -> float:
        """Bytes per token that one layer keeps for its backward pass."""
        config, item, tensor = self.config, self.item, self.layout.tensor
        whole = 2 * config.n_embd * item + 8  # input and its norm, with mean and deviation
        rotated = config.n_embd if item == 4 else config.n_head * config.rotary_dim  # kept in fp32 for the rotation
        cut = 2 * rotated * 4 + 4 * config.n_embd * item + 2 * config.inner_dim * item + 4 * config.n_head
        return whole + cut / tensor

    def _backward_workspace(self, tokens: int) -> float:
        config, item = self.config, self.item
        # Gradients of the residual, of the norm and of the MLP's two inner tensors live at once.
        layer = (
            tokens * item * (2 * config.n_embd + 2 * config.inner_dim / self.layout.tensor) if self.num_layers else 0
        )
        head = tokens * self.cut_vocab * (4 + item) if self.has_head else 0
        return max(layer, head)

    def _stage_buffers(self, hidden: int) -> int:
        """Received tensors: torch keeps one for each micro-batch and direction for the whole run."""
        pieces = range(self.index, self.layout.num_stages * self.layout.chunks, self.layout.num_stages)
        last = self.layout.num_stages * self.layout.chunks - 1
        ends = sum((piece > 0) + (piece < last) for piece in pieces)
        return ends * self.layout.micro_batches * hidden

    def generation(self) -> Memory:
        config, work, tensor = self.config, self.workload, self.layout.tensor
        cut = config.n_embd // tensor
        cache = 2 * self.num_layers * work.rows * (1 + work.context) * cut * self.item
        tokens = work.rows * work.prompt_tokens
        # The prompt's inner tensors, and one layer's keys and values with the unused slots blanked.
        inner = tokens * self.item * (3 * config.n_embd + 5 * cut + 2 * config.inner_dim // tensor)
        blanked = 2 * work.rows * work.context * cut * self.item
        logits = work.rows * config.vocab_size * (self.item + SAMPLER_BYTES)
        return Memory(
            weights=sum(num_bytes for unit in self.units() for _, num_bytes in unit),
            kv_cache=cache,
            buffers=work.rows * (config.vocab_size + 1),
            workspace=max(inner + blanked if self.num_layers else 0, logits),
        )

    def traffic(self) -> Traffic:
        config, work, layout = self.config, self.workload, self.layout
        train, several = work.job == "train", layout.tensor > 1
        tokens = work.rows * (work.context if train else 1)
        hidden = tokens * config.n_embd * self.item
        passes = (2 + work.recompute if train else 1) * self.num_layers + self.has_embedding + (train and self.has_head)
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
            sizes = [sum(num_bytes for _, num_bytes in unit) for unit in self.units()]
            held, layers = sum(sizes), sum(sizes[1 : 1 + self.num_layers])
            # Shared out, for every micro-batch: both ends are gathered once, layers for each pass, and gradients are
            # summed from whole ones.
            data = repeats * (held + layers + layout.replicas * held) if layout.shard else held
        return Traffic(round(tensor * repeats), pipeline * repeats, data)


def packed_bytes(num_outputs: int, num_inputs: int, group_size: int) -> int:
    """Bytes of a matrix in 4-bit groups: outputs padded to 16, inputs to 8, an fp16 scale and bias per group."""
    padded_outputs = -(-num_outputs // 16) * 16
    num_groups = 1 if group_size == -1 else -(-num_inputs // group_size)
    return padded_outputs * (-(-num_inputs // 8) * 4 + num_groups * 4)


def _bubble(layout: Layout, workload: Workload) -> float:
    """Fraction of a pass that a stage waits. In generation rows go through in as many groups as there are stages."""
    num_groups = min(workload.rows, layout.num_stages) if workload.job == "generate" else layout.micro_batches
    return bubble(layout.num_stages, num_groups, layout.chunks)


# ---- what does not fit ---------------------------------------------------------------------------------------------


def _overflow(made: Plan) -> MachineError:
    stage, work, layout = made.fullest, made.workload, made.layout
    largest = sorted(stage.memory.items().items(), key=lambda item: -item[1])[:3]
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest if size)
    fixes: list[str] = []
    for name, size in largest:
        fixes += [fix for fix in _shrinking(name, made) if size and fix not in fixes]
    over = [s.index for s in made.stages if s.memory.total > made.device_memory]
    where = f"stage {stage.index} of {layout.num_stages}" if layout.num_stages > 1 else "each device"
    others = f" ({len(over)} stages overflow)" if len(over) > 1 else ""
    return MachineError(
        asked=f"{work.job} with {layout.num_devices} devices of {format_bytes(made.device_memory)}",
        found=f"{where} would hold {format_bytes(stage.memory.total)}{others}: {listed}",
        rule="what a device holds at its peak must fit its memory",
        fix=f"{'; '.join(fixes)}",
    )


def _shrinking(name: str, made: Plan) -> list[str]:
    """Settings that make an item smaller, most effective first."""
    work, layout, train = made.workload, made.layout, made.workload.job == "train"
    more = "more devices: more stages (--stages) or a higher tensor parallel degree (--tensor)"
    choices: dict[str, list[tuple[bool, str]]] = {
        "weights": [
            (not train and not work.quantize, "four-bit weights (--quantize int4-g64)"),
            (train and layout.replicas > 1 and not layout.shard and layout.num_stages == 1, "--shard"),
            (work.dtype == "float32", "--dtype bfloat16"),
            (True, more),
        ],
        "gradients": [(train and layout.replicas > 1 and not layout.shard, "--shard"), (True, more)],
        "optimizer": [
            (layout.replicas > 1 and not layout.shard and layout.num_stages == 1, "--shard"),
            (work.optimizer == "adamw", "--optimizer sgd"),
            (True, more),
        ],
        "activations": [
            (not work.recompute, "--recompute"),
            (layout.schedule == "gpipe" and layout.num_stages > 1, "--schedule 1f1b"),
            (work.rows > 1, f"fewer rows (--rows, now {work.rows})"),
            (True, f"a shorter context (--context, now {work.context})"),
        ],
        "kv_cache": [
            (work.rows > 1, f"fewer rows (--rows, now {work.rows})"),
            (True, f"a shorter context (--context, now {work.context})"),
        ],
        "buffers": [(layout.micro_batches > 1, f"fewer micro-batches (--micro-batches, now {layout.micro_batches})")],
        "workspace": [
            (work.rows > 1, f"fewer rows (--rows, now {work.rows})"),
            (not train, f"shorter pieces of prompts (--prompt-tokens, now {work.prompt_tokens})"),
        ],
    }
    return [text for useful, text in choices[name] if useful]
