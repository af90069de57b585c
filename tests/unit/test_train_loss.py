"""The loss over chunks of tokens, rounding, scaling, schedules: the parts under the loop."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bluejay.config import OptimizerConfig, ScheduleConfig
from bluejay.train import (
    IGNORED,
    LossScaler,
    Updater,
    Weights,
    attend_in_tiles,
    linear_cross_entropy,
    round_stochastically,
    schedule_factor,
)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [3, 4, 1024])
def test_loss_and_gradients_equal_torch(smoothing: float, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a chunk that is left out or counted twice, a lost bias gradient, and a scale that is applied twice."""
    import bluejay.train.loss as module

    monkeypatch.setattr(module, "CHUNK_TOKENS", chunk)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*s, generator=generator, dtype=torch.float32) for s in ((11, 6), (13, 6)))
    bias = torch.randn(13, generator=generator)
    targets = torch.randint(0, 13, (11,), generator=generator)
    targets[[0, 4, 10]] = IGNORED
    ours = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    theirs = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    scale = torch.tensor(0.37)
    scaled, total = linear_cross_entropy(*ours, targets, scale, smoothing)
    (2 * scaled).backward()
    logits = F.linear(*theirs)
    F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing).mul(0.74).backward()
    expected = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
    torch.testing.assert_close(total, expected.detach())
    torch.testing.assert_close(scaled.detach(), expected.detach() * 0.37)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_tiles_are_attention(masked: bool) -> None:
    """Catches a tile that sees a key after its query, one that misses its last, and the short tile at the end."""
    generator = torch.Generator().manual_seed(0)
    ours = [torch.randn(2, 3, 300, 8, generator=generator).requires_grad_() for _ in range(3)]
    theirs = [t.detach().clone().requires_grad_() for t in ours]
    documents = torch.randint(0, 3, (2, 300), generator=generator).sort(1).values
    seen = (documents[:, None, :, None] == documents[:, None, None, :]) & torch.ones(300, 300, dtype=torch.bool).tril()
    mask = seen if masked else None
    weights = torch.randn(2, 3, 300, 8, generator=generator)
    got = attend_in_tiles(*ours, attn_mask=mask, is_causal=not masked, dropout_p=0.0)
    expected = F.scaled_dot_product_attention(*theirs, attn_mask=mask, is_causal=not masked)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-4)


def test_nothing_to_learn_gives_zero_and_not_nan() -> None:
    """B-35: the mean over no targets is nan; a sum over none is 0, and so are its gradients."""
    hidden, weight = torch.randn(4, 6).requires_grad_(), torch.randn(9, 6).requires_grad_()
    scaled, total = linear_cross_entropy(hidden, weight, None, torch.full((4,), IGNORED), torch.tensor(1.0))
    scaled.backward()
    assert (float(total.detach()), float(hidden.grad.abs().max()), float(weight.grad.abs().max())) == (0.0, 0.0, 0.0)  # type: ignore[union-attr]


def test_gradients_of_fp16_survive_a_large_batch() -> None:
    """Catches a scale that comes after the cast: 1e-6 / 8192 is 0 in fp16, 65536 times that is not."""
    hidden = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).half().requires_grad_()
    weight = torch.randn(9, 6, generator=torch.Generator().manual_seed(1)).half()
    for loss_scale, is_zero in ((1.0, True), (2.0**30, False)):
        hidden.grad = None
        scale = torch.tensor(loss_scale / 2**33)
        linear_cross_entropy(hidden, weight, None, torch.tensor([1, 2, 3, 4]), scale)[0].backward()
        assert bool((hidden.grad == 0).all()) is is_zero


def test_rounding_is_right_on_average() -> None:
    """B-38: 1 minus 6e-4, a hundred times, stays 1 in bf16 when rounded to the nearest; on average it must be 0.94."""
    x = torch.ones(4096, dtype=torch.bfloat16)
    nearest = x.clone()
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        x = round_stochastically(x.float() - 6e-4, generator)
        nearest = (nearest.float() - 6e-4).to(torch.bfloat16)
    assert (nearest == 1).all()
    assert abs(float(x.float().mean()) - 0.94) < 2e-3


