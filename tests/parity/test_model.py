"""Laws 1 and 3 for the eager model: equal to transformers, and to itself however its input is cut and padded."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bluejay.config import ModelConfig
from bluejay.models import GPTJ, KVCache, Where, positions_from_mask, rotary_phases, rotate

TOLERANCE = 1e-4


def noisy(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> GPTJ:
    model = GPTJ(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.normal_(0, 0.3, generator=generator)
    return model.to(dtype)


def cache_of_nan(config: ModelConfig, rows: int, slots: int, dtype: torch.dtype = torch.float32) -> KVCache:
    cache = KVCache(config, rows, slots, dtype)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(torch.nan)
    return cache


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"n_inner": 40},
        {"activation_function": "relu"},
        {"activation_function": "gelu"},
        {"activation_function": "silu"},
        {"layer_norm_epsilon": 0.1},
        {"rotary_dim": 16},
        {"n_head": 4, "rotary_dim": 2},
        {"tie_word_embeddings": True},
        {"n_layer": 3, "n_embd": 48, "n_head": 3, "vocab_size": 65},
    ],
    ids=str,
)
def test_logits_equal_transformers(tiny_config: ModelConfig, change: dict[str, object]) -> None:
    """Law 1; B-02, B-12, B-18: a lost bias, a size taken from 6B, half-split rotation, wrong activation or epsilon."""
    from transformers import GPTJConfig, GPTJForCausalLM

    config = replace(tiny_config, **change)
    ours = noisy(config)
    theirs = GPTJForCausalLM(GPTJConfig(**config.to_hf())).eval()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    ids = torch.randint(config.vocab_size, (3, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        difference = (ours(ids) - theirs(ids).logits).abs().max()
    assert difference < TOLERANCE


def test_gradients_equal_transformers(tiny_config: ModelConfig, tiny_model: GPTJ, tiny_hf: torch.nn.Module) -> None:
    """Law 1 backwards: a detached branch, or a bias that takes part twice, leaves the forward right."""
    theirs = copy.deepcopy(tiny_hf)
    ids = torch.randint(64, (2, 10), generator=torch.Generator().manual_seed(1))
    theirs(ids).logits.square().mean().backward()
    tiny_model(ids).square().mean().backward()
    expected = dict(theirs.named_parameters())
    for name, parameter in tiny_model.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-4, atol=1e-6, msg=name)


def test_rotation_is_interleaved() -> None:
    """B-18: pairs are (2i, 2i+1), so e0 at position 1 turns into (cos 1, sin 1, 0, ...); the rest is untouched."""
    x = torch.zeros(1, 1, 1, 8)
    x[..., 0], x[..., 6] = 1.0, 5.0
    turned = rotate(x, rotary_phases(torch.tensor([[1]]), 4))
    expected = torch.tensor([0.5403023, 0.8414710, 0, 0, 0, 0, 5.0, 0])
    torch.testing.assert_close(turned.flatten(), expected)


@pytest.mark.parametrize("convert", [torch.half, torch.bfloat16])
def test_rotary_phases_stay_exact_in_half_precision(tiny_config: ModelConfig, convert: torch.dtype) -> None:
    """B-29: a table that is cast with the weights is off by up to 2.0 at position 2047; ours within 1e-3 of fp64."""
    positions = torch.arange(2048)[None]
    exact = positions[0, :, None].double() / 10000.0 ** (torch.arange(0, 64, 2).double() / 64)
    cos, sin = rotary_phases(positions, 64)
    assert (cos[0, 0].double() - exact.cos()).abs().max() < 1e-3
    assert (sin[0, 0].double() - exact.sin()).abs().max() < 1e-3
    config = replace(tiny_config, n_positions=2048)
    model = noisy(config)
    for parameter in model.parameters():  # weights that lose nothing in half precision: what is left is the phases
        parameter.copy_(parameter.to(torch.bfloat16) / 4)
    ids = torch.randint(64, (1, 2048), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = model(ids)[0, 1800:]
        found = copy.deepcopy(model).to(convert)(ids)[0, 1800:].float()
    # A half-precision run strays by its rounding, 0.02 here; phases in bf16 move these logits by 0.3 and more.
    assert (expected - found).abs().max() < 0.06


def test_scores_do_not_overflow_in_fp16(tiny_config: ModelConfig) -> None:
    """B-27: q = k = 20 in 256 channels has a dot product of 102400, infinite in fp16. Two equal keys: half each."""
    config = replace(tiny_config, n_embd=256, n_head=1, rotary_dim=64, n_layer=1)
    model = noisy(config).half()
    attention = model.transformer.h[0].attn
    for projection in (attention.q_proj, attention.k_proj):
        projection.weight.zero_()
        projection.weight[:, 0] = 20.0
    attention.v_proj.weight.zero_()
    attention.v_proj.weight[:, 1] = 1.0
    attention.out_proj.weight.copy_(torch.eye(256))
    x = torch.zeros(1, 2, 256, dtype=torch.half)
    x[..., 0] = 1.0
    x[0, 0, 1], x[0, 1, 1] = 2.0, 4.0
    positions = torch.tensor([[0, 0]])  # equal phases, so equal keys
    where = Where(positions, *rotary_phases(positions, 64), torch.ones(1, 1, 2, 2, dtype=torch.bool))
    mixed = attention(x, where, None)
    torch.testing.assert_close(mixed, torch.full_like(mixed, 3.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cached", [False, True])
def test_padded_rows_are_finite_everywhere(tiny_config: ModelConfig, dtype: torch.dtype, cached: bool) -> None:
    """B-28: a query that may see nothing (padding, an idle row) must not give NaN, which would spread."""
    model = noisy(tiny_config, dtype=dtype)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0]])
    cache = cache_of_nan(tiny_config, 4, 32, dtype) if cached else None
    logits = model(torch.ones(4, 6, dtype=torch.int64), positions_from_mask(mask), cache)
    assert logits.isfinite().all()


def prefill_in_chunks(model: GPTJ, cache: KVCache, rows: list[Tensor], cuts: list[int], left: bool) -> list[Tensor]:
    """Feed ragged rows chunk by chunk, each chunk padded to its longest row; returns each row's logits."""
    logits: list[list[Tensor]] = [[] for _ in rows]
    start = 0
    for size in cuts:
        parts = [row[start : start + size] for row in rows]
        width = max(map(len, parts)) + 2  # a bucket is usually larger than what fills it
        ids = torch.zeros(len(rows), width, dtype=torch.int64)
        mask = torch.zeros(len(rows), width, dtype=torch.int64)
        for i, part in enumerate(parts):
            place = slice(width - len(part), width) if left else slice(0, len(part))
            ids[i, place], mask[i, place] = part, 1
        positions = positions_from_mask(mask)
        positions[positions >= 0] += start
        out = model(ids, positions, cache)
        for i in range(len(rows)):
            logits[i].append(out[i][mask[i] == 1])
        start += size
    return [torch.cat(parts) for parts in logits]


