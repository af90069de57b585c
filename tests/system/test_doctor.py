"""`bluejay doctor` and the entry point's promises, through real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

COMMAND = (sys.executable, "-m", "bluejay")


def bluejay(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The finished command; its output is not a terminal."""
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


def program(body: str, argv: Sequence[str] = ("x",)) -> list[str]:
    """A command that runs the entry point with a verb `x` of that body."""
    code = (
        "import sys\nfrom bluejay.cli.main import app, run\n"
        f"@app.command()\ndef x(json: bool = False) -> None:\n    {body}\n"
        f"sys.exit(run({list(argv)!r}))"
    )
    return [sys.executable, "-c", code]


def run_program(body: str, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(program(body, argv), capture_output=True, text=True, check=False)


def start_program(body: str) -> subprocess.Popen[str]:
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}  # as users have it
    return subprocess.Popen(program(body), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=buffered)


def test_doctor_measures_and_says_what_is_there(tmp_path: Path) -> None:
    """Catches a figure that is missing or zero, and a report that pollutes JSON or makes the folder it names."""
    done = bluejay("doctor", "--json", BLUEJAY_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["read_bytes_per_second"] > 0
    assert set(report["gemm_flops"]) == {"bfloat16", "float32"}
    assert min(report["gemm_flops"].values()) > 0
    assert report["cpu"]["num_cores"] >= 1
    assert report["cache_folder"] == str(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_doctor_for_people_fits_a_terminal(tmp_path: Path) -> None:
    """Catches lines over 80 columns, control codes in a pipe, and a missing compiler without the way to get one."""
    nothing = {"PATH": str(tmp_path), "CXX": ""}
    done = bluejay("doctor", "--no-measure", **nothing, BLUEJAY_CACHE=str(tmp_path), COLUMNS="80")
    assert done.returncode == 0, done.stderr
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    assert "\x1b" not in done.stdout
    for word in (
        "torch",
        "processor",
        "memory",
        "GPU",
        "C++ compiler",
        "cache folder",
        "missing: a C++ compiler",
        "get:",
    ):
        assert word in done.stdout
    assert "reading" not in done.stdout


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"BLUEJAY_CACHE": "/a/b"}, "/a/b"),
        ({"BLUEJAY_CACHE": "", "XDG_CACHE_HOME": "/c"}, "/c/bluejay"),
        ({"BLUEJAY_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/home/me"}, "/home/me/.cache/bluejay"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="the folders of Linux")
def test_cache_folder(environment: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a variable that is not read, or an empty one taken for the current folder."""
    from bluejay.cli.environment import cache_folder

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert str(cache_folder()) == folder


@pytest.mark.parametrize(
    "arguments",
    [["--nope"], ["doctor", "--nope"], ["dctor"], ["doctor", "extra"], ["doctor", "--json=maybe"], []],
)
def test_wrong_use_is_code_2_without_a_traceback(arguments: list[str]) -> None:
    """Catches a mistake of the user answered by a traceback, by code 1, or by silence."""
    done = bluejay(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.strip() or done.stdout.startswith("Usage")


def test_a_misspelled_verb_is_met_with_the_right_one() -> None:
    """Catches `No such command` without a hint."""
    assert "doctor" in bluejay("dctor").stderr


@pytest.mark.parametrize("json_option", [["--json"], ["--json=yes"]])
def test_mistakes_are_json_when_json_is_asked(json_option: list[str]) -> None:
    """Catches a program that reads our JSON and meets an empty output."""
    done = bluejay("doctor", *json_option, "--nope")
    assert json.loads(done.stdout)["error"]["code"] == "usage"
    assert done.returncode == 2


RAISE = {
    "ours": (
        "from bluejay.errors import MachineError; raise MachineError(asked='a', found='b', fix='c')",
        1,
        "machine",
    ),
    "wrong": ("from bluejay.errors import ConfigError; raise ConfigError(asked='a', found='b', fix='c')", 2, "config"),
    "unforeseen": ("{}['key']", 1, "unexpected"),
}


@pytest.mark.parametrize("kind", RAISE)
def test_errors_become_text_and_code_in_one_place(kind: str) -> None:
    """Catches a traceback without --debug, none with it before or after the verb, and a wrong exit code."""
    code, exit_code, name = RAISE[kind]
    plain = run_program(code, ["x"])
    assert (plain.returncode, plain.stdout) == (exit_code, "")
    assert plain.stderr.startswith("bluejay: ")
    assert "Traceback" not in plain.stderr
    assert "do: " in plain.stderr
    for argv in (["--debug", "x"], ["x", "--debug"]):
        assert "Traceback" in run_program(code, argv).stderr
    as_json = run_program(code, ["x", "--json"])
    assert as_json.returncode == exit_code
    assert json.loads(as_json.stdout)["error"]["code"] == name


def test_control_c_ends_cleanly() -> None:
    """Catches a traceback, or an exit code that says all went well, when the user has had enough."""
    process = start_program("import time; print('ready', flush=True); time.sleep(60)")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors.strip() == "bluejay: interrupted"


def test_a_closed_pipe_is_quiet() -> None:
    """Catches BrokenPipeError shouted at whoever wrote `bluejay ... | head`."""
    process = start_program("[print('line', i) for i in range(100_000)]")
    assert process.stdout is not None
    assert process.stdout.readline() == "line 0\n"
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(timeout=30) == 1


def test_a_pipe_closed_before_the_last_flush_is_quiet() -> None:
    """Catches the interpreter's own complaint about output that nobody took, on its way out."""
    process = start_program("print('a line that stays in the buffer until the end')")
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.wait(timeout=30)


def test_version() -> None:
    """Catches a version that differs from the package's."""
    import bluejay as package

    done = bluejay("--version")
    assert done.returncode == 0
    assert done.stdout.startswith(f"bluejay {package.__version__} (torch 2.13")
