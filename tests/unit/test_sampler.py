"""The sampler against its definition, against transformers' processors, and its random numbers against chance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from bluejay.generate import BAD_LOGITS, Sampling, rank_tokens, sample, sub_seed, uniform
from bluejay.generate import sampler as sampler_module

LARGEST_SEED = 2**63 - 1


def sampling(rows: int, **values: Any) -> Sampling:
    """Parameters of `rows` rows: everything off, temperature 1, seeds 0 to rows - 1; `values` are scalars or rows."""
    defaults: dict[str, tuple[Any, torch.dtype]] = {
        "temperature": (1.0, torch.float32),
        "top_k": (0, torch.int64),
        "top_p": (1.0, torch.float32),
        "min_p": (0.0, torch.float32),
        "repetition_penalty": (1.0, torch.float32),
        "seed": (list(range(rows)), torch.int64),
        "min_new": (0, torch.int64),
        "stop_ids": ([[-1, -1]] * rows, torch.int64),
        "beam": (False, torch.bool),
    }
    tensors = {}
    for name, (default, dtype) in defaults.items():
        tensor = torch.as_tensor(values.get(name, default), dtype=dtype)
        tensors[name] = tensor.expand(rows).clone() if tensor.dim() == 0 else tensor
    return Sampling(**tensors)


def draw(logits: Tensor, parameters: Sampling, step: int = 0, greedy: bool = False) -> Tensor:
    """Tokens of [B, V] logits with nothing seen; a single row of logits [V] is shared by all rows."""
    rows = len(parameters.seed)
    logits = logits.expand(rows, -1)
    seen = torch.zeros(logits.shape, dtype=torch.bool)
    return sample(logits, seen, torch.full((rows,), step), parameters, greedy=greedy)


def gaussian(*shape: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


# ---- always a valid token ------------------------------------------------------------------------------------------

half = st.floats(-6e4, 6e4, width=16)


@settings(max_examples=300, deadline=None)
@given(
    logits=st.lists(half, min_size=1, max_size=12) | st.lists(st.sampled_from([-6e4, 0.0, 6e4]), min_size=1),
    temperature=st.sampled_from([0.0, 1e-40, 1e-6, 1e-4, 1.0, 1e3]),
    top_p=st.sampled_from([0.0, 1e-9, 0.5, 1.0]),
    top_k=st.sampled_from([0, 1, 5, 1000]),
    min_p=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, LARGEST_SEED),
    step=st.integers(0, 2**31),
)
def test_a_valid_token_always(
    logits: list[float], temperature: float, top_p: float, top_k: int, min_p: float, seed: int, step: int
) -> None:
    """B-25: 0/0 at temperature 0, overflow at tiny ones, nobody left at top_p 0, top_k beyond the vocabulary."""
    row = torch.tensor([logits], dtype=torch.float16)
    parameters = sampling(1, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=[seed])
    token = int(draw(row, parameters, step))
    assert 0 <= token < len(logits)
    if temperature == 0 or top_p == 0:
        assert token == logits.index(max(logits))
    elif top_k == 1 or min_p == 1:
        assert logits[token] == max(logits)  # equally likely tokens all survive


@pytest.mark.parametrize("greedy", [False, True])
def test_ties_go_to_the_first_token(greedy: bool) -> None:
    """The two greedy paths may not differ on equal logits: a batch with one sampling neighbor takes the other path."""
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0], [5.0, 5.0, 0.0, 5.0], [2.0, 2.0, 2.0, 2.0]]).repeat(1, 300)
    assert draw(logits, sampling(3, temperature=0.0), greedy=greedy).tolist() == [1, 0, 0]


def test_greedy_equals_temperature_zero() -> None:
    """The path without a sort applies the same penalty and the same ban as the one with it."""
    logits = gaussian(64, 50)
    seen = gaussian(64, 50, seed=1) > 0
    step = torch.arange(64) % 4
    stop_ids = torch.stack([logits.argmax(-1), torch.full((64,), -1)], dim=1)
    parameters = sampling(64, temperature=0.0, repetition_penalty=1.7, min_new=2, stop_ids=stop_ids)
    sorted_path = sample(logits, seen, step, parameters)
    assert torch.equal(sorted_path, sample(logits, seen, step, parameters, greedy=True))
    assert not torch.equal(sorted_path, logits.argmax(-1))


# ---- the same distribution as transformers -------------------------------------------------------------------------

NUM_QUANTILES = 4096


def distribution(logits: Tensor, monkeypatch: pytest.MonkeyPatch, **parameters: Any) -> Tensor:
    """Probabilities that the sampler gives each token of [V], by drawing every quantile."""
    quantiles = (torch.arange(NUM_QUANTILES).double() + 0.5) / NUM_QUANTILES
    with monkeypatch.context() as patch:
        patch.setattr(sampler_module, "uniform", lambda seed, step: quantiles)
        tokens = draw(logits, sampling(NUM_QUANTILES, **parameters))
    return tokens.bincount(minlength=len(logits)) / NUM_QUANTILES


def expected_distribution(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """transformers' warpers, in the order in which it applies them."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    warpers += [TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)]
    return warpers(torch.zeros(1, 1, dtype=torch.int64), logits[None])[0].softmax(-1)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.9])