@settings(max_examples=25, deadline=None)
@given(data=st.data(), left=st.booleans(), slots=st.sampled_from([20, 32]))
def test_any_chunking_and_padding_equals_the_full_forward(data: st.DataObject, left: bool, slots: int) -> None:
    """Law 3; B-19, B-21, B-22: unused slots hold NaN; any cut, side of padding and cache size gives the same logits."""
    config = ModelConfig(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, rotary_dim=8)
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
    cuts = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=20).filter(lambda c: sum(c) >= max(lengths)))
    model = noisy(config)
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(64, (n,), generator=generator) for n in lengths]
    with torch.no_grad():
        found = prefill_in_chunks(model, cache_of_nan(config, len(rows), slots), rows, cuts, left)
        for row, logits in zip(rows, found, strict=True):
            assert (logits - model(row[None])[0]).abs().max() < TOLERANCE


def test_cache_is_exact_in_fp64(tiny_config: ModelConfig) -> None:
    """B-21: in fp64 cached and uncached logits agree to 1e-10, which separates rounding from logic."""
    model = noisy(tiny_config, dtype=torch.float64)
    ids = torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(4))
    cache = cache_of_nan(tiny_config, 2, 32, torch.float64)
    # Phases are fp32 by design on both sides, so they cancel.
    steps = [model(ids[:, :7], cache=cache)] + [model(ids[:, i : i + 1], cache=cache) for i in range(7, 20)]
    assert (torch.cat(steps, 1) - model(ids)).abs().max() < 1e-10


def test_reset_and_copied_rows_start_clean(tiny_config: ModelConfig, tiny_model: GPTJ) -> None:
    """B-68's class: a row that held another text, or NaN, answers as a fresh one; a copied row as its source."""
    cache = cache_of_nan(tiny_config, 3, 32)
    ids = torch.randint(64, (3, 9), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        tiny_model(torch.flip(ids, [1]).repeat(1, 2), cache=cache)
        for tensor in (*cache.keys, *cache.values):
            tensor[1].fill_(torch.nan)
        cache.reset()
        expected = tiny_model(ids)
        torch.testing.assert_close(tiny_model(ids, cache=cache), expected, atol=TOLERANCE, rtol=0)
        cache.copy_rows([0, 1], [1, 0])  # rows trade places
        swapped = tiny_model(ids[:, :1], cache=cache)
        full = tiny_model(torch.cat([ids[[1, 0, 2]], ids[:, :1]], 1))
        torch.testing.assert_close(swapped, full[:, -1:], atol=TOLERANCE, rtol=0)


def test_positions_follow_each_rows_own_length(tiny_config: ModelConfig, tiny_model: GPTJ) -> None:
    """Rule 5(c): without given positions, a row goes on from its own length, not from the batch's longest."""
    rows = [torch.arange(1, 4), torch.arange(5, 14)]
    cache = cache_of_nan(tiny_config, 2, 32)
    with torch.no_grad():
        prefill_in_chunks(tiny_model, cache, rows, [9], left=False)
        found = tiny_model(torch.tensor([[20], [21]]), cache=cache)
        for row, token, logits in zip(rows, (20, 21), found, strict=True):
            expected = tiny_model(torch.cat([row, torch.tensor([token])])[None])[0, -1]
            assert (logits[0] - expected).abs().max() < TOLERANCE


def test_last_selects_each_rows_own_token(tiny_model: GPTJ) -> None:
    """B-19(b): reading the logit of a padding slot of a right-padded row."""
    ids = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        last = tiny_model(ids, last=torch.tensor([3, 7]))
        full = tiny_model(ids)
    torch.testing.assert_close(last, torch.stack([full[0, 3], full[1, 7]]), atol=1e-5, rtol=0)


def test_untied_weights_do_not_share_storage(tiny_config: ModelConfig) -> None:
    """B-08: GPT-J is untied unless its config says otherwise."""
    untied, tied = GPTJ(tiny_config), GPTJ(replace(tiny_config, tie_word_embeddings=True))
    assert untied.lm_head.weight.data_ptr() != untied.transformer.wte.weight.data_ptr()
    assert tied.lm_head.weight is tied.transformer.wte.weight
