"""Perplexity against a direct computation with transformers on the same ids."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bluejay.errors import RequestError
from bluejay.generate import Engine, NumericsError
from bluejay.tasks import perplexity, windows

if TYPE_CHECKING:
    from transformers import GPTJForCausalLM

IDS = torch.randint(1, 57, (83,), generator=torch.Generator().manual_seed(7)).tolist()


def direct(model: GPTJForCausalLM, ids: list[int], context: int, stride: int) -> float:
    """The sum of negative log-likelihoods as transformers' own documentation computes it: labels of -100 where a token
    was scored before."""
    total, previous_end = 0.0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + context, len(ids))
        window = torch.tensor([ids[begin:end]])
        labels = window.clone()
        labels[:, : -(end - previous_end)] = -100
        num_scored = int((labels[:, 1:] != -100).sum())
        if num_scored:
            with torch.no_grad():
                total += float(model(window, labels=labels).loss) * num_scored
        previous_end = end
        if end == len(ids):
            break
    return total


@pytest.mark.parametrize(("context", "stride"), [(32, 16), (32, 31), (16, 5), (24, 1)])
def test_equal_to_transformers(
    tiny_hf: GPTJForCausalLM, make_engine: Callable[..., Engine], context: int, stride: int
) -> None:
    """A window's first token scored from nothing, a token scored twice or never, targets shifted by one."""
    score = perplexity(make_engine(), IDS, context=context, stride=stride)
    assert score.num_tokens == len(IDS) - 1
    assert score.nll == pytest.approx(direct(tiny_hf, IDS, context, stride) / score.num_tokens, abs=2e-5)
    assert score.perplexity == pytest.approx(math.exp(score.nll))
    assert score.bits_per_byte == pytest.approx(score.nll / math.log(2))  # this engine's tokens are bytes
    assert (score.context, score.stride) == (context, stride)


@given(st.integers(2, 200), st.integers(2, 40), st.data())
def test_every_token_is_scored_once(num_tokens: int, context: int, data: st.DataObject) -> None:
    """Gaps and overlaps at the seams of windows, and a window that nothing of is scored in."""
    stride = data.draw(st.integers(1, context - 1))
    scored: list[int] = []
    for start, stop, first in windows(num_tokens, context, stride):
        assert 0 <= start < first < stop <= min(start + context, num_tokens)
        scored += range(first, stop)
    assert scored == list(range(1, num_tokens))


def test_what_cannot_be_scored_is_refused(make_engine: Callable[..., Engine]) -> None:
    """A perplexity of one token, of windows that the model has no positions for, or of NaN."""
    engine = make_engine()
    with pytest.raises(RequestError, match="1 tokens"):
        perplexity(engine, [5])
    for context, stride in ((33, 16), (16, 16), (1, 0)):
        with pytest.raises(RequestError, match="windows"):
            perplexity(engine, IDS, context=context, stride=stride)
    with torch.no_grad():
        engine.model.lm_head.weight[0, 0] = math.nan
    with pytest.raises(NumericsError):
        perplexity(engine, IDS)
