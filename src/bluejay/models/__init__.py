"""GPT-J as eager modules, its cache, and its costs."""

from bluejay.models import costs
from bluejay.models.gptj import GPTJ, Block, Where, positions_from_mask, rotary_phases, rotate
from bluejay.models.kv_cache import KVCache, LayerCache, aligned_rows
from bluejay.models.split import (
    CUTS,
    EMBEDDING,
    HEAD,
    QUANTIZED,
    cut_dim,
    parameter_shapes,
    part_shape,
)
from bluejay.models.vocab import resize_vocab

__all__ = [
    "CUTS",
    "EMBEDDING",
    "GPTJ",
    "HEAD",
    "QUANTIZED",
    "Block",
    "KVCache",
    "LayerCache",
    "Where",
    "aligned_rows",
    "costs",
    "cut_dim",
    "parameter_shapes",
    "part_shape",
    "positions_from_mask",
    "resize_vocab",
    "rotary_phases",
    "rotate",
]
