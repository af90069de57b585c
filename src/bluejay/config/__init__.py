"""Configuration as frozen dataclasses: presets, strict parsing, canonical form."""

from bluejay.config.canonical import canonical, canonical_json, digest
from bluejay.config.compile import CompileSpec
from bluejay.config.generation import MAX_ANSWERS, MAX_BEAMS, MAX_LOGPROBS, MAX_STOP_IDS, GenerationConfig
from bluejay.config.model import ACTIVATIONS, DTYPES, IGNORED_HF_KEYS, ModelConfig
from bluejay.config.parallel import Layout, Workload
from bluejay.config.preset import parse_model, preset, preset_names
from bluejay.config.quant import QUANT_FORMAT_VERSION, QUANT_LAYERS, QUANT_METHODS, ZERO_CONVENTION, QuantSpec
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
    "QUANT_FORMAT_VERSION",
    "QUANT_LAYERS",
    "QUANT_METHODS",
    "ZERO_CONVENTION",
    "CompileSpec",
    "GenerationConfig",
    "Layout",
    "ModelConfig",
    "QuantSpec",
    "RunConfig",
    "Target",
    "Workload",
    "canonical",
    "canonical_json",
    "digest",
    "load_target",
    "parse_model",
    "preset",
    "preset_names",
]
