"""`bluejay quantize`: a checkpoint into a directory with four-bit weights."""

from __future__ import annotations

import dataclasses
import json as json_format
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bluejay.cli.display import Display
from bluejay.cli.environment import cache_folder, preferred_compiler
from bluejay.cli.evaluate import read_text
from bluejay.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor

    from bluejay.checkpoint import Checkpoint
    from bluejay.config import QuantSpec
    from bluejay.events import Observer


def quantize(
    model: Annotated[str, typer.Argument(help="`nano` (bundled), a checkpoint directory, or a hub id.")],
    out: Annotated[Path, typer.Argument(help="The directory to make.")],
    bits: Annotated[int, typer.Option(help="Bits of a code: 4.")] = 4,
    group_size: Annotated[int, typer.Option(help="Inputs that share a scale: 16 to 256; -1: a whole row.")] = 64,
    method: Annotated[str, typer.Option(help="minmax, mse (best range), gptq (needs --calibration).")] = "minmax",
    layers: Annotated[str, typer.Option(help="Patterns of layers, with commas; default: all but the embedding.")] = "",
    calibration: Annotated[Path | None, typer.Option(help="gptq: text like what the model will read.")] = None,
    calibration_tokens: Annotated[int, typer.Option(min=1, help="gptq: tokens of it to use, at most.")] = 65536,
    evaluate: Annotated[
        Path | None, typer.Option(help="Perplexity on this text, before and after, for the card.")
    ] = None,
    backend: Annotated[str, typer.Option(help="--evaluate: auto, inductor (compiled) or eager.")] = "auto",
    strict: Annotated[bool, typer.Option(help="A missing tensor is an error.")] = True,
    offline: Annotated[bool, typer.Option(help="Never ask the network for a hub id.")] = False,
    quiet: Annotated[bool, typer.Option(help="No progress.")] = False,
    json: Annotated[bool, typer.Option(help="Print one JSON object.")] = False,
) -> None:
    """Pack a model's linear layers to four bits. Run again after an interruption, it goes on."""
    from bluejay.build import locate
    from bluejay.checkpoint import open_checkpoint
    from bluejay.config import QuantSpec
    from bluejay.quant import quantize_checkpoint, summarize
    from bluejay.units import format_bytes, format_seconds

    chosen = {"layers": [part.strip() for part in layers.split(",")]} if layers else {}
    spec = QuantSpec.from_dict({"bits": bits, "group_size": group_size, "method": method, **chosen})
    if (method == "gptq") != (calibration is not None):
        raise RequestError(
            asked=f"--method {method}" + (f" with --calibration {calibration}" if calibration else ""),
            found="a text that nothing reads" if calibration else "no --calibration",
            rule="gptq measures what layers are fed; the other methods look at weights alone",
            fix="leave --calibration out" if calibration else "name a text file with --calibration",
        )
    scored = read_text(evaluate, "--evaluate") if evaluate else ""
    started = time.perf_counter()
    with Display(quiet) as display:
        checkpoint = open_checkpoint(locate(model), offline=offline, observe=display)
        for warning in checkpoint.warnings:
            display.warn(warning)
        ids = calibration_ids(calibration, checkpoint, calibration_tokens) if calibration else None
        records = quantize_checkpoint(checkpoint, out, spec, calibration=ids, strict=strict, observe=display)
        seconds = time.perf_counter() - started
        summary = summarize(records, spec)
        quality = _compare(model, out, spec, scored, backend, offline, display) if scored else {}
    if quality:
        _add_to_card(out, quality)
    if json:
        record = {"out": str(out), "seconds": seconds, "spec": dataclasses.asdict(spec), **summary}
        tensors = [record.as_dict() for record in records]
        print(json_format.dumps({**record, "perplexity": quality, "tensors": tensors}))
    elif not quiet:
        for name, value in quality.items():
            print(f"{name}: perplexity {value:.4f}")
        packed, kept = format_bytes(summary["packed_bytes"]), format_bytes(summary["kept_bytes"])
        print(
            f"{out}: {summary['packed_tensors']} tensors in {packed} at {summary['bits_per_weight']:.3f} bits a "
            f"weight, {summary['kept_tensors']} kept in {kept}; lowest signal to noise {summary['lowest_snr_db']} dB; "
            f"{format_seconds(seconds)}",
            file=sys.stderr,
        )


def calibration_ids(file: Path, checkpoint: Checkpoint, num_tokens: int) -> Tensor:
    """Token ids in rows of the model's window, [sequences, tokens].

    Raises:
        RequestError: less text than one window.
    """
    import torch

    from bluejay.checkpoint import load_tokenizer

    window = checkpoint.config.n_positions
    # No tokenizer gives fewer than a token per 16 bytes of running text, so the rest need not be read.
    text = read_text(file, "--calibration")[: 16 * max(num_tokens, window)]
    ids = load_tokenizer(checkpoint.directory, checkpoint.config).encode(text)[: max(num_tokens, window)]
    if len(ids) < window:
        raise RequestError(
            asked=f"calibration with {file}",
            found=f"{len(ids)} tokens",
            rule=f"layers are fed whole windows of {window} tokens",
            fix="give a longer text",
        )
    return torch.tensor(ids[: len(ids) // window * window]).view(-1, window)


def _compare(
    model: str, out: Path, spec: QuantSpec, text: str, backend: str, offline: bool, observe: Observer
) -> dict[str, float]:
    """Perplexity of the original, of what plain methods make of it with these groups, and of what was written."""
    import bluejay
    from bluejay.tasks import perplexity

    def score(source: str, packing: QuantSpec | None) -> float:
        engine = bluejay.load(
            source,
            quantize=packing,
            max_rows=4,
            backend=backend,
            offline=offline,
            cxx=preferred_compiler(),
            cache=str(cache_folder()),
            observe=observe,
        )
        return perplexity(engine, text, observe=observe).perplexity

    plain = [dataclasses.replace(spec, method=method) for method in ("minmax", "mse") if method != spec.method]
    figures = {"original": score(model, None)}
    figures |= {packing.name: score(model, packing) for packing in plain}
    return figures | {spec.name: score(str(out), None)}


def _add_to_card(out: Path, quality: dict[str, float]) -> None:
    """The figures at the end of the directory's README, which is replaced in one step."""
    rows = [f"| {name} | {value:.4f} |" for name, value in quality.items()]
    card = out / "README.md"
    lines = [
        "Perplexity on a text that was not used for packing:",
        "",
        "| weights | perplexity |",
        "|---|---|",
        *rows,
        "",
    ]
    fresh = card.with_name(".README.md.new")
    fresh.write_text(card.read_text(encoding="utf-8") + "\n" + "\n".join(lines), encoding="utf-8")
    fresh.replace(card)
