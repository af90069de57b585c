"""Several processes as people start them: `--devices N`, torchrun, a rank that is killed, ranks that disagree."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bluejay.cli import launch

SOURCE = Path(__file__).parents[2] / "src"
SAMPLED = ["--max-new-tokens", "8", "--temperature", "1", "--seed", "3", "--json"]
PROMPT = ["generate", "Once upon a time", *SAMPLED, "--backend", "eager"]


def environment() -> dict[str, str]:
    paths = [str(SOURCE), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def answer(*command: str) -> list[int]:
    """The ids of the one JSON object that a command prints."""
    run = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, env=environment(), check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("new tokens") == 1  # one rank is heard, also where a launcher shows all
    (line,) = run.stdout.splitlines()
    ids: list[int] = json.loads(line)["completions"][0]["ids"]
    return ids


@pytest.fixture(scope="module")
def one_rank() -> list[int]:
    return answer("bluejay", *PROMPT)


def test_torchrun_gives_the_ids_of_one(one_rank: list[int]) -> None:
    """Catches a rank that starts ranks of its own, or a store that is opened twice."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "bluejay"]
    assert answer(*torchrun, *PROMPT, "--devices", "2") == one_rank


def test_a_killed_rank_ends_the_job_with_its_cause() -> None:
    """Catches a job that hangs when one rank is gone, or that ends as if it were done."""
    job = long_job()
    assert job.stdout is not None
    assert job.stdout.read(1), "nothing was written"  # both ranks are at work
    by_rank = ranks_of(job)
    started = time.monotonic()
    os.kill(by_rank["1"], signal.SIGKILL)
    _, errors = job.communicate(timeout=60)
    assert time.monotonic() - started < 60
    assert job.returncode == 1
    assert "rank 1 was killed by SIGKILL" in errors
    assert not Path(f"/proc/{by_rank['0']}").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_their_starter(number: int) -> None:
    """Catches ranks that compute on for ever when a scheduler, or the kernel, ends the process that started them."""
    job = long_job("--temperature", "1", "--n", "8")  # a minute's work, of which nothing is written until it is done
    try:
        by_rank = ranks_of(job)
        os.kill(job.pid, number)
        assert job.wait(timeout=30) == (128 + number if number == signal.SIGTERM else -number)
        deadline = time.monotonic() + 15
        while any(Path(f"/proc/{process}").exists() for process in by_rank.values()):
            assert time.monotonic() < deadline, "a rank is left"
            time.sleep(0.05)
    finally:
        for process in by_rank.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        job.communicate(timeout=30)


