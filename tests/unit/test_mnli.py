"""MNLI as text: labels by name, three ways of scoring, and what is not a label. B-69, B-70."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bluejay.build import Built, Programs
from bluejay.checkpoint import Tokenizer, load_tokenizer
from bluejay.config import CompileSpec, DataConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig
from bluejay.errors import ConfigError
from bluejay.events import Event
from bluejay.generate import Engine
from bluejay.models import GPTJ
from bluejay.tasks import MNLI_LABELS, MNLI_PROMPT, labelled_rows, mnli, order_warning, read_answer, read_samples
from bluejay.train import Rows, Samples, Trainer

PAIRS = [
    ("A man plays a guitar.", "A man makes music.", "entailment"),
    ("Two dogs run in the snow.", "There are animals outside.", "entailment"),
    ("A girl reads a book.", "The girl likes the story.", "neutral"),
    ("The train was late.", "It had snowed all night.", "neutral"),
    ("The shop is closed.", "The shop is open.", "contradiction"),
    ("Nobody came to the party.", "The party was full of people.", "contradiction"),
]
ROWS = [{"premise": p, "hypothesis": h, "label": MNLI_LABELS.index(name)} for p, h, name in PAIRS]
DATA = DataConfig(prompt=MNLI_PROMPT, answer=" {label}", labels=MNLI_LABELS, learn="answer", layout="rows")


@pytest.fixture(scope="module")
def tokenizer(nano_dir: Path) -> Tokenizer:
    return load_tokenizer(nano_dir)


def taught(tokenizer: Tokenizer, rows: list[dict[str, Any]], folder: Path, nano_dir: Path, window: int = 64) -> Engine:
    """An engine over a small model that has learned rows by heart, with the loop that users have."""
    file = folder / "rows.jsonl"
    import json

    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = ModelConfig(4096, window, 32, 1, 2, 8, bos_token_id=0, eos_token_ids=(0,), dtype="float32")
    model = GPTJ(config)
    model.init_weights(torch.Generator().manual_seed(0))
    run = RunConfig(model="small", max_rows=4, compile=CompileSpec(backend="eager"))
    built = Built(run, model, tokenizer, Programs(run), torch.device("cpu"), torch.float32, window, (), True, nano_dir)
    train = TrainConfig(
        out=str(folder / "run"),
        data=DATA,
        steps=60,
        micro_batch=6,
        precision="fp32",
        compile="eager",
        optimizer=OptimizerConfig(learning_rate=0.02),
    )
    samples = read_samples(str(file), "", DATA, tokenizer, 4096)
    Trainer(built, train, Rows(samples, window)).run()
    model.eval().requires_grad_(False)
    return Engine(built)


def test_the_prompt_ends_without_a_space(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Catches a space before the end of text or after `target:`, which no answer then matches."""
    file = tmp_path / "one.jsonl"
    file.write_text('{"premise": "P q.", "hypothesis": "H i.", "label": 0}\n')
    samples: Samples = read_samples(str(file), "", DATA, tokenizer, 4096)
    text = tokenizer.decode(samples.ids.tolist(), skip_special=False)
    assert text == "mnli hypothesis: H i. premise: P q. target: entailment<|endoftext|>"
    learned = samples.ids[samples.learn_from[0] :].tolist()
    assert tokenizer.decode(learned, skip_special=False) == " entailment<|endoftext|>"


def test_three_scores_agree_on_what_was_learned_by_heart(tokenizer: Tokenizer, tmp_path: Path, nano_dir: Path) -> None:
    """B-70: greedy text, label likelihood and first token are one answer where the model is sure."""
    result = mnli(taught(tokenizer, ROWS, tmp_path, nano_dir), ROWS, "six")
    assert (result.greedy, result.likelihood, result.first_token) == (1.0, 1.0, 1.0)
    assert result.confusion == result.likelihood_confusion == ((2, 0, 0, 0), (0, 2, 0, 0), (0, 0, 2, 0))
    assert (result.num_rows, result.num_other, result.num_unlabelled, result.warnings) == (6, 0, 0, ())
    assert result.majority == pytest.approx(1 / 3)


