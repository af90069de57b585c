"""One spelling for every value: what fingerprints and checksums are computed from.

Works by reflection, so a field that is added tomorrow is part of the spelling without anyone remembering it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any


def canonical(value: Any, *, exempt: Set[str] = frozenset(), where: str = "value") -> Any:
    """`value` as JSON data: dataclasses by their class name and every field, mappings with sorted keys, sets sorted.

    Fields declared `compare=False` are left out, because objects that are equal must be spelled equally, and so are
    the fields named in `exempt` as `Class.field`.

    Raises:
        TypeError: a value with no spelling of its own (a tensor, a function, NaN), with where it stands.
    """
    if value is None or isinstance(value, bool | int | str):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, Enum):
        return canonical(value.value, exempt=exempt, where=where)
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if is_dataclass(value) and not isinstance(value, type):
        kind = type(value).__name__
        named = {f.name for f in fields(value) if f.compare and f"{kind}.{f.name}" not in exempt}
        content = {name: canonical(getattr(value, name), exempt=exempt, where=f"{where}.{name}") for name in named}
        return {"class": kind, **content}
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"{where}: the key {wrong[0]!r} is not a string")
        return {key: canonical(value[key], exempt=exempt, where=f"{where}.{key}") for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [canonical(item, exempt=exempt, where=f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Set):
        return sorted((canonical(item, exempt=exempt, where=where) for item in value), key=canonical_json)
    raise TypeError(f"{where}: {value!r} of type {type(value).__qualname__} has no canonical form")


def canonical_json(value: Any, *, exempt: Set[str] = frozenset()) -> str:
    """The one JSON text of a value: sorted keys, no spaces, ASCII."""
    data = canonical(value, exempt=exempt)
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest(value: Any, *, exempt: Set[str] = frozenset()) -> str:
    """SHA-256 of `canonical_json(value)`, 64 hex digits."""
    return hashlib.sha256(canonical_json(value, exempt=exempt).encode("ascii")).hexdigest()
