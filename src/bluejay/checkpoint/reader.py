"""Weight files of both formats as mapped tensors: {safetensors, .bin} x {single, sharded}."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bluejay.checkpoint.files import WEIGHTS, contents, is_mask_buffer, listing, read_json
from bluejay.errors import CheckpointError

_ZIP = b"PK\x03\x04"
_LFS_POINTER = b"version https://git-lfs"
_MIB = 2**20


@dataclass(frozen=True)
class TensorInfo:
    """What a checkpoint holds under one name. `file` is the name of its weight file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class WeightFile:
    """One weight file, mapped privately: pages are read when they are touched, and writing to a tensor changes no file.

    `.bin` files in the format of torch before 1.6 cannot be mapped; they are held in memory whole (`is_mapped`).

    Raises:
        CheckpointError: truncated, not of its format, or holding anything but tensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes = path.stat().st_size
        with path.open("rb") as file:
            magic = file.read(len(_LFS_POINTER))
        if magic == _LFS_POINTER:
            raise CheckpointError(
                asked=f"read {path}",
                found="a Git LFS pointer instead of the weights",
                fix="run `git lfs pull` in that directory, or download the file itself",
            )
        self.is_mapped = path.suffix == ".safetensors" or magic.startswith(_ZIP)
        self._tensors = self._map()
        self._touched_bytes = 0

    def tensors(self) -> list[TensorInfo]:
        """What the file holds, in the order of its bytes where the format tells."""
        return [TensorInfo(name, tuple(t.shape), t.dtype, self.path.name) for name, t in self._tensors.items()]

    def read(self, name: str) -> Tensor:
        """A tensor as stored, mapped without a copy."""
        tensor = self._tensors[name]
        self._touched_bytes += tensor.nbytes
        return tensor.contiguous()

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """A copy of some rows of a tensor, as stored. Never more than a slice's worth of pages is held."""
        held = self._tensors[name]
        if self.path.suffix == ".safetensors":
            part = torch.empty((stop - start, *held.shape[1:]), dtype=held.dtype)
            self.read_into(name, part, start)
            return part
        part_bytes = (stop - start) * held[:1].nbytes
        del held
        self._make_room(part_bytes)
        self._touched_bytes += part_bytes
        return self._tensors[name][start:stop].clone(memory_format=torch.contiguous_format)

    def convert(self, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor in another dtype, converted by slice.

        The pages of a mapping count as memory of this process until they are unmapped, so the mapping is renewed after
        every slice's worth of them: beside the result, no more than that is ever held.
        """
        source = self._tensors[name]
        if not source.is_contiguous():
            return source.to(dtype, memory_format=torch.contiguous_format)
        result = torch.empty(source.shape, dtype=dtype)
        itemsize = source.element_size()
        step = self._limit // itemsize
        del source
        target = result.view(-1)
        for start in range(0, target.numel(), step):
            part = target[start : start + step]
            part_bytes = part.numel() * itemsize
            self._make_room(part_bytes)
            part.copy_(self._tensors[name].view(-1)[start : start + step])
            self._touched_bytes += part_bytes
        return result

    def read_into(self, name: str, target: Tensor, start: int = 0) -> None:
        """Rows of a tensor of a safetensors file into a contiguous one of its type; no page of the file is mapped.

        Args:
            target: as many rows as it has are read, from row `start` on.

        Raises:
            CheckpointError: the file has become shorter.
        """
        row_bytes = target.nbytes // max(len(target), 1)
        left = memoryview(target.view(-1).view(torch.uint8).numpy().data)
        with self.path.open("rb", buffering=0) as file:
            file.seek(self._starts[name] + start * row_bytes)
            while left:
                num_read = file.readinto(left)
                if not num_read:
                    raise CheckpointError(
                        asked=f"read {name} from {self.path}",
                        found=f"{len(left)} of {target.nbytes} bytes missing",
                        rule="a file stays as it is while it is read",
                        fix="put the complete file there and load again",
                    )
                left = left[num_read:]

    @cached_property
    def _starts(self) -> dict[str, int]:
        """Where the bytes of each tensor of a safetensors file begin."""
        with self.path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
        return {
            name: 8 + header_bytes + held["data_offsets"][0] for name, held in header.items() if name in self._tensors
        }

    @property
    def _limit(self) -> int:
        """Bytes of pages that may be held beside what is made from them."""
        return min(max(self.num_bytes // 64, 2 * _MIB), 64 * _MIB)

    def _make_room(self, part_bytes: int) -> None:
        if self.is_mapped and self._touched_bytes + part_bytes > self._limit:
            self._tensors = {}  # unmaps, as nothing else holds on to them
            self._tensors = self._map()
            self._touched_bytes = 0

    def _map(self) -> dict[str, Tensor]:
        try:
            if self.path.suffix == ".safetensors":
                with safe_open(self.path, "pt") as file:
                    return {name: file.get_tensor(name) for name in file.offset_keys()}
            content = torch.load(self.path, map_location="cpu", weights_only=True, mmap=self.is_mapped)
        except (SafetensorError, pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise CheckpointError(
                asked=f"read {self.path}",
                found=f"{self.num_bytes} bytes that do not read as weights: {reason[0]}",
                rule="the file must be complete and hold plain tensors; nothing else in it is ever executed",
                fix="compare its size with the original's and download or copy it again",
            ) from error
        if not isinstance(content, dict) or not all(isinstance(t, Tensor) for t in content.values()):
            raise CheckpointError(
                asked=f"read {self.path} as weights",
                found=f"a {type(content).__name__} that is not a flat mapping from names to tensors",
                fix="save only the model's state_dict() there",
            )
        return content


def find_weights(directory: Path, names: tuple[str, ...] = WEIGHTS) -> tuple[list[Path], dict[str, str], list[str]]:
    """The weight files of a directory, the index (name -> file; empty without shards), and warnings.

    Args:
        names: what they may be called, the preferred one first.

    Raises:
        CheckpointError: no weights, or an index that names files which are not there.
    """
    present = [name for name in names if (directory / name).is_file()]
    if not present:
        raise CheckpointError(
            asked=f"read weights from {directory}",
            found=contents(directory),
            rule=f"weights are in one of {', '.join(names)}; shards need their index",
            fix="point to a complete checkpoint directory, or download the missing file",
        )
    chosen, *others = present
    warnings = [f"weights are read from {chosen}; {', '.join(others)} beside it is not read"] if others else []
    if not chosen.endswith(".json"):
        return [directory / chosen], {}, warnings
    index_file = directory / chosen
    index = read_json(index_file).get("weight_map")
    if not isinstance(index, dict) or not index or not all(Path(str(file)).name == file for file in index.values()):
        raise CheckpointError(
            asked=f"read {index_file}",
            found="no weight_map from tensor names to file names in the same directory",
            fix="download the index again",
        )
    files = sorted(set(index.values()))
    missing = [file for file in files if not (directory / file).is_file()]
    if missing:
        raise CheckpointError(
            asked=f"read the {len(files)} files that {index_file} names",
            found=f"{len(missing)} missing: {listing(missing)}",
            rule="every shard is needed; without one the model would write noise",
            fix="download the missing files into that directory",
        )
    return [directory / file for file in files], index, warnings


def check_index(index: dict[str, str], found: dict[str, list[TensorInfo]], directory: Path) -> list[TensorInfo]:
    """The tensors of all shards, once each and from the file that the index names.

    Raises:
        CheckpointError: index and shards disagree about what is where.
    """
    held = {(info.name, file) for file, infos in found.items() for info in infos}
    lacking = [
        f"{name} in {file}" for name, file in index.items() if (name, file) not in held and not is_mask_buffer(name)
    ]
    unlisted = [f"{name} in {file}" for name, file in sorted(held) if name not in index and not is_mask_buffer(name)]
    if lacking or unlisted:
        raise CheckpointError(
            asked=f"read the {len(index)} tensors that the index in {directory} names",
            found="; ".join(
                f"{len(names)} {what}: {listing(sorted(names))}"
                for names, what in ((lacking, "not where it says"), (unlisted, "that it does not name"))
                if names
            ),
            rule="the index and its shards come from one save",
            fix="download index and shards again, from one revision",
        )
    return [info for infos in found.values() for info in infos if index.get(info.name) == info.file]
