"""Bytes, seconds and rates as people write them. Standard library only."""

from __future__ import annotations

import re

_BINARY = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def parse_bytes(text: str | int) -> int:
    """Bytes in a size such as `16GiB`, `900 MB` or `1024`. `MB` is 10^6, `MiB` is 2^20.

    Raises:
        ValueError: not a number followed by one of B, KB, MB, GB, TB, KiB, MiB, GiB, TiB.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    unit = match.group(2).lower() if match else None
    if match is None or unit is None or unit not in {**_BINARY, **_DECIMAL}:
        raise ValueError(f"{text!r} is not a size; write for example 512MiB, 16GiB or 900MB")
    return int(float(match.group(1)) * {**_BINARY, **_DECIMAL}[unit])


def counted(number: int, noun: str) -> str:
    """A number of things: `1 device`, `2 devices`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_bytes(num_bytes: float) -> str:
    """A byte count in the largest binary unit below it, three significant digits: `1.21 GiB`."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def format_seconds(seconds: float) -> str:
    """A duration at the scale it deserves: `812 us`, `3.4 ms`, `2.1 s`, `1:02:03`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
