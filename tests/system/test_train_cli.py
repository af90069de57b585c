"""`bluejay train` from the outside: what it leaves, what it refuses, and that it can be stopped in any way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from bluejay.build import read_weights
from bluejay.cli import run
from bluejay.train import EventFile

PACKAGE = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def checkpoint(_tiny_checkpoint: Path) -> Path:
    return _tiny_checkpoint


@pytest.fixture
def arguments(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A small run over the tiny model; its folder is `tmp_path / "out"`."""
    monkeypatch.setenv("BLUEJAY_CACHE", str(tmp_path / "cache"))
    words = "the cat sat on a mat and then the other cats went in there again with no end".split()
    lines = [" ".join(words[(i + k) % len(words)] for k in range(3 + i % 9)) for i in range(40)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model: {checkpoint}\nout: {tmp_path / 'out'}\ncompile: eager\nprecision: fp32\ndropout: 0.1\n"
        f"data: {{train: {data}, valid: {data}, layout: rows, length: 24}}\n"
        "steps: 8\nmicro_batch: 4\ngradient_accumulation: 2\noptimizer: {learning_rate: 2.0e-3}\n"
    )
    return ["train", "--config", str(config), "--quiet"]


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def losses(folder: Path) -> dict[int, float]:
    return {e["update"]: e["loss"] for e in events(folder) if e["event"] == "train.update"}


