"""Group quantization to four bits: pure functions, and the packed weight that knows its bytes and how it is cut.

A weight W [N outputs, K inputs] is divided along K into groups. A group's weights become codes 0 to 15 with
`w = bias + scale * code`. The layout of packed tensors is docs/quantization.md; its version is `QUANT_FORMAT_VERSION`.

Dimension letters: N outputs, K inputs, G groups of a row.

Source: Sheng et al. 2023 (FlexGen), group-wise min/max quantization.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bluejay.errors import CheckpointError, ConfigError

MAX_CODE = 15
LANES = 16  # outputs that lie beside each other in a packed word's vector
PER_WORD = 8  # codes in an int32
# Bit at which input 8c + k of a word begins: even inputs in the low half, odd ones in the high half.
SHIFTS = tuple(16 * (k & 1) + 4 * (k >> 1) for k in range(PER_WORD))
FP16_MAX = 65504.0
# Ranges that `mse` tries, as shares of the group's whole range.
_SHARES = tuple(1 - 0.02 * i for i in range(26))


def num_groups(in_features: int, group_size: int) -> int:
    """Groups of a row; the last may be short."""
    return 1 if group_size == -1 else -(-in_features // group_size)


def check_group(name: str, in_features: int, group_size: int) -> None:
    """
    Raises:
        ConfigError: the group is larger than the layer's input.
    """
    if group_size > in_features:
        raise ConfigError(
            asked=f"groups of {group_size} in {name}",
            found=f"{in_features} input features",
            rule="a group is no larger than the input; a last group may be short",
            fix=f"take a group of at most {in_features}, or -1 for one group a row",
        )


def quantize(weight: Tensor, group_size: int, method: str = "minmax") -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and biases of a weight.

    The range of a group always includes 0. Scale and bias are rounded outward to fp16, and with `minmax`
    |w - dequantized| <= scale / 2 holds for every element. Groups of one value that fp16 can hold are exact.

    Shapes:
        weight: [N, K], any floating type   returns: uint8 [N, K], fp16 [N, G], fp16 [N, G]

    Raises:
        CheckpointError: a weight that is not finite or beyond fp16's range.
    """
    check_group("a weight", weight.shape[1], group_size)
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    scales = torch.empty(weight.shape[0], num_groups(weight.shape[1], group_size), dtype=torch.float16)
    biases = torch.empty_like(scales)
    for columns, groups, width in _pieces(weight.shape[1], group_size):
        part = weight[:, columns].unflatten(1, (-1, width)).double()  # [N, G, width]
        check_range(part)
        scale, bias = group_parameters(part, method)
        codes[:, columns] = encode(part, scale[..., None], bias[..., None]).flatten(1)
        scales[:, groups], biases[:, groups] = scale, bias
    return codes, scales, biases


def check_range(weight: Tensor, name: str = "a weight") -> None:
    """
    Raises:
        CheckpointError: NaN, infinity, or a value beyond fp16's range.
    """
    if weight.numel() == 0:
        return
    low, high = (float(extreme) for extreme in torch.aminmax(weight))
    if not (low >= -FP16_MAX and high <= FP16_MAX):  # NaN compares false
        raise CheckpointError(
            asked=f"quantize {name} to four bits",
            found=f"values from {low:g} to {high:g}",
            rule=f"scales and biases are fp16: weights are finite and within +-{FP16_MAX:g}",
            fix="use an undamaged checkpoint, or leave that layer out with --layers",
        )


def group_parameters(groups: Tensor, method: str = "minmax") -> tuple[Tensor, Tensor]:
    """Scale and bias of each group.

    Shapes:
        groups: [..., width] fp64   returns: two of [...] fp16
    """
    low, high = torch.aminmax(groups, dim=-1)
    zero = low.new_zeros(())
    scale, bias = _of_range(torch.minimum(low, zero), torch.maximum(high, zero))
    if method == "mse":
        best = _squared_error(groups, scale, bias)
        for share in _SHARES[1:]:
            tried_scale, tried_bias = _of_range(share * torch.minimum(low, zero), share * torch.maximum(high, zero))
            error = _squared_error(groups, tried_scale, tried_bias)
            better = error < best
            best = torch.where(better, error, best)
            scale, bias = torch.where(better, tried_scale, scale), torch.where(better, tried_bias, bias)
    constant = low.half()
    exact = (low == high) & (constant.double() == low)
    return torch.where(exact, 0, scale), torch.where(exact, constant, bias)


