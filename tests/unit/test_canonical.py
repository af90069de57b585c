"""One spelling for every value: what fingerprints and checksums stand on."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bluejay.config import CompileSpec, ModelConfig, canonical, canonical_json, digest
from bluejay.errors import ConfigError


class Color(Enum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    number: int = 1


@dataclass(frozen=True)
class Outer:
    inner: Inner = Inner()
    names: tuple[str, ...] = ("a", "b")
    color: Color = Color.RED
    note: str = field(default="", compare=False)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(PLAIN)
def test_canonical_json_survives_json(value: Any) -> None:
    """Catches a checksum that differs once the manifest has been through a file."""
    assert canonical_json(json.loads(canonical_json(value))) == canonical_json(value)


def test_order_of_keys_and_of_sets_does_not_matter() -> None:
    """Catches a fingerprint that depends on insertion order, or on the hash seed of the process."""
    assert digest({"a": 1, "b": {"x", "y", "z"}}) == digest({"b": {"z", "y", "x"}, "a": 1})


def test_values_that_differ_are_spelled_differently() -> None:
    """Catches True = 1 = 1.0 = "1", and two dataclasses with equal fields."""
    values = [True, 1, 1.0, "1", None, "None", [1], b"1", Inner(), {"number": 1}]
    assert len({canonical_json(value) for value in values}) == len(values)


def test_every_compared_field_counts_and_no_other() -> None:
    """Catches a hand-kept list of fields, at any depth. B-47."""
    base = Outer()
    assert digest(replace(base, inner=Inner(2))) != digest(base)
    assert digest(replace(base, names=("b", "a"))) != digest(base)
    assert digest(replace(base, note="for the record only")) == digest(base)
    assert digest(replace(base, names=()), exempt={"Outer.names"}) == digest(base, exempt={"Outer.names"})
    assert digest(base, exempt={"Inner.number"}) != digest(base)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), len, {1: 2}, Inner])
def test_what_has_no_spelling_is_refused_with_its_place(value: Any) -> None:
    """Catches a value that is spelled by its address, so that no two runs agree."""
    with pytest.raises(TypeError, match=r"value\.model\[1\]"):
        canonical({"model": [0, value]})


def test_model_config_has_a_spelling_with_every_field(tiny_config: ModelConfig) -> None:
    """Catches a field of the model's config that is left out of its canonical form. B-47."""
    assert set(canonical(tiny_config)) == {"class"} | {f.name for f in fields(ModelConfig) if f.compare}


@pytest.mark.parametrize(
    "settings",
    [
        {"backend": "tvm"},
        {"blocks": "some"},
        {"kernel": "sse2"},
        {"threads": -1},
        {"threads": 1.0},
        {"threads": True},
        {"cxx": None},
    ],
)
def test_wrong_compile_settings_are_refused(settings: dict[str, Any]) -> None:
    """Catches a setting that is taken as it comes and fails, or does nothing, minutes later."""
    with pytest.raises(ConfigError) as caught:
        CompileSpec(**settings)
    assert next(iter(settings)) in str(caught.value)
