"""Files to samples: documents, templates, data sets that `datasets` saved; and what is refused, by line and field."""

from __future__ import annotations

from pathlib import Path

import pytest

from bluejay.checkpoint import Tokenizer, load_tokenizer
from bluejay.config import DataConfig
from bluejay.errors import ConfigError
from bluejay.tasks import read_samples


@pytest.fixture(scope="module")
def tokenizer(nano_dir: Path) -> Tokenizer:
    return load_tokenizer(nano_dir)


def texts(source: Path, data: DataConfig, tokenizer: Tokenizer, split: str = "train") -> list[str]:
    samples = read_samples(str(source), split, data, tokenizer, 4096)
    bounds = zip(samples.starts[:-1], samples.starts[1:], strict=True)
    return [tokenizer.decode(samples.ids[a:b].tolist(), skip_special=False) for a, b in bounds]


def test_documents_end_with_the_end_of_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Catches documents that run into each other, and a last one that never ends."""
    file = tmp_path / "text.txt"
    file.write_text("One.\n\nTwo.\n<|endoftext|>\nThree.\n<|endoftext|>\n")
    assert texts(file, DataConfig(), tokenizer) == ["One.\n\nTwo.<|endoftext|>", "Three.<|endoftext|>"]


def test_a_data_set_that_was_saved(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Catches a split that is not the one asked for; names of labels come from the configuration."""
    import datasets

    parts = {name: datasets.Dataset.from_list([{"q": f"{name}?", "label": 1}]) for name in ("train", "validation")}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "set"))
    data = DataConfig(prompt="{q}", answer=" {label}", labels=("no", "yes"))
    assert texts(tmp_path / "set", data, tokenizer, "validation") == ["validation? yes<|endoftext|>"]
    with pytest.raises(ConfigError) as caught:
        texts(tmp_path / "set", data, tokenizer, "test")
    assert "the split test" in caught.value.asked


@pytest.mark.parametrize(
    ("content", "data", "found"),
    [
        ('{"text": "a"}\n{"txt": "b"}\n', DataConfig(), "no text among txt"),
        ('{"text": "a"}\nnonsense\n', DataConfig(), "Expecting value"),
        ("[1]\n", DataConfig(), "a list"),
        ('{"q": "a", "label": 2}\n', DataConfig(prompt="{q}", labels=("no", "yes")), "2"),
        ("\n", DataConfig(), "none"),
        ('{"text": ["a"]}\n', DataConfig(), "text is a list"),
        ('{"text": "a"}\n', DataConfig(prompt="{text"), "expected '}'"),
        ('{"text": "a"}\n', DataConfig(prompt="{text:d}"), "format code 'd'"),
    ],
)
def test_what_is_wrong_is_named(
    content: str, data: DataConfig, found: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Catches rows that are passed over because they do not fit."""
    file = tmp_path / "rows.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        texts(file, data, tokenizer)
    assert found in caught.value.found


def test_a_line_of_json_ends_at_a_newline(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Catches rows torn at U+2028 or U+0085, which JSON may hold as they are."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "a\u2028b\u0085c"}\r\n{"text": "d"}', encoding="utf-8", newline="")
    assert texts(file, DataConfig(), tokenizer) == ["a\u2028b\u0085c<|endoftext|>", "d<|endoftext|>"]


@pytest.mark.parametrize("name", ["absent.txt", "absent.jsonl", "table.csv"])
def test_what_is_no_data(name: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Catches a missing file that is looked for on a hub."""
    (tmp_path / "table.csv").write_text("a,b\n")
    with pytest.raises(ConfigError):
        texts(tmp_path / name, DataConfig(), tokenizer)
