"""Saving a checkpoint: whole or not at all, with nothing in it that contradicts its config."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import bluejay.checkpoint.save as save_module
from bluejay.checkpoint import load_tokenizer, load_weights, open_checkpoint, save_checkpoint
from bluejay.config import ModelConfig
from bluejay.errors import BluejayError, CheckpointError, MachineError, TokenizerError
from bluejay.events import Event
from bluejay.models import GPTJ


@pytest.fixture
def weights(tiny_model: GPTJ) -> dict[str, Tensor]:
    return tiny_model.state_dict()


def snapshot(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def assert_refused(act: Callable[[], object], *needles: str, error: type[BluejayError] = CheckpointError) -> None:
    with pytest.raises(error) as caught:
        act()
    for needle in needles:
        assert needle in str(caught.value)


@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000, 1])
def test_round_trip(
    tmp_path: Path, tiny_config: ModelConfig, weights: dict, tiny_checkpoint: Path, max_shard_bytes: int
) -> None:
    """A shard too large, a tensor in no shard, files only their owner can read, a tokenizer that stays behind."""
    events: list[Event] = []
    target = tmp_path / "new" / "saved"
    save_checkpoint(
        target,
        weights,
        tiny_config,
        tokenizer_from=tiny_checkpoint,
        max_shard_bytes=max_shard_bytes,
        observe=events.append,
    )
    files = sorted(target.glob("*.safetensors"))
    assert (len(files) == 1) == (max_shard_bytes == 10**9)
    assert (target / "model.safetensors.index.json").exists() == (len(files) > 1)
    for file in files:
        assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE((target / "config.json").stat().st_mode)
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            sizes = [opened.get_tensor(name).nbytes for name in opened.offset_keys()]
            assert sum(sizes) <= max_shard_bytes or len(sizes) == 1
    checkpoint = open_checkpoint(target)
    assert checkpoint.config == tiny_config
    assert checkpoint.warnings == ()
    assert all(torch.equal(checkpoint.read(name), weights[name]) for name in checkpoint.tensors)
    assert checkpoint.tensors.keys() == weights.keys()
    assert load_tokenizer(target).encode("and then") == load_tokenizer(tiny_checkpoint).encode("and then")
    assert [event.fields["file"] for event in events if event.name == "save"] == [file.name for file in files]
    assert events[-1].fields["done_bytes"] == events[-1].fields["total_bytes"] == checkpoint.num_bytes
    assert [path.name for path in target.parent.iterdir()] == ["saved"]


def test_config_states_the_tensors_dtype(tmp_path: Path, tiny_config: ModelConfig, weights: dict) -> None:
    """B-09: trained in one type, saved under the label of another."""
    save_checkpoint(tmp_path / "c", {name: t.bfloat16() for name, t in weights.items()}, tiny_config)
    assert open_checkpoint(tmp_path / "c").dtype == torch.bfloat16
    assert open_checkpoint(tmp_path / "c").warnings == ()


def test_padding_rows_survive(tmp_path: Path, tiny_config: ModelConfig, tiny_checkpoint: Path) -> None:
    """B-06: the embedding is cut to the tokenizer's entries on the way, and reloading fails."""
    checkpoint = open_checkpoint(tiny_checkpoint)
    assert load_tokenizer(tiny_checkpoint, checkpoint.config).num_entries == 57
    model = GPTJ(checkpoint.config)
    load_weights(model, checkpoint)
    model(torch.arange(6)[None]).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    save_checkpoint(tmp_path / "tuned", model.state_dict(), model.config, tokenizer_from=tiny_checkpoint)
    tuned = open_checkpoint(tmp_path / "tuned")
    assert tuned.config.vocab_size == 64
    for name in ("transformer.wte.weight", "lm_head.weight", "lm_head.bias"):
        assert tuned.tensors[name].shape[0] == 64
        assert torch.equal(tuned.read(name), model.state_dict()[name])


