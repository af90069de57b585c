"""int4_linear on a GPU: the operation of the same name, computed by torch."""

from __future__ import annotations

import pytest
import torch

from bluejay import kernels
from bluejay.errors import MachineError

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gpu_gives_what_the_reference_gives(dtype: torch.dtype) -> None:
    """Catches a path that dequantizes on the host, or a native one chosen for a tensor that is elsewhere."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-(2**31), 2**31 - 1, (5, 9, 16), dtype=torch.int32, generator=generator)
    scales = (torch.rand(5, 5, 16, generator=generator) * 0.1).half()
    biases = torch.randn(5, 5, 16, generator=generator).half()
    x = torch.randn(7, 72, generator=generator).to(dtype)
    bias = torch.randn(70, generator=generator).to(dtype)
    expected = kernels.reference(x, codes, scales, biases, bias, 70, 16)
    there = [tensor.cuda() for tensor in (x, codes, scales, biases, bias)]
    y = kernels.int4_linear(*there, 70, 16)
    assert y.is_cuda
    torch.testing.assert_close(y.cpu(), expected, rtol=2e-2 if dtype != torch.float32 else 1e-4, atol=1e-3)
    with pytest.raises(MachineError, match="cuda"):
        kernels.int4_linear(*there, 70, 16, "portable")