@pytest.mark.parametrize("top_k", [0, 1, 5, 99])
@pytest.mark.parametrize("top_p", [0.0, 0.2, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 0.4, 1.0])
def test_distribution_equals_transformers(
    monkeypatch: pytest.MonkeyPatch, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Order of the filters, boundary tokens kept or dropped, renormalization: each moves a token in or out, or mass."""
    for seed in range(3):
        logits = gaussian(24, seed=seed)
        ours = distribution(logits, monkeypatch, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        theirs = expected_distribution(logits, temperature, top_k, top_p, min_p)
        assert not ours[theirs == 0].any()
        assert ours[theirs > 2 / NUM_QUANTILES].all()
        torch.testing.assert_close(ours, theirs, atol=1.5 / NUM_QUANTILES, rtol=0)


@pytest.mark.parametrize("top_k", [1, 3, 4])
def test_equal_logits_at_the_edge_of_top_k(monkeypatch: pytest.MonkeyPatch, top_k: int) -> None:
    """A token as likely as the k-th stays in, as in transformers; dropping by rank would depend on the sort."""
    logits = torch.tensor([0.0, 2.0, 1.0, 1.0, 2.0, 1.0, -3.0])
    ours = distribution(logits, monkeypatch, top_k=top_k)
    theirs = expected_distribution(logits, 1.0, top_k, 1.0, 0.0)
    assert torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours, theirs, atol=1.5 / NUM_QUANTILES, rtol=0)


@pytest.mark.parametrize("top_p", [0.125, 0.25, 0.5, 0.75, 1.0])
def test_the_edge_of_top_p(monkeypatch: pytest.MonkeyPatch, top_p: float) -> None:
    """Eight equally likely tokens: once exactly top_p of the probability is in, the next token stays out."""
    logits = torch.zeros(8)
    ours, theirs = distribution(logits, monkeypatch, top_p=top_p), expected_distribution(logits, 1.0, 0, top_p, 0.0)
    assert (ours > 0).sum() == (theirs > 0).sum() == top_p * 8


@pytest.mark.parametrize("shift", [-50_000.0, 50_000.0])
def test_large_logits_keep_their_distribution(monkeypatch: pytest.MonkeyPatch, shift: float) -> None:
    """B-25: exp overflows, or all weights underflow, unless the best score is subtracted first."""
    logits = torch.tensor([0.0, 1.0, 0.5, 1.5, -1.0]) + shift
    ours = distribution(logits, monkeypatch, temperature=0.75)
    torch.testing.assert_close(ours, (logits / 0.75).softmax(-1), atol=1.5 / NUM_QUANTILES, rtol=1e-2)


def test_seeds_draw_from_the_distribution() -> None:
    """The same without a patched random number: 40,000 seeds, chi-square over 16 tokens."""
    logits = gaussian(16, scale=1.0)
    expected = expected_distribution(logits, 0.8, 12, 0.95, 0.02) * 40_000
    counts = draw(logits, sampling(40_000, temperature=0.8, top_k=12, top_p=0.95, min_p=0.02)).bincount(minlength=16)
    kept = expected > 0
    assert not counts[~kept].any()
    # 9 or more degrees of freedom: a right sampler exceeds 45 once in a million times; the draws are fixed anyway.
    assert ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum() < 45


@settings(max_examples=50, deadline=None)
@given(penalty=st.sampled_from([0.5, 1.0, 1.3, 5.0]), seed=st.integers(0, 1000))
def test_repetition_penalty_equals_transformers(penalty: float, seed: int) -> None:
    """Dividing negative scores makes repeated tokens likelier; a token seen twice is penalized once."""
    logits = gaussian(3, 30, seed=seed)
    logits[:, 0] = 0.0
    ids = torch.randint(30, (3, 20), generator=torch.Generator().manual_seed(seed))
    seen = torch.zeros(3, 30, dtype=torch.bool).scatter(1, ids, True)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
    ours = sampler_module.process(logits, seen, torch.zeros(3), sampling(3, repetition_penalty=penalty))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("step", [0, 2, 3, 4])
def test_ban_on_ending_equals_transformers(step: int) -> None:
    """Off by one in min_new; the padding id -1 taken for the last token; only the first of several stop ids banned."""
    logits = gaussian(1, 10)
    processor = MinNewTokensLengthLogitsProcessor(5, 3, [4, 9], device="cpu")
    theirs = processor(torch.zeros(1, 5 + step, dtype=torch.int64), logits.clone())
    parameters = sampling(1, min_new=3, stop_ids=[[4, -1, 9, -1]])
    seen = torch.zeros(1, 10, dtype=torch.bool)
    assert torch.equal(sampler_module.process(logits, seen, torch.tensor([step]), parameters), theirs)


@pytest.mark.parametrize("temperature", [1e-4, 1.0, 1e3])
def test_a_banned_token_is_never_drawn(temperature: float) -> None:
    """Minus infinity must survive every filter, also when it was the likeliest token and when heat flattens all."""
    logits = torch.tensor([9.0, 1.0, 0.0, -1.0])
    parameters = sampling(5000, temperature=temperature, min_new=1, stop_ids=[[0, 3]] * 5000)
    drawn = set(draw(logits, parameters).tolist())
    assert drawn == ({1} if temperature < 1 else {1, 2})


# ---- rows are independent ------------------------------------------------------------------------------------------


def test_a_row_does_not_depend_on_its_neighbors() -> None:
    """A parameter, seed or sort of one row leaking into another; a row's number taken as its seed."""
    generator = torch.Generator().manual_seed(0)
    rows = 40
    logits = gaussian(rows, 30)
    seen = gaussian(rows, 30, seed=1) > 1
    step = torch.randint(100, (rows,), generator=generator)
    parameters = sampling(
        rows,
        temperature=torch.tensor([0.0, 0.5, 1.0, 2.0]).repeat(10),
        top_k=torch.tensor([0, 3, 7, 1, 50]).repeat(8),
        top_p=torch.rand(rows, generator=generator),
        min_p=torch.rand(rows, generator=generator) / 4,
        repetition_penalty=1 + torch.rand(rows, generator=generator),
        seed=torch.randint(LARGEST_SEED, (rows,), generator=generator),
    )
    together = sample(logits, seen, step, parameters)
    order = torch.randperm(rows, generator=generator)
    permuted = sample(logits[order], seen[order], step[order], Sampling(*[p[order] for p in parameters]))
    assert torch.equal(permuted, together[order])
    for i in range(rows):
        one = slice(i, i + 1)
        alone = sample(logits[one], seen[one], step[one], Sampling(*[p[one] for p in parameters]))
        assert alone[0] == together[i]


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_not_numbers(bad: float, greedy: bool) -> None:
    """NaN logits drawn as token 0 ("!!!!"), or spoiling the good rows beside them."""
    logits = gaussian(3, 20)
    parameters = sampling(3, temperature=0.0 if greedy else 1.0)
    good = draw(logits, parameters, greedy=greedy)
    logits[1, 7] = bad
    assert draw(logits, parameters, greedy=greedy).tolist() == [good[0], BAD_LOGITS, good[2]]


def test_ranked_tokens_are_those_of_the_model() -> None:
    """Log-probabilities after temperature, penalty or filters instead of before; those of a neighboring token."""
    logits = gaussian(4, 30).half()
    seen = torch.ones(4, 30, dtype=torch.bool)
    chosen = torch.tensor([3, 29, 0, BAD_LOGITS])
    parameters = sampling(
        4, temperature=0.2, top_k=2, repetition_penalty=3.0, min_new=5, stop_ids=[[1, 2]] * 4, beam=[False] * 3 + [True]
    )
    logprobs, values, tokens = rank_tokens(logits, chosen, seen, torch.zeros(4), parameters, 6)
    direct = logits.float().log_softmax(-1)
    top = direct.topk(6)
    torch.testing.assert_close(logprobs[:3], direct[[0, 1, 2], chosen[:3]])
    torch.testing.assert_close(values[:3], top.values[:3])
    assert torch.equal(tokens[:3], top.indices[:3])
    # A beam ranks processed log-probabilities: negative ones times the penalty, and no end of text yet.
    processed = (direct[3] * 3.0).index_fill(0, torch.tensor([1, 2]), -torch.inf).topk(6)
    torch.testing.assert_close(values[3], processed.values)
    assert torch.equal(tokens[3], processed.indices)


# ---- random numbers ------------------------------------------------------------------------------------------------

NUM_DRAWS = 100_000
COUNT = torch.arange(NUM_DRAWS)
ZERO = torch.zeros(NUM_DRAWS, dtype=torch.int64)
STREAMS = {
    "seeds": (COUNT, ZERO),
    "seeds at step 1000": (COUNT, ZERO + 1000),
    "high seeds": (COUNT << 32, ZERO),
    "largest seeds": (LARGEST_SEED - COUNT, ZERO + 7),
    "steps": (ZERO, COUNT),
    "steps of another seed": (ZERO + 123456789012345, COUNT),
    "seed and step together": (COUNT, COUNT),
}


def chi_square(values: Tensor, num_bins: int) -> float:
    counts = values.bincount(minlength=num_bins).double()
    expected = len(values) / num_bins
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("stream", STREAMS)
def test_uniform_numbers_look_like_chance(stream: str) -> None:
    """A weak hash: bins that fill unevenly, at the top or in the last bits, and neighbors that move together."""
    numbers = uniform(*STREAMS[stream])
    assert numbers.dtype == torch.float64
    assert 0 <= numbers.min() < 1e-3
    assert 1 - 1e-3 < numbers.max() < 1
    assert abs(float(numbers.mean()) - 0.5) < 5 / (12 * NUM_DRAWS) ** 0.5
    limit = 255 + 5 * (2 * 255) ** 0.5
    assert chi_square((numbers * 256).long(), 256) < limit
    assert chi_square((numbers * 2**53).long() & 0xFF, 256) < limit
    pairs = (numbers[:-1] * 16).long() * 16 + (numbers[1:] * 16).long()  # a number and its neighbor's
    assert chi_square(pairs, 256) < limit
    for lag in (1, 2, 256):
        correlation = torch.corrcoef(torch.stack([numbers[:-lag], numbers[lag:]]))[0, 1]
        assert abs(float(correlation)) < 5 / NUM_DRAWS**0.5


def test_seed_and_step_do_not_stand_for_each_other() -> None:
    """hash(seed + step) or hash(seed ^ step): seed 1's second token would use seed 2's first number."""
    seed, step = torch.meshgrid(torch.arange(1000), torch.arange(100), indexing="ij")
    numbers = uniform(seed.flatten(), step.flatten())
    assert len(numbers.unique()) > NUM_DRAWS - 20  # 32-bit hashes of 100,000 inputs: one collision is expected


def test_sub_seeds_are_distinct() -> None:
    """Answers of a request that repeat each other, or another request's; answer 0 must be what n=1 gives."""
    seeds = [*range(100), 2**31, 2**32, 2**62, LARGEST_SEED]
    derived = {(seed, i): sub_seed(seed, i) for seed in seeds for i in range(30)}
    assert all(derived[seed, 0] == seed for seed in seeds)
    assert len(set(derived.values())) == len(derived)
    assert all(0 <= value <= LARGEST_SEED for value in derived.values())
    assert max(derived[seed, 1] for seed in range(100)) > 2**61
