"""Training for group quantization: the forward pass sees weights as packing will round them, the gradient passes by.

Source: Bengio et al. 2013 (straight-through estimator); Jacob et al. 2018 (quantization-aware training).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bluejay.config import QuantSpec
from bluejay.quant.linear import needs_calibration, select
from bluejay.quant.packing import check_group, dequantize, quantize


@torch.library.custom_op("bluejay::fake_quantize", mutates_args=())
def fake_quantize(weight: Tensor, group_size: int, method: str) -> Tensor:
    """A weight as it comes back from its codes, in fp32; its gradient is taken as that of the weight itself.

    Shapes:
        weight: [N, K]   returns: [N, K]
    """
    return dequantize(*quantize(weight.detach(), group_size, method), group_size).to(weight.device)


@fake_quantize.register_fake
def _(weight: Tensor, group_size: int, method: str) -> Tensor:
    return torch.empty_like(weight, dtype=torch.float32)


def _straight_through(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return grad, None, None


fake_quantize.register_autograd(_straight_through)


class FakeQuantizedLinear(nn.Module):
    """`nn.Linear` that multiplies with its weight as four bits will hold it.

    The weight itself stays in fp32, whatever the model computes in: codes are those of the weight that is saved.
    """

    keeps_full_precision = True

    def __init__(self, linear: nn.Linear, spec: QuantSpec) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.group_size, self.method = spec.group_size, spec.method

    def effective_weight(self) -> Tensor:
        """What the layer multiplies with, in fp32."""
        rounded: Tensor = fake_quantize(self.weight, self.group_size, self.method)
        return rounded

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.effective_weight().to(x.dtype), self.bias)


def fake_quantize_model(model: nn.Module, spec: QuantSpec) -> nn.Module:
    """Let the linear layers that `spec` means round their weights in the forward pass, in place; names stay.

    Raises:
        ConfigError: a pattern that means no layer, a group larger than a layer's input, or method `gptq`.
    """
    if spec.method == "gptq":
        raise needs_calibration(spec)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    chosen = select(linears, spec)
    for name in chosen:
        check_group(f"{name}.weight", linears[name].in_features, spec.group_size)
    for name in chosen:
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, FakeQuantizedLinear(linears[name], spec))
    return model
