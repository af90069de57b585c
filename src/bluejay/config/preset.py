"""Model shapes by name: the YAML files of `presets/`, read strictly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from importlib import resources
from typing import Any

import yaml

from bluejay.config.checks import near
from bluejay.config.model import ModelConfig
from bluejay.errors import ConfigError

_FOLDER = resources.files("bluejay.config") / "presets"
# Field annotations of ModelConfig and what YAML may hold for them.
_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (float, int),
    "bool": (bool,),
    "str": (str,),
    "int | None": (int, type(None)),
    "tuple[int, ...]": (list,),
}


def preset_names() -> tuple[str, ...]:
    """The names that `preset` knows, sorted."""
    files = (file.name for file in _FOLDER.iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in files if name.endswith(".yaml")))


def preset(name: str) -> ModelConfig:
    """The model shape called `name`.

    Raises:
        ConfigError: no such preset.
    """
    if name not in preset_names():
        raise ConfigError(
            asked=f"the model preset {name!r}",
            found=f"no preset of that name{near(name, preset_names())}",
            rule=f"the presets are {', '.join(preset_names())}",
            fix="use one of these names",
        )
    return parse_model(yaml.safe_load((_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")), f"preset {name}")


def parse_model(raw: Mapping[str, Any], source: str) -> ModelConfig:
    """The ModelConfig that plain data describes, with no key unknown, missing or of another type.

    Raises:
        ConfigError: naming the key, and the nearest known ones for a misspelled one.
    """
    known = {field.name: str(field.type) for field in fields(ModelConfig) if field.name != "ignored_keys"}
    for key, value in raw.items():
        if key not in known:
            raise ConfigError(
                asked=f"{key}: {value!r} in {source}",
                found=f"no setting of that name{near(str(key), known)}",
                rule="an unknown setting is never ignored",
                fix=f"correct or remove it; the settings are {', '.join(known)}",
            )
        allowed = _TYPES[known[key]]
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            raise ConfigError(
                asked=f"{key}: {value!r} in {source}",
                found=f"a value of type {type(value).__name__}",
                rule=f"{key} is of type {known[key]}",
                fix="write a value of that type (in YAML, 1e-5 is text and 1.0e-5 a number)",
            )
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in raw.items()}
    required = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "rotary_dim")
    if missing := [key for key in required if key not in values]:
        raise ConfigError(
            asked=f"a model from {source}",
            found=f"no {', '.join(missing)}",
            rule="sizes are never guessed",
            fix=f"add {', '.join(missing)}",
        )
    return ModelConfig(**values)
