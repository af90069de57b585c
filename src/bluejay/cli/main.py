"""The entry point: the verbs, and the one place where an error becomes text and an exit code.

Exit codes: 0 done, 1 failed, 2 wrong use, 130 interrupted.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated, Any

import typer

import bluejay
from bluejay.cli.arguments import normalize
from bluejay.cli.bench import bench
from bluejay.cli.cache import cache
from bluejay.cli.compile import compile
from bluejay.cli.doctor import doctor
from bluejay.cli.evaluate import evaluate
from bluejay.cli.generate import generate
from bluejay.cli.plan import plan
from bluejay.cli.quantize import quantize
from bluejay.cli.train import train
from bluejay.errors import BluejayError

# Verb files import torch and the other rooms inside their functions, so that `--help` and mistakes answer at once.
app = typer.Typer(name="bluejay", add_completion=False, rich_markup_mode=None)
app.command()(generate)
app.command()(compile)
app.command()(plan)
app.command()(train)
app.command()(quantize)
app.command()(evaluate)
app.command()(doctor)
app.add_typer(bench)
app.add_typer(cache)


# What a stream that cannot be written says: a full disk, a closed or a broken one.
_OUTPUT_ERRORS = (errno.ENOSPC, errno.EIO, errno.EBADF, errno.EFBIG)


@app.callback(invoke_without_command=True)
def program(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Show the version and leave.")] = False,
) -> None:
    """Compile GPT-J once and run it anywhere."""
    if version:
        typer.echo(f"bluejay {bluejay.__version__} (torch {metadata.version('torch')})")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        code = _answer(sys.argv[1:] if argv is None else list(argv))
    except KeyboardInterrupt:
        code = _interrupted()
    return code if _close_output() else 1


def _answer(argv: list[str]) -> int:
    command = typer.main.get_command(app)
    debug, as_json = "--debug" in argv, "--json" in argv  # what holds until the arguments are understood
    try:
        arguments = normalize(command, argv)
        debug, as_json = "--debug" in arguments.switched_on, "--json" in arguments.switched_on
        code = command.main(arguments.words, prog_name="bluejay", standalone_mode=False, obj=argv)
        return _interrupted() if code == 130 else code or 0
    except SystemExit as left:  # typer's own answer to a pipe that the reader closed
        return left.code if isinstance(left.code, int) else 1
    except BluejayError as error:
        _report(str(error), error.as_dict(), as_json, debug)
        return error.exit_code
    except typer.TyperException as error:
        message = error.format_message()
        _report(f"{message}\n  do: bluejay {_verb(error)}--help", {"code": "usage", "found": message}, as_json, debug)
        return error.exit_code
    except BrokenPipeError:
        return 1
    except OSError as error:
        if error.filename is not None or error.errno not in _OUTPUT_ERRORS:
            return _unexpected(error, as_json, debug)
        if debug:
            traceback.print_exc()
        _give_up_output(error)
        return 1
    except Exception as error:
        return _unexpected(error, as_json, debug)


def _unexpected(error: Exception, as_json: bool, debug: bool) -> int:
    first_line = next(iter(str(error).splitlines()), "")
    text = f"unexpected {type(error).__name__}: {first_line}\n  do: run again with --debug for the traceback"
    _report(text, {"code": "unexpected", "found": f"{type(error).__name__}: {first_line}"}, as_json, debug)
    return 1


def _report(text: str, data: dict[str, str], as_json: bool, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    if as_json:
        print(json.dumps({"error": data}))
    print(f"bluejay: {text}", file=sys.stderr)


def _verb(error: Any) -> str:
    """The verb that a usage error is about, with a space after it."""
    path = error.ctx.command_path.split()[1:] if getattr(error, "ctx", None) else []
    return "".join(f"{word} " for word in path)


def _interrupted() -> int:
    if "BLUEJAY_LISTENER" not in os.environ:  # who starts ranks says it for all of them
        print("\nbluejay: interrupted", file=sys.stderr)
    return 130


def _close_output() -> bool:
    """Flush; whether all was written. If not, keep the interpreter from complaining about it on its way out."""
    try:
        sys.stdout.flush()
        return True
    except OSError as error:
        return _give_up_output(error)


def _give_up_output(error: OSError) -> bool:
    """Say that nothing more can be written, unless that is no failure of ours, and have the rest go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):  # nobody reads any more
        return True
    print(f"bluejay: standard output: {error.strerror}", file=sys.stderr)
    return False
