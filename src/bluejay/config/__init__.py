"""Configuration as frozen dataclasses: presets, strict parsing, canonical form."""

from bluejay.config.model import ACTIVATIONS, DTYPES, IGNORED_HF_KEYS, ModelConfig

__all__ = ["ACTIVATIONS", "DTYPES", "IGNORED_HF_KEYS", "ModelConfig"]
