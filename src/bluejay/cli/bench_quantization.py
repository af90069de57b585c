"""`bluejay bench quantization`: speed against quality of weight formats, as a table and a page."""

from __future__ import annotations

import html as html_format
import json as json_format
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bluejay.cli.display import Display
from bluejay.cli.environment import cache_folder, preferred_compiler
from bluejay.cli.evaluate import TASKS, Options, read_text
from bluejay.cli.quantize import calibration_ids
from bluejay.errors import RequestError
from bluejay.files import temporary_folder

if TYPE_CHECKING:
    from bluejay.config import QuantSpec
    from bluejay.generate import Engine
    from bluejay.tasks import Perplexity

ORIGINAL = "original"


@dataclass(frozen=True)
class FormatFigures:
    """One weight format: what it takes, how fast it writes and how well it predicts.

    Attributes:
        format: `original`, or a name that `--quantize` takes; `-gptq` needs `bluejay quantize`.
        bits_per_weight: of the linear layers, measured: codes, scales, biases and padding.
        weight_bytes: of all the model's tensors in memory.
        seconds_per_token: in decode programs, one row, median over the rounds.
        accuracy: share of a task's rows that the greedy answer gets right; None without a task.
    """

    format: str
    method: str
    group_size: int
    bits_per_weight: float
    weight_bytes: int
    perplexity: float
    bits_per_byte: float
    seconds_per_token: float
    accuracy: float | None = None


def quantization(
    model: Annotated[str, typer.Argument(help="`nano` (bundled), a checkpoint directory, or a hub id.")] = "nano",
    text: Annotated[Path | None, typer.Option(help="The text to score, UTF-8.")] = None,
    groups: Annotated[str, typer.Option(help="Group sizes, with commas; -1 is a whole row.")] = "16,32,64,128,256",
    methods: Annotated[str, typer.Option(help="Of minmax, mse, gptq, with commas.")] = "minmax,mse",
    calibration: Annotated[Path | None, typer.Option(help="gptq: text like what the model will read.")] = None,
    calibration_tokens: Annotated[int, typer.Option(min=1, help="gptq: tokens of it to use, at most.")] = 65536,
    data: Annotated[str, typer.Option(help="Also measure accuracy at MNLI: a .jsonl file, or a hub id.")] = "",
    split: Annotated[str, typer.Option(help="Which split of a hub id, such as validation_matched.")] = "",
    new: Annotated[int, typer.Option(min=2, help="Tokens to write when speed is measured.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each format's speed.")] = 5,
    html: Annotated[Path | None, typer.Option(help="Write the page here.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16; default: the checkpoint's.")] = "",
    backend: Annotated[str, typer.Option(help="auto, inductor (compiled) or eager (no compiler).")] = "auto",
    offline: Annotated[bool, typer.Option(help="Never ask the network for a hub id.")] = False,
    json: Annotated[bool, typer.Option(help="Print one JSON object.")] = False,
) -> None:
    """Compare weight formats: bytes, perplexity on a text, and speed on this machine."""
    specs = _specs(groups, methods)
    needs_text = any(spec.method == "gptq" for spec in specs)
    if needs_text != (calibration is not None):
        raise RequestError(
            asked=f"--methods {methods}" + (f" with --calibration {calibration}" if calibration else ""),
            found="no --calibration" if needs_text else "a text that nothing reads",
            rule="gptq measures what layers are fed; the other methods look at weights alone",
            fix="name a text file with --calibration, or leave gptq out"
            if needs_text
            else "leave --calibration out, or add gptq to --methods",
        )
    scored = read_text(text, "--text")
    task = TASKS["mnli"](Options(text=None, data=data, split=split)) if data else None
    if html is not None and not html.parent.is_dir():
        raise RequestError(
            asked=f"--html {html}",
            found=f"no folder {html.parent}",
            rule="it is asked before anything is measured",
            fix="name a file in a folder that is there",
        )

    from bluejay.build import locate
    from bluejay.checkpoint import open_checkpoint
    from bluejay.quant import QuantizedSource, quantize_checkpoint

    with temporary_folder() as folder, Display(quiet=json) as display:
        original = open_checkpoint(locate(model), offline=offline, observe=display)
        for spec in specs:
            QuantizedSource(original, spec)  # what does not fit the model is told before anything is measured

        def load(spec: QuantSpec | None) -> Engine:
            import bluejay

            source, packing = model, spec
            if spec is not None and spec.method == "gptq":
                assert calibration is not None
                source, packing = str(Path(folder) / spec.name), None
                ids = calibration_ids(calibration, original, calibration_tokens)
                quantize_checkpoint(original, source, spec, calibration=ids, observe=display)
            return bluejay.load(
                source,
                quantize=packing,
                dtype=dtype or None,
                max_rows=4,
                backend=backend,
                offline=offline,
                cxx=preferred_compiler(),
                cache=str(cache_folder()),
                observe=display,
            )

        formats = {ORIGINAL: None, **{spec.name: spec for spec in specs}}
        table = []
        for name, packing in formats.items():
            engine = load(packing)
            figures = _measure(name, packing, engine, scored, new, rounds, display)
            accuracy = task(engine, display).figures["greedy"] if task else None
            table.append(replace(figures, accuracy=accuracy))
    if html:
        html.write_text(page(model, table), encoding="utf-8")
    if json:
        print(json_format.dumps({"model": model, "formats": [asdict(figures) for figures in table]}))
    else:
        _show(table)
        if html:
            print(f"page: {html}")


