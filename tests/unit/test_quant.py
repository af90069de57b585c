"""Pure group quantization: the bound on every element, the packed layout bit by bit, and cutting."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from bluejay.config import QuantSpec
from bluejay.errors import CheckpointError, ConfigError
from bluejay.quant import PackedWeight, QuantizedLinear, dequantize, pack, quantize, quantize_model, unpack

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GROUPS = (16, 24, 32, 64, 128, 256, -1)


def errors(weight: Tensor, group_size: int, method: str = "minmax") -> tuple[Tensor, Tensor]:
    """|w - deq(w)| and scale / 2 of each element, in fp64."""
    codes, scales, biases = quantize(weight, group_size, method)
    width = weight.shape[1] if group_size == -1 else group_size
    step = scales.double().repeat_interleave(width, 1)[:, : weight.shape[1]]
    return (weight.double() - dequantize(codes, scales, biases, group_size, torch.float64)).abs(), step / 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_element_is_within_half_a_step(dtype: torch.dtype) -> None:
    """Scales rounded down to fp16 so that the extremes fall outside, ties to the farther side, ranges without 0: over
    10,000 groups of all magnitudes, with outliers of 1e4 (law 5, B-44)."""
    generator = torch.Generator().manual_seed(1)
    groups = torch.randn(10_000, 32, generator=generator)
    groups *= 10.0 ** torch.randint(-8, 4, (10_000, 1), generator=generator)
    groups[:2000] = groups[:2000].abs()
    groups[2000:4000] = -groups[2000:4000].abs()
    groups[4000:6000, 3] = 1e4
    groups[5000:6000, 4] = -1e4
    groups[6000:6100] = groups[6000:6100, :1]
    groups = groups.clamp(-65504, 65504).to(dtype)
    error, half = errors(groups, 32)
    assert bool((error <= half).all())
    assert bool(half.isfinite().all())


def test_next_to_the_middle_of_two_codes() -> None:
    """Codes computed in fp32, where a weight just beyond the middle is taken for the middle, and then for the farther
    code. A step of the smallest kind is enough to break the bound."""
    generator = torch.Generator().manual_seed(4)
    extremes = torch.randn(500, 2, generator=generator).sort(dim=1).values * torch.tensor([3.0, 1.0])
    _, scales, biases = quantize(extremes, -1)
    middles = (biases.double() + scales.double() * (torch.arange(15) + 0.5)).float()
    below, above = (torch.nextafter(middles, torch.tensor(side)) for side in (-math.inf, math.inf))
    groups = torch.cat((extremes, middles, below, above), dim=1)
    groups = groups.clamp(extremes[:, :1], extremes[:, 1:])  # the range, and so scale and bias, stays
    error, half = errors(groups, -1)
    assert bool((error <= half).all())


@settings(max_examples=60)
@given(st.lists(st.floats(-65280, 65280, width=32), min_size=16, max_size=40), st.sampled_from(DTYPES))
def test_the_bound_holds_for_any_numbers(values: list[float], dtype: torch.dtype) -> None:
    """The same for what nobody thought of: subnormal numbers, ranges of twice fp16's largest number."""
    weight = torch.tensor([values]).to(dtype)
    error, half = errors(weight, 16)
    assert bool((error <= half).all())


def test_a_range_always_includes_zero() -> None:
    """The numbers of B-44: a one-signed group whose zero point was clipped came back as [0.2, 0.2]."""
    codes, scales, biases = quantize(torch.tensor([[0.5, 0.7]]), -1)
    assert dequantize(codes, scales, biases, -1)[0].tolist() == pytest.approx([0.513, 0.700], abs=1e-3)
    assert scales.item() == pytest.approx(0.0467, abs=1e-4)
    assert codes.tolist() == [[11, 15]]


