"""A small world in which entailment follows from rules: seeded sentences for the whole path to be proven on.

    python recipes/mnli/synthetic.py build/synthetic

A premise says who put which thing where: `Tom put the red ball in the garden.` A hypothesis has one of three forms:

    The {thing} is in the {place}.      The {thing} is {color}.      The {color} {thing} is in the {place}.

- entailment: everything it says is in the premise;
- contradiction: the thing is the premise's, and one of color and place is another;
- neutral: the thing is another one, of which the premise says nothing; color and place may be the same or others.

The three labels come equally often in every form, so a hypothesis alone tells nothing: the label follows only from
comparing the two sentences. No premise of the test part occurs in the training part.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path

NAMES = "Tom Mary Jack Anna Peter Jane".split()
COLORS = "red blue green white black brown".split()
THINGS = "ball box hat book cup stone".split()
PLACES = "garden house river kitchen forest barn".split()
LABELS = ("entailment", "neutral", "contradiction")
FORMS = ("The {thing} is in the {place}.", "The {thing} is {color}.", "The {color} {thing} is in the {place}.")
SEED, NUM_TEST_PREMISES, ROWS_PER_PREMISE = 7, 200, 9


def rows(seed: int = SEED) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Training and test rows: for each premise, every label in every form once."""
    rng = random.Random(seed)
    worlds = list(itertools.product(NAMES, COLORS, THINGS, PLACES))
    rng.shuffle(worlds)
    made = [[row_of(world, form, label, rng) for form in FORMS for label in LABELS] for world in worlds]
    test, train = made[:NUM_TEST_PREMISES], made[NUM_TEST_PREMISES:]
    return list(itertools.chain(*train)), list(itertools.chain(*test))


def row_of(world: tuple[str, ...], form: str, label: str, rng: random.Random) -> dict[str, object]:
    """One premise and hypothesis with a label."""
    name, color, thing, place = world
    said = {"color": color, "thing": thing, "place": place}
    if label == "contradiction":
        sayable = [key for key in ("color", "place") if f"{{{key}}}" in form]
        wrong = rng.choice(sayable)
        said[wrong] = other(said[wrong], COLORS if wrong == "color" else PLACES, rng)
    elif label == "neutral":
        said["thing"] = other(thing, THINGS, rng)
        for key, words in (("color", COLORS), ("place", PLACES)):
            if rng.random() < 0.5:
                said[key] = other(said[key], words, rng)
    premise = f"{name} put the {color} {thing} in the {place}."
    return {"premise": premise, "hypothesis": form.format(**said), "label": LABELS.index(label), "label_text": label}


def other(word: str, words: list[str], rng: random.Random) -> str:
    """Another word of the list."""
    return rng.choice([w for w in words if w != word])


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in zip(("train", "test"), rows(), strict=True):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        print(f"{folder / name}.jsonl: {len(part)} rows")


if __name__ == "__main__":
    main()
