"""Errors have four parts, stable codes and exit codes."""

from __future__ import annotations

import inspect

import pytest

from bluejay import errors
from bluejay.errors import BluejayError, ConfigError

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, BluejayError)]


def test_text_has_all_parts_in_order() -> None:
    """Catches a part that is stored and never shown."""
    error = ConfigError(asked="7 heads", found="n_embd=32", rule="heads divide n_embd", fix="use 8")
    text = "[config]\n  asked: 7 heads\n  found: n_embd=32\n  rule: heads divide n_embd\n  do: use 8"
    assert str(error) == text
    assert error.args == (text,)
    assert error.as_dict() == {
        "code": "config", "asked": "7 heads", "found": "n_embd=32", "rule": "heads divide n_embd", "do": "use 8"
    }  # fmt: skip


def test_an_empty_rule_is_left_out_of_the_text() -> None:
    """Catches an empty `rule:` line."""
    assert "rule" not in str(ConfigError(asked="a", found="b", fix="c"))


@pytest.mark.parametrize("kind", CLASSES)
def test_codes(kind: type[BluejayError]) -> None:
    """Catches an exit code that is neither failure (1) nor wrong use (2), and two kinds under one code."""
    assert kind.exit_code in (1, 2)
    assert [other.code for other in CLASSES].count(kind.code) == 1