def test_zeros_and_constants() -> None:
    """A division by a zero range gives NaN; a constant group loses digits that fp16 could hold (B-44)."""
    for dtype in DTYPES:
        zeros = quantize(torch.zeros(2, 32, dtype=dtype), 16)
        assert not dequantize(*zeros, 16).any()
        for value in (0.3125, -2.5):
            constant = torch.full((2, 32), value, dtype=dtype)
            assert torch.equal(dequantize(*quantize(constant, 16), 16), constant.float())
    tiny = dequantize(*quantize(torch.full((1, 16), 1e-30), 16), 16)
    assert bool(tiny.isfinite().all())


@pytest.mark.parametrize("value", [70000.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("method", ["minmax", "mse"])
def test_what_fp16_cannot_hold_is_named(value: float, method: str) -> None:
    """An infinite scale, or NaN codes, where one weight is out of range."""
    weight = torch.randn(32, 64)
    weight[17, 5] = value
    with pytest.raises(CheckpointError, match=r"h\.3\.mlp\.fc_in\.weight"):
        PackedWeight.of(weight, 32, method, name="h.3.mlp.fc_in.weight")


def test_mse_is_never_worse() -> None:
    """A clipping search that forgets the whole range: each group's squared error is at most that of minmax."""
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    weight[3, 7] = 30.0
    for group_size in (16, 64, -1):
        plain, searched = (
            errors(weight, group_size, method)[0]
            .square()
            .unflatten(1, (-1, 256 if group_size < 0 else group_size))
            .sum(-1)
            for method in ("minmax", "mse")
        )
        assert bool((searched <= plain * (1 + 1e-12)).all())
        assert float(searched.sum()) < 0.98 * float(plain.sum())


def test_layout_bit_by_bit() -> None:
    """Nibbles swapped, or outputs and inputs: the code of output 16 b + j, input 8 c + k is in word [b, c, j], from bit
    16 (k & 1) + 4 (k >> 1) on (B-45)."""
    codes = torch.zeros(40, 20, dtype=torch.uint8)
    scales, biases = torch.zeros(40, 2, dtype=torch.float16), torch.zeros(40, 2, dtype=torch.float16)
    codes[37, 13] = 9
    scales[37, 1], biases[37, 0] = 5, 7
    words, packed_scales, packed_biases = pack(codes, scales, biases)
    assert words.shape == (3, 3, 16)
    assert packed_scales.shape == packed_biases.shape == (3, 2, 16)
    assert words[2, 1, 5] == 9 << (16 * (5 & 1) + 4 * (5 >> 1))
    assert packed_scales[2, 1, 5] == 5
    assert packed_biases[2, 0, 5] == 7
    assert int(words.count_nonzero() + packed_scales.count_nonzero() + packed_biases.count_nonzero()) == 3
    row = torch.arange(8, dtype=torch.uint8).expand(16, 8)
    first = pack(row, scales[:16, :1], biases[:16, :1])[0][0, 0]
    assert [f"{int(word) & 0xFFFFFFFF:08x}" for word in first] == ["75316420"] * 16


def test_codes_by_hand() -> None:
    """A zero point off by one: codes 0 to 15 with scale 0.5 and bias -4 are -4.0 to 3.5 exactly (B-45)."""
    words = torch.zeros(1, 2, 16, dtype=torch.int32)
    words[0, 0, 0] = int("75316420", 16)
    words[0, 1, 0] = int("fdb9eca8", 16) - 2**32
    scales, biases = torch.zeros(2, 1, 1, 16, dtype=torch.float16)
    scales[0, 0, 0], biases[0, 0, 0] = 0.5, -4.0
    weight = PackedWeight(words, scales, biases, (1, 16), 16)
    assert weight.dequantize()[0].tolist() == [-4.0 + 0.5 * code for code in range(16)]


@settings(max_examples=40)
@given(st.integers(1, 50), st.integers(1, 80), st.sampled_from([8, 16, 24, -1]), st.integers(0, 2**31))
def test_unpacking_undoes_packing(num_rows: int, width: int, group_size: int, seed: int) -> None:
    """A padded row or input that shifts its neighbors; a code whose top bit is taken for a sign."""
    generator = torch.Generator().manual_seed(seed)
    groups = 1 if group_size == -1 else -(-width // group_size)
    codes = torch.randint(0, 16, (num_rows, width), generator=generator, dtype=torch.uint8)
    scales, biases = torch.randn(2, num_rows, groups, generator=generator).half()
    packed = pack(codes, scales, biases)
    assert packed[0].shape == (-(-num_rows // 16), -(-width // 8), 16)
    for got, want in zip(unpack(*packed, (num_rows, width)), (codes, scales, biases), strict=True):
        assert torch.equal(got, want)
    layout = PackedWeight.layout((num_rows, width), group_size)
    assert [(tuple(t.shape), t.dtype) for t in packed] == list(layout.values())


@pytest.mark.parametrize("group_size", [16, 32, -1])
def test_any_input_width(group_size: int) -> None:
    """A group that does not divide the input: the last one is short and has a range of its own (B-42)."""
    weight = torch.randn(5, 48, generator=torch.Generator().manual_seed(2))
    got = PackedWeight.of(weight, group_size).dequantize()
    for start in range(0, 48, 48 if group_size == -1 else group_size):
        stop = 48 if group_size == -1 else start + group_size
        alone = weight[:, start:stop]
        assert torch.equal(got[:, start:stop], PackedWeight.of(alone, -1).dequantize())


@pytest.mark.parametrize("group_size", [0, 7, 8, 20, 257, 512, -2, 64.0, True])
def test_group_sizes_that_do_not_exist(group_size: Any) -> None:
    """A setting that fails in the middle of a model, or means something else than it says (B-42)."""
    with pytest.raises(ConfigError):
        QuantSpec(group_size=group_size)


def test_a_group_too_large_leaves_the_model_whole() -> None:
    """A half-converted model: the second layer's input is smaller than the group, or its weights are not finite."""
    model = nn.ModuleDict({"first": nn.Linear(256, 8), "second": nn.Linear(48, 8)})
    with pytest.raises(ConfigError, match=r"second\.weight"):
        quantize_model(model, QuantSpec(group_size=128, layers=("*",)))
    assert all(isinstance(child, nn.Linear) for child in model.children())
    with torch.no_grad():
        model["second"].weight[0, 0] = math.nan
    with pytest.raises(CheckpointError, match=r"second\.weight"):
        quantize_model(model, QuantSpec(group_size=16, layers=("*",)))
    assert all(isinstance(child, nn.Linear) for child in model.children())


def test_a_pattern_without_a_layer_is_refused() -> None:
    """A typing error that leaves a layer as it is without a word (law 10)."""
    model = nn.ModuleDict({"fc_in": nn.Linear(32, 8)})
    with pytest.raises(ConfigError, match="near: fc_in"):
        quantize_model(model, QuantSpec(group_size=16, layers=("fc_inn",)))


# ---- cutting -------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.sampled_from([16, 32, -1]), st.integers(1, 4), st.integers(0, 3), st.integers(0, 1), st.integers(0, 2**31))
def test_quantize_then_cut_is_cut_then_quantize(group_size: int, parts: int, part: int, dim: int, seed: int) -> None:
    """Groups that straddle a cut, rows lost in the padding of a block of 16: bit for bit (law 5)."""
    part %= parts
    parts = 1 if dim == 1 and group_size == -1 else parts
    part %= parts
    weight = torch.randn(12, 32 * 12, generator=torch.Generator().manual_seed(seed))
    length = weight.shape[dim] // parts
    cut = PackedWeight.of(weight, group_size).cut(dim, part, parts)
    alone = PackedWeight.of(weight.narrow(dim, part * length, length), group_size)
    assert cut.shape == alone.shape
    for name in ("codes", "scales", "biases"):
        assert torch.equal(getattr(cut, name), getattr(alone, name))
    assert cut.num_bytes == alone.num_bytes


@pytest.mark.parametrize(("dim", "parts", "group_size"), [(1, 4, 32), (1, 5, 16), (0, 5, 16), (1, 2, -1)])
def test_off_a_boundary_is_an_error_with_the_numbers(dim: int, parts: int, group_size: int) -> None:
    """A cut through a group, which gives half of it another's scale (law 5)."""
    packed = PackedWeight.of(torch.randn(12, 192), group_size, name="transformer.h.0.mlp.fc_out.weight")
    with pytest.raises(ConfigError) as caught:
        packed.cut(dim, 0, parts)
    text = str(caught.value)
    assert "transformer.h.0.mlp.fc_out.weight" in text
    assert str(packed.shape[dim]) in text
    assert f"of {parts}" in text
    assert ("one group a row" if group_size == -1 else f"groups of {group_size}") in text


# ---- the layer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("group_size", GROUPS)
def test_the_layer_is_the_dequantized_one(group_size: int, bias: bool) -> None:
    """A kernel right for one group size only; a bias lost or added twice (B-43). The dequantizer is the test's own."""
    linear = nn.Linear(272, 40, bias=bias)
    packed = PackedWeight.of(linear.weight.detach(), group_size)
    layer = QuantizedLinear.like(linear, group_size, packed)
    weight = torch.empty(40, 272)
    for n in range(40):
        for k in range(272):
            group = 0 if group_size == -1 else k // group_size
            code = int(packed.codes[n // 16, k // 8, n % 16]) >> (16 * (k & 1) + 4 * ((k % 8) >> 1)) & 15
            scale, offset = (float(p[n // 16, group, n % 16]) for p in (packed.scales, packed.biases))
            weight[n, k] = offset + scale * code
    for num_rows in (1, 2, 7, 33):
        x = torch.randn(num_rows, 272)
        want = nn.functional.linear(x, weight, linear.bias)
        assert torch.allclose(layer(x), want, atol=2e-5, rtol=1e-5)


def test_a_cast_leaves_packed_weights_alone() -> None:
    """`model.to(bfloat16)` that takes three bits of every scale."""
    layer = QuantizedLinear.like(nn.Linear(32, 8), 16, PackedWeight.of(torch.randn(8, 32), 16))
    before = layer.scales.clone()
    layer.to(torch.bfloat16)
    assert layer.scales.dtype == torch.float16
    assert torch.equal(layer.scales, before)
    assert layer.codes.dtype == torch.int32
    assert layer.bias.dtype == torch.bfloat16


def test_bits_are_counted_with_scales_and_biases() -> None:
    """4 bits a weight claimed where a group of 64 needs 4 + 32 / 64."""
    packed = PackedWeight.of(torch.randn(64, 256), 64)
    assert packed.bits_per_weight == 4.5
    assert packed.num_bytes == 64 * 256 * 4.5 / 8


# ---- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "group_size", "method"),
    [("int4", 64, "minmax"), ("int4-g64", 64, "minmax"), ("int4-row", -1, "minmax"), ("int4-g32-mse", 32, "mse")],
)
def test_short_names(name: str, group_size: int, method: str) -> None:
    """A format that is read as another one."""
    spec = QuantSpec.parse(name)
    assert (spec.group_size, spec.method) == (group_size, method)
    assert QuantSpec.parse(spec.name) == spec


@pytest.mark.parametrize("name", ["int8", "int4-64", "int4-g0", "int4-g64-fast", "int4g64", ""])
def test_unknown_names_are_refused(name: str) -> None:
    """A typing error that gives an unquantized model, or one in another format."""
    with pytest.raises(ConfigError):
        QuantSpec.parse(name)


@pytest.mark.parametrize(
    ("name", "near"), [("int4-g", "int4-g64"), ("int4-g64-msee", "int4-g64-mse"), ("int4g64", "int4-g64")]
)
def test_a_name_cut_short_is_quoted_whole(name: str, near: str) -> None:
    """`int4-g` taken for a method called g: the answer is about something that nobody wrote."""
    with pytest.raises(ConfigError) as caught:
        QuantSpec.parse(name)
    assert repr(name) in caught.value.asked
    assert caught.value.found.endswith(f"near: {near}")
