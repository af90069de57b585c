"""Hugging Face checkpoints and tokenizers: directories and hub ids in, directories out."""

from bluejay.checkpoint.load import Checkpoint, load_weights, open_checkpoint
from bluejay.checkpoint.reader import TensorInfo
from bluejay.checkpoint.save import save_checkpoint
from bluejay.checkpoint.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "Checkpoint",
    "TensorInfo",
    "Tokenizer",
    "load_tokenizer",
    "load_weights",
    "open_checkpoint",
    "save_checkpoint",
]