@given(value=st.floats(-(2.0**99), 2.0**99, allow_nan=False, width=32))
def test_rounding_gives_a_neighbor(value: float) -> None:
    """Catches noise in the wrong bits: the result is one of the two bf16 numbers around x, and x itself where exact."""
    x = torch.full((64,), value, dtype=torch.float32)
    got = round_stochastically(x, torch.Generator().manual_seed(1)).float()
    cut = (x.view(torch.int32) & ~0xFFFF).view(torch.float32)
    step = ((cut.view(torch.int32) + 0x10000).view(torch.float32) - cut).abs()
    assert ((got == cut) | ((got - cut).abs() == step)).all()
    exact = cut == x
    assert (got[exact] == x[exact]).all()


def test_rounding_keeps_what_is_not_a_number() -> None:
    """Catches noise that turns infinity into NaN or a number."""
    got = round_stochastically(torch.tensor([math.inf, -math.inf, math.nan]))
    assert got[0] == math.inf
    assert got[1] == -math.inf
    assert got[2].isnan()


def test_the_loss_scale_falls_at_once_and_rises_slowly() -> None:
    """Catches a skip that is not counted and a scale that never comes back."""
    scaler = LossScaler(1024.0)
    scaler.update(overflowed=True)
    assert (scaler.scale, scaler.num_skipped) == (512.0, 1)
    for _ in range(LossScaler.GROWTH_INTERVAL):
        scaler.update(overflowed=False)
    assert (scaler.scale, scaler.num_skipped) == (1024.0, 1)
    other = LossScaler(1.0)
    other.load(scaler.state())
    assert other.state() == scaler.state()


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (ScheduleConfig("linear", warmup=2, decay=1.0), [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        (ScheduleConfig("linear", warmup=0, decay=0.5, floor=0.1), [1.0, 1.0, 1.0, 1.0, 0.7, 0.4]),
        (ScheduleConfig("constant", warmup=3), [1 / 3, 2 / 3, 1.0, 1.0, 1.0, 1.0]),
        (ScheduleConfig("cosine", warmup=2), [0.5, 1.0, 1.0, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5]),
    ],
)
def test_schedules(schedule: ScheduleConfig, factors: list[float]) -> None:
    """Catches a first update with rate 0, a decay that ends early, and a warm-up counted in micro-batches."""
    got = [schedule_factor(update, 6, schedule) for update in range(6)]
    assert got == pytest.approx(factors)


@given(
    warmup=st.integers(0, 30),
    total=st.integers(1, 60),
    decay=st.floats(0, 1),
    floor=st.floats(0, 1),
    name=st.sampled_from(["linear", "cosine", "constant"]),
)
def test_schedules_never_leave_their_range(warmup: int, total: int, decay: float, floor: float, name: str) -> None:
    """Catches a negative or growing rate for any length of run, a warm-up longer than the run included."""
    schedule = ScheduleConfig(name, warmup, decay, floor)  # type: ignore[arg-type]
    factors = [schedule_factor(update, total, schedule) for update in range(total)]
    assert all(0 < f <= 1 or (f == 0 == floor) for f in factors)
    after = factors[warmup:]
    assert after == sorted(after, reverse=True)


def updater_of(config: OptimizerConfig, rows: int = 8, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Updater]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"h": nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4)]), "wte": nn.Embedding(5, 4)})
    model = nn.ModuleDict({"transformer": model})
    weights = Weights(model, dtype, masters=True)
    for one in weights:
        one.parameter.grad = torch.zeros_like(one.parameter)
    return model, Updater(weights, config, rows, seed=0)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_decay_is_for_matrices_only(name: str) -> None:
    """Catches norms and biases that shrink, and decay that goes through the gradient: with none it is 1 - lr w."""
    config = OptimizerConfig(name, 0.1, weight_decay=0.5, muon_learning_rate=0.2, muon_weight_decay=0.25)  # type: ignore[arg-type]
    model, updater = updater_of(config)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    updater.step(0, 1.0)
    for n, p in model.named_parameters():
        factor = 0.95 if p.dim() > 1 else 1.0
        torch.testing.assert_close(p.detach(), before[n] * factor)


def test_the_rate_scales_with_the_global_batch() -> None:
    """Catches a scaling that goes by the micro-batch, or that is on without being asked for."""
    for reference, expected in ((0, 0.1), (4, 0.2), (16, 0.05)):
        updater = updater_of(OptimizerConfig(learning_rate=0.1, reference_batch=reference), rows=8)[1]
        updater.step(0, 1.0)
        assert updater.learning_rate == pytest.approx(expected)
