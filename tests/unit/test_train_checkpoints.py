"""Checkpoints of a run come whole or not at all, and the good ones stay."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

import bluejay.train.checkpoints as module
from bluejay.train import Checkpoints, TrainingError


def write(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "weights").write_text("w")


def save(checkpoints: Checkpoints, update: int, best: int | None = None) -> None:
    checkpoints.save(update, write, {"m": torch.full((3,), float(update))}, {"update": update}, best)


def test_the_last_few_and_the_best_are_kept(tmp_path: Path) -> None:
    """Catches a best checkpoint that is deleted because it is old, and folders that pile up."""
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    assert checkpoints.last() is None
    for update in range(1, 7):
        save(checkpoints, update, best=2)
    assert [saved.update for saved in checkpoints.all()] == [2, 5, 6]
    last = checkpoints.last()
    assert last is not None
    assert last.state() == {"update": 6}
    assert last.tensors()["m"].tolist() == [6.0, 6.0, 6.0]
    modes = {(last.folder / name).stat().st_mode for name in ("state.safetensors", "state.json")}
    assert len(modes) == 1  # whoever may read one may read the other


def test_what_a_killed_run_left_is_not_a_checkpoint(tmp_path: Path) -> None:
    """Catches a half-written folder that is resumed from; the next save takes it away."""
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 1)
    half = tmp_path / ".update-00000002.abcd"
    write_half = half / "model"
    write_half.mkdir(parents=True)
    assert [saved.update for saved in checkpoints.all()] == [1]
    save(checkpoints, 3)
    assert not half.exists()


def test_every_file_is_on_the_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a checkpoint whose name survives a power cut and whose weights do not: all must be flushed before it."""
    flushed: list[str] = []
    monkeypatch.setattr(module, "flush", lambda path: flushed.append(path.name))
    save(Checkpoints(tmp_path / "c", keep=1), 1)
    assert {"weights", "model", "state.safetensors", "state.json"} <= set(flushed[:-2])
    assert flushed[-2].startswith(".update-00000001")
    assert flushed[-1] == "c"


def test_a_full_disk_keeps_the_last_good_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an error that comes after the old checkpoint is gone, and one that does not say where it is."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1)

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(TrainingError) as caught:
        save(checkpoints, 2)
    assert "No space left on device" in caught.value.found
    assert "update-00000001" in caught.value.rule
    assert [entry.name for entry in tmp_path.iterdir()] == ["update-00000001"]
    last = checkpoints.last()
    assert last is not None
    assert last.tensors()["m"].tolist() == [1.0, 1.0, 1.0]
