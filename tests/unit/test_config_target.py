"""Target files: what is read, and one error by name for what is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from bluejay.config import Target, load_target
from bluejay.errors import ConfigError


def test_a_target_is_read(tmp_path: Path) -> None:
    """A size taken for a number of something else, or a field that is dropped."""
    file = tmp_path / "box.yaml"
    file.write_text("memory: 16GiB\nthreads: 8\ncpu_features: [avx512f]\n")
    assert load_target(file) == Target("box", 16 * 2**30, 8, ("avx512f",))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("- a", "list"),
        ("memroy: 1GiB", "memroy"),
        ("memory: lots", "lots"),
        ("threads: -1", "-1"),
        ("threads: two", "two"),
        ("cpu_features: avx2", "avx2"),
        ("a: [", "mapping"),
    ],
)
def test_a_wrong_target_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    """An unknown key that is ignored, or a raw error of the YAML reader."""
    file = tmp_path / "box.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=named):
        load_target(file)
