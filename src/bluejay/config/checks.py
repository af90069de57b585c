"""What settings have in common: how a wrong value is refused, and how a file of settings is read."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml

from bluejay.errors import ConfigError


def refusal(what: str, name: str, value: object, rule: str) -> ConfigError:
    """The error for `what` (a run, a plan, ...) of which the setting `name` has a value that `rule` does not allow."""
    return ConfigError(
        asked=f"{what} with {name}={value!r}",
        found=f"{name}={value!r}",
        rule=f"{name} must be {rule}",
        fix=f"give {name} such a value, or leave it out",
    )


def near(word: str, known: Iterable[str]) -> str:
    """`; near ones: a, b` for a misspelled word, or nothing when no known one is near."""
    found = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    return f"; near ones: {', '.join(found)}" if found else ""


def read_mapping(file: Path, refuse: Callable[[str, str], ConfigError]) -> dict[Any, Any]:
    """The mapping in a YAML file.

    Args:
        refuse: makes the error from what was found and what to do.

    Raises:
        ConfigError: unreadable, or something else than a mapping.
    """
    try:
        raw = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise refuse(str(error).splitlines()[0], "name a readable YAML file") from None
    if not isinstance(raw, dict):
        raise refuse(f"a {type(raw).__name__}", "write key: value lines")
    return raw
