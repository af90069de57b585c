"""`bluejay compile`: put every program that a job needs into the store, without running it."""

from __future__ import annotations

import json as json_format
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bluejay.cli.display import Display
from bluejay.cli.environment import cache_folder, preferred_compiler
from bluejay.cli.generate import common
from bluejay.cli.launch import device_of_rank, is_heard, is_starter, layout_of, ranks, start_ranks

if TYPE_CHECKING:
    from bluejay.build import Built
    from bluejay.config import Target


def compile(
    program: typer.Context,
    model: Annotated[str, typer.Argument(help="`nano` (bundled), a checkpoint directory, or a hub id.")] = "nano",
    batch: Annotated[int, typer.Option(help="Rows at once, at most.")] = 1,
    context: Annotated[int, typer.Option(help="Tokens a row may hold; 0: the model's window.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16; default: the checkpoint's.")] = "",
    quantize: Annotated[str, typer.Option(help="Pack weights while loading: int4-g64, int4-row, int4-g32-mse.")] = "",
    kernel: Annotated[str, typer.Option(help="Four-bit products: auto, an instruction set, or x8 (coarser).")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    devices: Annotated[int, typer.Option(min=1, help="Ranks that will hold the model together.")] = 1,
    stages: Annotated[int, typer.Option(min=1, help="Stages of a pipeline; other devices share layers.")] = 1,
    blocks: Annotated[str, typer.Option(help="auto, inline (one program), shared (one per kind of layer).")] = "auto",
    target_file: Annotated[Path | None, typer.Option(help="YAML: the machine to compile for.")] = None,
    cache: Annotated[Path | None, typer.Option(help="Folder of compiled programs.")] = None,
    offline: Annotated[bool, typer.Option(help="Never ask the network for a hub id.")] = False,
    quiet: Annotated[bool, typer.Option(help="No progress.")] = False,
    json: Annotated[bool, typer.Option(help="Print one JSON object.")] = False,
) -> None:
    """Compile all programs for a model and a job; later runs of the same kind start at once."""
    layout = layout_of(devices, stages)
    if is_starter(devices):  # ranks compile with the cores that they will run with, and each what its part needs
        raise typer.Exit(start_ranks(program.obj, devices))
    from bluejay.build import build
    from bluejay.config import load_target
    from bluejay.generate import compile_ahead, run_config

    started = time.perf_counter()
    target = load_target(target_file) if target_file else None
    run = run_config(
        model,
        dtype or None,
        quantize=quantize,
        kernel=kernel,
        context=context,
        max_rows=batch,
        device=device_of_rank(device),
        layout=layout,
        offline=offline,
        blocks=blocks,
        threads=target.threads if target else 0,
        cxx=preferred_compiler(),
        cache=str(cache or cache_folder()),
    )
    quiet = quiet or not is_heard()
    with ranks(layout, [common(run)], run.device) as mesh, Display(quiet) as display:
        built = build(run, display, weights=False, mesh=mesh)
        if target:
            _check(target, built)
        labels = compile_ahead(built)
        made = [(labels, built.programs.store.compilations)]
        if mesh is not None:
            from bluejay.parallel import from_all

            made = from_all(made[0])
    labels = list(dict.fromkeys(label for of_rank, _ in made for label in of_rank))
    compilations = sum(count for _, count in made)
    seconds = time.perf_counter() - started
    if json:
        record = {"programs": labels, "compilations": compilations, "seconds": seconds, "cache": run.cache}
        print(json_format.dumps(record))
    elif not quiet:
        print("\n".join(labels))
        print(f"{len(labels)} programs in {run.cache}, {compilations} compiled, {seconds:.1f} s", file=sys.stderr)


def _check(target: Target, built: Built) -> None:
    """Refuse a job that does not fit the target, and a target that this machine cannot compile for."""
    from bluejay.errors import MachineError
    from bluejay.machine import cpu_features
    from bluejay.models import costs
    from bluejay.units import format_bytes

    if absent := sorted(set(target.cpu_features) - set(cpu_features())):
        raise MachineError(
            asked=f"programs for {target.name}",
            found=f"this machine lacks {', '.join(absent)}",
            rule="programs are made for the processor they are made on",
            fix="compile on a machine of that kind and move the programs with bluejay cache export and import",
        )
    config, run = built.model.config, built.run
    weights = sum(tensor.nbytes for tensor in (*built.model.parameters(), *built.model.buffers()))
    cache = run.max_rows * built.context * costs.kv_bytes_per_token(config, built.dtype.itemsize)
    if target.memory_bytes and weights + cache > target.memory_bytes:
        raise MachineError(
            asked=f"a job for {target.name} with {format_bytes(target.memory_bytes)} of memory",
            found=f"{format_bytes(weights)} of weights and {format_bytes(cache)} of cache",
            rule="weights and cache must fit the target's memory",
            fix="lower --batch or --context, or choose a smaller --dtype",
        )
