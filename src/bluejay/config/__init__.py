"""Configuration as frozen dataclasses: presets, strict parsing, canonical form."""

from bluejay.config.canonical import canonical, canonical_json, digest
from bluejay.config.compile import CompileSpec
from bluejay.config.generation import MAX_ANSWERS, MAX_BEAMS, MAX_LOGPROBS, MAX_STOP_IDS, GenerationConfig
from bluejay.config.model import ACTIVATIONS, DTYPES, IGNORED_HF_KEYS, ModelConfig
from bluejay.config.preset import parse_model, preset, preset_names
from bluejay.config.run import RunConfig
from bluejay.config.target import Target, load_target

__all__ = [
    "ACTIVATIONS",
    "DTYPES",
    "IGNORED_HF_KEYS",
    "MAX_ANSWERS",
    "MAX_BEAMS",
    "MAX_LOGPROBS",
    "MAX_STOP_IDS",
    "CompileSpec",
    "GenerationConfig",
    "ModelConfig",
    "RunConfig",
    "Target",
    "canonical",
    "canonical_json",
    "digest",
    "load_target",
    "parse_model",
    "preset",
    "preset_names",
]
