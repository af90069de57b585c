"""From samples to batches: which sample is in which row of which update is a pure function of the seed.

Nothing is drawn from a random state and nothing is counted as we go, so a run that begins at update 1000 sees what a
run that came there from 0 sees.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bluejay.errors import ConfigError

IGNORED = -100  # a target that is not learned; what PyTorch's losses ignore by default
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Samples:
    """Token ids of all samples, one after another. What is padding follows from lengths, never from an id.

    Attributes:
        ids: of all samples.
        starts: where each begins in `ids`; one more at the end.
        learn_from: index within each sample from which its tokens are targets (0: all; the first token of a sample
            has nothing before it and is a target only where another sample stands before it).
    """

    ids: NDArray[Any]
    starts: Ints
    learn_from: Ints

    @classmethod
    def of(cls, samples: Iterable[tuple[list[int], int]], vocab_size: int) -> Samples:
        """Samples from (ids, learn_from) pairs; samples without any token are left out."""
        dtype = np.uint16 if vocab_size <= 2**16 else np.int32
        parts, lengths, learn_from = [], [0], []
        for ids, first in samples:
            if ids:
                parts.append(np.array(ids, dtype=dtype))
                lengths.append(len(ids))
                learn_from.append(first)
        joined = np.concatenate(parts) if parts else np.zeros(0, dtype)
        return cls(joined, np.cumsum(lengths, dtype=np.int64), np.array(learn_from, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.learn_from)

    @property
    def lengths(self) -> Ints:
        """Tokens of each sample."""
        return np.diff(self.starts)

    def digest(self) -> str:
        """SHA-256 of all of it: the same data gives the same run."""
        total = hashlib.sha256()
        for array in (self.ids, self.starts, self.learn_from):
            total.update(np.ascontiguousarray(array).tobytes())
        return total.hexdigest()


@dataclass(frozen=True)
class Batch:
    """A micro-batch. Real tokens stand at the left of each row, so a causal model never sees padding.

    Shapes:
        inputs, targets: [B, T] int64; `IGNORED` targets are not learned
        segments: [B, T] int64, the document that each token belongs to, where attention stays inside documents
    """

    inputs: Tensor
    targets: Tensor
    segments: Tensor | None
    num_tokens: int
    num_targets: int

    def to(self, device: torch.device) -> Batch:
        segments = None if self.segments is None else self.segments.to(device)
        return Batch(self.inputs.to(device), self.targets.to(device), segments, self.num_tokens, self.num_targets)


class Rows:
    """One sample a row: inputs are its tokens but the last, targets its tokens but the first.

    Rows of a micro-batch are padded to the smallest of a few widths that holds the longest, so that a compiled step
    meets few shapes. Tokens beyond `length` inputs are cut off.

    Raises:
        ConfigError: no sample has a target left.
    """

    def __init__(self, samples: Samples, length: int) -> None:
        self._samples = samples
        self.length = length
        lengths = np.minimum(samples.lengths, length + 1)
        first_target = np.maximum(samples.learn_from, 1)
        self._kept = np.flatnonzero(lengths > first_target)
        self._lengths = lengths
        self.num_without_target = len(samples) - len(self._kept)
        self.num_cut = int((samples.lengths > length + 1).sum())
        self.num_targets = int((lengths - first_target)[self._kept].sum())
        if not len(self._kept):
            longest = int(samples.lengths.max(initial=0))
            raise ConfigError(
                asked=f"train on {len(samples)} samples, {length} tokens each at most",
                found=f"{self.num_without_target} of {len(samples)} samples have no target after truncation; "
                f"the longest has {longest} tokens",
                rule="a sample is learned from the first token of its answer on, which must not be cut off",
                fix=f"raise data.length to at least {longest}, shorten the prompt, or learn all tokens",
            )
        self._widths = sorted({max(1, -(-length * part // 8)) for part in (1, 2, 3, 4, 6, 8)})

    def __len__(self) -> int:
        return len(self._kept)

    def order(self, seed: int, epoch: int) -> Ints:
        """The samples of an epoch as they are used: all that can be learned from, each once."""
        return np.random.default_rng((seed, epoch)).permutation(self._kept)

    def batch(self, chosen: Ints, rows: int, seed: int = 0, epoch: int = 0) -> Batch:
        """The chosen samples in a micro-batch of `rows` rows; rows without a sample are empty."""
        longest = int(self._lengths[chosen].max(initial=2)) - 1
        width = next(width for width in self._widths if width >= longest)
        inputs = np.zeros((rows, width), dtype=np.int64)
        targets = np.full((rows, width), IGNORED, dtype=np.int64)
        for row, sample in enumerate(chosen):
            start, num = self._samples.starts[sample], self._lengths[sample]
            ids = self._samples.ids[start : start + num]
            first = max(int(self._samples.learn_from[sample]), 1)
            inputs[row, : num - 1] = ids[:-1]
            targets[row, first - 1 : num - 1] = ids[first:]
        num_tokens = int((self._lengths[chosen] - 1).sum())
        return _batch(inputs, targets, None, num_tokens)


class Blocks:
    """Documents packed one after another and cut into blocks: no padding but in the last block of an epoch.

    Each epoch joins the documents in another order, cuts the stream, and shuffles the blocks. Every token of an epoch
    is an input once (but the very last) and a target once (but the very first).

    Args:
        within_documents: attention stays inside a document, and no document's first token is a target.
    """

    def __init__(self, samples: Samples, length: int, within_documents: bool = False) -> None:
        self._samples = samples
        self.length = length
        self.within_documents = within_documents
        self._stream = lru_cache(maxsize=1)(self._join)
        self.num_cut = 0
        self.num_without_target = int((samples.lengths <= np.maximum(samples.learn_from, 1)).sum())
        num_targets = samples.lengths - np.maximum(samples.learn_from, int(within_documents))
        self.num_targets = int(np.maximum(num_targets, 0).sum())
        if len(samples.ids) < 2 or self.num_targets < 1:
            raise ConfigError(
                asked=f"train on {len(samples)} samples packed into blocks of {length} tokens",
                found=f"{self.num_without_target} of {len(samples)} samples have no target; {len(samples.ids)} tokens",
                rule="there must be a token to predict",
                fix="give more text, or learn all tokens",
            )

    def __len__(self) -> int:
        return -(-(len(self._samples.ids) - 1) // self.length)

    def order(self, seed: int, epoch: int) -> Ints:
        """The blocks of an epoch as they are used, each once."""
        return np.random.default_rng((seed, epoch, 1)).permutation(len(self))

    def batch(self, chosen: Ints, rows: int, seed: int = 0, epoch: int = 0) -> Batch:
        """The chosen blocks in a micro-batch of `rows` rows; rows without a block are empty."""
        inputs = np.zeros((rows, self.length), dtype=np.int64)
        targets = np.full((rows, self.length), IGNORED, dtype=np.int64)
        segments = np.zeros((rows, self.length), dtype=np.int64)
        num_tokens = 0
        for row, block in enumerate(chosen):
            ids, is_target, documents = self._cut(int(block) * self.length, seed, epoch)
            num = len(ids) - 1
            inputs[row, :num], segments[row, :num] = ids[:-1], documents[:-1] + 1
            targets[row, :num] = np.where(is_target[1:], ids[1:], IGNORED)
            num_tokens += num
        return _batch(inputs, targets, segments if self.within_documents else None, num_tokens)

    def _cut(self, start: int, seed: int, epoch: int) -> tuple[Ints, NDArray[np.bool_], Ints]:
        """Ids, whether each is a target, and its document's place in the stream, of a block and one token more."""
        order, ends = self._stream(seed, epoch)  # documents in the stream's order, and where each ends in it
        stop = min(start + self.length + 1, len(self._samples.ids))
        ids, is_target, documents = [], [], []
        place = int(np.searchsorted(ends, start, side="right"))
        while start < stop:
            document = order[place]
            first = int(ends[place] - self._samples.lengths[document])
            end = min(stop, int(ends[place]))
            offset = int(self._samples.starts[document]) - first
            ids.append(self._samples.ids[start + offset : end + offset].astype(np.int64))
            least = max(int(self._samples.learn_from[document]), int(self.within_documents))
            is_target.append(np.arange(start, end) - first >= least)
            documents.append(np.full(end - start, place))
            start, place = end, place + 1
        return np.concatenate(ids), np.concatenate(is_target), np.concatenate(documents)

    def _join(self, seed: int, epoch: int) -> tuple[Ints, Ints]:
        order = np.random.default_rng((seed, epoch)).permutation(len(self._samples))
        return order, np.cumsum(self._samples.lengths[order])


