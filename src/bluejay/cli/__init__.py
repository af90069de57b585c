"""The command line: one entry point, one parser, one verb per file. The only room that prints and reads the
environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["run"]


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    _prepare_streams()
    try:
        from bluejay.cli.main import run as answer  # a third of a second, in which people press Ctrl-C too
    except KeyboardInterrupt:
        print("\nbluejay: interrupted", file=sys.stderr)
        return 130
    return answer(argv)


def _prepare_streams() -> None:
    """A stream that our starter closed leads nowhere; one that cannot spell a character writes its code instead.

    Without this the next file that anybody opens would take the closed stream's number, and what native code prints.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open as long as the process lives
    for stream in (sys.stdout, sys.stderr):
        if (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "") != "utf8":
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
