"""Law 1 on the bundled model, with its own tokenizer: 64 new tokens after 20 English beginnings, as in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import bluejay
from bluejay.generate import Engine

NEW_TOKENS = 64
BEGINNINGS = """\
Once upon a time
The
In the morning the children went down to the river, and
"Where are you going?" asked the old man.
Water is
The history of the town begins in
She opened the door slowly, because she was afraid of what she might find behind it. The room was dark and
A dog and a cat
It was the first day of winter. Snow lay on the roofs, on the trees, on the long road that led out of the village, \
and nobody had yet walked through it. Tom put on his coat and his boots, took his sister by the hand, and
My name is
He said that
The sun is a star. The earth is a planet. The moon
There were three brothers who lived in a small house at the edge of the forest. The first was strong, the second was \
clever, and the third
"No," said
When the war was over,
Many people believe that
One, two, three,
The king had a daughter who never laughed. He promised half of his kingdom to the man who could make her laugh. \
Many came from far away: dancers, singers, clowns with painted faces. They all tried and they all failed. At last \
there came a poor boy with a goose under his arm, and he
Plants need
I went to the market to buy some bread and""".split("\n")


@pytest.fixture(scope="module")
def expected(nano_dir: Path) -> dict[int, list[list[int]]]:
    """transformers' new ids of each prompt alone, by number of beams."""
    from transformers import AutoTokenizer, GPTJForCausalLM

    theirs = GPTJForCausalLM.from_pretrained(nano_dir, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(nano_dir)
    ids: dict[int, list[list[int]]] = {1: [], 4: []}
    for text in BEGINNINGS:
        prompt = tokenizer(text, return_tensors="pt")
        for num_beams, answers in ids.items():
            with torch.no_grad():
                options = {"max_new_tokens": NEW_TOKENS, "num_beams": num_beams, "do_sample": False}
                out = theirs.generate(**prompt, **options, pad_token_id=tokenizer.eos_token_id)
            answers.append(out[0, prompt["input_ids"].shape[1] :].tolist())
    return ids


def engine_of(nano_dir: Path, max_rows: int) -> Engine:
    return bluejay.load(str(nano_dir), dtype="float32", max_rows=max_rows, backend="eager")


def answers_of(engine: Engine, batch_size: int, **settings: Any) -> list[list[int]]:
    answers = []
    for first in range(0, len(BEGINNINGS), batch_size):
        batch = BEGINNINGS[first : first + batch_size]
        answers += [list(g.ids) for g in engine.generate(batch, max_new_tokens=NEW_TOKENS, **settings)]
    return answers


def test_prompts_differ_in_length(nano_dir: Path) -> None:
    """A batch of equal lengths would test no padding: lengths span a prefill bucket and more."""
    lengths = {len(engine_of(nano_dir, 1).tokenizer.encode(text)) for text in BEGINNINGS}
    assert len(BEGINNINGS) == 20
    assert len(lengths) >= 8
    assert min(lengths) <= 2
    assert max(lengths) > 64


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("batch_size", [1, 5])
def test_ids_equal_transformers(
    nano_dir: Path, expected: dict[int, list[list[int]]], batch_size: int, num_beams: int
) -> None:
    """Law 1 on trained weights: an error too small to move a random model's tokens adds up over 64 of a real one's."""
    engine = engine_of(nano_dir, batch_size * num_beams)
    assert answers_of(engine, batch_size, num_beams=num_beams) == expected[num_beams]


def test_compiled_ids_equal_transformers(
    nano_dir: Path, expected: dict[int, list[list[int]]], program_folder: str
) -> None:
    """Laws 1 and 2 on trained weights: sums in another order, fused and contracted, over 64 tokens of real text."""
    shapes: dict[str, Any] = {"max_rows": 1, "context": 256, "slot_buckets": (256,), "prefill_buckets": (64,)}
    engine = bluejay.load(str(nano_dir), dtype="float32", backend="inductor", cache=program_folder, **shapes)
    assert answers_of(engine, 1) == expected[1]
    assert engine.figures.compilations == 2