def test_contradictions(tmp_path: Path, tiny_config: ModelConfig, weights: dict) -> None:
    """B-06, B-08: a config that says one thing and tensors that say another, found out only when it is loaded."""

    def save(tensors: dict[str, Tensor], config: ModelConfig = tiny_config) -> Callable[[], None]:
        return lambda: save_checkpoint(tmp_path / "c", tensors, config)

    tied = replace(tiny_config, tie_word_embeddings=True)
    assert_refused(save(weights, replace(tiny_config, vocab_size=57)), "64 rows", "vocab_size=57")
    assert_refused(save({**weights, "lm_head.bias": torch.zeros(57)}), "57 rows in lm_head.bias", "vocab_size=64")
    accidentally = {**weights, "lm_head.weight": weights["transformer.wte.weight"]}
    assert_refused(save(accidentally), "share their memory", "lm_head.weight")
    assert_refused(save(weights, tied), "differ", "lm_head.weight")
    assert_refused(save({name: t.to("meta") for name, t in weights.items()}), "no values in")
    assert list(tmp_path.iterdir()) == []
    equal = {**weights, "lm_head.weight": weights["transformer.wte.weight"].clone()}
    save(equal, tied)()
    assert "lm_head.weight" not in open_checkpoint(tmp_path / "c").tensors


def test_occupied_directory(tmp_path: Path, tiny_config: ModelConfig, weights: dict) -> None:
    """A folder of something else is deleted, or a checkpoint is overwritten unasked."""
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter1.txt").write_text("years of work")
    for overwrite in (False, True):
        assert_refused(
            lambda: save_checkpoint(other, weights, tiny_config, overwrite=overwrite),  # noqa: B023
            "chapter1.txt",
            "choose another directory",
        )
    assert_refused(lambda: save_checkpoint(other / "chapter1.txt", weights, tiny_config, overwrite=True), "a file")
    assert snapshot(other) == {"chapter1.txt": b"years of work"}
    (tmp_path / "empty").mkdir()
    save_checkpoint(tmp_path / "empty", weights, tiny_config)
    before = snapshot(tmp_path)
    assert_refused(lambda: save_checkpoint(tmp_path / "empty", weights, tiny_config), "overwrit")
    assert snapshot(tmp_path) == before