def _specs(groups: str, methods: str) -> list[QuantSpec]:
    """Every method at every group size, checked before anything is loaded."""
    from bluejay.config import QuantSpec

    try:
        sizes = [int(group) for group in groups.split(",")]
    except ValueError:
        raise RequestError(
            asked=f"--groups {groups}",
            found="something that is no number",
            rule="whole numbers with commas",
            fix="write for example --groups 32,64",
        ) from None
    names = [method.strip() for method in methods.split(",")]
    return [QuantSpec.from_dict({"group_size": size, "method": method}) for method in names for size in sizes]


def _measure(
    name: str, spec: QuantSpec | None, engine: Engine, text: str, new: int, rounds: int, observe: Display
) -> FormatFigures:
    from bluejay.config import GenerationConfig
    from bluejay.quant import QuantizedLinear
    from bluejay.tasks import perplexity

    score: Perplexity = perplexity(engine, text, observe=observe)
    config = GenerationConfig(max_new_tokens=new, ignore_eos=True)
    prompt = list(range(5, 17))
    engine.generate(prompt, config)
    seconds = []
    for _ in range(rounds):
        before = engine.figures
        engine.generate(prompt, config)
        after = engine.figures
        seconds.append((after.decode_seconds - before.decode_seconds) / (after.decoded_tokens - before.decoded_tokens))
    packed = [module.packed for module in engine.model.modules() if isinstance(module, QuantizedLinear)]
    num_weights = sum(weight.shape[0] * weight.shape[1] for weight in packed)
    bits = 8 * sum(weight.num_bytes for weight in packed) / num_weights if packed else 8.0 * engine.built.dtype.itemsize
    return FormatFigures(
        format=name,
        method=spec.method if spec else ORIGINAL,
        group_size=spec.group_size if spec else 0,
        bits_per_weight=bits,
        weight_bytes=sum(tensor.nbytes for tensor in (*engine.model.parameters(), *engine.model.buffers())),
        perplexity=score.perplexity,
        bits_per_byte=score.bits_per_byte,
        seconds_per_token=statistics.median(seconds),
    )


COLUMNS: dict[str, Callable[[FormatFigures], str]] = {
    "format": lambda f: f.format,
    "bits a weight": lambda f: f"{f.bits_per_weight:.3f}",
    "memory": lambda f: _bytes(f.weight_bytes),
    "perplexity": lambda f: f"{f.perplexity:.4f}",
    "bits a byte": lambda f: f"{f.bits_per_byte:.5f}",
    "per token": lambda f: _seconds(f.seconds_per_token),
    "accuracy": lambda f: "" if f.accuracy is None else f"{f.accuracy:.1%}",
}


def _columns(table: Sequence[FormatFigures]) -> dict[str, Callable[[FormatFigures], str]]:
    """Those that were measured."""
    return {name: cell for name, cell in COLUMNS.items() if any(cell(figures) for figures in table)}


def _bytes(count: int) -> str:
    from bluejay.units import format_bytes

    return format_bytes(count)


def _seconds(seconds: float) -> str:
    from bluejay.units import format_seconds

    return format_seconds(seconds)


def _show(table: Sequence[FormatFigures]) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table(box=None, pad_edge=False)
    columns = _columns(table)
    for column in columns:
        shown.add_column(column, justify="left" if column == "format" else "right")
    for figures in table:
        shown.add_row(*(cell(figures) for cell in columns.values()))
    Console().print(shown)


# ---- the page: one file that needs nothing else ----------------------------------------------------------------------

