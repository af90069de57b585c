"""A quantized directory onto disk: tensor by tensor, whole or not at all, going on where a killed process stopped."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import math
import os
import shutil
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from bluejay.checkpoint.files import (
    CONFIG,
    GENERATION_CONFIG,
    QUANTIZATION_RECORD,
    QUANTIZED,
    TOKENIZER_FILES,
    contents,
)
from bluejay.checkpoint.reader import TensorInfo
from bluejay.checkpoint.save import write_json
from bluejay.config import QUANT_FORMAT_VERSION, QUANT_METHOD, ZERO_CONVENTION, ModelConfig, QuantSpec, canonical
from bluejay.errors import BluejayError, CheckpointError, MachineError
from bluejay.files import flush
from bluejay.units import format_bytes

_KINDS = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.int32: "I32",
}
_ALIGNMENT = 64  # of the data's beginning; packed tensors come first and keep it
_JOURNAL = "journal.jsonl"


class PackedWriter:
    """Writes a quantized directory beside its target and renames it into place at the end.

    Everything is decided before the first tensor: names, shapes and dtypes fix each tensor's place in the file, so
    tensors come in any order and the bytes do not depend on it. Finished tensors are listed in a journal. A writer of
    the same `identity` goes on after them; one of another begins anew.

    Args:
        tensors: what the file will hold.
        identity: what the content depends on.

    Attributes:
        done: what `finish` noted, of this and of earlier runs, by tensor.

    Raises:
        CheckpointError: the target is occupied, another process writes it, or the disk cannot be written (then also
            when the `with` block is left).
        MachineError: the disk has no room.
    """

    def __init__(self, target: str | Path, tensors: Sequence[TensorInfo], identity: str) -> None:
        self.target = Path(target).expanduser().resolve()
        ordered = sorted(tensors, key=lambda info: (-_alignment(info), info.name))
        self._header, self._places, self.num_bytes = _header(ordered)
        self._infos = {info.name: info for info in tensors}
        self._staging = self.target.with_name(f".{self.target.name}.partial")
        try:
            self._open(identity)
        except OSError as error:
            raise self._failed(error) from error

    def _open(self, identity: str) -> None:
        self._check_target()
        self._staging.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._staging, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise CheckpointError(
                asked=f"write {self.target}",
                found="another process that is writing it",
                fix="wait for it, or choose another directory",
            ) from None
        try:
            self.done = self._resume(identity)
            self._check_room()
            self._file = os.open(self._staging / QUANTIZED, os.O_RDWR | os.O_CREAT, 0o644)
            os.ftruncate(self._file, self.num_bytes)
            _write_at(self._file, self._header, 0)
            self._journal = (self._staging / _JOURNAL).open("a", encoding="utf-8")
            if not self._journal.tell():
                self._note({"identity": identity})
        except BaseException:
            os.close(self._lock)
            raise

    def __enter__(self) -> PackedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._journal.close()
        os.close(self._file)
        if isinstance(error, BluejayError):  # the same call would fail again: nothing is worth keeping
            shutil.rmtree(self._staging, ignore_errors=True)
        os.close(self._lock)
        if isinstance(error, OSError):
            raise self._failed(error) from error

    def write(self, name: str, tensor: Tensor, first_row: int = 0) -> None:
        """Put rows of a tensor, or all of it, into the file."""
        info = self._infos[name]
        assert (tensor.dtype, tensor.shape[1:]) == (info.dtype, info.shape[1:]), name
        row_bytes = info.num_bytes // info.shape[0]
        data: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        _write_at(self._file, data, self._places[name] + first_row * row_bytes)

    def read(self, name: str) -> Tensor:
        """A tensor that is finished."""
        info = self._infos[name]
        data = bytearray(os.pread(self._file, info.num_bytes, self._places[name]))
        return torch.frombuffer(data, dtype=info.dtype).reshape(info.shape)

    def finish(self, records: Mapping[str, Mapping[str, Any]]) -> None:
        """Note that tensors are written, with what there is to say of each."""
        os.fdatasync(self._file)
        self._note({"done": records})
        self.done |= {name: dict(record) for name, record in records.items()}

    def publish(
        self, source: Path, config: ModelConfig, spec: QuantSpec, record: Mapping[str, Any], readme: str
    ) -> None:
        """Add config, tokenizer, record and README, and rename the directory into place."""
        stated = {
            "quant_method": QUANT_METHOD,
            "format_version": QUANT_FORMAT_VERSION,
            "zero_convention": ZERO_CONVENTION,
            **{f.name: getattr(spec, f.name) for f in dataclasses.fields(spec)},
        }
        write_json(self._staging / CONFIG, {**config.to_hf(), "quantization_config": stated})
        write_json(self._staging / QUANTIZATION_RECORD, record)
        (self._staging / "README.md").write_text(readme, encoding="utf-8")
        for name in (*TOKENIZER_FILES, GENERATION_CONFIG):
            if (source / name).is_file():
                shutil.copyfile(source / name, self._staging / name)
        (self._staging / _JOURNAL).unlink()
        for file in self._staging.iterdir():
            flush(file)
        flush(self._staging)
        os.replace(self._staging, self.target)
        flush(self.target.parent)

    def _failed(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            asked=f"write a quantized checkpoint to {self.target}",
            found=str(error),
            rule=f"the directory is whole or not there; what is finished stays in {self._staging}",
            fix="correct the cause and run the same command again: it goes on from there",
        )

    def _check_target(self) -> None:
        if self.target.exists() and not (self.target.is_dir() and not any(self.target.iterdir())):
            raise CheckpointError(
                asked=f"write a quantized checkpoint to {self.target}",
                found=contents(self.target) if self.target.is_dir() else "a file of that name",
                rule="nothing is overwritten",
                fix="choose another directory, or remove that one",
            )

    def _check_room(self) -> None:
        file = self._staging / QUANTIZED
        held = file.stat().st_blocks * 512 if file.exists() else 0
        free_bytes = shutil.disk_usage(self._staging).free
        if self.num_bytes - held > free_bytes:
            raise MachineError(
                asked=f"write {format_bytes(self.num_bytes)} to {self.target}",
                found=f"{format_bytes(free_bytes)} free on that disk",
                fix="free some space or choose another disk",
            )

    def _resume(self, identity: str) -> dict[str, dict[str, Any]]:
        """What an earlier run finished, if it wrote the same thing; else what it left is removed."""
        journal = self._staging / _JOURNAL
        lines = []
        if journal.is_file():
            for line in journal.read_bytes().splitlines(keepends=True):
                if not line.endswith(b"\n"):  # the process was killed while it wrote this
                    break
                try:
                    lines.append(json.loads(line))
                except ValueError:  # the machine was, and the disk kept less than it had said
                    break
        file = self._staging / QUANTIZED
        is_whole = file.is_file() and file.stat().st_size == self.num_bytes
        if not is_whole or not lines or lines[0] != {"identity": identity}:
            for entry in self._staging.iterdir():
                entry.unlink()
            return {}
        journal.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return {name: record for line in lines[1:] for name, record in line["done"].items()}

    def _note(self, line: Mapping[str, Any]) -> None:
        self._journal.write(json.dumps(canonical(line)) + "\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())


def _alignment(info: TensorInfo) -> int:
    """The largest power of two up to 64 that divides a tensor's bytes: tensors in this order keep each other's."""
    return math.gcd(info.num_bytes, _ALIGNMENT)


def _header(infos: Sequence[TensorInfo]) -> tuple[bytes, dict[str, int], int]:
    """The safetensors header, where each tensor begins in the file, and the file's size."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    places, offset = {}, 0
    for info in infos:
        places[info.name] = offset
        end = offset + info.num_bytes
        entries[info.name] = {"dtype": _KINDS[info.dtype], "shape": list(info.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    return header, {name: len(header) + place for name, place in places.items()}, len(header) + offset


def _write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view[: 2**30], offset)
        view, offset = view[written:], offset + written
