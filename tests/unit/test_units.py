"""Sizes and durations as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bluejay.units import format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1024", 1024), ("16GiB", 16 * 2**30), ("900 MB", 900_000_000), (" 1.5kib ", 1536), ("2TB", 2 * 10**12), (7, 7)],
)
def test_parse_bytes(text: str | int, num_bytes: int) -> None:
    """Catches MB taken as MiB: 7 percent of a memory limit."""
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 XB", "1e3", "1,5GB", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    """Catches a size guessed from text that is none."""
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1_300_000_000, "1.21 GiB"),
        (1010 * 2**20, "1010 MiB"),
        (2**42, "4 TiB"),
    ],
)
def test_format_bytes(num_bytes: int, text: str) -> None:
    """Catches a wrong power, and 1e+03 for what lies between 1000 and 1024."""
    assert format_bytes(num_bytes) == text


@given(st.integers(min_value=0, max_value=2**49))
def test_what_is_written_can_be_read(num_bytes: int) -> None:
    """Catches a format that parse_bytes does not know, and a loss beyond the three digits shown."""
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.006)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.000812, "812 us"), (0.0034, "3.4 ms"), (2.1, "2.1 s"), (119.4, "119 s"), (3723, "1:02:03"), (125, "0:02:05")],
)
def test_format_seconds(seconds: float, text: str) -> None:
    """Catches minutes that are not carried into hours."""
    assert format_seconds(seconds) == text
