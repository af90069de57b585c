"""`bluejay plan`: who would hold what, and whether it fits, before anything is read or rented."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from bluejay.config import ModelConfig, QuantSpec
    from bluejay.parallel import Plan


def plan(
    model: Annotated[str, typer.Argument(help="A preset, a config.json, a directory with one, or a hub id.")],
    config: Annotated[Path | None, typer.Option(help="YAML with any of these settings; options override it.")] = None,
    devices: Annotated[int | None, typer.Option(help="Devices; without a layout, the best one is proposed.")] = None,
    device_memory: Annotated[str | None, typer.Option(help="Memory of each, such as 16GiB; default: any.")] = None,
    layers_per_device: Annotated[
        str | None, typer.Option(help="Layers of each stage, such as 4,4,-1 (-1: share the rest), or auto.")
    ] = None,
    stages: Annotated[int | None, typer.Option(help="Devices of the pipeline.")] = None,
    tensor: Annotated[int | None, typer.Option(help="Devices that share each layer's matrices.")] = None,
    replicas: Annotated[int | None, typer.Option(help="Whole copies of the model.")] = None,
    shard: Annotated[bool | None, typer.Option(help="Replicas share out weights, gradients, optimizer.")] = None,
    schedule: Annotated[str | None, typer.Option(help="gpipe, 1f1b, interleaved or zero-bubble.")] = None,
    chunks: Annotated[int | None, typer.Option(help="Pieces of the model on each device.")] = None,
    micro_batches: Annotated[int | None, typer.Option(help="Micro-batches in a pass; 0: all of an update's.")] = None,
    job: Annotated[str | None, typer.Option(help="generate or train.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: the model's.")] = None,
    quantize: Annotated[str | None, typer.Option(help="int4-g64: four-bit weights, in groups of 64 inputs.")] = None,
    rows: Annotated[int | None, typer.Option(help="Rows at once, or rows of a micro-batch.")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens of a row; 0: the model's window.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(help="Tokens of a prompt that are read in one call.")] = None,
    gradient_accumulation: Annotated[int | None, typer.Option(help="Micro-batches per weight update.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="adamw or muon.")] = None,
    master_weights: Annotated[bool | None, typer.Option(help="Half precision: also keep weights in fp32.")] = None,
    recompute: Annotated[bool | None, typer.Option(help="Keep each layer's input only.")] = None,
    offline: Annotated[bool, typer.Option(help="Never ask the network for a hub id.")] = False,
    json: Annotated[bool, typer.Option(help="Print one JSON object.")] = False,
) -> None:
    """Show which device would hold what, how large, and whether it fits. Reads no weight."""
    given = {
        "devices": devices,
        "device_memory": device_memory,
        "layers_per_device": layers_per_device,
        "stages": stages,
        "tensor": tensor,
        "replicas": replicas,
        "shard": shard,
        "schedule": schedule,
        "chunks": chunks,
        "micro_batches": micro_batches,
        "job": job,
        "dtype": dtype,
        "quantize": quantize,
        "rows": rows,
        "context": context,
        "prompt_tokens": prompt_tokens,
        "gradient_accumulation": gradient_accumulation,
        "optimizer": optimizer,
        "master_weights": master_weights,
        "recompute": recompute,
    }
    settings = {} if config is None else _read(config, list(given))
    settings |= {name: value for name, value in given.items() if value is not None}
    shape, packing = _shape(model, offline)
    made = make_plan(shape, settings if packing is None else _as_packed(model, packing, settings))
    if json:
        print(json_format.dumps({"model": model, **made.as_dict()}))
    else:
        show(made)


def make_plan(shape: ModelConfig, settings: dict[str, Any]) -> Plan:
    """The plan for settings by name; the best one for `devices`, of those that have the sizes given."""
    from dataclasses import fields

    from bluejay.config import Layout, Workload
    from bluejay.parallel import plan, propose

    devices = settings.get("devices", 1)
    if type(devices) is not int or devices < 1:
        raise _refuse("devices", devices, "a whole number from 1", "write for example 4")
    if "layers_per_device" in settings:
        counts = _counts(settings["layers_per_device"])
        settings = {name: value for name, value in settings.items() if name != "layers_per_device"}
        settings |= {"layers_per_device": counts} if counts else {}
    memory = parse_memory(settings.get("device_memory", "0B"))
    workload = Workload(**{f.name: settings[f.name] for f in fields(Workload) if f.name in settings})
    given = {f.name: settings[f.name] for f in fields(Layout) if f.name in settings}
    _check_job(workload.job, settings)
    if "devices" in settings:
        return propose(shape, devices, workload, memory, **given)
    return plan(shape, Layout(**given), workload, memory)


# What only one of the two jobs has.
_OF_JOB = {
    "generate": ("quantize", "prompt_tokens"),
    "train": (
        *("gradient_accumulation", "optimizer", "master_weights", "recompute"),
        *("schedule", "chunks", "micro_batches", "shard"),
    ),
}


def _check_job(job: str, settings: dict[str, Any]) -> None:
    """Settings that the job has no use for are errors, not ignored."""
    from bluejay.errors import ConfigError

    for other, names in _OF_JOB.items():
        unused = [name for name in names if name in settings and other != job]
        if unused:
            listed = ", ".join(unused)
            raise ConfigError(
                asked=f"a plan to {job} with {listed}",
                found=f"settings of the job {other!r}",
                rule="a setting that would change nothing is an error",
                fix=f"leave out {listed}, or plan with --job {other}",
            )


def show(made: Plan) -> None:
    """Print a plan as a table, with the lines that say what for and how full."""
    print(table_text(made))


def table_text(made: Plan) -> str:
    """The plan as lines of text: what for, one line a stage, and what fills the fullest device."""
    from bluejay.units import format_bytes

    table = [columns(made), *rows_of(made)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(c.ljust(w) if i == 1 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in table
    ]
    fullest = made.fullest.memory
    largest = max(fullest.items(), key=lambda name: fullest.items()[name])
    share = fullest.items()[largest] / fullest.total
    room = f" of {format_bytes(made.device_memory)}" if made.device_memory else ""
    last = f"fullest device: {format_bytes(fullest.total)}{room}, {share:.0%} of it {largest.replace('_', ' ')}"
    return "\n".join([heading(made), *(line.rstrip() for line in lines), last])


def heading(made: Plan) -> str:
    """One line: how the devices are used, and for what."""
    layout, work = made.layout, made.workload
    parts = [
        f"{layout.num_stages} stage{'s' if layout.num_stages > 1 else ''}",
        f"tensor parallel degree {layout.tensor}",
        f"{layout.replicas} replica{'s' if layout.replicas > 1 else ''}"
        + (" that share out state" if layout.shard else ""),
    ]
    weights = f"{work.dtype}{', ' + work.quantize if work.quantize else ''}"
    what = f"{work.job}, {weights}, {work.rows} row{'s' if work.rows > 1 else ''} of {work.context} tokens"
    if work.job == "train":
        what += f" x {work.gradient_accumulation} micro-batches"
    waiting = ""
    if layout.num_stages > 1:
        waiting = f"; stages wait {made.bubble:.0%} of the time ({layout.schedule}, {layout.micro_batches} in a pass)"
        if work.job == "generate":
            waiting = f"; stages wait {made.bubble:.0%} of the time"
    return f"{made.num_devices} device{'s' if made.num_devices > 1 else ''}: {' x '.join(parts)}\n{what}{waiting}"


def columns(made: Plan) -> list[str]:
    """The table's columns: those items that any device has."""
    used = [name for name in made.stages[0].memory.items() if any(s.memory.items()[name] for s in made.stages)]
    return ["stage", "layers", "time", *(name.replace("_", " ") for name in used), "total"]


