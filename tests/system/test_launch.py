"""Several processes as people start them: `--devices N`, torchrun, a rank that is killed, ranks that disagree."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bluejay.cli import launch

SOURCE = Path(__file__).parents[2] / "src"
PROMPT = ["generate", "Once upon a time", "--max-new-tokens", "8", "--temperature", "1", "--seed", "3", "--json"]


def environment() -> dict[str, str]:
    paths = [str(SOURCE), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def answer(*command: str) -> list[int]:
    """The ids of the one JSON object that a command prints."""
    run = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, env=environment(), check=False
    )
    assert run.returncode == 0, run.stderr
    (line,) = run.stdout.splitlines()
    ids: list[int] = json.loads(line)["completions"][0]["ids"]
    return ids


@pytest.fixture(scope="module")
def one_rank() -> list[int]:
    return answer("bluejay", *PROMPT, "--backend", "eager")


def test_ranks_started_here_give_the_ids_of_one(one_rank: list[int]) -> None:
    """Catches ranks that all print, or that sample on their own (B-54)."""
    assert answer("bluejay", *PROMPT, "--devices", "2", "--stages", "2") == one_rank


def test_torchrun_gives_the_ids_of_one(one_rank: list[int]) -> None:
    """Catches a rank that starts ranks of its own, or a store that is opened twice."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "bluejay"]
    assert answer(*torchrun, *PROMPT, "--devices", "2") == one_rank


def test_a_killed_rank_ends_the_job_with_its_cause() -> None:
    """Catches a job that hangs when one rank is gone, or that ends as if it were done."""
    command = [sys.executable, "-m", "bluejay", "generate", "Once", "--max-new-tokens", "500", "--ignore-eos"]
    job = subprocess.Popen(
        [*command, "--devices", "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    assert job.stdout is not None
    assert job.stdout.read(1), "nothing was written"  # both ranks are at work
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    by_rank = {_variable(int(child), "RANK"): int(child) for child in children}
    started = time.monotonic()
    os.kill(by_rank["1"], signal.SIGKILL)
    _, errors = job.communicate(timeout=60)
    assert time.monotonic() - started < 60
    assert job.returncode == 1
    assert "rank 1 was killed by SIGKILL" in errors
    assert not Path(f"/proc/{by_rank['0']}").exists()


def _variable(process: int, name: str) -> str:
    content = Path(f"/proc/{process}/environ").read_bytes().decode().split("\0")
    return dict(item.partition("=")[::2] for item in content)[name]


def test_ranks_that_were_asked_different_things_stop_before_they_work() -> None:
    """B-53: catches ranks that wait for each other for ever because each has its own input."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = (
        "import sys; from bluejay.parallel import Rank, join\n"
        f"join(Rank(int(sys.argv[1]), 2, '127.0.0.1', {port}), asked=sys.argv[2], timeout_seconds=60)"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", code, str(i), f"seed {i}"], stderr=subprocess.PIPE, env=environment())
        for i in range(2)
    ]
    for run in runs:
        _, errors = run.communicate(timeout=60)
        assert run.returncode != 0
        assert b"rank 1 was asked something else than rank 0" in errors


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--devices", "4", "--stages", "3"], "--stages 1, 2, 4"),
        (["--devices", "2", "--backend", "inductor"], "eagerly"),
        (["--devices", "2", "--interactive"], "one rank"),
    ],
)
def test_what_ranks_cannot_do_is_refused_before_they_start(options: list[str], word: str) -> None:
    """Catches two ranks that load a model only to say that the request was wrong."""
    prompt = [] if "--interactive" in options else ["Once"]
    run = subprocess.run(
        [sys.executable, "-m", "bluejay", "generate", *prompt, *options],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert run.returncode == 2
    assert word in run.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process choose its cores")
def test_ranks_have_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches two ranks on one core, and a core that is given away twice when the numbers do not divide."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3, 5, 6, 7})
    cores = [launch._cores_of(index, 3) for index in range(3)]
    assert cores == [[0, 1], [2, 3], [5, 6]]
    assert launch._cores_of(0, 8) == []
