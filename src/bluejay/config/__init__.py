"""Configuration as frozen dataclasses: presets, strict parsing, canonical form."""

from bluejay.config.canonical import canonical, canonical_json, digest
from bluejay.config.checks import near, read_mapping
from bluejay.config.compile import CompileSpec
from bluejay.config.generation import MAX_ANSWERS, MAX_BEAMS, MAX_LOGPROBS, MAX_STOP_IDS, GenerationConfig
from bluejay.config.model import ACTIVATIONS, DTYPES, IGNORED_HF_KEYS, ModelConfig
from bluejay.config.parallel import Layout, Workload
from bluejay.config.preset import parse_model, preset, preset_names
from bluejay.config.quant import (
    QUANT_FORMAT_VERSION,
    QUANT_LAYERS,
    QUANT_METHOD,
    QUANT_METHODS,
    ZERO_CONVENTION,
    QuantSpec,
)
from bluejay.config.run import RunConfig
from bluejay.config.target import Target, load_target
from bluejay.config.train import (
    LORA_TARGETS,
    DataConfig,
    LoraConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
    as_yaml,
    parse_train,
    read_train,
    train_preset_names,
)

__all__ = [
    "ACTIVATIONS",
    "DTYPES",
    "IGNORED_HF_KEYS",
    "LORA_TARGETS",
    "MAX_ANSWERS",
    "MAX_BEAMS",
    "MAX_LOGPROBS",
    "MAX_STOP_IDS",
    "QUANT_FORMAT_VERSION",
    "QUANT_LAYERS",
    "QUANT_METHOD",
    "QUANT_METHODS",
    "ZERO_CONVENTION",
    "CompileSpec",
    "DataConfig",
    "GenerationConfig",
    "Layout",
    "LoraConfig",
    "ModelConfig",
    "OptimizerConfig",
    "QuantSpec",
    "RunConfig",
    "ScheduleConfig",
    "Target",
    "TrainConfig",
    "Workload",
    "as_yaml",
    "canonical",
    "canonical_json",
    "digest",
    "load_target",
    "near",
    "parse_model",
    "parse_train",
    "preset",
    "preset_names",
    "read_mapping",
    "read_train",
    "train_preset_names",
]
