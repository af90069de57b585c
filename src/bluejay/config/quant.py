"""How weights are quantized: bits, group, method, and which layers."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

from bluejay.config.checks import refusal
from bluejay.errors import ConfigError

QUANT_METHODS = ("minmax", "mse", "gptq")
QUANT_LAYERS = ("q_proj", "k_proj", "v_proj", "out_proj", "fc_in", "fc_out", "lm_head")
QUANT_METHOD = "bluejay"  # as config.json names it
QUANT_FORMAT_VERSION = 1
ZERO_CONVENTION = "w = bias + scale * code; codes are 0 to 15, unsigned; no zero point is stored"
SMALLEST_GROUP, LARGEST_GROUP, GROUP_STEP = 16, 256, 8

_NAME = re.compile(r"int4(?:-(?:g(?P<group>\d+)|(?P<row>row)))?(?:-(?P<method>[a-z]+))?")


@dataclass(frozen=True)
class QuantSpec:
    """Group quantization of linear layers.

    Attributes:
        bits: 4.
        group_size: consecutive input features that share a scale and a bias; -1 is all of them.
        method: how a group's range is found. `minmax`: its extremes; `mse`: the range with the smallest squared error;
            `gptq`: extremes, and each column's rounding error is made good by the columns after it.
        layers: patterns (`*`, `?`, `[...]`) of the linear layers meant, against the whole name or its last part.
    """

    bits: int = 4
    group_size: int = 64
    method: Literal["minmax", "mse", "gptq"] = "minmax"
    layers: tuple[str, ...] = QUANT_LAYERS

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits != 4:
            raise _refuse("bits", self.bits, "4")
        whole = type(self.group_size) is int
        in_range = whole and SMALLEST_GROUP <= self.group_size <= LARGEST_GROUP and self.group_size % GROUP_STEP == 0
        if not whole or not (in_range or self.group_size == -1):
            rule = f"a multiple of {GROUP_STEP} from {SMALLEST_GROUP} to {LARGEST_GROUP}, or -1 (one group a row)"
            raise _refuse("group_size", self.group_size, rule)
        if self.method not in QUANT_METHODS:
            raise _refuse("method", self.method, f"one of {', '.join(QUANT_METHODS)}")
        patterns = isinstance(self.layers, tuple) and all(isinstance(p, str) and p for p in self.layers)
        if not patterns or not self.layers:
            raise _refuse("layers", self.layers, f"a tuple of patterns such as {', '.join(QUANT_LAYERS)}")

    @property
    def name(self) -> str:
        """The short spelling that `parse` reads, without the layers: `int4-g64`, `int4-row-mse`."""
        group = "row" if self.group_size == -1 else f"g{self.group_size}"
        return f"int{self.bits}-{group}" + ("" if self.method == "minmax" else f"-{self.method}")

    @classmethod
    def parse(cls, name: str) -> QuantSpec:
        """The spec that a short name means: `int4`, `int4-g64`, `int4-row`, `int4-g32-mse`.

        Raises:
            ConfigError: no such format.
        """
        match = _NAME.fullmatch(name)
        if match is None or (match["method"] or cls.method) not in QUANT_METHODS:
            usual = [f"int4-g{group}{method}" for group in (64, 16, 32, 128, 256) for method in ("", "-mse", "-gptq")]
            near = difflib.get_close_matches(name, ["int4", *usual], n=1)
            raise ConfigError(
                asked=f"the weight format {name!r}",
                found="no such format" + (f"; near: {near[0]}" if near else ""),
                rule="int4, then -gN (group of N) or -row, then -mse or -gptq where wanted",
                fix="write for example int4-g64",
            )
        group = -1 if match["row"] else int(match["group"] or cls.group_size)
        return cls(group_size=group, method=match["method"] or cls.method)  # type: ignore[arg-type]  # checked there

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> QuantSpec:
        """The spec in plain data, as JSON holds it.

        Raises:
            ConfigError: an unknown key, or a value that is not allowed.
        """
        known = [f.name for f in fields(cls)]
        if unknown := [key for key in raw if key not in known]:
            near = difflib.get_close_matches(unknown[0], known, n=1)
            raise ConfigError(
                asked=f"a quantization with {unknown[0]}",
                found="no such setting" + (f"; near: {near[0]}" if near else ""),
                rule=f"settings are {', '.join(known)}",
                fix="correct or remove it",
            )
        layers = raw.get("layers", QUANT_LAYERS)
        return cls(**{**raw, "layers": tuple(layers) if isinstance(layers, list | tuple) else layers})


_refuse = partial(refusal, "a quantization")
