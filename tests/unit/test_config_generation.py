"""What may be asked of generation: every wrong value and every contradiction is one error that names its numbers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bluejay.config import MAX_ANSWERS, MAX_BEAMS, MAX_LOGPROBS, MAX_STOP_IDS, GenerationConfig
from bluejay.errors import RequestError

NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "length_penalty")
COUNTS = ("max_new_tokens", "min_new_tokens", "top_k", "num_beams", "n", "seed", "logprobs", "prompt_logprobs")


def refused(**settings: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        GenerationConfig.of(**settings)
    assert caught.value.exit_code == 2
    return caught.value


WRONG_VALUES: list[tuple[str, Any]] = [
    *((name, value) for name in COUNTS for value in (-1, 1.0, 1.5, "1", True, 2**63, [1])),
    *((name, None) for name in COUNTS if name not in ("seed", "logprobs", "prompt_logprobs")),
    *((name, value) for name in NUMBERS for value in (math.nan, math.inf, -math.inf, "1", None, True, 10**400)),
    ("temperature", -0.1),
    ("temperature", 1001),
    ("top_p", -0.1),
    ("top_p", 1.1),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", -2),
    ("length_penalty", 51),
    ("num_beams", 0),
    ("num_beams", MAX_BEAMS + 1),
    ("n", 0),
    ("n", MAX_ANSWERS + 1),
    ("logprobs", MAX_LOGPROBS + 1),
    ("prompt_logprobs", MAX_LOGPROBS + 1),
    ("early_stopping", "always"),
    ("early_stopping", "false"),
    ("early_stopping", 1),
    ("early_stopping", None),
    ("over_window", "truncate"),
    ("over_window", True),
    ("ignore_eos", "false"),
    ("ignore_eos", 0),
]


@pytest.mark.parametrize(("name", "value"), WRONG_VALUES, ids=lambda v: str(v)[:20])
def test_a_wrong_value_is_refused_by_name(name: str, value: Any) -> None:
    """B-65's values and B-39's "False": NaN compares false with every bound, True is an int, "8" is no number."""
    error = refused(**{name: value})
    assert name in error.asked
    assert repr(value) in error.found
    assert error.rule.startswith(f"{name} must be ")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [b"a"]),
        ("stop", 7),
        ("stop_ids", -1),
        ("stop_ids", [1, True]),
        ("stop_ids", "7"),
        ("stop_ids", 1.5),
        ("stop_ids", list(range(MAX_STOP_IDS))),
    ],
    ids=str,
)
def test_wrong_stops_are_refused_by_name(name: str, value: Any) -> None:
    """An empty stop string ends every answer at once; an id that is no id never ends one."""
    error = refused(**{name: value})
    assert name in error.asked
    assert name in error.rule


def test_a_plain_string_is_not_a_tuple_of_letters() -> None:
    """`GenerationConfig(stop="END")` taken as three stop strings E, N and D; an int taken for ids."""
    for wrong in ({"stop": "END"}, {"stop": ["END"]}, {"stop_ids": 5}, {"stop_ids": None}):
        with pytest.raises(RequestError):
            GenerationConfig(**wrong)  # type: ignore[arg-type]


CONTRADICTIONS: list[tuple[dict[str, Any], list[str]]] = [
    ({"min_new_tokens": 9, "max_new_tokens": 8}, ["min_new_tokens=9", "max_new_tokens=8"]),
    ({"num_beams": 3, "temperature": 0.7}, ["num_beams=3", "temperature=0.7"]),
    ({"num_beams": 2, "n": 3}, ["n=3", "num_beams=2"]),
    ({"n": 5}, ["n=5", "temperature=0"]),
    ({"length_penalty": 0.5}, ["length_penalty=0.5", "num_beams=1"]),
    ({"early_stopping": True}, ["early_stopping=True", "num_beams=1"]),
    ({"early_stopping": "never"}, ["early_stopping=never", "num_beams=1"]),
    ({"num_beams": 4, "logprobs": 2}, ["logprobs=2", "num_beams=4"]),
]


@pytest.mark.parametrize(("settings", "named"), CONTRADICTIONS, ids=lambda v: str(v)[:50])
def test_a_contradiction_names_both_sides(settings: dict[str, Any], named: list[str]) -> None:
    """Law 10: one of two settings that exclude each other must not be dropped silently."""
    error = refused(**settings)
    for side in named:
        assert side in error.found
    assert error.rule
    assert error.fix


@pytest.mark.parametrize(
    "settings",
    [
        {"min_new_tokens": 8, "max_new_tokens": 8},
        {"num_beams": 3, "n": 3, "length_penalty": -1, "early_stopping": "never"},
        {"num_beams": MAX_BEAMS, "prompt_logprobs": 0},
        {"n": MAX_ANSWERS, "temperature": 1},
        {"temperature": 0, "top_p": 0.0, "top_k": 5, "min_p": 1},
        {"max_new_tokens": 0, "logprobs": MAX_LOGPROBS, "seed": 2**63 - 1},
        {"stop_ids": list(range(MAX_STOP_IDS - 1)), "ignore_eos": True, "over_window": "cut"},
    ],
    ids=lambda v: str(v)[:50],
)
def test_edges_are_allowed(settings: dict[str, Any]) -> None:
    """A bound that refuses its own edge, and filters refused with greedy decoding, where they simply do nothing."""
    config = GenerationConfig.of(**settings)
    for name, value in settings.items():
        assert getattr(config, name) == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ({"stop": "END"}, ("END",)),
        ({"stop": ["a", "b"]}, ("a", "b")),
        ({"stop": (s for s in ("a", "b"))}, ("a", "b")),
        ({"stop": None}, ()),
        ({"stop_ids": 5}, (5,)),
        ({"stop_ids": range(3)}, (0, 1, 2)),
        ({"stop_ids": None}, ()),
    ],
    ids=range(7),
)
def test_one_or_many_stops(given_: dict[str, Any], expected: tuple[Any, ...]) -> None:
    """A string spread into its letters, a generator used up by the check, a list that makes the config unhashable."""
    config = GenerationConfig.of(**given_)
    assert getattr(config, next(iter(given_))) == expected
    hash(config)


def test_settings_override_a_base() -> None:
    """Settings merged in the wrong order, and a base that is changed by it, or not checked again afterwards."""
    base = GenerationConfig(temperature=1.0, n=3, stop=("x",))
    changed = GenerationConfig.of(base, n=4)
    assert (changed.temperature, changed.n, changed.stop) == (1.0, 4, ("x",))
    assert base.n == 3
    assert GenerationConfig.of(base) == base
    with pytest.raises(RequestError, match="n=3"):
        GenerationConfig.of(base, temperature=0)


@given(name=st.text(min_size=1, max_size=12).filter(lambda s: s not in GenerationConfig.__dataclass_fields__))
def test_unknown_settings_are_refused(name: str) -> None:
    """Law 10: a misspelled setting that is silently ignored."""
    error = refused(**{name: 1, "temperature": 0.5})
    assert name in error.asked
    assert "temperature" not in error.asked
    for field in dataclasses.fields(GenerationConfig):
        assert field.name in error.rule
