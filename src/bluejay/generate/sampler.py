"""From logits to the next token: a pure function of (logits, parameters, request seed, step).

Everything is a tensor with one entry per row, so the same code runs eagerly and inside a compiled step. Randomness is a
hash of (seed, step) rather than a generator's state: a row draws the same numbers whoever its neighbors are, on every
device, on every rank.

Dimension letters: B rows, V vocabulary, N stop ids per row (padded with -1).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
BAD_LOGITS = -2  # the token returned for a row whose logits are NaN or infinite


class Sampling(NamedTuple):
    """Parameters of each row. All [B] except `stop_ids` [B, N]; `beam` rows rank processed log-probabilities."""

    temperature: Tensor  # fp32, 0 = greedy
    top_k: Tensor  # int64, 0 = off
    top_p: Tensor  # fp32
    min_p: Tensor  # fp32
    repetition_penalty: Tensor  # fp32
    seed: Tensor  # int64
    min_new: Tensor  # int64
    stop_ids: Tensor  # int64
    beam: Tensor  # bool


def mix(word: Tensor) -> Tensor:
    """A 32-bit integer hash on int64 tensors. Its multipliers are below 2^31, so no product overflows int64.

    Source: Wellons, hash-prospector (two-round multiply-xorshift, bias 0.107).
    """
    word = word ^ (word >> 16)
    word = (word * 0x21F0AAAD) & _MASK
    word = word ^ (word >> 15)
    word = (word * 0x735A2D97) & _MASK
    return word ^ (word >> 15)


def uniform(seed: Tensor, step: Tensor) -> Tensor:
    """One number in [0, 1) per row, in fp64.

    Shapes:
        seed, step: [B] int64, not negative   returns: [B]
    """
    lower, upper = seed & _MASK, seed >> 32
    word = mix(mix((lower + 0x9E3779B9) & _MASK) ^ upper)
    other = mix(mix((upper + 0x7F4A7C15) & _MASK) ^ lower)
    high = mix(((word ^ step) + 0x3C6EF372) & _MASK)
    low = mix(((other ^ step) + 0x1B873593) & _MASK)
    return ((high << 21) | (low >> 11)).double() / float(1 << 53)


def sub_seed(seed: int, sample: int) -> int:
    """The seed of the request's answer number `sample`; answer 0 keeps the request's own."""
    if sample == 0:
        return seed
    numbers = uniform(torch.tensor([seed, seed ^ 0x5DEECE66D]), torch.tensor([sample, sample]) + (1 << 20))
    return int((numbers[0] * 2**31).long() << 32 | (numbers[1] * 2**32).long())


def process(scores: Tensor, seen: Tensor, step: Tensor, parameters: Sampling) -> Tensor:
    """Scores after the repetition penalty and the ban on ending before `min_new`.

    Shapes:
        scores: [B, V] fp32   seen: [B, V] bool, tokens of the prompt and the output so far   step: [B] tokens written
    """
    penalty = parameters.repetition_penalty[:, None]
    scores = torch.where(seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)
    banned = torch.where((step < parameters.min_new)[:, None], parameters.stop_ids, -1)  # [B, N]
    columns = torch.arange(scores.shape[1], device=scores.device)
    is_banned = torch.zeros_like(seen)
    for slot in range(banned.shape[1]):  # a loop of compares fuses into one pass; a [B, N, V] compare would not fit
        is_banned = is_banned | (columns == banned[:, slot : slot + 1])
    return scores.masked_fill(is_banned, -torch.inf)


def choose(scores: Tensor, step: Tensor, parameters: Sampling) -> Tensor:
    """The next token of each row by temperature, top-k, top-p, min-p and the row's own random number.

    Shapes:
        scores: [B, V] fp32, processed   returns: [B] int64
    """
    ordered, tokens = scores.sort(dim=-1, descending=True, stable=True)
    greedy = tokens[:, 0]
    temperature = parameters.temperature.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    ordered = (ordered - ordered[:, :1]) / temperature  # the best is 0: finite however small the temperature
    top_k = parameters.top_k
    kth = torch.where(top_k > 0, top_k, ordered.shape[1]).clamp_max(ordered.shape[1]) - 1
    ordered = ordered.masked_fill(ordered < ordered.gather(1, kth[:, None]), -torch.inf)
    weights = ordered.double().exp()
    weights = weights / weights.sum(-1, keepdim=True)
    before = weights.cumsum(-1) - weights
    best = torch.arange(ordered.shape[1], device=scores.device) == 0
    kept = (before < parameters.top_p[:, None]) & (weights >= parameters.min_p[:, None] * weights[:, :1]) | best
    weights = weights.masked_fill(~kept, 0)
    cumulative = weights.cumsum(-1)
    threshold = uniform(parameters.seed, step)[:, None] * cumulative[:, -1:]
    rank = (cumulative <= threshold).sum(-1).clamp_max(kept.sum(-1) - 1)
    drawn = tokens.gather(1, rank[:, None])[:, 0]
    return torch.where(parameters.temperature == 0, greedy, drawn)


def sample(logits: Tensor, seen: Tensor, step: Tensor, parameters: Sampling, *, greedy: bool = False) -> Tensor:
    """The next token of each row; BAD_LOGITS where the logits are not numbers.

    `greedy` skips the sort; every row must then have temperature 0.

    Shapes:
        logits: [B, V], any float dtype   seen: [B, V] bool   step: [B] int64   returns: [B] int64
    """
    logits = logits.float()
    scores = process(logits, seen, step, parameters)
    tokens = scores.argmax(-1) if greedy else choose(scores, step, parameters)
    return torch.where(logits.sum(-1).isfinite(), tokens, BAD_LOGITS)


def rank_tokens(
    logits: Tensor, chosen: Tensor, seen: Tensor, step: Tensor, parameters: Sampling, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of the chosen tokens, and the `count` likeliest with theirs.

    Before temperature and filters; for beam rows after `process`, which is what beam search ranks.

    Shapes:
        logits: [B, V]   chosen: [B]   returns: [B], [B, count], [B, count] int64
    """
    logprobs = logits.float().log_softmax(-1)
    ranked = torch.where(parameters.beam[:, None], process(logprobs, seen, step, parameters), logprobs)
    values, tokens = ranked.topk(count, dim=-1)
    return logprobs.gather(1, chosen.clamp_min(0)[:, None])[:, 0], values, tokens
