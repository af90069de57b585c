"""What the files and tensors of a Hugging Face directory are called."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from bluejay.errors import BluejayError, CheckpointError

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
# Another name than the ecosystem's: who does not know packed weights must find none, rather than fill in random ones.
QUANTIZED, QUANTIZATION_RECORD = "model.int4.safetensors", "quantization.json"
PACKED_ENDINGS = (".codes", ".scales", ".biases")
WEIGHTS = (SAFETENSORS, SAFETENSORS_INDEX, BIN, BIN_INDEX)  # in order of preference, as transformers has it

TOKENIZER, VOCAB, MERGES = "tokenizer.json", "vocab.json", "merges.txt"
ADDED_TOKENS, SPECIAL_TOKENS = "added_tokens.json", "special_tokens_map.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_FILES = (TOKENIZER, VOCAB, MERGES, ADDED_TOKENS, SPECIAL_TOKENS, TOKENIZER_CONFIG, "chat_template.jinja")

EMBEDDING, HEAD, HEAD_BIAS = "transformer.wte.weight", "lm_head.weight", "lm_head.bias"

_WEIGHT_FILE = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
_MASK = re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)")


def is_weight_file(name: str) -> bool:
    """Whether a file of this name holds weights, or says what they are."""
    return name in (QUANTIZED, QUANTIZATION_RECORD) or _WEIGHT_FILE.fullmatch(name) is not None


def is_mask_buffer(name: str, shape: tuple[int, ...] | None = None) -> bool:
    """Whether a tensor is a causal mask, which old releases saved with the weights: `[1, 1, n, n]`, or its filler."""
    match = _MASK.fullmatch(name)
    if match is None or shape is None:
        return match is not None
    if match[1] == "masked_bias":
        return len(shape) <= 1
    return len(shape) == 4 and shape[:2] == (1, 1) and shape[2] == shape[3]


def listing(names: list[str], limit: int = 5) -> str:
    """The first few names, and how many there are in all."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown}, ... ({len(names)} in all)"


def contents(directory: Path) -> str:
    """What a directory holds, for an error message."""
    return listing(sorted(entry.name for entry in directory.iterdir()), 12) or "nothing"


def read_json(path: Path, error: type[BluejayError] = CheckpointError) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        BluejayError: of the given class, when the file is not a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as problem:  # bad UTF-8 and bad JSON alike
        raise error(
            asked=f"read {path}", found=f"not JSON: {problem}", fix="download or copy the file again"
        ) from problem
    if not isinstance(content, dict):
        raise error(
            asked=f"read {path}",
            found=f"a {type(content).__name__}",
            rule="the file holds one JSON object",
            fix="download or copy the file again",
        )
    return content
