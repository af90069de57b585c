"""How rooms tell what they do without knowing who listens. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Event:
    """One thing that happened: a dotted name such as `checkpoint.shard` and its figures as plain data."""

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)


Observer = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The observer of callers who do not listen."""
