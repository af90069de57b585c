"""`bluejay cache`: what is kept of compiled programs, whether it is sound, and how it moves to another machine."""

from __future__ import annotations

import dataclasses
import json as json_format
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bluejay.cli.environment import cache_folder, preferred_compiler
from bluejay.errors import ConfigError, MachineError
from bluejay.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from bluejay.compile import EntryInfo, ImportReport, Store

_SHORT = 12  # digits of a fingerprint that people see
_MANY = 6  # tensors that are listed one by one

Cache = Annotated[Path | None, typer.Option(help="Folder of compiled programs.")]
Json = Annotated[bool, typer.Option(help="Print one JSON object instead of text.")]

cache = typer.Typer(name="cache", rich_markup_mode=None)


@cache.callback(invoke_without_command=True)
def verbs(context: typer.Context) -> None:
    """Look after compiled programs, and move them to other machines."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@cache.command("list")
def list_programs(cache: Cache = None, json: Json = False) -> None:
    """List programs, last used first."""
    store = _open(cache)
    with _file_errors(f"list the programs in {store.folder}"):
        infos, parts = store.entries(), store.parts.entries()
    if json:
        sizes = {"num_bytes": _total(infos), "parts_bytes": _total(parts)}
        _print_json({"folder": str(store.folder), **sizes, "programs": _as_dicts(infos)})
    elif infos:
        _print(_table_of(infos), f"{_count(infos)} in {store.folder}")
        if parts:
            _print(
                f"{_plural(len(parts), 'part')}, {format_bytes(_total(parts))}, to compile others of their kind faster"
            )
    else:
        _print(f"no programs in {store.folder}")


@cache.command()
def show(
    program: Annotated[str, typer.Argument(help="The fingerprint, or its first digits.")],
    cache: Cache = None,
    json: Json = False,
) -> None:
    """Show what is known of one program; --json: all."""
    store = _open(cache)
    with _file_errors(f"the program {program}"):
        manifest = store.show(program)
    if json:
        _print_json(manifest)
    else:
        _print(_table_of_manifest(manifest))


@cache.command()
def verify(cache: Cache = None, json: Json = False) -> None:
    """Read every program in full; exit with 1 if one is damaged."""
    store = _open(cache)
    with _file_errors(f"verify the programs in {store.folder}"):
        infos = store.entries(verify=True)
    damaged = _damaged(infos)
    if json:
        _print_json({"folder": str(store.folder), "checked": len(infos), "damaged": _as_dicts(damaged)})
    elif damaged:
        _print(
            _table_of(damaged),
            f"{len(damaged)} of {len(infos)} programs damaged in {store.folder}",
            "they are never run; `bluejay cache prune` removes them",
        )
    else:
        _print(f"{_count(infos)} in {store.folder}: nothing is damaged")
    if damaged:
        raise typer.Exit(1)


@cache.command()
def prune(
    max_size: Annotated[
        str | None, typer.Option(help="Keep the last used up to this size, such as 2GiB; default: any size.")
    ] = None,
    cache: Cache = None,
    json: Json = False,
) -> None:
    """Remove damaged programs and the longest unused; the last used only if it alone is over the size."""
    max_bytes = None if max_size is None else _parse_size(max_size)
    store = _open(cache)
    with _file_errors(f"remove programs from {store.folder}"):
        removed = store.prune(sys.maxsize if max_bytes is None else max_bytes)
        kept = store.entries()
    if max_bytes is not None and removed and not kept and not removed[0].problem:  # the last used comes first
        _warn(f"the last used program too: its {format_bytes(removed[0].num_bytes)} exceed --max-size {max_size}")
    if json:
        sizes = {"max_bytes": max_bytes, "removed_bytes": _total(removed), "kept_bytes": _total(kept)}
        _print_json({"folder": str(store.folder), **sizes, "removed": _as_dicts(removed), "kept": len(kept)})
        return
    if removed:
        _print(_table_of(removed), "")
    _print(f"removed {_count(removed)}; {_count(kept)} in {store.folder}")


@cache.command()
def clear(
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False, cache: Cache = None, json: Json = False
) -> None:
    """Remove every program."""
    store = _open(cache)
    if not yes:
        _confirm_clear(store)
    with _file_errors(f"remove programs from {store.folder}"):
        removed = store.clear()
    if json:
        figures = {"removed_bytes": _total(removed), "removed": _as_dicts(removed)}
        _print_json({"folder": str(store.folder), **figures})
    else:
        _print(f"removed {_count(removed)} from {store.folder}")


@cache.command("export")
def export_file(
    file: Annotated[Path, typer.Argument(help="The archive to write (zip).")],
    overwrite: Annotated[bool, typer.Option(help="Replace the file if there is one.")] = False,
    cache: Cache = None,
    json: Json = False,
) -> None:
    """Write all sound programs into one file."""
    from bluejay.compile import export_programs

    if file.is_dir() or (file.exists() and not overwrite):
        raise ConfigError(
            asked=f"export programs to {file}",
            found="a folder" if file.is_dir() else f"a file of {format_bytes(file.stat().st_size)}",
            rule="a file is replaced only on request, a folder never",
            fix="name another file" if file.is_dir() else "name another file, or add --overwrite",
        )
    store = _open(cache)
    with _file_errors(f"export programs to {file}"):
        infos = store.entries(verify=True)
        skipped = _damaged(infos)
        for info in skipped:
            _warn(f"the program {info.fingerprint[:_SHORT]} is damaged and left out: {info.problem}")
        written = export_programs(store, file, [info.fingerprint for info in infos if not info.problem])
        num_bytes = file.stat().st_size
    if json:
        record = {"file": str(file), "num_bytes": num_bytes, "programs": written, "skipped": _as_dicts(skipped)}
        _print_json(record)
    else:
        _print(f"{_plural(len(written), 'program')}, {format_bytes(num_bytes)}, in {file}")


@cache.command("import")
def import_file(
    file: Annotated[Path, typer.Argument(help="An archive that `bluejay cache export` wrote.")],
    cache: Cache = None,
    json: Json = False,
) -> None:
    """Take the programs for this kind of machine from a file.

    Programs are native code that runs with your rights, and checksums do not say who made them: import only archives
    from a source you trust.
    """
    if not file.is_file():
        raise ConfigError(
            asked=f"import programs from {file}",
            found="a folder" if file.is_dir() else "no such file",
            fix="name a file that `bluejay cache export` wrote",
        )
    store = _open(cache)
    with _file_errors(f"import programs from {file} into {store.folder}"):
        report = _import_for_devices(store, file)
    if json:
        _print_json({"file": str(file), "folder": str(store.folder), **report.as_dict()})
    else:
        _print(f"imported {_plural(len(report.imported), 'program')} into {store.folder}")
        _print_refused(report.refused)
    _warn_of_threads(report.threads)
    if report.refused and not report.imported:
        raise typer.Exit(1)


# ---- doing ---------------------------------------------------------------------------------------------------------


def _open(folder: Path | None) -> Store:
    from bluejay.compile import Store

    folder = folder or cache_folder()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            asked=f"programs in {folder}", found="a file", rule="programs are kept in a folder", fix="name a folder"
        )
    return Store(folder)


@contextmanager
def _file_errors(asked: str) -> Iterator[None]:
    """Errors of the file system, told as what they kept from being done."""
    try:
        yield
    except OSError as error:
        raise MachineError(
            asked=asked,
            found=": ".join(str(part) for part in (error.filename, error.strerror or error) if part),
            fix="see to the rights and the space of that place, or name another one",
        ) from error


def _parse_size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(asked=f"--max-size {text}", found=str(error), fix="give a size, such as 2GiB") from None


def _confirm_clear(store: Store) -> None:
    """
    Raises:
        ConfigError: nobody is there to answer.  Exit: the answer was not yes.
    """
    if not sys.stdin.isatty():
        raise ConfigError(
            asked=f"remove every program in {store.folder}",
            found="no terminal to ask at",
            rule="without a terminal the command itself has to say yes",
            fix="add --yes",
        )
    with _file_errors(f"list the programs in {store.folder}"):
        infos = store.entries()
    print(f"remove {_count(infos)} from {store.folder}? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        print("bluejay: nothing was removed", file=sys.stderr)
        raise typer.Exit(1)


def _import_for_devices(store: Store, file: Path) -> ImportReport:
    """Import what any device of this machine can run: a program for one of them always differs from the others."""
    import torch

    from bluejay.compile import ImportReport, environment, import_programs, room_digests
    from bluejay.machine import cxx_compiler

    compiler, rooms = cxx_compiler(preferred_compiler()), room_digests()
    devices = [torch.device(kind) for kind in ("cpu", "cuda") if kind == "cpu" or torch.cuda.is_available()]
    reports = [import_programs(store, file, environment(device, compiler), rooms) for device in devices]
    refused = {
        fingerprint: min((report.refused[fingerprint] for report in reports), key=len)
        for fingerprint in reports[0].refused
        if all(fingerprint in report.refused for report in reports)
    }
    imported = tuple(fingerprint for report in reports for fingerprint in report.imported)
    threads = {number for report in reports for number in report.threads}
    return ImportReport(imported, refused, tuple(sorted(threads)))


# ---- telling -------------------------------------------------------------------------------------------------------


def _damaged(infos: Sequence[EntryInfo]) -> list[EntryInfo]:
    return [info for info in infos if info.problem]


def _total(infos: Sequence[EntryInfo]) -> int:
    return sum(info.num_bytes for info in infos)


def _plural(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _count(infos: Sequence[EntryInfo]) -> str:
    size = f", {format_bytes(_total(infos))}" if infos else ""
    return f"{_plural(len(infos), 'program')}{size}"


def _as_dicts(infos: Sequence[EntryInfo]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(info) for info in infos]


def _print_json(record: Mapping[str, Any]) -> None:
    print(json_format.dumps(record, indent=2))


def _print(*parts: str | Table) -> None:
    """Tables as wide as the terminal; sentences as one line each, because they hold paths that people copy."""
    from rich.console import Console

    console = Console(highlight=False)
    for part in parts:
        if isinstance(part, str):
            console.print(part, markup=False, soft_wrap=True)
        else:
            console.print(part)


def _warn(text: str) -> None:
    print(f"bluejay: warning: {text}", file=sys.stderr)


def _warn_of_threads(made_for: Sequence[int]) -> None:
    """A program for another number of threads than torch's here is not found by who does not ask for that number."""
    import torch

    here = torch.get_num_threads()
    if made_for and here not in made_for:
        numbers = " and ".join(map(str, made_for))
        fix = f"set OMP_NUM_THREADS={made_for[0]}"
        _warn(f"these programs are for {numbers} CPU threads, torch uses {here} here: {fix} to use them")


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