def long_job(*options: str) -> subprocess.Popen[str]:
    """Two ranks with much to write."""
    command = [sys.executable, "-m", "bluejay", "generate", "Once", "--max-new-tokens", "500", "--ignore-eos"]
    return subprocess.Popen(
        [*command, "--devices", "2", "--backend", "eager", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )


def ranks_of(job: subprocess.Popen[str]) -> dict[str, int]:
    """The process of each of two ranks, once they are there."""
    deadline = time.monotonic() + 30
    by_rank: dict[str, int] = {}
    while len(by_rank) < 2:
        assert time.monotonic() < deadline, "no ranks were started"
        time.sleep(0.02)
        for child in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split():
            content = Path(f"/proc/{child}/environ").read_bytes().decode().split("\0")
            rank = dict(item.partition("=")[::2] for item in content).get("RANK")
            if rank is not None:
                by_rank[rank] = int(child)
    return by_rank


@pytest.mark.parametrize("differ", ["files", "settings"])
def test_ranks_that_were_asked_different_things_stop_before_they_work(
    differ: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """B-53: catches ranks that wait for each other for ever because each has its own settings, and text from two
    checkpoints that have one name on two hosts."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    runs = []
    for rank in range(2):
        host = tmp_path / f"host{rank}"
        shutil.copytree(tiny_checkpoint, host / "model")
        if differ == "files" and rank == 1:
            weights = host / "model" / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\1")
        loop = ["--loop", "device"] if differ == "settings" and rank == 1 else []
        launcher = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-m", "bluejay", "generate", "once", "--model", "model", "--devices", "2", *loop]
        runs.append(subprocess.Popen(command, stderr=subprocess.PIPE, cwd=host, env={**environment(), **launcher}))
    for run in runs:
        _, errors = run.communicate(timeout=60)
        assert run.returncode == 2
        assert b"rank 1 was asked something else than rank 0" in errors


def test_a_batch_streams_over_ranks_as_on_one_device(tmp_path: Path) -> None:
    """Catches answers in another order or of another prompt, a rank that reads the file itself, ranks that all print or
    that sample on their own (B-54), text with a locale."""
    file = tmp_path / "prompts"
    file.write_text("Once upon a time\nÉté\nThe little dog\nOne day,\nShe\n", encoding="utf-8")
    command = [sys.executable, "-m", "bluejay", "generate", "--echo", *SAMPLED[:-1], "--backend", "eager"]
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": "utf-8"}
    spread = ["--devices", "2", "--stages", "2", "--loop", "device", "--iterations", "3"]
    texts = []
    for options in (["--prompts", str(file)], ["--prompts", str(file), *spread], ["Once upon a time"]):
        run = subprocess.run(
            [*command, *options],
            capture_output=True,
            env={**environment(), **plain},
            check=False,
        )
        assert run.returncode == 0, run.stderr.decode()
        texts.append(run.stdout.decode())
        assert run.stderr.decode().count("new tokens") == 1
    assert texts[0] == texts[1]
    assert texts[0].startswith(f"=== prompt 1 of 5\n{texts[2]}")
    assert "=== prompt 2 of 5\nÉté" in texts[0]


def test_what_one_rank_refuses_is_said_once() -> None:
    """Catches a wrong request that ends as a killed rank, with a second message and another exit code."""
    command = [sys.executable, "-m", "bluejay", "generate", "--file", "/nonexistent", "--devices", "2"]
    run = subprocess.run(
        [*command, "--backend", "eager"], capture_output=True, text=True, env=environment(), check=False
    )
    assert run.returncode == 2
    assert run.stderr.count("bluejay: [") == 1
    assert "No such file" in run.stderr


def test_programs_of_ranks_are_shipped(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Compiled ahead for two ranks, exported, imported elsewhere: nothing is compiled, and the ids are those of one
    eager rank, greedy and sampled. Catches a place in a pipeline that is part of a fingerprint, and one that is not.
    """
    here, there, file = tmp_path / "here", tmp_path / "there", tmp_path / "programs.zip"
    ranks = ["--devices", "2", "--stages", "2"]
    shape = ["--context", "16", "--quiet"]
    made = _json("compile", str(tiny_checkpoint), *ranks, *shape, "--cache", str(here), "--json")
    # Prefill, greedy and sampling, of each stage; the first does not see how the last one chooses.
    assert (len(made["programs"]), made["compilations"]) == (6, 5), made
    assert {label.rsplit(", ", 1)[1] for label in made["programs"]} == {"stage 1 of 2", "stage 2 of 2"}
    for verb in (["export", str(file), "--cache", str(here)], ["import", str(file), "--cache", str(there)]):
        subprocess.run([sys.executable, "-m", "bluejay", "cache", *verb], env=environment(), check=True)
    request = ["generate", "once upon", "--model", str(tiny_checkpoint), "--max-new-tokens", "6", "--json", *shape]
    for sampling in (["--temperature", "1", "--seed", "3"], []):
        found = _json(*request, *sampling, *ranks, "--cache", str(there), "--backend", "inductor")
        wanted = _json(*request, *sampling, "--backend", "eager")
        assert found["completions"] == wanted["completions"]
        assert [rank["figures"]["compilations"] for rank in found["ranks"]] == [0, 0]


def _json(*command: str) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-m", "bluejay", *command], capture_output=True, text=True, env=environment(), check=False
    )
    assert run.returncode == 0, run.stderr
    record: dict[str, Any] = json.loads(run.stdout)
    return record


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--devices", "4", "--stages", "3"], "--stages 1, 2, 4"),
        (["--devices", "2", "--loop", "unrolled"], "a whole answer as one program"),
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
