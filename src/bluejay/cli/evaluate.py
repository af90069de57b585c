"""`bluejay evaluate`: how well a model does at a task."""

from __future__ import annotations

import dataclasses
import json as json_format
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bluejay.cli.display import Display
from bluejay.cli.environment import cache_folder, preferred_compiler
from bluejay.errors import RequestError

if TYPE_CHECKING:
    from bluejay.events import Observer
    from bluejay.generate import Engine


@dataclass(frozen=True)
class Options:
    """What the command line gave for the task."""

    text: Path | None
    stride: int = 0
    data: str = ""
    split: str = ""
    offline: bool = False


@dataclass(frozen=True)
class Outcome:
    """A task's figures as plain data, and as a sentence."""

    figures: dict[str, Any]
    sentence: str


# A task is prepared before a weight is read, and then given the engine.
Task = Callable[[Options], "Callable[[Engine, Observer], Outcome]"]


def _perplexity(options: Options) -> Callable[[Engine, Observer], Outcome]:
    text = read_text(options.text, "--text")

    def run(engine: Engine, observe: Observer) -> Outcome:
        from bluejay.tasks import perplexity

        score = perplexity(engine, text, stride=options.stride, observe=observe)
        rate = score.num_tokens / score.seconds
        return Outcome(
            dataclasses.asdict(score),
            f"perplexity {score.perplexity:.4f}, {score.nll:.5f} nats a token, {score.bits_per_byte:.5f} bits a byte; "
            f"{score.num_tokens:,} tokens in windows of {score.context}, {score.stride} apart, {rate:,.0f} tokens/s",
        )

    return run


def _mnli(options: Options) -> Callable[[Engine, Observer], Outcome]:
    if not options.data:
        raise RequestError(
            asked="--task mnli",
            found="no --data",
            rule="a set is a .jsonl file with premise, hypothesis and label, or a hub id with its --split",
            fix="--data FILE, or --data nyu-mll/glue:mnli --split validation_matched",
        )
    if not options.split and not options.data.endswith((".jsonl", ".json")):
        raise RequestError(
            asked=f"--data {options.data}",
            found="no --split",
            rule="matched and mismatched are two sets, and never mixed",
            fix="--split validation_matched or --split validation_mismatched",
        )

    from bluejay.tasks import MNLI_LABELS, MNLI_PROMPT, fill, labelled_rows, mnli, read_rows

    name = f"{options.data} {options.split}".strip()
    rows = list(read_rows(options.data, options.split, offline=options.offline))
    for row, _ in labelled_rows(rows, name)[0]:
        fill(MNLI_PROMPT, row, name)  # what is missing is told before a weight is read

    def run(engine: Engine, observe: Observer) -> Outcome:
        from bluejay.events import Event

        score = mnli(engine, rows, name, observe)
        for text in score.warnings:
            observe(Event("warning", {"text": text}))
        heads = [*MNLI_LABELS, "other"]
        lines = [
            f"{name}: {score.num_rows} rows, {score.num_unlabelled} without a label left out, "
            f"{score.num_too_long} too long",
            f"accuracy by greedy text {score.greedy:.1%}, by likelihood {score.likelihood:.1%}, "
            f"by first token {score.first_token:.1%}; always the commonest label {score.majority:.1%}; "
            f"{score.num_other} answers were no label",
            " ".join(["greedy answer:".ljust(16), *(head.rjust(13) for head in heads)]),
            *(
                " ".join([label.ljust(16), *(str(count).rjust(13) for count in counts)])
                for label, counts in zip(MNLI_LABELS, score.confusion, strict=True)
            ),
        ]
        return Outcome(dataclasses.asdict(score), "\n".join(lines))

    return run


TASKS: dict[str, Task] = {
    "mnli": _mnli,
    "perplexity": _perplexity,
}


def evaluate(
    model: Annotated[str, typer.Argument(help="`nano` (bundled), a checkpoint directory, or a hub id.")] = "nano",
    task: Annotated[str, typer.Option(help=f"One of: {', '.join(TASKS)}.")] = "perplexity",
    text: Annotated[Path | None, typer.Option(help="perplexity: the text to score, UTF-8.")] = None,
    context: Annotated[int, typer.Option(help="Tokens a row may hold, and a window; 0: the model's window.")] = 0,
    data: Annotated[str, typer.Option(help="mnli: a .jsonl file, or a hub id.")] = "",
    split: Annotated[str, typer.Option(help="mnli: which split of a hub id, such as validation_matched.")] = "",
    stride: Annotated[int, typer.Option(help="perplexity: tokens from a window to the next; 0: half of one.")] = 0,
    quantize: Annotated[str, typer.Option(help="Pack weights while loading: int4-g64, int4-row, int4-g32-mse.")] = "",
    kernel: Annotated[str, typer.Option(help="Four-bit products: auto, an instruction set, or x8 (coarser).")] = "auto",
    batch: Annotated[int, typer.Option(min=1, help="Rows at once.")] = 4,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16; default: the checkpoint's.")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    backend: Annotated[str, typer.Option(help="auto, inductor (compiled) or eager (no compiler).")] = "auto",
    cache: Annotated[Path | None, typer.Option(help="Folder of compiled programs.")] = None,
    offline: Annotated[bool, typer.Option(help="Never ask the network for a hub id.")] = False,
    quiet: Annotated[bool, typer.Option(help="No progress.")] = False,
    json: Annotated[bool, typer.Option(help="Print one JSON object.")] = False,
) -> None:
    """Measure how well a model does at a task."""
    if task not in TASKS:
        raise RequestError(
            asked=f"--task {task}", found="no such task", rule=f"tasks are {', '.join(TASKS)}", fix="name one of them"
        )
    run = TASKS[task](Options(text, stride, data, split, offline))

    import bluejay

    with Display(quiet) as display:
        engine = bluejay.load(
            model,
            dtype=dtype or None,
            quantize=quantize,
            kernel=kernel,
            device=device,
            context=context,
            max_rows=batch,
            backend=backend,
            cxx=preferred_compiler(),
            cache=str(cache or cache_folder()),
            offline=offline,
            observe=display,
        )
        outcome = run(engine, display)
    if json:
        print(json_format.dumps({"model": model, "task": task, "quantize": quantize, **finite(outcome.figures)}))
    else:
        print(outcome.sentence)


def read_text(file: Path | None, option: str) -> str:
    """The UTF-8 text of a file that an option names.

    Raises:
        RequestError: not given, unreadable, or not UTF-8.
    """
    if file is None:
        raise RequestError(asked="a text", found=f"no {option}", fix=f"name a UTF-8 text file with {option}")
    try:
        return file.read_bytes().decode()  # not read_text, which makes one character of the two that end a line
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8 at byte {error.start}"
        raise RequestError(
            asked=f"the text in {file}", found=str(reason), rule="texts are UTF-8 files", fix=f"correct {option}"
        ) from None


def finite(figures: dict[str, Any]) -> dict[str, Any]:
    """Figures as JSON has them, which knows no infinity."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in figures.items()}
