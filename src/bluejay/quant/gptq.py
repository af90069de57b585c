"""Rounding with second-order error feedback: each column's error is made good by the columns that follow it.

Dimension letters: N outputs, K inputs, T tokens.

Source: Frantar et al. 2022, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers".
"""

from __future__ import annotations

import torch
from torch import Tensor

from bluejay.errors import CheckpointError
from bluejay.quant.packing import (
    Noise,
    PackedWeight,
    check_group,
    check_range,
    dequantize,
    encode,
    group_parameters,
    pack,
)

# Added to the diagonal, as a share of its mean: makes the matrix invertible where inputs depend on each other.
DAMPING = 0.01
_ROW_BLOCK = 128  # columns between which errors are carried at once, where a group is a whole row


class InputMoments:
    """The sum of x xT over all inputs that a layer was fed: half the Hessian of its squared output error."""

    def __init__(self, in_features: int) -> None:
        self.sum = torch.zeros(in_features, in_features)

    def add(self, x: Tensor) -> None:
        """
        Shapes:
            x: [..., K]
        """
        flat = x.reshape(-1, x.shape[-1]).float()
        self.sum.addmm_(flat.T, flat)


def gptq(weight: Tensor, moments: Tensor, group_size: int, name: str = "a weight") -> tuple[PackedWeight, Noise]:
    """Quantize a weight for the inputs that its layer sees. Each group's range is that of the corrected weights in it.

    Shapes:
        weight: [N, K]   moments: [K, K], overwritten

    Raises:
        ConfigError: the group is larger than K.
        CheckpointError: values that fp16 cannot hold, or moments that are not finite.
    """
    num_rows, width = weight.shape
    check_group(name, width, group_size)
    check_range(weight, name)
    if not bool(moments.isfinite().all()):
        raise CheckpointError(
            asked=f"gptq of {name}",
            found="inputs that are not finite when calibration text goes through the layers before it",
            rule="layers are fed in fp32, which ends at 3.4e38",
            fix="check the weights, or take method minmax or mse, which look at weights alone",
        )
    feedback = _feedback(moments)
    left = weight.float().clone()  # [N, K], corrected as columns are rounded
    codes = torch.empty(num_rows, width, dtype=torch.uint8)
    scales, biases = [], []
    step = _ROW_BLOCK if group_size == -1 else group_size
    for start in range(0, width, step):
        stop = min(start + step, width)
        if start == 0 or group_size != -1:
            scale, bias = group_parameters(left[:, start : width if group_size == -1 else stop].double())
            scales.append(scale)
            biases.append(bias)
        errors = torch.empty(num_rows, stop - start)
        block = left[:, start:stop].T.contiguous()  # [width of the block, N]
        for i in range(stop - start):
            column = start + i
            codes[:, column] = encode(block[i].double(), scale, bias)
            rounded = torch.addcmul(bias.float(), scale.float(), codes[:, column].float())
            errors[:, i] = (block[i] - rounded) / feedback[column, column]
            block[i + 1 :].addr_(feedback[column, column + 1 : stop], errors[:, i], alpha=-1)
        left[:, stop:].addmm_(errors, feedback[start:stop, stop:], alpha=-1)
    plain = codes, torch.stack(scales, dim=1), torch.stack(biases, dim=1)
    wide = weight.double()
    noise = float((dequantize(*plain, group_size).double() - wide).square().sum())
    packed = PackedWeight(*pack(*plain), (num_rows, width), group_size, name)
    return packed, Noise(float(wide.square().sum()), noise)


def _feedback(moments: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse: row k says how columns after k make good an error of column k.

    Inputs that are never anything but zero get a one on the diagonal: their columns neither give nor take.
    """
    diagonal = moments.diagonal()
    diagonal.masked_fill_(diagonal == 0, 1.0)
    diagonal.add_(DAMPING * float(diagonal.mean()))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moments))
    return torch.linalg.cholesky(inverse, upper=True)
