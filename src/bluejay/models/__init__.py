"""GPT-J as eager modules, its cache, and its costs."""

from bluejay.models import costs
from bluejay.models.gptj import GPTJ, Block, Where, positions_from_mask, rotary_phases, rotate
from bluejay.models.kv_cache import KVCache, LayerCache, aligned_rows
from bluejay.models.vocab import resize_vocab

__all__ = [
    "GPTJ",
    "Block",
    "KVCache",
    "LayerCache",
    "Where",
    "aligned_rows",
    "costs",
    "positions_from_mask",
    "resize_vocab",
    "rotary_phases",
    "rotate",
]