Source = Rows | Blocks


def lay_out(samples: Samples, layout: Literal["rows", "blocks"], length: int, within_documents: bool) -> Source:
    """Samples as rows or as blocks of `length` tokens."""
    return Rows(samples, length) if layout == "rows" else Blocks(samples, length, within_documents)


class Reader:
    """The micro-batches of each update, for one replica of several.

    Attributes:
        updates_per_epoch: the last one of an epoch may hold fewer rows.
    """

    def __init__(
        self,
        source: Source,
        micro_batch: int,
        accumulation: int,
        seed: int,
        *,
        replicas: int = 1,
        replica: int = 0,
    ) -> None:
        self.source = source
        self._micro_batch, self._accumulation = micro_batch, accumulation
        self._seed, self._replicas, self._replica = seed, replicas, replica
        self._global_batch = micro_batch * accumulation * replicas
        self.updates_per_epoch = -(-len(source) // self._global_batch)
        self._order = lru_cache(maxsize=1)(source.order)

    def chosen(self, update: int) -> tuple[int, Ints]:
        """The epoch of an update, and the samples (or blocks) of its global batch."""
        epoch, place = divmod(update, self.updates_per_epoch)
        order = self._order(self._seed, epoch)
        return epoch, order[place * self._global_batch : (place + 1) * self._global_batch]

    def batches(self, update: int) -> list[Batch]:
        """This replica's micro-batches of an update. Rows are dealt like cards, so that no replica is left without."""
        epoch, chosen = self.chosen(update)
        mine = chosen[self._replica :: self._replicas]
        return [
            self.source.batch(mine[i :: self._accumulation], self._micro_batch, self._seed, epoch)
            for i in range(self._accumulation)
        ]


def _batch(inputs: Ints, targets: Ints, segments: Ints | None, num_tokens: int) -> Batch:
    return Batch(
        torch.from_numpy(inputs),
        torch.from_numpy(targets),
        None if segments is None else torch.from_numpy(segments),
        num_tokens,
        int((targets != IGNORED).sum()),
    )
