"""MNLI as text: a prompt, a label's name, the end of text; and three ways of scoring an answer.

    mnli hypothesis: A dog sleeps. premise: A dog runs. target: contradiction<|endoftext|>

- Greedy text is the strict score: what the model writes up to its end of text, spaces at the edges and letter case
  aside, must be the label's name. Anything else, and a text that does not end, is wrong and counted as `other`.
- Label likelihood ranks the three labels by the probability of their whole text, end of text included. Summed, not
  averaged: these are the probabilities with which the model would write each answer, so a label of two tokens is not at
  a disadvantage as a whole, and where the model is sure of its format this agrees with the greedy text.
- First token ranks them by the probability of their first tokens alone. With GPT-2's vocabulary ` entailment` is two
  tokens, and without the space three: the first token is that of the label with its space.

Source: Williams et al. 2018 (MultiNLI); GLUE's order of labels.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bluejay.config import GenerationConfig
from bluejay.errors import ConfigError
from bluejay.events import Event, Observer, ignore
from bluejay.generate import Engine
from bluejay.tasks.samples import fill, label_name

MNLI_LABELS = ("entailment", "neutral", "contradiction")  # GLUE's order: 0, 1, 2
MNLI_PROMPT = "mnli hypothesis: {hypothesis} premise: {premise} target:"
OTHER = "other"
_UNLABELLED = (None, -1, "-1", "-")


@dataclass(frozen=True)
class Mnli:
    """What came out of scoring one set.

    Attributes:
        name: of the set; matched and mismatched are two sets and two results.
        num_rows: labelled rows, which all count.
        num_unlabelled: rows without a label, which do not.
        num_too_long: rows whose prompt leaves no room for the answer; they count as wrong.
        greedy, likelihood, first_token: accuracies.
        majority: accuracy of always naming the commonest label.
        num_other: greedy answers that are no label.
        confusion: rows of the named label, columns of the greedy answer, `other` last.
        likelihood_confusion: the same for the likeliest label; too long ones are in `other`.
        others: the commonest answers that are no label, with how often they came.
        warnings: what makes the figures doubtful.
    """

    name: str
    num_rows: int
    num_unlabelled: int
    num_too_long: int
    greedy: float
    likelihood: float
    first_token: float
    majority: float
    num_other: int
    confusion: tuple[tuple[int, ...], ...]
    likelihood_confusion: tuple[tuple[int, ...], ...]
    others: tuple[tuple[str, int], ...]
    warnings: tuple[str, ...]


def mnli(engine: Engine, rows: Iterable[Mapping[str, Any]], name: str, observe: Observer = ignore) -> Mnli:
    """Score one set of rows with `premise`, `hypothesis` and `label` (or `label_text`).

    Raises:
        ConfigError: a row lacks a field, or as `labelled_rows`.
    """
    labelled, num_unlabelled = labelled_rows(rows, name)
    tokenizer = engine.tokenizer
    answers = [tokenizer.encode(f" {label}") for label in MNLI_LABELS]
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    room = max(map(len, answers)) + 1
    prompts = [tokenizer.encode(fill(MNLI_PROMPT, row, name)) for row, _ in labelled]
    written: list[str] = []
    likeliest: list[int] = []
    first: list[int] = []
    group = max(1, engine.max_rows)
    greedy = GenerationConfig(max_new_tokens=room)
    scored = GenerationConfig(max_new_tokens=0, prompt_logprobs=0)
    for start in range(0, len(prompts), group):
        fitting = [p for p in prompts[start : start + group] if len(p) + room <= engine.context]
        texts = iter(engine.generate(fitting, greedy) if fitting else [])
        scores = iter(engine.generate([p + a + end for p in fitting for a in answers], scored) if fitting else [])
        for prompt in prompts[start : start + group]:
            if len(prompt) + room > engine.context:
                written.append("(too long)")
                likeliest.append(len(MNLI_LABELS))
                first.append(len(MNLI_LABELS))
                continue
            text = next(texts)
            written.append(text.text if text.stop_reason == "eos" else f"{text.text} ...")
            whole, begin = [], []
            for _ in answers:
                logprobs = next(scores).prompt_logprobs
                assert logprobs is not None
                tail = [token.logprob or 0.0 for token in logprobs[len(prompt) :]]
                whole.append(sum(tail))
                begin.append(tail[0])
            likeliest.append(_largest(whole))
            first.append(_largest(begin))
        observe(Event("evaluate", {"done": len(written), "total": len(prompts)}))
    return _summary(name, [label for _, label in labelled], written, likeliest, first, num_unlabelled)


def labelled_rows(rows: Iterable[Mapping[str, Any]], name: str) -> tuple[list[tuple[Mapping[str, Any], int]], int]:
    """Rows with the number of their label in `MNLI_LABELS`, and how many rows have none.

    Labels go by name: where a row gives number and name, they must agree, because published models and data sets order
    the three differently.

    Raises:
        ConfigError: they do not agree, there is no such label, or no row has one.
    """
    found: list[tuple[Mapping[str, Any], int]] = []
    fields: dict[str, None] = {}
    num_unlabelled = 0
    for number, row in enumerate(rows, 1):
        label, text = row.get("label"), row.get("label_text")
        where = f"row {number} of {name}"
        given = [value for value in (text, label) if value not in _UNLABELLED]
        if not given:
            num_unlabelled += 1
            fields |= dict.fromkeys(row)
            continue
        names = {label_name(value, MNLI_LABELS, where) for value in given}
        if len(names) > 1:
            raise ConfigError(
                asked=f"the label of {where}",
                found=f"label {label!r} and label_text {text!r}",
                rule=f"numbers mean {', '.join(f'{i} {n}' for i, n in enumerate(MNLI_LABELS))}, as in GLUE",
                fix="correct the numbers, or leave them out and keep the names",
            )
        found.append((row, MNLI_LABELS.index(names.pop())))
    if not found:
        raise ConfigError(
            asked=f"the accuracy on {name}",
            found=f"{num_unlabelled} rows, none with a label; their fields are {', '.join(fields) or 'none'}",
            rule="a row has premise, hypothesis and label (0 to 2, or a name) or label_text; test sets of benchmarks "
            "hold their labels back",
            fix="use the validation set, or rename the fields",
        )
    return found, num_unlabelled


def read_answer(text: str) -> int:
    """The number of the label that a greedy text names, or that of `other`."""
    spoken = text.strip().casefold()
    return MNLI_LABELS.index(spoken) if spoken in MNLI_LABELS else len(MNLI_LABELS)


def _summary(
    name: str,
    labels: Sequence[int],
    written: Sequence[str],
    likeliest: Sequence[int],
    first: Sequence[int],
    num_unlabelled: int,
) -> Mnli:
    spoken = [read_answer(text) for text in written]
    total = len(labels)
    others = Counter(text.strip() for text, answer in zip(written, spoken, strict=True) if answer == len(MNLI_LABELS))
    confusion, by_likelihood = _confusion(labels, spoken), _confusion(labels, likeliest)
    warnings = [
        text
        for kind, table in (("greedy text", confusion), ("likelihood", by_likelihood))
        if (text := order_warning(table, kind))
    ]
    return Mnli(
        name=name,
        num_rows=total,
        num_unlabelled=num_unlabelled,
        num_too_long=sum(answer == len(MNLI_LABELS) for answer in likeliest),
        greedy=_accuracy(confusion),
        likelihood=_accuracy(by_likelihood),
        first_token=_accuracy(_confusion(labels, first)),
        majority=max(Counter(labels).values()) / total,
        num_other=sum(others.values()),
        confusion=confusion,
        likelihood_confusion=by_likelihood,
        others=tuple(others.most_common(5)),
        warnings=tuple(warnings),
    )


def order_warning(confusion: Sequence[Sequence[int]], kind: str) -> str:
    """Whether the answers would be right under other names: a model that was taught another order of labels."""
    total = sum(map(sum, confusion))
    right = _accuracy(confusion)
    most = max(map(sum, confusion)) / total
    orders = itertools.permutations(range(len(MNLI_LABELS)))
    best = max(orders, key=lambda order: sum(confusion[i][j] for i, j in enumerate(order)))
    swapped = sum(confusion[i][j] for i, j in enumerate(best)) / total
    if right >= most or swapped < right + 0.15 or swapped <= most:
        return ""
    meant = ", ".join(f"{MNLI_LABELS[j]} for {MNLI_LABELS[i]}" for i, j in enumerate(best) if i != j)
    return (
        f"label order? by {kind} {right:.1%} are right, and {swapped:.1%} would be if the model meant {meant}: "
        "it seems to have been taught another order of labels"
    )


def _confusion(labels: Sequence[int], answers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    counts = Counter(zip(labels, answers, strict=True))
    size = len(MNLI_LABELS)
    return tuple(tuple(counts[i, j] for j in range(size + 1)) for i in range(size))


def _accuracy(confusion: Sequence[Sequence[int]]) -> float:
    return sum(confusion[i][i] for i in range(len(confusion))) / sum(map(sum, confusion))


def _largest(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)