_COLORS = {ORIGINAL: "#555555", "minmax": "#c2410c", "mse": "#1d4ed8", "gptq": "#15803d"}
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 560, 360, 70, 20, 16, 48
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1180px; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a }
table { border-collapse: collapse; margin: 1rem 0 } th, td { padding: .3rem .9rem; text-align: right }
th { border-bottom: 2px solid #999; font-weight: 600 } td { border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left } figure { display: inline-block; margin: 0 1rem 1rem 0 }
figcaption { font-weight: 600 } svg text { font: 12px system-ui, sans-serif; fill: #333 }
"""


def page(model: str, table: Sequence[FormatFigures]) -> str:
    """The figures as an HTML page: quality against bits and against time, and the table."""
    columns = _columns(table)
    head = "".join(f"<th>{column}</th>" for column in columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html_format.escape(cell(figures))}</td>" for cell in columns.values()) + "</tr>"
        for figures in table
    )
    used = list(dict.fromkeys(figures.method for figures in table))
    legend = " &nbsp; ".join(f'<span style="color:{_COLORS[method]}">&#9679;</span> {method}' for method in used)
    title = f"Weight formats of {html_format.escape(model)}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>"
        "<p>Lower is better on every axis. Bits a weight count codes, scales, biases and padding; time is that of "
        f"decode programs for one row on the machine where this was measured.</p><p>{legend}</p>"
        f"{_chart('Perplexity against bits a weight', table, lambda f: f.bits_per_weight, 'bits a weight')}"
        f"{_chart('Perplexity against time a token', table, lambda f: 1000 * f.seconds_per_token, 'ms a token')}"
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></body></html>\n"
    )


def _chart(title: str, table: Sequence[FormatFigures], across: Callable[[FormatFigures], float], label: str) -> str:
    """A scatter of perplexity. The original is a dashed line: beside it, formats would all be in one corner."""
    points = [figures for figures in table if figures.method != ORIGINAL]
    base = next((figures for figures in table if figures.method == ORIGINAL), None)
    x_low, x_high = _range([across(figures) for figures in points])
    y_low, y_high = _range([figures.perplexity for figures in table])

    def x(value: float) -> float:
        return _LEFT + (value - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - y_low) / (y_high - y_low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = []
    for i in range(5):
        at_x, at_y = x_low + (x_high - x_low) * i / 4, y_low + (y_high - y_low) * i / 4
        parts += [
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(at_y):.1f}" y2="{y(at_y):.1f}" stroke="#e5e5e5"/>',
            f'<text x="{_LEFT - 8}" y="{y(at_y) + 4:.1f}" text-anchor="end">{at_y:.4g}</text>',
            f'<text x="{x(at_x):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{at_x:.3g}</text>',
        ]
    parts.append(
        f'<text x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{label}</text>'
        f'<text transform="translate(14 {_HEIGHT / 2}) rotate(-90)" text-anchor="middle">perplexity</text>'
    )
    if base is not None:
        at = y(base.perplexity)
        where = f"{base.bits_per_weight:.0f} bits, {_seconds(base.seconds_per_token)} a token"
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="{_COLORS[ORIGINAL]}" '
            f'stroke-dasharray="5 4"/><text x="{_LEFT + 6}" y="{at - 6:.1f}">original: {where}</text>'
        )
    for figures in points:
        group = "row" if figures.group_size == -1 else f"g{figures.group_size}"
        at_x, at_y, color = x(across(figures)), y(figures.perplexity), _COLORS[figures.method]
        # On two sides: minmax and mse lie close together.
        anchor, shift = ("end", -8) if figures.method == "mse" or at_x > _WIDTH - 50 else ("start", 8)
        parts.append(
            f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="5" fill="{color}"><title>{figures.format}: perplexity '
            f"{figures.perplexity:.4f}, {figures.bits_per_weight:.3f} bits, {_seconds(figures.seconds_per_token)}"
            f'</title></circle><text x="{at_x + shift:.1f}" y="{at_y + 4:.1f}" text-anchor="{anchor}">{group}</text>'
        )
    return (
        f'<figure><figcaption>{title}</figcaption><svg width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        f'aria-label="{title}">{"".join(parts)}</svg></figure>'
    )


def _range(values: Sequence[float]) -> tuple[float, float]:
    """The values' range with a margin, never empty."""
    low, high = min(values), max(values)
    margin = 0.08 * (high - low) or 0.05 * abs(high) or 1.0
    return low - margin, high + margin