def rows_of(made: Plan) -> list[list[str]]:
    """The table's rows, one per stage."""
    from bluejay.units import format_bytes

    rows = []
    for stage in made.stages:
        ends = [name for name, held in (("embedding", stage.has_embedding), ("head", stage.has_head)) if held]
        layers = ", ".join(f"{a}-{b - 1}" if b - a > 1 else str(a) for a, b in stage.pieces if b > a)
        sizes = [format_bytes(stage.memory.items()[name.replace(" ", "_")]) for name in columns(made)[3:-1]]
        held = " + ".join(filter(None, [layers, *ends]))
        rows.append([str(stage.index), held, f"{stage.cost:.0%}", *sizes, format_bytes(stage.memory.total)])
    return rows


def _shape(model: str, offline: bool) -> tuple[ModelConfig, QuantSpec | None]:
    """A model's shape, and how it is packed already."""
    from bluejay.config import preset, preset_names

    if model in preset_names():
        return preset(model), None
    from bluejay.checkpoint import read_config, read_quantization

    return read_config(model, offline=offline), read_quantization(model, offline=offline)


def _as_packed(model: str, packing: QuantSpec, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with the format that a quantized directory has.

    Raises:
        ConfigError: another format was asked for, or only some of its layers are packed.
    """
    from bluejay.config import QUANT_LAYERS
    from bluejay.errors import ConfigError

    if settings.get("quantize"):
        raise ConfigError(
            asked=f"a plan of {model} with --quantize {settings['quantize']}",
            found=f"weights already packed as {packing.name}",
            rule="packing what is packed only adds error",
            fix="leave --quantize out, or name the original model",
        )
    if set(packing.layers) != set(QUANT_LAYERS):
        raise ConfigError(
            asked=f"a plan of {model}",
            found=f"layers {', '.join(packing.layers)} packed as {packing.name}, and no others",
            rule="a plan counts all linear layers packed, or none",
            fix="plan the original model with and without --quantize: this one is between the two",
        )
    return {**settings, "quantize": packing.name}


def _read(file: Path, known: list[str]) -> dict[str, Any]:
    """Settings from a YAML file, with no key unknown."""
    import difflib

    from bluejay.config import read_mapping
    from bluejay.errors import ConfigError

    def refuse(found: str, fix: str) -> ConfigError:
        rule = f"a plan's file is a mapping with any of {', '.join(known)}"
        return ConfigError(asked=f"the settings in {file}", found=found, rule=rule, fix=fix)

    raw = read_mapping(file, refuse)
    for key in raw:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            raise refuse(f"the unknown key {key!r}", f"write {near[0]}" if near else "remove it")
    return raw


def _counts(value: Any) -> tuple[int, ...]:
    """Layers per device from text such as `4,4,-1`, a list, or `auto` (nothing fixed)."""
    if value == "auto":
        return ()
    items = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    counts: list[Any] = [int(i) if isinstance(i, str) and i.strip().removeprefix("-").isdecimal() else i for i in items]
    if not counts or any(type(count) is not int for count in counts):
        rule = "numbers of layers with commas between them, -1 for an even share of the rest, or auto"
        raise _refuse("layers_per_device", value, rule, "write for example 4,4,-1")
    return tuple(counts)


def parse_memory(value: str | int) -> int:
    """Bytes of a device, from text such as 16GiB; a number without its unit is none."""
    from bluejay.units import parse_bytes

    try:
        if not str(value).strip()[-1:].isalpha():
            raise ValueError(f"{value!r} has no unit")
        return parse_bytes(value)
    except ValueError as error:
        raise _refuse("device_memory", value, "a size with its unit", "write for example 16GiB", str(error)) from None


def _refuse(name: str, value: object, rule: str, fix: str, found: str = "") -> Exception:
    from bluejay.errors import ConfigError

    return ConfigError(
        asked=f"a plan with {name}={value!r}", found=found or f"{value!r}", rule=f"{name} must be {rule}", fix=fix
    )