def same(a: Path, b: Path) -> bool:
    one, other = read_weights(a), read_weights(b)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_what_a_run_leaves(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a missing plot, an unsaved configuration, events without their figures, and padding counted as tokens."""
    assert run([*arguments, "--json", "--set", "eval_every=4", "--set", "save_every=4"]) == 0
    result = json.loads(capsys.readouterr().out)
    out = tmp_path / "out"
    assert result["stopped"] == "done"
    assert result["update"] == 8
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "loss.html").read_text()
    assert "data:image/svg+xml;base64," in page
    assert "http" not in page.replace("http://www.w3.org", "")
    assert "gradient_accumulation: 2" in (out / "config.yaml").read_text()
    told = events(out)
    updates = [e for e in told if e["event"] == "train.update"]
    assert [e["update"] for e in updates] == list(range(1, 9))
    assert all(e["memory_bytes"] > 0 and e["seconds"] > 0 and e["learning_rate"] > 0 for e in updates)
    epoch = sum(e["num_tokens"] for e in updates[:5])  # 40 rows in updates of 8
    start = next(e for e in told if e["event"] == "train.start")
    assert epoch == start["num_targets"] == sum(e["num_targets"] for e in updates[:5])
    assert [e["update"] for e in told if e["event"] == "train.eval"] == [4, 8]
    assert result["valid_loss"] < updates[0]["loss"]
    assert sorted(entry.name for entry in (out / "checkpoints").iterdir()) == ["update-00000004", "update-00000008"]
    words = ["the cat", "--max-new-tokens", "4", "--backend", "eager", "--quiet"]
    assert run(["generate", *words, "--model", str(out / "model")]) == 0
    assert run(arguments) == 2  # the folder holds a run
    assert "add --resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--set", "step=3"], "near ones: steps"),
        (["--set", "recompute=maybe"], "recompute='maybe'"),
        (["--set", "global_batch=12"], "global_batch=12 with micro_batch=4, gradient_accumulation=2"),
        (["--set", "wandb=true"], "pip install wandb"),
        (["--set", "tensorboard=true"], "pip install tensorboard"),
        (["--set", "data.length=64"], "a window of 32"),
        (["--set", "data.train="], "no data.train"),
        (["--resume"], "no checkpoint"),
        (["--quiet=maybe"], "'maybe'"),
    ],
)
def test_what_is_refused(
    words: list[str],
    found: str,
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B-39, B-40: catches a wrong setting that is taken, and a tracker that is left out because it is not there."""
    for module in ("wandb", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    assert run([*arguments, *words]) == 2
    assert found in capsys.readouterr().err


def test_one_run_in_a_folder(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches two runs that write into one folder at once, each deleting what the other has half-written."""
    with closing(EventFile(tmp_path / "out" / "events.jsonl")):
        assert run(arguments) == 1
    assert "another process" in capsys.readouterr().err
    assert run([*arguments, "--set", "steps=1"]) == 0


def test_what_is_no_folder_or_no_model_to_train(
    arguments: list[str], checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a file in the folder's place, and a packed model as the base, that end in an unexpected error."""
    (tmp_path / "file").write_text("mine")
    assert run([*arguments, "--set", f"out={tmp_path / 'file'}"]) == 1
    assert f"write {tmp_path / 'file'}" in capsys.readouterr().err
    packed = tmp_path / "packed"
    assert run(["quantize", str(checkpoint), str(packed), "--group-size", "32", "--quiet"]) == 0
    assert run([*arguments, "--set", f"model={packed}"]) == 2
    assert "packed to four bits" in capsys.readouterr().err


def test_compiling_is_said_before_it_is_done(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches minutes of silence in which the first update is compiled."""
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    assert run([*arguments[:-1], "--set", "compile=auto", "--set", "steps=1"]) == 0
    said = capsys.readouterr().err
    assert 0 < said.find("compiling the step for gradients") < said.find("compiled the step for gradients")


def test_numbers_that_are_none_stop_it(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """B-39: a loss that explodes is an error with the update and the last good checkpoint, and stays in the events."""
    words = ["--set", "optimizer.learning_rate=1e30", "--set", "optimizer.clip_norm=0", "--set", "save_every=1"]
    assert run([*arguments, *words]) == 1
    said = capsys.readouterr().err
    assert "[training]" in said
    assert "update-0000000" in said
    assert "nan" in said


def test_a_damaged_line_of_events(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a run that fails at the end, at its plot, because a line of an earlier part was damaged since."""
    assert run([*arguments, "--set", "steps=2"]) == 0
    file = tmp_path / "out" / "events.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([lines[0], b"\xff" + lines[1][5:], *lines[2:]]))
    capsys.readouterr()
    assert run([*arguments, "--set", "steps=3", "--resume"]) == 0
    assert capsys.readouterr().err.count(f"line 2 of {file} is damaged") == 1
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("row", "words", "found"),
    [
        ({"sentence1": "a", "gold_label": "neutral"}, [], "their fields are sentence1, gold_label"),
        ({"premise": "a", "hypothesis": "b", "label": -1}, [], "1 rows, none with a label"),
        ({"text": "a", "label": 0}, [], "no hypothesis, premise among text, label"),
        ({}, ["--data", "owner/name:mnli", "--split", "validation_matched", "--offline"], "owner/name"),
        ({}, ["--data", "owner/name:mnli"], "no --split"),
    ],
)
def test_what_cannot_be_scored(
    row: dict[str, Any],
    words: list[str],
    found: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a set that is found to be no MNLI only after a model was loaded, and a message that names no field."""
    import bluejay

    monkeypatch.setattr(bluejay, "load", lambda *model, **settings: pytest.fail("a model was loaded"))
    file = tmp_path / "set.jsonl"
    file.write_text(json.dumps(row) + "\n")
    assert run(["evaluate", "--task", "mnli", "--data", str(file), "--quiet", *words]) == 2
    assert found in capsys.readouterr().err


def start(arguments: list[str], *words: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE)}
    command = [sys.executable, "-m", "bluejay", *arguments, *words]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)


def wait_for(folder: Path, process: subprocess.Popen[bytes]) -> None:
    """Until a checkpoint is there."""
    while not folder.exists():
        assert process.poll() is None, process.stderr.read().decode() if process.stderr else ""
        time.sleep(0.02)


def test_it_goes_on_after_being_killed_and_interrupted(arguments: list[str], tmp_path: Path) -> None:
    """Law 7 from the outside: kill -9 at any moment loses no good checkpoint; Ctrl-C saves; and the end is the same,
    bit for bit, as that of a run that nobody touched."""
    steps = ["--set", "steps=40", "--set", "save_every=2", "--set", "async_save=true"]
    out = tmp_path / "out"
    process = start(arguments, *steps)
    wait_for(out / "checkpoints" / "update-00000004", process)
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    assert not (out / "model").exists()
    process = start(arguments, *steps, "--resume")
    wait_for(out / "checkpoints" / "update-00000012", process)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert not (out / "model").exists()
    stopped = max(int(entry.name[-8:]) for entry in (out / "checkpoints").glob("update-*"))
    assert stopped == max(losses(out))  # nothing since the last checkpoint is lost
    assert run([*arguments, *steps, "--resume"]) == 0
    assert run([*arguments, *steps, "--set", "async_save=false", "--set", f"out={tmp_path / 'straight'}"]) == 0
    assert losses(out) == losses(tmp_path / "straight")
    assert same(out / "model", tmp_path / "straight" / "model")
    assert (out / "loss.png").exists()


def test_adapters_from_the_command_line(arguments: list[str], tmp_path: Path, checkpoint: Path) -> None:
    """Catches an adapter run that writes a whole model, or a merged one that is no checkpoint."""
    words = ["--set", "lora.rank=2", "--set", "lora.targets=q_proj,lm_head"]
    assert run([*arguments, *words]) == 0
    assert sorted(entry.name for entry in (tmp_path / "out" / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert run([*arguments, *words, "--set", f"out={tmp_path / 'merged'}", "--set", "lora.merge=true"]) == 0
    merged, base = read_weights(tmp_path / "merged" / "model"), read_weights(checkpoint)
    changed = {name for name in base if not torch.equal(merged[name], base[name])}
    assert changed == {f"transformer.h.{i}.attn.q_proj.weight" for i in range(2)} | {"lm_head.weight"}