def _table_of(infos: Sequence[EntryInfo]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("program", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("compiled in", justify="right", no_wrap=True)
    table.add_column("last used", no_wrap=True)
    table.add_column("made for", overflow="fold")
    for info in infos:
        told = [Text(info.label)] if info.label else []
        told += [Text(f"damaged: {info.problem}", style="red")] if info.problem else []
        seconds = format_seconds(info.compile_seconds) if info.compile_seconds else ""
        table.add_row(
            info.fingerprint[:_SHORT],
            format_bytes(info.num_bytes),
            seconds,
            _moment(info.last_used),
            Text("\n").join(told),
        )
    return table


def _rows_of_program(manifest: Mapping[str, Any]) -> dict[str, str]:
    """What native kernels, which are kept here too, do not have."""
    fields, signature, memory = manifest["fields"], manifest["signature"], manifest["memory"]
    modules = list(fields["module"].values())
    return {
        "device": f"{fields['device']}, {_plural(fields['threads'], 'thread')}",
        "module": f"{modules[0]['class']}, {_plural(len(modules), 'module')}",
        "inputs": _tensors(signature["inputs"], memory["inputs_bytes"]),
        "outputs": _tensors(signature["outputs"], memory["outputs_bytes"]),
        "weights": _tensors(signature["weights"], memory["weights_bytes"]),
        "workspace": f"at most {format_bytes(memory['workspace_bytes_at_most'])}",
        "settings": _pairs(fields["spec"]),
        "identity": _pairs(fields["identity"]),
    }


def _table_of_manifest(manifest: Mapping[str, Any]) -> Table:
    from rich.table import Table
    from rich.text import Text

    fields = manifest["fields"]
    num_bytes = sum(record["bytes"] for record in manifest["files"].values())
    rows = {
        "program": manifest["fingerprint"],
        "made for": manifest["label"],
        "made": f"{_moment(manifest['created'])}, in {format_seconds(manifest['compile_seconds'])}",
        "size": f"{format_bytes(num_bytes)} in {_plural(len(manifest['files']), 'file')}",
        **(_rows_of_program(manifest) if "signature" in manifest else {"device": fields["device"]}),
        **{name.replace("_", " "): _value(value) for name, value in _known(fields["environment"])},
        "sources": _pairs({name: value[:_SHORT] for name, value in fields["sources"].items()}),
    }
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows.items():
        if text:
            table.add_row(name, Text(text))
    return table


def _tensors(specs: Sequence[Mapping[str, Any]], num_bytes: int) -> str:
    told = [f"{spec['name']} {spec['dtype']}{spec['shape']}" for spec in specs[:_MANY]]
    told += [f"{len(specs) - _MANY} more"] if len(specs) > _MANY else []
    return f"{_plural(len(specs), 'tensor')}, {format_bytes(num_bytes)}: {', '.join(told)}"


def _known(data: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in data.items() if name != "class" and value not in ("", [])]


def _value(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _pairs(data: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_value(value)}" for name, value in _known(data))


def _print_refused(refused: Mapping[str, Any]) -> None:
    """The programs that were not for this machine: those that differ in the same fields together."""
    alike: dict[Any, list[str]] = {}
    for fingerprint, differences in refused.items():
        alike.setdefault(differences, []).append(fingerprint)
    for differences, fingerprints in alike.items():
        names = ", ".join(fingerprint[:_SHORT] for fingerprint in fingerprints)
        heading = f"not for this machine: {_plural(len(fingerprints), 'program')} ({names})"
        _print("", heading, _table_of_differences(differences))
    if refused:
        _print("", "they are not needed: this machine compiles its own when it first uses a model")


def _table_of_differences(differences: Sequence[Any]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2))
    for heading in ("field", "in the file", "here"):
        table.add_column(heading, overflow="fold")
    for difference in differences:
        table.add_row(difference.field, Text(difference.theirs or "none"), Text(difference.ours or "none"))
    return table
