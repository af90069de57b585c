"""What a run is made of: every wrong value is one error that names it, before anything is read."""

from __future__ import annotations

from typing import Any

import pytest

import bluejay
from bluejay.config import RunConfig
from bluejay.errors import BluejayError, ConfigError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", ""),
        ("dtype", "float64"),
        ("dtype", "fp16"),
        ("dtype", None),
        ("context", -1),
        ("context", "512"),
        ("context", 1.5),
        ("context", True),
        ("max_rows", 0),
        ("max_rows", "8"),
        ("max_rows", True),
        ("prefill_buckets", ()),
        ("prefill_buckets", (16, 8)),
        ("prefill_buckets", (8, 8)),
        ("prefill_buckets", (0, 8)),
        ("prefill_buckets", (8.0,)),
        ("prefill_buckets", [8, 16]),
        ("batch_buckets", 4),
        ("batch_buckets", ("1", "2")),
        ("slot_buckets", (64, 32)),
        ("slot_buckets", None),
        ("compile", "eager"),
        ("cache", None),
        ("loop", "for"),
        ("iterations", 0),
        ("iterations", "8"),
        ("strict", "false"),
        ("verify", 0),
        ("offline", None),
    ],
)
def test_a_wrong_value_is_refused_by_name(name: str, value: Any) -> None:
    """ "false" taken as true (B-39); a bucket of 0, which never ends; a list, which no cached plan can be keyed by."""
    with pytest.raises(ConfigError) as caught:
        RunConfig(**{"model": "nano", name: value})
    assert f"{name}={value!r}" in caught.value.found
    assert caught.value.rule.startswith(f"{name} must be ")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("dtype", ["", "float32", "bfloat16", "float16"])
def test_right_values_are_kept(dtype: str) -> None:
    """A check that refuses what the documentation promises, or the defaults."""
    run = RunConfig(
        "some/model", dtype=dtype, context=1, max_rows=1, prefill_buckets=(3,), slot_buckets=(), strict=False
    )
    assert (run.dtype, run.context, run.max_rows, run.prefill_buckets, run.strict) == (dtype, 1, 1, (3,), False)
    hash(run)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"contxt": 5}, "contxt"),
        ({"max_rows": 0}, "max_rows=0"),
        ({"dtype": "int8"}, "int8"),
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, "float16 and torch_dtype=bfloat16"),
        ({"backend": "llvm"}, "llvm"),
        ({"device": "tpu"}, "tpu"),
        ({"device": "cuda:99"}, "cuda:99"),
    ],
)
def test_load_refuses_before_it_reads(settings: dict[str, Any], named: str) -> None:
    """A wrong setting that is dropped, or found only after gigabytes of weights (here: a directory not looked for)."""
    with pytest.raises(BluejayError) as caught:
        bluejay.load("no-such-directory", **settings)
    assert named in caught.value.asked
    assert caught.value.fix


@pytest.mark.parametrize("context", [0, 20, 32])
def test_context_within_the_window(tiny_checkpoint: Any, context: int) -> None:
    """A context of 0 is the whole window; a smaller one is what requests are checked against."""
    engine = bluejay.load(str(tiny_checkpoint), context=context, torch_dtype="float32")
    assert engine.context == (context or 32)
    with pytest.raises(BluejayError, match=f"a window of {engine.context} tokens"):
        engine.generate([1, 2, 3], max_new_tokens=engine.context)


def test_context_beyond_the_window(tiny_checkpoint: Any) -> None:
    """B-23: positions past the trained window give noise, or an index out of range on the device."""
    with pytest.raises(ConfigError, match=r"33 tokens[\s\S]*32"):
        bluejay.load(str(tiny_checkpoint), context=33)
