"""`bluejay train` over several processes: ranks started here or by torchrun, one that is killed, wrong requests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bluejay.build import read_weights
from bluejay.cli import run

STEPS = 60
SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def arguments(_tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A small run over the tiny model, with weights and moments in fp32 and dropout."""
    folder = tmp_path_factory.mktemp("run")
    words = "the cat sat on a mat and then the other cats went in there again with no end".split()
    lines = [" ".join(words[(i + k) % len(words)] for k in range(3 + i % 9)) for i in range(40)]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    config = folder / "run.yaml"
    config.write_text(
        f"model: {_tiny_checkpoint}\ncompile: eager\nprecision: fp32\n"
        f"data: {{train: {data}, valid: {data}, layout: rows, length: 24}}\n"
        f"steps: {STEPS}\nmicro_batch: 2\nglobal_batch: 8\noptimizer: {{learning_rate: 2.0e-3}}\n"
    )
    return ["train", "--config", str(config)]


def start(arguments: list[str], *words: str, out: Path, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    paths = [str(SOURCE), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *launcher, *(("-m",) if launcher else ()), "bluejay", *arguments]
    command += [*words, "--set", f"out={out}"]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def told(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def losses(out: Path) -> dict[int, float]:
    return {e["update"]: e["loss"] for e in told(out / "events.jsonl") if e["event"] == "train.update"}


def wait_for(folder: Path, job: subprocess.Popen[str]) -> None:
    """Until a checkpoint is there."""
    deadline = time.monotonic() + 200
    while not folder.exists():
        assert job.poll() is None, job.stderr.read() if job.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def one_process(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run on one device."""
    out = tmp_path_factory.mktemp("alone") / "out"
    assert run([*arguments, "--quiet", "--set", f"out={out}"]) == 0
    return out


def test_ranks_leave_what_one_process_leaves(arguments: list[str], one_process: Path, tmp_path: Path) -> None:
    """Catches ranks that all print or write, events without their rank, and a result that is a part of the model."""
    out = tmp_path / "out"
    layout = ["--set", "parallel.stages=2", "--set", "parallel.micro_batches=2"]
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    job = start(arguments, *layout, "--json", out=out, launcher=launcher)
    printed, errors = job.communicate(timeout=200)
    assert job.returncode == 0, errors
    result = json.loads(printed)
    assert result["model"] == str(out / "model")
    assert errors.count("parameters are trained") == 1
    assert sorted(entry.name for entry in out.iterdir()) == [
        *("checkpoints", "config.yaml", "events-rank1.jsonl", "events.jsonl", "loss.html", "loss.png", "model")
    ]
    assert losses(out) == pytest.approx(losses(one_process), rel=1e-4)
    for rank, name in enumerate(("events.jsonl", "events-rank1.jsonl")):
        events = told(out / name)
        assert {e["rank"] for e in events} == {rank}
        assert [e["update"] for e in events if e["event"] == "train.update"] == list(range(1, STEPS + 1))
    ours, theirs = read_weights(out / "model"), read_weights(one_process / "model")
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-4) for name in theirs)


def test_a_run_outlives_a_killed_rank_and_ctrl_c(arguments: list[str], one_process: Path, tmp_path: Path) -> None:
    """Catches a job that hangs when one rank is gone, a checkpoint that only the layout that wrote it can read, and a
    starter that ends its ranks before they have saved. The run of two sharded replicas is killed, goes on as two tensor
    parallel ranks, and is interrupted there."""
    out = tmp_path / "out"
    sharded = ["--set", "parallel.replicas=2", "--set", "parallel.shard=true", "--set", "save_every=1"]
    job = start(arguments, "--devices", "2", *sharded, out=out)
    wait_for(out / "checkpoints" / "update-00000002", job)
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    ranks = {_rank_of(int(child)): int(child) for child in children}
    started = time.monotonic()
    os.kill(ranks["1"], signal.SIGKILL)
    _, errors = job.communicate(timeout=60)
    assert time.monotonic() - started < 60
    assert job.returncode == 1
    assert "rank 1 was killed by SIGKILL" in errors
    assert not (out / "model").exists()
    killed = last_saved(out)
    assert (out / "checkpoints" / f"update-{killed:08d}" / "state.json").exists()
    job = start(arguments, "--devices", "2", "--set", "parallel.tensor=2", "--set", "save_every=1", "--resume", out=out)
    wait_for(out / "checkpoints" / f"update-{killed + 2:08d}", job)
    job.send_signal(signal.SIGINT)
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 130, errors
    assert errors.count("bluejay: interrupted\n") == 1
    assert killed + 2 <= last_saved(out) == max(losses(out)) < STEPS
    assert not (out / "model").exists()
    wanted = losses(one_process)
    assert losses(out) == pytest.approx({update: wanted[update] for update in losses(out)}, rel=1e-4)


def last_saved(out: Path) -> int:
    return max(int(entry.name[-8:]) for entry in (out / "checkpoints").glob("update-*"))


def _rank_of(process: int) -> str:
    content = Path(f"/proc/{process}/environ").read_bytes().decode().split("\0")
    return dict(item.partition("=")[::2] for item in content)["RANK"]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--devices", "3", "--set", "parallel.stages=2"], "devices = stages x tensor x replicas"),
        (["--devices", "3", "--set", "parallel.tensor=3"], "use one of 1, 2"),
        (["--set", "parallel.stages=3"], "use at most 2 stages"),
        (["--set", "parallel.stage=3"], "near ones: stages"),
        (["--set", "parallel.layers_per_device=3,2"], "use [1, 1]"),
        (["--devices", "2", "--set", "global_batch=6"], "6 with micro_batch=2"),
        (["--set", "parallel.tensor=2", "--set", "lora.rank=2"], "LoRA over"),
        (["--devices", "2", "--set", "parallel.tensor=2", "--device-memory", "100KiB"], "each device would hold"),
        (["--device-memory", "1GiB", "--set", "lora.rank=2"], "adapters need far less"),
        (["--device-memory", "plenty"], "a size with its unit"),
        (["--set", "parallel.stages=2", "--set", "parallel.micro_batches=3"], "use one of 1, 2, 4"),
    ],
)
def test_what_cannot_be_is_refused_before_a_rank_starts(
    words: list[str],
    found: str,
    arguments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches ranks that read a model only to find that the request was wrong."""
    monkeypatch.setattr("bluejay.cli.train.start_ranks", lambda argv, count: pytest.fail("ranks were started"))
    assert run([*arguments, "--set", f"out={tmp_path / 'out'}", *words]) in (1, 2)
    assert found in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
