"""The cost formulas against the model itself: counted parameters, and the FLOPs that torch counts while it runs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bluejay.config import ModelConfig, preset
from bluejay.models import GPTJ, KVCache, costs

ODD_INNER = {"n_inner": 40}
TIED = {"tie_word_embeddings": True}


def on_meta(config: ModelConfig) -> GPTJ:
    with torch.device("meta"):
        return GPTJ(config)


def counted_flops(model: GPTJ, new: int, past: int, config: ModelConfig, last: bool) -> int:
    ids = torch.zeros(1, new, dtype=torch.int64)
    cache = None
    if past:
        cache = KVCache(config, num_rows=1, num_slots=past + new)
        cache.lengths.fill_(past)
    # The math kernel is made of plain matrix products, which every release of torch counts.
    with (
        torch.no_grad(),
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        FlopCounterMode(display=False) as counter,
    ):
        model(ids, cache=cache, last=torch.tensor([new - 1]) if last else None)
    return counter.get_total_flops()


@pytest.mark.parametrize("change", [{}, ODD_INNER, TIED])
def test_parameters_are_those_of_the_model(tiny_config: ModelConfig, change: dict[str, object]) -> None:
    """Catches a forgotten bias, a norm counted once, n_inner taken as 4 * n_embd, a tied head counted twice."""
    config = dataclasses.replace(tiny_config, **change)
    counted = sum(p.numel() for p in on_meta(config).parameters())  # parameters() yields a shared one once
    assert costs.num_parameters(config) == counted


def test_6b_has_the_known_number_of_parameters() -> None:
    """Catches a wrong 6B preset. The often quoted 6,053,381,344 counts what is replicated over 8 TPU shards 8 times."""
    config = preset("gptj-6b")
    assert costs.num_parameters(config) == 6_050_882_784 == sum(p.numel() for p in on_meta(config).parameters())
    per_shard_copies = config.n_layer * 3 * config.n_embd + 2 * config.n_embd  # norms and the bias after reduction
    embedding_bias = config.n_embd  # in the original code only, zero in every release
    assert costs.num_parameters(config) + 7 * per_shard_copies + 8 * embedding_bias == 6_053_381_344


@pytest.mark.parametrize("change", [{}, ODD_INNER])
@pytest.mark.parametrize(("new", "past", "last"), [(9, 0, False), (9, 0, True), (1, 12, True), (5, 8, True)])
def test_flops_are_those_torch_counts(
    tiny_config: ModelConfig, change: dict[str, object], new: int, past: int, last: bool
) -> None:
    """Catches a matrix left out, multiply-adds counted as one, attention over the new tokens only, a head per token."""
    config = dataclasses.replace(tiny_config, **change)
    counted = counted_flops(GPTJ(config).eval(), new, past, config, last)
    assert costs.prefill_flops(config, new, past, num_logits=1 if last else new) == counted


def test_decode_is_a_prefill_of_one(tiny_config: ModelConfig) -> None:
    """Catches a context counted without the new token."""
    assert costs.decode_flops(tiny_config, context=13) == costs.prefill_flops(tiny_config, num_tokens=1, past=12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cache_bytes_are_those_of_the_cache(tiny_config: ModelConfig, dtype: torch.dtype) -> None:
    """Catches keys without values, one layer, or a fixed element size."""
    num_slots = 16
    cache = KVCache(tiny_config, num_rows=1, num_slots=num_slots, dtype=dtype)
    with_padding_slot = num_slots + 1
    assert costs.kv_bytes_per_token(tiny_config, dtype.itemsize) * with_padding_slot == cache.num_bytes
    assert costs.kv_bytes_read_per_decoded_token(tiny_config, 10, dtype.itemsize) == cache.num_bytes / 17 * 10


def test_bytes_read_when_decoding(tiny_config: ModelConfig) -> None:
    """Catches an embedding counted as read (a twentieth of 6B), and weights read once per row instead of per step."""
    embedding = tiny_config.vocab_size * tiny_config.n_embd
    total = costs.num_parameters(tiny_config)
    assert costs.weight_bytes(tiny_config, 2) == 2 * total
    assert costs.weight_bytes_read_per_decoded_token(tiny_config, 2) == 2 * (total - embedding + tiny_config.n_embd)
    many = costs.weight_bytes_read_per_decoded_token(tiny_config, 2, batch=8)
    assert many == 2 * ((total - embedding) / 8 + tiny_config.n_embd)
    tied = dataclasses.replace(tiny_config, tie_word_embeddings=True)
    assert costs.weight_bytes_read_per_decoded_token(tied, 2) >= 2 * costs.num_parameters(tied)


def test_floor_of_a_decode_step(tiny_config: ModelConfig) -> None:
    """Catches a floor per token given as one per step: 8 rows read the weights once and 8 caches."""
    one = costs.decode_seconds_floor(tiny_config, 20, 4, read_bytes_per_second=1e9)
    eight = costs.decode_seconds_floor(tiny_config, 20, 4, read_bytes_per_second=1e9, batch=8)
    cache = costs.kv_bytes_read_per_decoded_token(tiny_config, 20, 4) + tiny_config.n_embd * 4
    assert eight - one == pytest.approx(7 * cache / 1e9)
