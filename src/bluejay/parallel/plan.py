"""The planner: from numbers to who holds what, how large. A pure function; no weight is read, no device touched."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from bluejay.config import Layout, ModelConfig, Workload
from bluejay.errors import BluejayError, ConfigError, MachineError
from bluejay.models import costs
from bluejay.parallel.memory import ITEM_BYTES, Held, Memory, Traffic
from bluejay.parallel.partition import balance, even_shares, share_layers
from bluejay.parallel.schedule import bubble
from bluejay.units import counted, format_bytes


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


def propose(config: ModelConfig, num_devices: int, workload: Workload, device_memory: int = 0, **given: Any) -> Plan:
    """The plan for `num_devices` that takes least time for each row, of those that fit.

    Time is the slowest stage's share of the model over its devices, with the bubble. At equal times, what moves fewer
    bytes comes first: replicas, then stages, then tensor parallelism; and sharing out state only where it must be.

    Args:
        given: fields of `Layout` that are settled.

    Raises:
        ConfigError: no layout of so many devices agrees with what is given.
        MachineError: none fits; the error is that of the one that comes closest.
    """
    workload = _resolve(config, workload)
    fitting: list[tuple[tuple[float, ...], Plan]] = []
    closest: tuple[float, BluejayError] | None = None
    for layout in _candidates(config, num_devices, workload, given):
        over = math.inf  # where the settings contradict this layout, not all of them
        try:
            made = replace(plan(config, layout, workload), device_memory=device_memory)
            over = made.fullest.memory.total - device_memory
            if device_memory and over > 0:  # the fastest split may overflow where another does not
                made = plan(config, layout, workload, device_memory)
        except BluejayError as error:
            if closest is None or over < closest[0]:
                closest = (over, error)
            continue
        time = max(stage.cost for stage in made.stages) / layout.tensor / (1 - made.bubble) / layout.replicas
        rank = (round(time, 9), -layout.replicas, float(layout.shard), layout.tensor, layout.num_stages)
        fitting.append((rank, made))
    if fitting:
        return min(fitting, key=lambda pair: pair[0])[1]
    if closest is None:
        plan(config, Layout(**given), workload)  # says what is wrong with it, if anything is
        raise _mismatch(num_devices, Layout(**given))
    raise closest[1]


def _candidates(config: ModelConfig, num_devices: int, workload: Workload, given: dict[str, Any]) -> Iterable[Layout]:
    """Layouts of all devices that have the sizes given, and could be this model's."""
    counts = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    asked = given.get("stages") or len(given.get("layers_per_device", ()))
    for tensor, stages in itertools.product(counts, counts):
        replicas = num_devices // tensor // stages
        if num_devices % (tensor * stages) or tensor not in _degrees(config):
            continue
        if stages != (asked or stages) or (stages > config.n_layer and not asked):
            continue
        if tensor != given.get("tensor", tensor) or replicas != given.get("replicas", replicas):
            continue
        if tensor > 1 and not _cuts_on_groups(config, workload, tensor):
            continue
        if (given.get("chunks", 1) > 1 and stages == 1) or (given.get("shard") and replicas == 1):
            continue
        shards = workload.job == "train" and replicas > 1 and stages == 1 and "shard" not in given
        for shard in (False, True) if shards else (given.get("shard", False),):
            yield Layout(**{**given, "stages": stages, "tensor": tensor, "replicas": replicas, "shard": shard})


