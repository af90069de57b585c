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


def test_a_data_set_in_parquet(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a folder of tables taken for one that `datasets` saved, a table that is no data, and a folder whose name
    `datasets` takes for that of a reader."""
    import datasets

    monkeypatch.chdir(tmp_path)
    folder = Path("parquet")
    folder.mkdir()
    for name in ("train", "validation"):
        datasets.Dataset.from_list([{"text": f"{name}."}]).to_parquet(str(folder / f"{name}.parquet"))
    datasets.Dataset.from_list([{"text": "Another."}]).to_parquet("train-another.parquet")
    assert texts(folder, DataConfig(), tokenizer, "train") == ["train.<|endoftext|>"]
    assert texts(folder, DataConfig(), tokenizer, "validation") == ["validation.<|endoftext|>"]
    assert texts(folder / "train.parquet", DataConfig(), tokenizer, "any") == ["train.<|endoftext|>"]


def test_offline_asks_no_network(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an offline run that asks the hub for its data, and a process that stays offline afterwards."""
    import datasets
    from huggingface_hub import constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    seen: list[tuple[bool, bool]] = []

    def load(*name: str | None, split: str) -> None:
        seen.append((datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE))
        raise ConnectionError("nobody there")

    monkeypatch.setattr(datasets, "load_dataset", load)
    for offline in (True, False):
        with pytest.raises(ConfigError) as caught:
            read_samples("owner/name:part", "train", DataConfig(), tokenizer, 4096, offline=offline)
        assert "ConnectionError: nobody there" in caught.value.found
    assert seen == [(True, True), (False, False)]


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