def test_overwrite_in_place(tmp_path: Path, tiny_config: ModelConfig, tiny_checkpoint: Path) -> None:
    """Saving over the files the weights are mapped from; stale shards left beside new weights; a README lost."""
    (tiny_checkpoint / "README.md").write_text("a card")
    for name in ("pytorch_model.bin", "model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        (tiny_checkpoint / name).write_bytes(b"stale")
    checkpoint = open_checkpoint(tiny_checkpoint)
    with torch.device("meta"):
        model = GPTJ(checkpoint.config)
    load_weights(model, checkpoint)
    with torch.no_grad():
        model.lm_head.bias += 1
    expected = {name: t.clone() for name, t in model.state_dict().items()}
    save_checkpoint(tiny_checkpoint, model.state_dict(), model.config, overwrite=True)
    saved = open_checkpoint(tiny_checkpoint)
    assert all(torch.equal(saved.read(name), expected[name]) for name in expected)
    assert all(torch.equal(t, expected[name]) for name, t in model.state_dict().items())
    assert load_tokenizer(tiny_checkpoint).num_entries == 57
    assert (tiny_checkpoint / "README.md").read_text() == "a card"
    assert saved.warnings == ()
    (tiny_checkpoint / "added_tokens.json").write_text('{"stale": 57}')
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tiny_checkpoint / "tokenizer.json").rename(tokenizer / "tokenizer.json")
    save_checkpoint(tiny_checkpoint, expected, model.config, tokenizer_from=tokenizer, overwrite=True)
    assert {path.name for path in tiny_checkpoint.iterdir()} >= {"README.md", "tokenizer.json"}
    assert not (tiny_checkpoint / "added_tokens.json").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_through_a_link(tmp_path: Path, tiny_config: ModelConfig, weights: dict) -> None:
    """Overwriting through a symbolic link replaces the link and leaves the old checkpoint behind it."""
    save_checkpoint(tmp_path / "real", weights, tiny_config)
    (tmp_path / "link").symlink_to("real")
    save_checkpoint(tmp_path / "link", {n: t + 1 for n, t in weights.items()}, tiny_config, overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert torch.equal(open_checkpoint(tmp_path / "real").read("lm_head.bias"), weights["lm_head.bias"] + 1)


@pytest.mark.parametrize("existing", [True, False])
@pytest.mark.parametrize("step", ["save_file", "write_json", "flush", "rename"])
@pytest.mark.parametrize("failure", [OSError("disk full"), KeyboardInterrupt()])
def test_failure_leaves_nothing(
    tmp_path: Path,
    tiny_config: ModelConfig,
    weights: dict,
    tiny_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    existing: bool,
    step: str,
    failure: BaseException,
) -> None:
    """A full disk or Ctrl-C leaves half a checkpoint, or none where a good one was, or rubbish beside it."""
    target = tmp_path / "saved"
    if existing:
        save_checkpoint(target, weights, tiny_config)
    before = snapshot(tmp_path)
    real = getattr(os if step == "rename" else save_module, step)
    countdown = [2]

    def fails_the_second_time(*args: object, **kwargs: object) -> object:
        countdown[0] -= 1
        if countdown[0] == 0:
            raise failure
        return real(*args, **kwargs)

    if step == "rename" and not existing:
        step = "replace"
        countdown = [1]
    monkeypatch.setattr(os if step in ("rename", "replace") else save_module, step, fails_the_second_time)
    changed = {name: t + 1 for name, t in weights.items()}
    with pytest.raises(CheckpointError if isinstance(failure, OSError) else KeyboardInterrupt):
        save_checkpoint(target, changed, tiny_config, max_shard_bytes=20_000, overwrite=True)
    monkeypatch.undo()
    assert snapshot(tmp_path) == before
    assert {path.name for path in tmp_path.iterdir()} == {"tiny_checkpoint"} | ({"saved"} if existing else set())


_KILLED = """
import os, signal, sys, torch
import bluejay.checkpoint.save as save
from bluejay.checkpoint import open_checkpoint
real, calls = save.save_file, []
def save_file(*args, **kwargs):
    calls.append(0)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    real(*args, **kwargs)
save.save_file = save_file
old = open_checkpoint(sys.argv[1])
new = {name: old.read(name) + 1 for name in old.tensors}
save.save_checkpoint(sys.argv[1], new, old.config, max_shard_bytes=9999, overwrite=True)
"""


def test_killed_midway(tmp_path: Path, tiny_config: ModelConfig, weights: dict) -> None:
    """The process is killed after two shards: the old checkpoint is gone or mixed with the new one."""
    save_checkpoint(tmp_path / "saved", weights, tiny_config)
    before = snapshot(tmp_path / "saved")
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path / "saved")], timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert snapshot(tmp_path / "saved") == before


def test_no_room(
    tmp_path: Path, tiny_config: ModelConfig, weights: dict, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk too small is noticed after hours of writing."""
    monkeypatch.setattr(save_module.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    assert_refused(
        lambda: save_checkpoint(tmp_path / "c", weights, tiny_config), "1000 B free", "KiB", error=MachineError
    )
    monkeypatch.undo()
    assert_refused(
        lambda: save_checkpoint(tmp_path / "c", weights, tiny_config, tokenizer_from=tmp_path),
        "tiny_checkpoint",
        error=TokenizerError,
    )
    assert not (tmp_path / "c").exists()
    assert json.loads((tiny_checkpoint / "config.json").read_text())["vocab_size"] == 64
