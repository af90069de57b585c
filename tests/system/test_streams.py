"""The command line with streams that are closed, full, or cannot spell: in real processes, as shells start them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BLUEJAY = f"{sys.executable} -m bluejay"


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_nobody_listening(tmp_path: Path, closed: str) -> None:
    """Catches `unexpected AttributeError` under a service manager that gives no streams, or a report written into
    whatever file was opened next and took the closed stream's number."""
    done = shell(f"{BLUEJAY} cache list --cache {tmp_path} {closed}")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == ("" if ">&- " in f"{closed} ".replace("2>&-", "") else f"no programs in {tmp_path}\n")
    done = shell(f"{BLUEJAY} cache show 00 --cache {tmp_path} {closed}")
    assert done.returncode == 1
    assert ("[store]" in done.stderr) == ("2>&-" not in closed)
    assert list(tmp_path.iterdir()) == []


def test_generate_needs_no_streams(tmp_path: Path) -> None:
    """Catches the progress display, or the reading of a prompt, that asks a stream which is not there."""
    done = shell(f"{BLUEJAY} generate --backend eager --max-new-tokens 2 Once --cache {tmp_path} <&- >&- 2>&-")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_under_the_output_is_told(tmp_path: Path, unbuffered: str) -> None:
    """Catches an answer that is lost with code 0, or with a traceback of the interpreter on its way out; told twice."""
    done = shell(f"{BLUEJAY} cache list --cache {tmp_path} >/dev/full", PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 1
    assert done.stderr == "bluejay: standard output: No space left on device\n"


@pytest.mark.parametrize("setting", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}])
def test_a_terminal_without_the_characters_shows_their_codes(tmp_path: Path, setting: dict[str, str]) -> None:
    """Catches `unexpected UnicodeEncodeError` where a name or a text has a letter that the terminal has not."""
    folder = tmp_path / "Bücher"
    done = shell(f"{BLUEJAY} cache list --cache {folder}", PYTHONCOERCECLOCALE="0", **setting)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("no programs in ")
    assert "cher" in done.stdout


INTERRUPTED_AT_ONCE = """
import sys

class Finder:
    def find_spec(self, name, *rest):
        if name == "bluejay.cli.main":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Finder())
from bluejay.cli import run
sys.exit(run(["cache", "list"]))
"""


def test_an_interrupt_while_starting_is_no_traceback() -> None:
    """Catches twenty lines of imports shown to whoever presses Ctrl-C in the first half second."""
    command = [sys.executable, "-c", INTERRUPTED_AT_ONCE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "\nbluejay: interrupted\n"