def _mismatch(num_devices: int, layout: Layout) -> ConfigError:
    sizes = f"{counted(layout.num_stages, 'stage')} x tensor {layout.tensor} x {counted(layout.replicas, 'replica')}"
    return ConfigError(
        asked=counted(num_devices, "device"),
        found=f"{sizes}, which no other sizes bring to {num_devices}",
        rule="devices = stages x tensor x replicas",
        fix=f"use --devices {layout.num_devices} or a multiple of it, or leave these sizes out to have them proposed",
    )


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
        raise _cut_group(config, workload, tensor)
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
    if layout.shard and (layout.schedule == "zero-bubble" or workload.job != "train"):
        raise ConfigError(
            asked="shard=True",
            found=f"job {workload.job!r}, schedule {layout.schedule!r}",
            rule="sharing out is for training with backward passes in one part, at whose end gradients are summed",
            fix="leave shard out, or use another schedule",
        )
    if workload.job == "train" and workload.optimizer == "muon" and (tensor > 1 or layout.shard):
        raise ConfigError(
            asked="optimizer muon",
            found=f"a tensor parallel degree of {tensor}" if tensor > 1 else "replicas that share out state",
            rule="muon's step is of whole matrices, and these are cut",
            fix="use stages and replicas without sharing out, or adamw",
        )
    if layout.shard and not workload.master_weights and workload.dtype != "float32":
        raise ConfigError(
            asked="shard=True with master_weights=False",
            found=f"dtype {workload.dtype}",
            rule="what replicas share out is the fp32 state that training without masters does without",
            fix="choose one of them",
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
        if config.n_layer < stages * layout.chunks:
            raise ConfigError(
                asked=f"{stages} stages of {layout.chunks} chunks",
                found=f"{config.n_layer} layers",
                rule="a chunk holds at least one layer",
                fix=f"use at most {config.n_layer // stages} chunks",
            )
    if workload.job == "train" and layout.schedule in ("interleaved", "zero-bubble") and micro % stages:
        nearest = max(stages, micro // stages * stages)
        raise ConfigError(
            asked=f"schedule={layout.schedule} with {micro} micro-batches over {stages} stages",
            found=f"{micro} over {stages} leaves {micro % stages}",
            rule="each device works in rounds of as many micro-batches as there are stages",
            fix=f"use {nearest} micro-batches",
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


def _cut_group(config: ModelConfig, workload: Workload, tensor: int) -> ConfigError:
    """The error for groups that a degree would cut, with the degrees and the largest group that it would not."""
    group = workload.group_size
    names = ("attn.out_proj.weight", "mlp.fc_out.weight")
    name, width = next(
        (n, w) for n, w in zip(names, _inner_widths(config), strict=True) if group < 0 or w // tensor % group
    )
    degrees = [d for d in _degrees(config) if _cuts_on_groups(config, workload, d)]
    fitting = [
        g for g in range(256, 15, -8) if _cuts_on_groups(config, replace(workload, quantize=f"int4-g{g}"), tensor)
    ]
    return ConfigError(
        asked=f"{name} in {'one group a row' if group < 0 else f'groups of {group}'} over {tensor} devices",
        found=f"{width} inputs, {width // tensor} a device",
        rule="a group of inputs shares one scale and cannot be cut",
        fix=f"use a degree of {', '.join(map(str, degrees))}"
        + (f", or --quantize int4-g{fitting[0]}" if fitting else ""),
    )


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
    tokens, passes = workload.context, 4 / 3 if workload.recompute else 1.0  # three passes, or four
    layer = costs.prefill_flops(replace(config, n_layer=1), tokens, num_logits=0) * passes
    return layer, float(tokens * config.n_embd), float(tokens * 2 * config.n_embd * config.vocab_size)


def _stage(
    config: ModelConfig, layout: Layout, workload: Workload, index: int, pieces: tuple[tuple[int, int], ...]
) -> Stage:
    has_embedding, has_head = index == 0, index == layout.num_stages - 1
    num_layers = sum(stop - first for first, stop in pieces)
    layer, embedding, head = _unit_costs(config, workload)
    held = Held(config, layout, workload, index, num_layers, has_embedding, has_head)
    return Stage(
        index=index,
        pieces=pieces,
        has_embedding=has_embedding,
        has_head=has_head,
        cost=num_layers * layer + embedding * has_embedding + head * has_head,
        memory=held.training() if workload.job == "train" else held.generation(),
        traffic=held.traffic(),
    )


def _bubble(layout: Layout, workload: Workload) -> float:
    """Fraction of a pass that a stage waits. In generation rows go through in as many groups as there are stages."""
    num_groups = min(workload.rows, layout.num_stages) if workload.job == "generate" else layout.micro_batches
    schedule = layout.schedule if workload.job == "train" else "1f1b"
    return bubble(layout.num_stages, num_groups, layout.chunks, schedule)


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
        asked=f"{work.job} with {counted(layout.num_devices, 'device')} of {format_bytes(made.device_memory)}",
        found=f"{where} would hold {format_bytes(stage.memory.total)}{others}: {listed}",
        rule="what a device holds at its peak must fit its memory",
        fix=f"{'; '.join(fixes)}",
    )


def _shrinking(name: str, made: Plan) -> list[str]:
    """Settings that make an item smaller, most effective first; only such as the planner would accept."""
    work, layout, train = made.workload, made.layout, made.workload.job == "train"
    rows = (work.rows > 1, f"fewer rows (--rows, now {work.rows})")
    context = (True, f"a shorter context (--context, now {work.context})")
    more = (bool(_more_devices(made)), _more_devices(made))
    shard = (layout.replicas > 1 and not layout.shard and _may_share_out(made), "--shard")
    packs = not train and _cuts_on_groups(made.model, replace(work, quantize="int4-g64"), layout.tensor)
    waits = layout.schedule == "gpipe" and layout.num_stages > 1
    alternates = waits and layout.micro_batches >= layout.num_stages
    longer = f"gradient accumulation of at least {layout.num_stages} (--gradient-accumulation), for 1f1b"
    choices: dict[str, list[tuple[bool, str]]] = {
        "weights": [
            (packs and not work.quantize, "four-bit weights (--quantize int4-g64)"),
            shard,
            (work.dtype == "float32", "--dtype bfloat16"),
            more,
        ],
        "gradients": [shard, more],
        "optimizer": [
            shard,
            (work.optimizer == "adamw" and layout.tensor == 1 and not layout.shard, "--optimizer muon"),
            more,
        ],
        "activations": [
            (not work.recompute, "--recompute"),
            (alternates, "--schedule 1f1b"),
            (waits and not alternates and work.rows > 1, longer + " with fewer rows"),
            rows,
            context,
        ],
        "kv_cache": [rows, context],
        "buffers": [(layout.micro_batches > 1, f"fewer micro-batches (--micro-batches, now {layout.micro_batches})")],
        "workspace": [
            rows,
            (not train, f"shorter pieces of prompts (--prompt-tokens, now {work.prompt_tokens})"),
            (train, context[1]),
        ],
    }
    return [text for useful, text in choices[name] if useful]


def _more_devices(made: Plan) -> str:
    """How more devices would hold less each; "" when the model cannot be spread over more."""
    layout, higher = made.layout, [d for d in _degrees(made.model) if d > made.layout.tensor]
    higher = [d for d in higher if _cuts_on_groups(made.model, made.workload, d) and made.workload.optimizer != "muon"]
    tied = made.workload.job == "train" and made.model.tie_word_embeddings
    stages = layout.num_stages < made.model.n_layer and not tied
    ways = ["more stages (--stages)"] * stages + [f"a higher tensor parallel degree (--tensor {d})" for d in higher[:1]]
    return f"more devices: {' or '.join(ways)}" if ways else ""


def _may_share_out(made: Plan) -> bool:
    """Whether the planner takes the layout with replicas that share out state."""
    try:
        _checked(made.model, replace(made.layout, shard=True), made.workload)
    except ConfigError:
        return False
    return True
