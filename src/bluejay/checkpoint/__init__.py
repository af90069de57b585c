"""Hugging Face checkpoints and tokenizers: directories and hub ids in, directories out."""

from bluejay.checkpoint.load import Checkpoint, WeightSource, check_fit, load_weights, open_checkpoint
from bluejay.checkpoint.packed import PackedWriter
from bluejay.checkpoint.pages import LargePages, has_large_pages
from bluejay.checkpoint.reader import TensorInfo
from bluejay.checkpoint.save import save_checkpoint
from bluejay.checkpoint.shape import read_config, read_quantization
from bluejay.checkpoint.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "Checkpoint",
    "LargePages",
    "PackedWriter",
    "TensorInfo",
    "Tokenizer",
    "WeightSource",
    "check_fit",
    "has_large_pages",
    "load_tokenizer",
    "load_weights",
    "open_checkpoint",
    "read_config",
    "read_quantization",
    "save_checkpoint",
]
