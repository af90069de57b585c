"""`bluejay doctor`: what this machine is, what it can do, and what is missing."""

from __future__ import annotations

import json as json_format
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from bluejay.machine import MachineReport

# The features that decide how fast the model runs; `--json` has all of them.
_TELLING_FEATURES = ("amx", "avx2", "avx512_bf16", "avx512_vnni", "avx512f", "bf16", "i8mm", "sve", "asimd")


def doctor(
    json: Annotated[bool, typer.Option(help="Print the report as JSON.")] = False,
    measure: Annotated[bool, typer.Option(help="Measure memory and matrix speed (about three seconds).")] = True,
) -> None:
    """Show what this machine is and can do, and what is missing."""
    from rich.console import Console

    from bluejay.cli.environment import cache_folder, preferred_compiler
    from bluejay.machine import describe

    with Console(stderr=True).status("measuring memory and matrix speed" if measure else "looking around"):
        report = describe(cache_folder(), measure=measure, preferred_compiler=preferred_compiler())
    if json:
        print(json_format.dumps(report.as_dict(), indent=2))
    else:
        _show(report)


def _show(report: MachineReport) -> None:
    from rich.console import Console
    from rich.table import Table

    from bluejay.units import format_bytes

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("versions", ", ".join(f"{name} {version}" for name, version in report.versions.items()))
    table.add_row("system", report.system)
    cpu = report.cpu
    telling = [name for name in cpu.features if name.startswith(_TELLING_FEATURES)]
    table.add_row("processor", f"{cpu.model}, {cpu.num_cores} cores, torch uses {report.num_threads} threads")
    table.add_row("features", " ".join(telling) or "none that speed up a model")
    table.add_row(
        "memory", f"{format_bytes(report.memory_bytes)}, {format_bytes(report.available_memory_bytes)} available"
    )
    for device in report.devices:
        detail = f"{device.model}, {format_bytes(device.memory_bytes)}, capability {device.capability}"
        table.add_row(device.name, detail)
    if not report.devices:
        table.add_row("GPU", "none that torch can use")
    table.add_row("C++ compiler", f"{report.compiler.version} ({report.compiler.path})" if report.compiler else "none")
    table.add_row("cache folder", f"{report.cache_folder}, {format_bytes(report.free_disk_bytes)} free on its disk")
    if report.read_bytes_per_second is not None:
        rates = ", ".join(f"{name} {flops / 1e12:.3g} TFLOP/s" for name, flops in report.gemm_flops.items())
        table.add_row("reading", f"{report.read_bytes_per_second / 1e9:.3g} GB/s from memory, all threads")
        table.add_row("matrices", rates)
        table.add_row("so GPT-J-6B", _ceiling_of_6b(report.read_bytes_per_second))
    console = Console(highlight=False)
    console.print(table)
    console.print()
    for missing in report.missing:
        console.print(f"missing: {missing.what}", style="bold yellow", markup=False)
        console.print(f"  why: {missing.why}\n  get: {missing.how}", markup=False)
    if not report.missing:
        console.print("nothing is missing", style="green")


def _ceiling_of_6b(read_bytes_per_second: float) -> str:
    from bluejay.config import preset
    from bluejay.models import costs

    config = preset("gptj-6b")
    per_token = costs.weight_bytes_read_per_decoded_token(config, element_bytes=2)
    rate = read_bytes_per_second / per_token
    return (
        f"at most {rate:.3g} tokens/s for one row in bf16: {per_token / 1e9:.3g} GB of weights are read for each token"
    )
