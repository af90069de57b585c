"""`bluejay bench`: measurements that help to choose a setting on this machine."""

from __future__ import annotations

import json as json_format
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from bluejay.cli.bench_quantization import quantization
from bluejay.cli.display import Display
from bluejay.cli.environment import preferred_compiler
from bluejay.files import temporary_folder

bench = typer.Typer(name="bench", help="Measure what helps to choose a setting on this machine.", no_args_is_help=True)
bench.command()(quantization)


@dataclass(frozen=True)
class LoopFigures:
    """One way to close the loop: what its programs cost to make, and a token to write.

    Attributes:
        seconds_per_token: in decode programs, median over the rounds, of answers written to the end.
        wasted: tokens computed for nobody when answers stop at a string a third of the way, as a share of all.
        same_ids: its answers are those of the host loop.
    """

    loop: str
    compile_seconds: float
    compilations: int
    seconds_per_token: float
    wasted: float
    same_ids: bool


@bench.command("decode-loops")
def decode_loops(
    model: Annotated[str, typer.Argument(help="`nano` (bundled), a checkpoint directory, or a hub id.")] = "nano",
    new: Annotated[int, typer.Option(min=2, help="Tokens to write.")] = 32,
    iterations: Annotated[int, typer.Option(help="Steps a call of the device loop.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each loop; the loops take turns.")] = 5,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16; default: the checkpoint's.")] = "",
    quantize: Annotated[str, typer.Option(help="Pack weights while loading: int4-g64, int4-row, int4-g32-mse.")] = "",
    backend: Annotated[str, typer.Option(help="inductor or eager.")] = "inductor",
    blocks: Annotated[str, typer.Option(help="auto, inline or shared.")] = "auto",
    json: Annotated[bool, typer.Option(help="Print one JSON object.")] = False,
) -> None:
    """Compare the three ways to close the generation loop. Compiles into a folder of its own."""
    import bluejay
    from bluejay.config import GenerationConfig

    prompt = list(range(5, 17))
    config = GenerationConfig(max_new_tokens=new, temperature=1.0, seed=1, ignore_eos=True)
    engines, compiling = {}, {}
    with temporary_folder() as folder, Display(quiet=json) as display:
        for loop in ("host", "device", "unrolled"):
            engine = bluejay.load(
                model,
                dtype=dtype or None,
                quantize=quantize,
                max_rows=1,
                loop=loop,
                iterations=iterations,
                backend=backend,
                blocks=blocks,
                cxx=preferred_compiler(),
                cache=str(Path(folder) / loop),
                observe=display,
            )
            engine.generate(prompt, config)
            engines[loop], compiling[loop] = engine, engine.figures
        seconds: dict[str, list[float]] = {loop: [] for loop in engines}
        answers = {}
        for _ in range(rounds):
            for loop, engine in engines.items():
                before = engine.figures
                answers[loop] = engine.generate(prompt, config)
                after = engine.figures
                spent = after.decode_seconds - before.decode_seconds
                seconds[loop].append(spent / (after.decoded_tokens - before.decoded_tokens))
        text = answers["host"].text
        stop = text[len(text) // 3 :][:4] or None
        table = []
        for loop, engine in engines.items():
            before = engine.figures
            engine.generate(prompt, config, stop=stop)
            wasted = engine.figures.wasted_tokens - before.wasted_tokens
            useful = engine.figures.decoded_tokens - before.decoded_tokens
            table.append(
                LoopFigures(
                    loop,
                    compiling[loop].compile_seconds,
                    compiling[loop].compilations,
                    statistics.median(seconds[loop]),
                    wasted / max(wasted + useful, 1),
                    answers[loop].ids == answers["host"].ids,
                )
            )
    if json:
        record = {"model": model, "quantize": quantize, "new": new, "iterations": iterations, "rounds": rounds}
        print(json_format.dumps({**record, "backend": backend, "loops": [asdict(figures) for figures in table]}))
    else:
        _show(table, iterations)


def _show(table: list[LoopFigures], iterations: int) -> None:
    from rich.console import Console
    from rich.table import Table

    from bluejay.units import format_seconds

    shown = Table(box=None, pad_edge=False)
    for column in ("loop", "programs", "compile", "per token", "wasted by a stop string", "same ids"):
        shown.add_column(column, justify="left" if column == "loop" else "right")
    for figures in table:
        shown.add_row(
            f"device, {iterations} a call" if figures.loop == "device" else figures.loop,
            str(figures.compilations),
            format_seconds(figures.compile_seconds),
            format_seconds(figures.seconds_per_token),
            f"{figures.wasted:.0%}",
            "yes" if figures.same_ids else "NO",
        )
    Console().print(shown)
