"""What people see while programs compile: a line for each, on a terminal and elsewhere; the cursor comes back."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import bluejay
from bluejay.cli.display import Display
from bluejay.events import Event

SOURCE = Path(bluejay.__file__).parents[1]
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


def tell(display: Display, name: str, program: str, **fields: Any) -> None:
    display(Event(f"compile.{name}", {"label": f"[{program}] rows", "fingerprint": program, **fields}))


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda self: True)


def drawn(display: Display) -> list[str]:
    """The lines that move, as they would be drawn now."""
    if display._progress is None:
        return []
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(display._progress.get_renderable())
    return [line[2:].strip() for line in console.export_text().splitlines() if line.strip()]


@pytest.mark.usefixtures("terminal")
def test_each_program_has_a_line_while_it_runs() -> None:
    """Catches two programs that share one line: the second start hides the first, the first end hides the second."""
    with Display() as display:
        tell(display, "start", "a")
        tell(display, "start", "b")
        tell(display, "part", "a", part=2, parts=3)
        tell(display, "wait", "c")
        assert drawn(display) == [
            "0:00:00 compiling [a] rows, part 2 of 3",
            "0:00:00 compiling [b] rows (once; the program is kept)",
            "0:00:00 waiting for another process that compiles [c] rows",
        ]
        tell(display, "done", "a", seconds=1.0)
        tell(display, "waited", "c")
        assert drawn(display) == ["0:00:00 compiling [b] rows (once; the program is kept)"]
        tell(display, "start", "b")  # its worker died, and it begins again
        assert len(drawn(display)) == 1
        tell(display, "failed", "b")
        assert display._progress is None


@pytest.mark.usefixtures("terminal")
def test_the_cursor_comes_back(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a terminal without a cursor: an error in the `with`, one after it, and an end that comes twice."""
    display = Display()

    def interrupted() -> None:
        with display:
            tell(display, "start", "a")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    err = capsys.readouterr().err
    assert err.rindex(SHOW) > err.rindex(HIDE)
    tell(display, "start", "a")  # an engine compiles later, when nothing encloses it
    tell(display, "failed", "a")
    tell(display, "failed", "a")
    display.__exit__(None, None, None)
    err = capsys.readouterr().err
    assert err.rindex(SHOW) > err.rindex(HIDE)


def test_a_process_that_leaves_gives_the_cursor_back() -> None:
    """Catches an exception past everything that would have closed the display."""
    code = (
        "from bluejay.cli.display import Display; from bluejay.events import Event\n"
        "Display()(Event('compile.start', {'label': 'x', 'fingerprint': 'x'}))\nraise SystemExit(3)"
    )
    master, slave = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "TERM": "xterm"}
    process = subprocess.Popen([sys.executable, "-c", code], stdin=slave, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    read = b""
    try:
        while piece := os.read(master, 1000):
            read += piece
    except OSError:  # the other side is closed
        pass
    finally:
        os.close(master)
    assert process.wait() == 3
    assert read.rindex(SHOW.encode()) > read.rindex(HIDE.encode())


def test_elsewhere_a_line_for_each_start(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches escape codes in a log, and silence while another process compiles."""
    with Display() as display:
        tell(display, "start", "a")
        tell(display, "part", "a", part=1, parts=2)
        tell(display, "wait", "b")
        tell(display, "waited", "b")
        tell(display, "done", "a", seconds=1.0)
        display(Event("warning", {"text": "odd"}))
    assert capsys.readouterr().err.splitlines() == [
        "bluejay: compiling [a] rows (once; the program is kept)",
        "bluejay: waiting for another process that compiles [b] rows",
        "bluejay: warning: odd",
    ]


@pytest.mark.usefixtures("terminal")
def test_a_warning_stays_above_the_lines_that_move(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a warning that ends the display, or is cut to the width of the terminal."""
    with Display() as display:
        tell(display, "start", "a")
        display(Event("warning", {"text": "odd [b] " * 30}))
        assert len(drawn(display)) == 1
    assert "bluejay: warning: " + "odd [b] " * 30 in capsys.readouterr().err
