"""`bluejay::int4_linear`: y = x @ W.T + bias for a weight W of four bits, in torch's dispatcher.

The packed layout, version 1. W is [N out, K in], quantized along K in groups of G consecutive inputs: G a multiple of 8
from 16 to 256, or -1 for one group per row; the last group may be short. A code is 0 to 15 and w = bias + scale * code.

    codes            int32    [Np/16, Kp/8, 16]    [b, c, j] holds output 16b + j, inputs 8c to 8c + 7:
                                                   input 8c + k from bit 16 * (k & 1) + 4 * (k >> 1) on
    scales, biases   float16  [Np/16, groups, 16]

Np and Kp are N and K rounded up to 16 and 8. What lies beyond N and K has no effect, whatever it is.

The native paths accumulate in fp32 (in integers within a group where docs/kernels.md says so) and round once, to x's
dtype. Every path gives a row the same bits whatever rows it is called with.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

NATIVE_PATHS = ("amx", "avx512", "avx2", "portable", "x8")
PLAIN_PATHS = ("torch", "reference")

# Codes of this many outputs x inputs are unpacked at a time by the path "torch": 16 MiB of fp32.
_PANEL_ELEMENTS = 2**22
_SHIFTS = [16 * (k & 1) + 4 * (k >> 1) for k in range(8)]
_SCHEMA = (
    "(Tensor x, Tensor codes, Tensor scales, Tensor biases, Tensor? bias, int out_features, int group_size, "
    "str path) -> Tensor"
)

_library = torch.library.Library("bluejay", "FRAGMENT")
_library.define(f"int4_linear{_SCHEMA}")
# The same without native code. The native library takes over the first for tensors on the CPU, and calls this one for
# the paths "torch" and "reference".
_library.define(f"int4_linear_plain{_SCHEMA}")


def int4_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    biases: Tensor,
    bias: Tensor | None,
    out_features: int,
    group_size: int,
    path: str = "auto",
) -> Tensor:
    """x @ W.T + bias in x's dtype (bfloat16, float32 or float16), accumulated in fp32.

    Args:
        path: "auto", or one of `available_paths`. "x8" rounds bf16 x to 8 bits, for less time with 8 rows and more; for
            other x it is "avx512".

    Shapes:
        x: [..., K]   codes: [Np/16, Kp/8, 16]   scales, biases: [Np/16, groups, 16]   bias: [N]   returns: [..., N]

    Raises:
        MachineError: this machine, or this build, does not have the path.
    """
    # While a program is traced nothing is computed: whether this machine has the path is asked where it runs.
    if path in NATIVE_PATHS and not torch.compiler.is_compiling():
        from bluejay.kernels.native import check_path

        check_path(path, x.device)
    result: Tensor = torch.ops.bluejay.int4_linear(x, codes, scales, biases, bias, out_features, group_size, path)
    return result


def reference(
    x: Tensor, codes: Tensor, scales: Tensor, biases: Tensor, bias: Tensor | None, out_features: int, group_size: int
) -> Tensor:
    """What `int4_linear` is: the whole weight in fp32, one matrix product in fp32, rounded to x's dtype.

    Shapes: as `int4_linear`.
    """
    weight = _dequantize(codes, scales, biases, x.shape[-1], group_size)[:out_features]
    return F.linear(x.float(), weight, None if bias is None else bias.float()).to(x.dtype)


def _dequantize(codes: Tensor, scales: Tensor, biases: Tensor, in_features: int, group_size: int) -> Tensor:
    """The weight of whole blocks of outputs, in fp32.

    Shapes:
        codes: [B, Kp/8, 16]   scales, biases: [B, groups, 16]   returns: [16 * B, K]
    """
    shifts = torch.tensor(_SHIFTS, dtype=torch.int32, device=codes.device)
    digits = (codes.unsqueeze(-1) >> shifts) & 15  # [B, Kp/8, 16, 8]
    code = digits.permute(0, 2, 1, 3).flatten(2)[..., :in_features]  # [B, 16, K]
    group = torch.arange(in_features, device=codes.device) // (in_features if group_size == -1 else group_size)
    scale, offset = (part.float().transpose(1, 2)[..., group] for part in (scales, biases))  # [B, 16, K]
    return (offset + scale * code).flatten(0, 1)


def _by_panels(
    x: Tensor, codes: Tensor, scales: Tensor, biases: Tensor, bias: Tensor | None, out_features: int, group_size: int
) -> Tensor:
    """`reference`, some outputs at a time, so that memory stays small."""
    blocks = max(1, _PANEL_ELEMENTS // (16 * x.shape[-1]))
    wide = x.float()
    parts = [
        F.linear(wide, _dequantize(*panel, x.shape[-1], group_size))
        for panel in zip(codes.split(blocks), scales.split(blocks), biases.split(blocks), strict=True)
    ]
    y = torch.cat(parts, -1)[..., :out_features]
    # Contiguous, as `_shape_only` says: a compiled program reads the rows of a padded block's view by those strides.
    return (y if bias is None else y + bias.float()).to(x.dtype).contiguous()


def _plain(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    biases: Tensor,
    bias: Tensor | None,
    out_features: int,
    group_size: int,
    path: str,
) -> Tensor:
    if path == "reference":
        return reference(x, codes, scales, biases, bias, out_features, group_size)
    if path not in ("auto", "torch"):
        from bluejay.kernels.native import refuse

        raise refuse(path, x.device)
    return _by_panels(x, codes, scales, biases, bias, out_features, group_size)


def _shape_only(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    biases: Tensor,
    bias: Tensor | None,
    out_features: int,
    group_size: int,
    path: str,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


for _name in ("int4_linear", "int4_linear_plain"):
    _library.impl(_name, _plain, "CompositeExplicitAutograd")
    torch.library.register_fake(f"bluejay::{_name}", _shape_only, lib=_library)
