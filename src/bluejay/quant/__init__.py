"""Group quantization to four bits: pure primitives, packed weights, and two verbs, for models and for checkpoints."""

from bluejay.quant.convert import QuantizedSource, quantize_checkpoint, summarize
from bluejay.quant.gptq import InputMoments, gptq
from bluejay.quant.linear import QuantizedLinear, TensorRecord, choose_kernel, quantize_model
from bluejay.quant.packing import PackedWeight, dequantize, pack, quantize, unpack
from bluejay.quant.training import FakeQuantizedLinear, fake_quantize_model

__all__ = [
    "FakeQuantizedLinear",
    "InputMoments",
    "PackedWeight",
    "QuantizedLinear",
    "QuantizedSource",
    "TensorRecord",
    "choose_kernel",
    "dequantize",
    "fake_quantize_model",
    "gptq",
    "pack",
    "quantize",
    "quantize_checkpoint",
    "quantize_model",
    "summarize",
    "unpack",
]
