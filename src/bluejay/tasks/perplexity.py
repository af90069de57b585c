"""How well a model predicts a text: the negative log-likelihood of each token, in windows that overlap.

Source: Jelinek et al. 1977 (perplexity). The text is cut as `transformers` documents it for models of fixed length.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bluejay.config import GenerationConfig
from bluejay.errors import RequestError
from bluejay.events import Event, Observer, ignore
from bluejay.generate import Engine, NumericsError

_SCORED = GenerationConfig(max_new_tokens=0, prompt_logprobs=0)


@dataclass(frozen=True)
class Perplexity:
    """What came out of scoring a text.

    Attributes:
        nll: negative log-likelihood, mean over the scored tokens, in nats.
        perplexity: exp(nll).
        bits_per_byte: the scored tokens' likelihood in bits over the bytes of their text: tokenizers can be compared.
        num_tokens: tokens scored: all but the text's first, which nothing predicts.
        num_bytes: bytes of text that they stand for.
        context: tokens a window holds at most.
        stride: tokens by which a window follows the one before; each token is scored with at least context - stride
            tokens before it, but for the first window's.
        seconds: what scoring took, without compiling.
    """

    nll: float
    perplexity: float
    bits_per_byte: float
    num_tokens: int
    num_bytes: int
    context: int
    stride: int
    seconds: float


def windows(num_tokens: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Windows over a text as (first token, end, first token to score). Every token but the first is scored once."""
    scored = 1
    for start in range(0, num_tokens, stride):
        stop = min(start + context, num_tokens)
        if scored < stop:
            yield start, stop, max(scored, start + 1)
        scored = max(scored, stop)
        if stop == num_tokens:
            return


def perplexity(
    engine: Engine, text: str | Sequence[int], *, context: int = 0, stride: int = 0, observe: Observer = ignore
) -> Perplexity:
    """Score a text, or token ids, with an engine; as many windows at once as the engine has rows.

    Args:
        context: tokens a window holds; 0 takes the engine's.
        stride: tokens from a window to the next; 0 takes half a window.

    Raises:
        RequestError: fewer than two tokens, or a window or stride that does not fit.
        NumericsError: the model gave logits that are not numbers.
    """
    context = context or engine.context
    stride = stride or max(context // 2, 1)
    if not 2 <= context <= engine.context or not 1 <= stride < context:
        raise RequestError(
            asked=f"windows of {context} tokens, {stride} apart",
            found=f"an engine with a context of {engine.context}",
            rule="2 <= context <= the engine's, and 1 <= stride < context, so that every token has one before it",
            fix="choose a smaller context or stride",
        )
    ids = engine.tokenizer.encode(text) if isinstance(text, str) else list(text)
    if len(ids) < 2:
        raise RequestError(
            asked="the perplexity of a text",
            found=f"{len(ids)} tokens",
            rule="the first token has nothing that predicts it, so there must be a second",
            fix="give a longer text",
        )
    started, compiling = time.perf_counter(), engine.figures.compile_seconds
    cut = list(windows(len(ids), context, stride))
    total, num_scored = 0.0, 0
    for first in range(0, len(cut), engine.max_rows):
        group = cut[first : first + engine.max_rows]
        results = engine.generate([ids[start:stop] for start, stop, _ in group], _SCORED)
        for result, (start, stop, score_from) in zip(results, group, strict=True):
            scores = result.prompt_logprobs
            assert scores is not None
            total -= math.fsum(score.logprob for score in scores[score_from - start :] if score.logprob is not None)
            num_scored += stop - score_from
        observe(Event("evaluate", {"done": num_scored, "total": len(ids) - 1}))
    seconds = time.perf_counter() - started - (engine.figures.compile_seconds - compiling)
    num_bytes = sum(len(engine.tokenizer.token_bytes(token)) for token in ids[1:])
    nll = total / num_scored
    if math.isnan(nll):
        raise NumericsError(
            asked=f"the perplexity of {len(ids)} tokens",
            found="log-probabilities that are not numbers",
            rule="weights in float16 may overflow; damaged weights spread NaN to every logit",
            fix="try bfloat16 or float32, and check the weights",
        )
    # A model can be so bad that exp overflows.
    likely = math.exp(nll) if nll < 700 else math.inf
    bits = total / math.log(2) / num_bytes if num_bytes else math.inf
    return Perplexity(nll, likely, bits, num_scored, num_bytes, context, stride, seconds)
