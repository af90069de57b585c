"""The two programs of generation: prefill (a chunk of prompt per row) and decode (one or more new tokens per row).

Both take and return flat tensors and change their rows in place, so that either can be compiled as it stands. A row
that is not to move has position -1: it writes to the cache's padding slot, sees nothing, and its answer is -1.

Dimension letters: B rows, T tokens of a chunk, I device iterations, V vocabulary, K ranked tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from bluejay.config import MAX_STOP_IDS, GenerationConfig
from bluejay.generate.sampler import Sampling, rank_tokens, sample
from bluejay.models import GPTJ, KVCache, aligned_rows

IDLE = -1


@dataclass
class Rows:
    """What the device knows of each row besides its cache. Rows lie outermost, so a range of rows is a view.

    Attributes:
        token, position: the token to feed next and its position (IDLE: do not move). [B] int64
        step, max_new: tokens written so far and at most. [B] int64
        seen: tokens of prompt and output; the last column swallows padding. [B, V + 1] bool
        others: see `Sampling`.
    """

    token: Tensor
    position: Tensor
    step: Tensor
    max_new: Tensor
    seen: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    seed: Tensor
    min_new: Tensor
    stop_ids: Tensor
    beam: Tensor

    @classmethod
    def allocate(cls, num_rows: int, vocab_size: int, device: torch.device) -> Rows:
        """Idle rows."""

        def whole(value: int, *shape: int) -> Tensor:
            return aligned_rows(num_rows, shape, value, torch.int64, device)

        def real(value: float) -> Tensor:
            return aligned_rows(num_rows, (), value, torch.float32, device)

        def flags(*shape: int) -> Tensor:
            return aligned_rows(num_rows, shape, False, torch.bool, device)

        return cls(
            token=whole(0),
            position=whole(IDLE),
            step=whole(0),
            max_new=whole(0),
            seen=flags(vocab_size + 1),
            temperature=real(0),
            top_k=whole(0),
            top_p=real(1),
            min_p=real(0),
            repetition_penalty=real(1),
            seed=whole(0),
            min_new=whole(0),
            stop_ids=whole(-1, MAX_STOP_IDS),
            beam=flags(),
        )

    def tensors(self) -> list[Tensor]:
        return [getattr(self, f.name) for f in fields(self)]

    def view(self, first_row: int, num_rows: int) -> Rows:
        return Rows(*[t[first_row : first_row + num_rows] for t in self.tensors()])

    def copy_rows(self, sources: list[int], targets: list[int]) -> None:
        """Row `targets[i]` becomes what row `sources[i]` was; sources are read before targets are written."""
        for tensor in self.tensors():
            tensor[targets] = tensor[sources]

    def assign(self, row: int, config: GenerationConfig, max_new: int, stop_ids: list[int], seed: int) -> None:
        """Prepare a row for a new request; it stays idle until its prompt is in the cache."""
        self.position[row] = IDLE
        self.step[row] = 0
        self.max_new[row] = max_new
        self.seen[row] = False
        self.temperature[row] = config.temperature
        self.top_k[row] = config.top_k
        self.top_p[row] = config.top_p
        self.min_p[row] = config.min_p
        self.repetition_penalty[row] = config.repetition_penalty
        self.seed[row] = seed
        self.min_new[row] = config.min_new_tokens
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(stop_ids)] = torch.tensor(stop_ids, dtype=torch.int64)
        self.beam[row] = config.num_beams > 1

    def take(self, tokens: Tensor) -> Tensor:
        """Feed these tokens next; rows that end with them go idle. Returns the tokens, IDLE where a row did not move.

        Shapes:
            tokens, returns: [B] int64
        """
        moving = self.position >= 0
        self.step.add_(moving)
        ended = (tokens[:, None] == self.stop_ids).any(1) | (self.step >= self.max_new) | (tokens < 0)
        self.token.copy_(torch.where(moving, tokens.clamp_min(0), self.token))
        self.position.copy_(torch.where(moving & ~ended, self.position + 1, IDLE))
        return torch.where(moving, tokens, IDLE)

    @property
    def sampling(self) -> Sampling:
        return Sampling(*[getattr(self, name) for name in Sampling._fields])

    def note_seen(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Mark the tokens just fed; returns the table without the padding column.

        Shapes:
            ids, positions: [B, T]   returns: [B, V] bool
        """
        real = torch.where(positions >= 0, ids, self.seen.shape[1] - 1)
        self.seen.scatter_(1, real, True)
        return self.seen[:, :-1]


