"""Checkpoints of a run: each is one folder that comes into being by one rename, and holds all that a resume needs.

    checkpoints/update-00000200/model/               weights in Hugging Face layout (or adapter/, PEFT's layout)
                               /state.safetensors    optimizer moments, moving average
                               /state.json           update, loss scale, best evaluation, configuration, data's digest

No random state is in it: order, dropout and rounding are functions of the seed and the number of the update.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from bluejay.errors import BluejayError
from bluejay.files import flush
from bluejay.units import format_bytes

_NAME = re.compile(r"update-(\d{8})")
_STATE, _TENSORS = "state.json", "state.safetensors"


class TrainingError(BluejayError):
    """A run that cannot go on: numbers that are not numbers, a checkpoint that cannot be written or does not fit."""

    code = "training"


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Around the writing of a file of a run.

    Raises:
        TrainingError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise TrainingError(
            asked=f"write {path}",
            found=f"{type(error).__name__}: {error}",
            rule="a run keeps its events and settings in its folder; checkpoints that are there stay whole",
            fix="make room or choose another out; a run with a checkpoint goes on with --resume",
        ) from error


def keep_alone(file: IO[str], path: Path) -> None:
    """Lock a run's open file, so that no other run writes there until it is closed or the process ends.

    Raises:
        TrainingError: another process has locked it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise TrainingError(
            asked=f"a run in {path.parent}",
            found=f"another process that trains into it, and writes {path.name}",
            rule="a run never mixes with another",
            fix="wait for it, or choose another out",
        ) from None


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint."""

    folder: Path
    update: int

    def state(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / _STATE).read_text(encoding="utf-8"))
        return content

    def tensors(self) -> dict[str, Tensor]:
        return load_file(self.folder / _TENSORS)


class Checkpoints:
    """The checkpoints of one run, in one folder: the last few, and the best."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self._keep = folder, keep

    def all(self) -> list[Saved]:
        """Complete checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        matches = ((entry, _NAME.fullmatch(entry.name)) for entry in self.folder.iterdir())
        return sorted((Saved(entry, int(m[1])) for entry, m in matches if m), key=lambda saved: saved.update)

    def last(self) -> Saved | None:
        """The newest complete checkpoint."""
        return next(reversed(self.all()), None)

    def save(
        self,
        update: int,
        write_weights: Callable[[Path], None],
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
        best_update: int | None,
    ) -> Saved:
        """Write a checkpoint, then delete those that are neither among the last few nor the best.

        Raises:
            TrainingError: it cannot be written. What was there before still is.
        """
        self._remove_remains()
        final = self.folder / f"update-{update:08d}"
        staging = self.folder / f".{final.name}.{secrets.token_hex(4)}"
        try:
            staging.mkdir(parents=True)
            write_weights(staging)
            held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
            save_file(held, staging / _TENSORS)
            (staging / _STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
            shutil.copymode(staging / _STATE, staging / _TENSORS)  # safetensors: readable for their owner only
            for entry in (*staging.rglob("*"), staging):
                flush(entry)
            if final.exists():
                self._remove(final)
            os.rename(staging, final)
            flush(self.folder)
        except (OSError, SafetensorError, BluejayError) as error:
            free = shutil.disk_usage(self.folder if self.folder.is_dir() else Path.cwd()).free  # as it was found
            shutil.rmtree(staging, ignore_errors=True)
            last = self.last()
            reason = error.found if isinstance(error, BluejayError) else f"{type(error).__name__}: {error}"
            raise TrainingError(
                asked=f"a checkpoint of update {update} in {self.folder}",
                found=f"{reason}; {format_bytes(free)} free on that disk",
                rule=f"the last good checkpoint is intact: {last.folder if last else 'there was none'}",
                fix="make room (or lower keep), then go on with --resume",
            ) from error
        for saved in self.all()[: -self._keep]:
            if saved.update != best_update:
                self._remove(saved.folder)
        return Saved(final, update)

    def _remove(self, folder: Path) -> None:
        """Take the name away first, so that a folder with a checkpoint's name is always complete."""
        hidden = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
        os.rename(folder, hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def _remove_remains(self) -> None:
        """Delete what a killed run left half-written or half-deleted."""
        for entry in self.folder.glob(".update-*") if self.folder.is_dir() else ():
            shutil.rmtree(entry, ignore_errors=True)
