"""Text on a disk, or a hub's data set, to samples: token ids and where learning begins in each."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from bluejay.checkpoint import Tokenizer
from bluejay.config import DataConfig
from bluejay.errors import ConfigError
from bluejay.events import Event, Observer, ignore
from bluejay.train import Samples

END_OF_TEXT = "<|endoftext|>"
_HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?(:[\w.-]+)?")


def read_samples(
    source: str,
    split: str,
    data: DataConfig,
    tokenizer: Tokenizer,
    vocab_size: int,
    *,
    offline: bool = False,
    observe: Observer = ignore,
) -> Samples:
    """The samples of a `.txt`, `.jsonl` or `.parquet` file, a folder of a data set, or a hub id.

    Every sample ends with the tokenizer's end of text. Prompt and answer are encoded apart, as they are when the model
    is asked: the answer's first token never merges with the prompt's last.

    Raises:
        ConfigError: not there, not readable, no samples, or a template names a field that a row lacks.
    """
    if tokenizer.eos_id is None:
        raise ConfigError(
            asked=f"samples of {source}",
            found="a tokenizer without an end of text",
            rule="a model that is never shown an end never stops",
            fix=f"name an eos_token such as {END_OF_TEXT} in tokenizer_config.json",
        )
    if Path(source).suffix == ".txt":
        if data.prompt or data.answer:
            raise ConfigError(
                asked=f"templates for {source}", found="plain text without fields", fix="leave prompt and answer out"
            )
        pairs = _documents(source, tokenizer)
    else:
        rows: Iterable[Mapping[str, Any]] = read_rows(source, split, offline=offline)
        if data.labels:
            rows = _labelled(rows, source, observe)
        pairs = _rows(rows, source, data, tokenizer)
    samples = Samples.of(pairs, vocab_size)
    if not len(samples):
        raise ConfigError(asked=f"samples of {source}", found="none", fix="give a file that holds text")
    observe(Event("data", {"source": source, "samples": len(samples), "tokens": len(samples.ids)}))
    return samples


def read_rows(source: str, split: str, *, offline: bool = False) -> Iterator[dict[str, Any]]:
    """The rows of a `.jsonl` file, or of one split of a data set, as mappings.

    Raises:
        ConfigError: not there or not readable.
    """
    path = Path(source).expanduser()
    if path.suffix in (".jsonl", ".json"):
        yield from _json_lines(path)
    elif path.is_dir() or path.suffix == ".parquet" or (not path.exists() and _HUB_ID.fullmatch(source)):
        yield from _data_set(source, path, split, offline)
    else:
        raise ConfigError(
            asked=f"data from {source}",
            found="a file of another kind" if path.exists() else "no such file or folder",
            rule="data is a .txt, .jsonl or .parquet file, a folder of a data set, or a hub id",
            fix="name one of these",
        )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            asked=f"data from {path}",
            found=f"no such file, seen from {Path.cwd()}",
            rule="paths are relative to where the command runs",
            fix="correct the path; a recipe's data is made by its run.py: python recipes/mnli/run.py synthetic",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            asked=f"data from {path}", found=str(error), rule="text is UTF-8", fix="name a readable text file"
        ) from None


def _documents(source: str, tokenizer: Tokenizer) -> Iterator[tuple[list[int], int]]:
    for document in _read_text(Path(source).expanduser()).split(END_OF_TEXT):
        if text := document.strip("\n"):
            yield [*tokenizer.encode(text), _eos(tokenizer)], 0


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(_read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            row = error
        if not isinstance(row, dict):
            raise ConfigError(
                asked=f"line {number} of {path}",
                found=str(row) if isinstance(row, ValueError) else f"a {type(row).__name__}",
                rule="every line is one JSON object",
                fix="correct the line",
            )
        yield row


def _rows(
    rows: Iterable[Mapping[str, Any]], source: str, data: DataConfig, tokenizer: Tokenizer
) -> Iterator[tuple[list[int], int]]:
    if not data.prompt and not data.answer:
        data = DataConfig(prompt="{text}")
    for number, row in enumerate(rows, 1):
        fields = dict(row)
        if data.labels:
            fields["label"] = label_name(row.get("label"), data.labels, f"row {number} of {source}")
        prompt = tokenizer.encode(fill(data.prompt, fields, f"row {number} of {source}")) if data.prompt else []
        answer = tokenizer.encode(fill(data.answer, fields, f"row {number} of {source}")) if data.answer else []
        learn_from = len(prompt) if data.learn == "answer" else 0
        yield [*prompt, *answer, _eos(tokenizer)], learn_from


def _labelled(rows: Iterable[Mapping[str, Any]], source: str, observe: Observer) -> Iterator[Mapping[str, Any]]:
    """The rows that have a label: data sets mark those without by -1 or nothing."""
    num_unlabelled = 0
    for row in rows:
        if row.get("label") in (None, -1):
            num_unlabelled += 1
        else:
            yield row
    if num_unlabelled:
        observe(Event("warning", {"text": f"{num_unlabelled} rows of {source} have no label and are left out"}))


def fill(template: str, fields: Mapping[str, Any], where: str) -> str:
    """A template with a row's fields filled in.

    Raises:
        ConfigError: the row lacks one of them, or one is no text or number, or the template is none.
    """
    try:
        wanted = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise _no_template(template, where, error) from None
    if missing := [name for name in wanted if fields.get(name) is None]:
        raise ConfigError(
            asked=f"the template {template!r} for {where}",
            found=f"no {', '.join(missing)} among {', '.join(fields)}",
            rule="every field that a template names is in every row",
            fix="correct the template or the data",
        )
    if nested := [name for name in wanted if isinstance(fields[name], list | dict)]:
        raise ConfigError(
            asked=f"the template {template!r} for {where}",
            found=f"{nested[0]} is a {type(fields[nested[0]]).__name__}",
            rule="a field that a template names is text or a number",
            fix="correct the template or the data",
        )
    try:
        return template.format_map(fields)
    except ValueError as error:
        raise _no_template(template, where, error) from None


def _no_template(template: str, where: str, error: ValueError) -> ConfigError:
    return ConfigError(
        asked=f"the template {template!r} for {where}",
        found=str(error),
        rule="a template is text with {field} in it; a brace itself is doubled",
        fix="correct the template",
    )


def label_name(label: Any, names: tuple[str, ...], where: str) -> str:
    """The name of a label that is given as its number, or as its name.

    Raises:
        ConfigError: neither.
    """
    if isinstance(label, str) and label in names:
        return label
    if type(label) is int and 0 <= label < len(names):
        return names[label]
    raise ConfigError(
        asked=f"the label of {where}",
        found=repr(label),
        rule=f"0 to {len(names) - 1} for {', '.join(names)}, or one of these names",
        fix="leave unlabelled rows out, or correct data.labels",
    )


def _data_set(source: str, path: Path, split: str, offline: bool) -> Iterator[dict[str, Any]]:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ConfigError(
            asked=f"the data set {source}",
            found="the package `datasets` is not installed",
            fix="pip install 'bluejay[train]'",
        ) from error
    name, _, configuration = source.partition(":")
    try:
        if path.is_dir() and any((path / mark).exists() for mark in ("dataset_dict.json", "state.json")):
            loaded = datasets.load_from_disk(str(path))
            rows = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        elif path.is_dir():
            rows = datasets.load_dataset(str(path.resolve()), split=split)  # "parquet" alone names a reader
        elif path.suffix == ".parquet":
            rows = datasets.Dataset.from_parquet(str(path))
        else:
            with _offline() if offline else nullcontext():
                rows = datasets.load_dataset(name, configuration or None, split=split)
    except Exception as error:  # whatever the library and its transport raise, the way out is the same
        raise ConfigError(
            asked=f"the split {split} of the data set {source}",
            found=f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}",
            rule="a folder of a data set, or a hub id with a network or in the cache of `datasets`",
            fix="check name, split and network",
        ) from error
    for row in rows:
        yield dict(row)


@contextmanager
def _offline() -> Iterator[None]:
    """No question to the network. `datasets` takes that from the environment only, as it was at its import."""
    import datasets
    import huggingface_hub

    switches: list[Any] = [datasets.config, huggingface_hub.constants]
    before = [switch.HF_HUB_OFFLINE for switch in switches]
    try:
        for switch in switches:
            switch.HF_HUB_OFFLINE = True
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.HF_HUB_OFFLINE = value


def _eos(tokenizer: Tokenizer) -> int:
    assert tokenizer.eos_id is not None
    return tokenizer.eos_id