class GenerationStep(nn.Module):
    """What both programs share: the model, the sampler's variant, and how flat tensors become rows and cache.

    Args:
        greedy: every row has temperature 0, so the step needs no sort.
        ranked: number of likeliest tokens to return with their log-probabilities; 0 returns none.
        chooses: false where the model is a stage before the last; the step then returns what the stage does.
    """

    def __init__(self, model: GPTJ, *, greedy: bool, ranked: int = 0, chooses: bool = True) -> None:
        super().__init__()
        self.model, self.greedy, self.ranked, self.chooses = model, greedy, ranked, chooses

    def unflatten(self, flat: tuple[Tensor, ...]) -> tuple[Rows, KVCache]:
        """Rows, then the cache's lengths, keys and values, in the order of `flatten`."""
        num_fields = len(fields(Rows))
        lengths, *storage = flat[num_fields:]
        num_layers = len(storage) // 2
        cache = KVCache.of(list(storage[:num_layers]), list(storage[num_layers:]), lengths)
        return Rows(*flat[:num_fields]), cache

    def choose(self, logits: Tensor, seen: Tensor, rows: Rows) -> tuple[Tensor, ...]:
        """Next tokens [B], and with `ranked`: log-probabilities [B], values [B, K], tokens [B, K]."""
        tokens = sample(logits, seen, rows.step, rows.sampling, greedy=self.greedy)
        if not self.ranked:
            return (tokens,)
        return (tokens, *rank_tokens(logits, tokens, seen, rows.step, rows.sampling, self.ranked))


def flatten(rows: Rows, cache: KVCache) -> tuple[Tensor, ...]:
    """The tensors a step takes after its own inputs."""
    return (*rows.tensors(), cache.lengths, *cache.keys, *cache.values)


class PrefillStep(GenerationStep):
    """A chunk of prompt per row; the sampled token matters only for rows whose prompt ends with this chunk.

    With `score`, also the log-probability of each chunk token's successor, `targets` (the prompt shifted by one).
    """

    def __init__(
        self,
        model: GPTJ,
        *,
        greedy: bool,
        ranked: int = 0,
        score: bool = False,
        chooses: bool = True,
    ) -> None:
        super().__init__(model, greedy=greedy, ranked=ranked, chooses=chooses)
        self.score = score

    def forward(
        self, ids: Tensor, positions: Tensor, last: Tensor, targets: Tensor, *flat: Tensor
    ) -> tuple[Tensor, ...]:
        """Returns tokens [B]; then with `ranked` [B], [B, K], [B, K]; then with `score` [B, T], [B, T, K], [B, T, K].

        Shapes:
            ids, positions, targets: [B, T] int64   last: [B] int64, index of each row's last real token in the chunk
        """
        rows, cache = self.unflatten(flat)
        if not self.chooses:
            return (self.model(ids, positions, cache, last=last),)
        seen = rows.note_seen(ids, positions)
        if not self.score:
            return self.choose(self.model(ids, positions, cache, last=last), seen, rows)
        logits = self.model(ids, positions, cache)  # [B, T, V]
        chosen = self.choose(logits[torch.arange(len(last), device=last.device), last], seen, rows)
        logprobs = logits.float().log_softmax(-1)
        values, tokens = logprobs.topk(max(self.ranked, 1), dim=-1)
        return (*chosen, logprobs.gather(2, targets[:, :, None])[:, :, 0], values, tokens)


class DecideStep(GenerationStep):
    """One new token per row, decided and not yet taken: for several ranks, which have to agree on it first."""

    def forward(self, *flat: Tensor) -> tuple[Tensor, ...]:
        """Returns tokens [B]; with `ranked` also [B], [B, K], [B, K]."""
        return self.decide(*self.unflatten(flat))

    def decide(self, rows: Rows, cache: KVCache) -> tuple[Tensor, ...]:
        ids, positions = rows.token[:, None], rows.position[:, None]
        last = torch.zeros_like(rows.token)
        if not self.chooses:
            return (self.model(ids, positions, cache, last=last),)
        seen = rows.note_seen(ids, positions)
        return self.choose(self.model(ids, positions, cache, last=last), seen, rows)


class DecodeStep(DecideStep):
    """`iterations` new tokens per row in one call; a row that ends inside freezes there."""

    def __init__(self, model: GPTJ, *, greedy: bool, ranked: int = 0, iterations: int = 1) -> None:
        super().__init__(model, greedy=greedy, ranked=ranked)
        self.iterations = iterations

    def forward(self, *flat: Tensor) -> tuple[Tensor, ...]:
        """Returns tokens [B, I], IDLE where a row did not move; with `ranked` also [B, I], [B, I, K], [B, I, K]."""
        rows, cache = self.unflatten(flat)
        outputs = []
        for _ in range(self.iterations):
            tokens, *ranked = self.decide(rows, cache)
            outputs.append((rows.take(tokens), *ranked))
        return tuple(torch.stack(column, dim=1) for column in zip(*outputs, strict=True))
