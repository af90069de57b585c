"""`bluejay bench`: figures, and mistakes that are told before anything is measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("the cat sat on the mat and ate the rat. " * 10)
    return file


def test_formats_are_compared(tiny_checkpoint: Path, tmp_path: Path, text_file: Path, cli: Cli) -> None:
    """A format that is not packed, or not measured; bits without scales; a page that lacks a format."""
    page = tmp_path / "formats.html"
    options = ["--groups", "16,-1", "--methods", "minmax,gptq", "--calibration", text_file, "--rounds", 1, "--new", 2]
    options += ["--html", page, "--backend", "eager", "--json"]
    code, out, err = cli("bench", "quantization", tiny_checkpoint, "--text", text_file, *options)
    assert code == 0, err
    formats = {figures["format"]: figures for figures in json.loads(out)["formats"]}
    assert list(formats) == ["original", "int4-g16", "int4-row", "int4-g16-gptq", "int4-row-gptq"]
    assert {name: f["bits_per_weight"] for name, f in formats.items() if "g16" in name} == {
        "int4-g16": 6.0,
        "int4-g16-gptq": 6.0,
    }
    assert (
        formats["int4-row"]["weight_bytes"] < formats["int4-g16"]["weight_bytes"] < formats["original"]["weight_bytes"]
    )
    assert len({figures["perplexity"] for figures in formats.values()}) == 5
    assert all(figures["seconds_per_token"] > 0 for figures in formats.values())
    assert all(name in page.read_text() for name in formats)


def test_accuracy_where_a_task_is_given(text_file: Path, tmp_path: Path, cli: Cli) -> None:
    """A task that is not passed on, or the accuracy of one format told for all."""
    data, page = tmp_path / "rows.jsonl", tmp_path / "formats.html"
    rows = [{"premise": f"It is {word}.", "hypothesis": "It is.", "label": i % 3} for i, word in enumerate("abcdef")]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--groups", "64", "--methods", "minmax", "--rounds", 1, "--new", 2, "--data", data, "--html", page]
    code, out, err = cli("bench", "quantization", "nano", "--text", text_file, *options, "--backend", "eager", "--json")
    assert code == 0, err
    formats = json.loads(out)["formats"]
    assert [figures["accuracy"] for figures in formats] == [0.0, 0.0]  # nano writes no label, and that is wrong
    assert "accuracy" in page.read_text()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--html", "nowhere/page.html"], "nowhere"),
        (["--groups", "16,64"], "32 input features"),
        (["--groups", "16,x"], "--groups"),
        (["--methods", "gptq"], "--calibration"),
        (["--data", "nyu-mll/glue:mnli"], "--split"),
    ],
)
def test_mistakes_are_told_before_measuring(
    tiny_checkpoint: Path,
    text_file: Path,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    word: str,
) -> None:
    """Minutes of measurements, and then a folder that is not there."""
    monkeypatch.setattr("bluejay.load", lambda *_, **__: pytest.fail("loaded the model"))
    code, _, err = cli("bench", "quantization", tiny_checkpoint, "--text", text_file, "--backend", "eager", *options)
    assert (code, word in err, "unexpected" in err) == (2, True, False), err


def test_loops_of_packed_weights(tiny_checkpoint: Path, cli: Cli) -> None:
    """`--quantize` that is not passed on; loops that differ."""
    options = ["--backend", "eager", "--rounds", 1, "--new", 4, "--json"]
    code, out, err = cli("bench", "decode-loops", tiny_checkpoint, "--quantize", "int4-g16", *options)
    assert code == 0, err
    record = json.loads(out)
    assert record["quantize"] == "int4-g16"
    assert [(f["loop"], f["same_ids"]) for f in record["loops"]] == [
        ("host", True),
        ("device", True),
        ("unrolled", True),
    ]
    assert cli("bench", "decode-loops", tiny_checkpoint, "--quantize", "int4-g64", *options)[0] == 2