def encode(weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Nearest codes, halves to even, clipped to the range. In fp64, because in fp32 a half may fall on either side.

    Shapes:
        weight: [...] fp64   scale, bias: fp16, broadcast   returns: [...] uint8
    """
    step = torch.where(scale > 0, scale, 1).double()
    return ((weight - bias.double()) / step).round_().clamp_(0, MAX_CODE).to(torch.uint8)


def dequantize(
    codes: Tensor, scales: Tensor, biases: Tensor, group_size: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """What codes stand for, computed in fp32, or in fp64 where that is asked.

    Shapes:
        codes: [N, K]   scales, biases: [N, G]   returns: [N, K] in `dtype`
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    width = codes.shape[1] if group_size == -1 else group_size
    scale, bias = (p.to(wide).repeat_interleave(width, dim=1)[:, : codes.shape[1]] for p in (scales, biases))
    return torch.addcmul(bias, scale, codes.to(wide)).to(dtype)


def pack(codes: Tensor, scales: Tensor, biases: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Layout version 1: outputs padded to 16, inputs to 8, with zeros.

    Shapes:
        codes: [N, K]   scales, biases: [N, G]   returns: int32 [Np/16, Kp/8, 16], two of fp16 [Np/16, G, 16]
    """
    rows, columns = -codes.shape[0] % LANES, -codes.shape[1] % PER_WORD
    padded = torch.nn.functional.pad(codes, (0, columns, 0, rows)).view(-1, LANES, (codes.shape[1] + columns) // 8, 8)
    words = torch.zeros(padded.shape[:-1], dtype=torch.int32)
    for k, shift in enumerate(SHIFTS):
        words |= padded[..., k].int() << shift

    def blocked(values: Tensor) -> Tensor:
        return torch.nn.functional.pad(values, (0, 0, 0, rows)).unflatten(0, (-1, LANES)).transpose(1, 2).contiguous()

    return words.transpose(1, 2).contiguous(), blocked(scales), blocked(biases)


def unpack(codes: Tensor, scales: Tensor, biases: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of `pack` for a weight of `shape` [N, K].

    Shapes:
        codes: int32 [Np/16, Kp/8, 16]   scales, biases: [Np/16, G, 16]   returns: uint8 [N, K], two of fp16 [N, G]
    """
    shifts = torch.tensor(SHIFTS, dtype=torch.int32, device=codes.device)
    split = (codes.transpose(1, 2)[..., None] >> shifts) & MAX_CODE  # [Np/16, 16, Kp/8, 8]
    plain = split.to(torch.uint8).flatten(2).flatten(0, 1)[: shape[0], : shape[1]]

    def rows(values: Tensor) -> Tensor:
        return values.transpose(1, 2).flatten(0, 1)[: shape[0]]

    return plain, rows(scales), rows(biases)


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight of `shape` [N, K] in the packed layout. `name` is for messages.

    Shapes:
        codes: int32 [Np/16, Kp/8, 16]   scales, biases: fp16 [Np/16, G, 16]
    """

    codes: Tensor
    scales: Tensor
    biases: Tensor
    shape: tuple[int, int]
    group_size: int
    name: str = "a weight"

    @staticmethod
    def layout(shape: tuple[int, int], group_size: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of `codes`, `scales` and `biases` of a weight of `shape` [N, K]."""
        blocks, words = -(-shape[0] // LANES), -(-shape[1] // PER_WORD)
        parameters = ((blocks, num_groups(shape[1], group_size), LANES), torch.float16)
        return {"codes": ((blocks, words, LANES), torch.int32), "scales": parameters, "biases": parameters}

    @classmethod
    def of(cls, weight: Tensor, group_size: int, method: str = "minmax", name: str = "a weight") -> PackedWeight:
        """Quantize and pack a weight [N, K].

        Raises:
            ConfigError: the group is larger than K.  CheckpointError: values that fp16 cannot hold.
        """
        shape = (weight.shape[0], weight.shape[1])
        return pack_rows(lambda start, stop: weight[start:stop], shape, group_size, method, name)[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of codes, scales and biases, padding included."""
        return self.codes.nbytes + self.scales.nbytes + self.biases.nbytes

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.num_bytes / (self.shape[0] * self.shape[1])

    def plain(self) -> tuple[Tensor, Tensor, Tensor]:
        """Codes [N, K], scales and biases [N, G]."""
        return unpack(self.codes, self.scales, self.biases, self.shape)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight that this stands for, [N, K]."""
        return dequantize(*self.plain(), self.group_size, dtype)

    def cut(self, dim: int, part: int, parts: int) -> PackedWeight:
        """Part number `part` of `parts` equal ones: outputs for `dim` 0, inputs for `dim` 1.

        Equal to cutting the weight first and quantizing the part, bit for bit, so it happens between groups only.

        Raises:
            ConfigError: the width does not divide, or a group would be cut.
        """
        width = self.shape[dim]
        length = width // parts
        start = part * length
        across = dim == 1 and parts > 1 and (self.group_size == -1 or length % self.group_size)
        if width % parts or across or not 0 <= part < parts:
            group = "one group a row" if self.group_size == -1 else f"groups of {self.group_size}"
            raise ConfigError(
                asked=f"part {part} of {parts} of {self.name} along its {('outputs', 'inputs')[dim]}",
                found=f"a width of {width} in {group}",
                rule="parts are equal and are cut between groups"
                if dim == 1
                else "parts are equal and numbered from 0",
                fix="choose a number of parts that divides it, or a smaller group",
            )
        codes, scales, biases = self.plain()
        if dim == 0:
            shape = (length, self.shape[1])
            cut = tuple(values[start : start + length] for values in (codes, scales, biases))
        else:
            shape = (self.shape[0], length)
            first, count = (0, scales.shape[1]) if parts == 1 else (start // self.group_size, length // self.group_size)
            cut = (
                codes[:, start : start + length],
                scales[:, first : first + count],
                biases[:, first : first + count],
            )
        return PackedWeight(*pack(*cut), shape, self.group_size, f"{self.name}, part {part} of {parts}")


@dataclass
class Noise:
    """Squares summed over a weight: of its values, and of what quantization changed."""

    signal: float = 0.0
    noise: float = 0.0

    @property
    def snr_db(self) -> float | None:
        """Signal over noise in decibels; None where nothing changed."""
        return 10 * math.log10(self.signal / self.noise) if self.noise else None


# Elements handled at once: fp64 copies of so many fit a core's cache.
_CHUNK = 2**18


def pack_rows(
    rows: Callable[[int, int], Tensor], shape: tuple[int, int], group_size: int, method: str, name: str
) -> tuple[PackedWeight, Noise]:
    """Quantize a weight of which only some rows are in memory at once.

    Args:
        rows: gives rows start to stop.
    """
    check_group(name, shape[1], group_size)
    made = {
        key: torch.empty(size, dtype=dtype) for key, (size, dtype) in PackedWeight.layout(shape, group_size).items()
    }
    packed = PackedWeight(**made, shape=shape, group_size=group_size, name=name)
    noise = Noise()
    for start, stop in row_chunks(shape):
        weight = rows(start, stop)
        check_range(weight, name)
        plain = quantize(weight, group_size, method)
        noise.signal += float(weight.double().square().sum())
        noise.noise += float((dequantize(*plain, group_size).double() - weight.double()).square().sum())
        first = start // LANES
        for target, part in zip((packed.codes, packed.scales, packed.biases), pack(*plain), strict=True):
            target[first : first + len(part)] = part
    return packed, noise


def row_chunks(shape: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Ranges of rows, multiples of 16 but for the last."""
    step = max(_CHUNK // max(shape[1], 1) // LANES, 1) * LANES
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])


def _pieces(in_features: int, group_size: int) -> Iterator[tuple[slice, slice, int]]:
    """Columns, groups and width of the full groups, and of a short last one."""
    width = in_features if group_size == -1 else group_size
    full = in_features // width
    yield slice(0, full * width), slice(0, full), width
    if rest := in_features % width:
        yield slice(full * width, in_features), slice(full, full + 1), rest


def _of_range(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest fp16 scale and the largest fp16 bias whose codes 0 to 15 span [low, high], with low <= 0 <= high."""
    bias = -_fp16_at_least(-low)
    return _fp16_at_least((high - bias.double()) / MAX_CODE), bias


def _fp16_at_least(value: Tensor) -> Tensor:
    """The nearest fp16 number at or above a number that is not negative."""
    near = value.half()
    return (near.view(torch.int16) + (near.double() < value)).view(torch.float16)


def _squared_error(groups: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    step = torch.where(scale > 0, scale, 1).double()[..., None]
    offset = bias.double()[..., None]
    codes = ((groups - offset) / step).round_().clamp_(0, MAX_CODE)
    return (codes.mul_(step).add_(offset).sub_(groups)).square_().sum(-1)