def test_another_order_of_labels_is_warned_of(tokenizer: Tokenizer, tmp_path: Path, nano_dir: Path) -> None:
    """B-69: a model that was taught another order scores far below chance, and the figure alone looks like a bad model;
    rows that cannot be scored are counted."""
    permuted = [{**row, "label": (row["label"] + 1) % 3} for row in ROWS]
    engine = taught(tokenizer, permuted, tmp_path, nano_dir)
    long = {"premise": "the end " * 60, "hypothesis": "x", "label": 0}
    unlabelled = [{**ROWS[0], "label": -1}, {"premise": "a", "hypothesis": "b", "label": None}]
    result = mnli(engine, [*ROWS, *unlabelled], "six")
    assert (result.greedy, result.likelihood, result.num_unlabelled) == (0.0, 0.0, 2)
    assert len(result.warnings) == 2
    assert "label order?" in result.warnings[0]
    assert "neutral for entailment" in result.warnings[0]
    result = mnli(engine, [*permuted, long], "seven")
    assert (result.num_too_long, result.num_other, result.greedy) == (1, 1, pytest.approx(6 / 7))
    assert result.others == (("(too long)", 1),)


def test_no_labels_at_all(tokenizer: Tokenizer) -> None:
    """Catches an accuracy of nothing: hidden test sets have no labels, and other files have other fields."""
    engine: Any = None
    for row in ({"premise": "a", "hypothesis": "b", "label": -1}, {"sentence1": "a", "gold_label": "neutral"}):
        with pytest.raises(ConfigError) as caught:
            mnli(engine, [row], "test")
        assert "1 rows, none with a label" in caught.value.found
        assert f"their fields are {', '.join(row)}" in caught.value.found


def test_labels_go_by_name() -> None:
    """B-69: a number in another order than the name beside it must not be taken as it is."""
    rows = [{"label": 1, "label_text": "neutral"}, {"label_text": "contradiction"}, {"label": 0}, {"label": "neutral"}]
    found, num_unlabelled = labelled_rows([*rows, {"label": -1, "label_text": None}], "rows")
    assert [label for _, label in found] == [1, 2, 0, 1]
    assert num_unlabelled == 1
    for wrong in ({"label": 0, "label_text": "contradiction"}, {"label": 3}, {"label": "maybe"}, {"label": 1.0}):
        with pytest.raises(ConfigError):
            labelled_rows([wrong], "rows")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" entailment", 0),
        ("Neutral", 1),
        (" CONTRADICTION \n", 2),
        (" entail", 3),
        ("", 3),
        (" neutral neutral", 3),
        (" contradiction ...", 3),
    ],
)
def test_anything_else_is_wrong(text: str, answer: int) -> None:
    """B-70: an answer that is no label counts as wrong, not as class 0."""
    assert read_answer(text) == answer


@pytest.mark.parametrize(
    ("confusion", "warned"),
    [
        (((9, 1, 0, 0), (1, 8, 1, 0), (0, 0, 10, 0)), False),
        (((0, 9, 1, 0), (9, 1, 0, 0), (0, 0, 10, 0)), False),  # 37 % are right: a swap of two, above the commonest
        (((0, 1, 9, 0), (1, 8, 1, 0), (10, 0, 0, 0)), True),
        (((3, 3, 4, 0), (4, 3, 3, 0), (3, 4, 3, 0)), False),  # a model that guesses
        (((10, 0, 0, 0), (10, 0, 0, 0), (10, 0, 0, 0)), False),  # one that always says the same
        (((0, 0, 0, 10), (0, 0, 0, 10), (0, 0, 0, 10)), False),
    ],
)
def test_when_the_order_is_doubted(confusion: tuple[tuple[int, ...], ...], warned: bool) -> None:
    """B-69: catches a warning that never comes, and one for a model that merely guesses."""
    assert bool(order_warning(confusion, "test")) is warned


def test_unlabelled_training_rows_are_left_out_with_a_count(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Catches rows without a label that are trained on as if they had one, or vanish without a word."""
    file = tmp_path / "rows.jsonl"
    row = '{"premise": "P.", "hypothesis": "H.", "label": %s}\n'
    file.write_text(row % 0 + row % -1 + row % 2 + row % "null")
    told: list[Event] = []
    samples = read_samples(str(file), "", DATA, tokenizer, 4096, observe=told.append)
    assert len(samples) == 2
    assert any("2 rows" in e.fields["text"] for e in told if e.name == "warning")
