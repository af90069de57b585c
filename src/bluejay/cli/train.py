"""`bluejay train`: from scratch or from a checkpoint, all weights or adapters, by one configuration file."""

from __future__ import annotations

import json as json_format
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bluejay.cli.display import Display
from bluejay.cli.environment import cache_folder, keep_compiled_steps, rank_of_launcher
from bluejay.cli.launch import device_of_rank, is_heard, is_starter, ranks, start_ranks
from bluejay.cli.plan import parse_memory
from bluejay.events import ignore

SAVING_SECONDS = 1800.0  # for ranks to finish an update and write a checkpoint after Ctrl-C

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from bluejay.config import TrainConfig
    from bluejay.events import Event
    from bluejay.parallel import Plan
    from bluejay.train import Saved, TrainResult


def train(
    program: typer.Context,
    config: Annotated[str, typer.Option(help="A YAML file, or a preset such as nano-full or gptj-6b-lora.")] = "",
    set: Annotated[list[str] | None, typer.Option("--set", help="One setting: a.b=c; may be repeated.")] = None,
    devices: Annotated[
        int, typer.Option(help="Ranks, started here; what `parallel` leaves open are replicas. 0: as `parallel` says.")
    ] = 0,
    device_memory: Annotated[str, typer.Option(help="Of each device, such as 16GiB: refuse what would not fit.")] = "",
    qat: Annotated[str, typer.Option(help="Train for group quantization, such as int4-g64.")] = "",
    resume: Annotated[bool, typer.Option(help="Go on from the newest checkpoint in `out`.")] = False,
    cache: Annotated[Path | None, typer.Option(help="Folder of compiled programs.")] = None,
    quiet: Annotated[bool, typer.Option(help="No progress and no configuration.")] = False,
    json: Annotated[bool, typer.Option(help="Print one JSON object at the end.")] = False,
) -> None:
    """Train a GPT-J model. Figures go to stderr; checkpoints, events, plot and result to the folder `out`."""
    from bluejay.config import as_yaml, read_train

    run = read_train(config, [*(set or ()), *([f"qat={qat}"] if qat else ())])
    run = on_devices(run, devices)
    made = check(run, resume, parse_memory(device_memory) if device_memory else 0)
    if is_starter(run.parallel.num_devices):
        raise typer.Exit(start_ranks(program.obj, run.parallel.num_devices, SAVING_SECONDS))
    keep_compiled_steps((cache or cache_folder()) / "train")
    if is_heard() and not quiet:
        print(as_yaml(run), file=sys.stderr)
    with TrainDisplay(quiet) as display:
        result = run_training(run, display if is_heard() else ignore, resume=resume, made=made)
    if is_heard() and json:
        print(json_format.dumps({**asdict(result), "model": result.model and str(result.model)}))
    elif is_heard() and not quiet:
        print(_last_line(run, result), file=sys.stderr)
    if result.stopped == "interrupted":
        raise typer.Exit(130)


def on_devices(run: TrainConfig, devices: int) -> TrainConfig:
    """The run on so many devices, or on as many as a launcher has started: what its layout leaves open are replicas.

    Raises:
        ConfigError: the layout is of another number.
    """
    from bluejay.errors import ConfigError

    layout, rank = run.parallel, rank_of_launcher()
    devices = devices or (rank.count if rank is not None else layout.num_devices)
    if layout.replicas == 1 and devices > 0 and devices % layout.num_devices == 0:
        layout = replace(layout, replicas=devices // layout.num_devices)
    if devices != layout.num_devices:
        parts = f"{layout.num_stages} stages x tensor parallel degree {layout.tensor} x {layout.replicas} replicas"
        raise ConfigError(
            asked=f"{devices} devices",
            found=f"a layout of {layout.num_devices}: {parts}",
            rule="devices = stages x tensor x replicas; replicas that are not set follow from the devices",
            fix=f"use --devices {layout.num_devices}, or --set parallel.stages, parallel.tensor or parallel.replicas",
        )
    return replace(run, parallel=layout)


def check(run: TrainConfig, resume: bool, device_memory: int = 0) -> Plan:
    """Everything that can be wrong with a run before any weight is read; its plan.

    Raises:
        ConfigError: `out` holds a run and `resume` was not asked, or nothing to resume; settings that contradict each
            other, the model or the layout.
        MachineError: a device would overflow.
    """
    from bluejay.build import locate
    from bluejay.checkpoint import read_config
    from bluejay.errors import ConfigError
    from bluejay.train import Checkpoints, plan_of

    out = Path(run.out)
    last = Checkpoints(out / "checkpoints", run.keep).last()
    if (last is None) == resume:
        raise ConfigError(
            asked=f"{'go on with' if resume else 'begin'} the run in {out}",
            found=f"a checkpoint of update {last.update}" if last else "no checkpoint",
            rule="a run never mixes with another, and only a run with a checkpoint goes on",
            fix="choose another out, or add --resume" if last else "leave --resume out",
        )
    run.accumulation()
    if not run.data.train:
        raise ConfigError(asked="a training run", found="no data.train", fix="--set data.train=FILE")
    model = read_config(locate(run.model), offline=run.offline)
    if run.data.length > model.n_positions:
        raise ConfigError(
            asked=f"data.length={run.data.length}", found=f"a window of {model.n_positions}", fix="lower data.length"
        )
    return plan_of(run, model, device_memory)


def run_training(
    run: TrainConfig, observe: Callable[[Event], None], *, resume: bool = False, made: Plan | None = None
) -> TrainResult:
    """Everything from a configuration to a result: model, data, loop, events, plot.

    Args:
        made: the run's plan, where it has been checked already.

    Raises:
        ConfigError, MachineError: as `check`.
        TrainingError and what `build` raises.
    """
    from bluejay.train import Checkpoints

    made = made or check(run, resume)
    last = Checkpoints(Path(run.out) / "checkpoints", run.keep).last()
    run = replace(run, device=device_of_rank(run.device))
    return _train(run, observe, last, made)


def _train(run: TrainConfig, observe: Callable[[Event], None], last: Saved | None, made: Plan) -> TrainResult:
    """The run itself; its file of events keeps other runs out of its folder."""
    from bluejay.build import locate
    from bluejay.checkpoint import load_tokenizer, open_checkpoint, read_config
    from bluejay.errors import ConfigError
    from bluejay.events import Event
    from bluejay.machine import peak_memory_bytes
    from bluejay.tasks import read_samples
    from bluejay.train import (
        EventFile,
        Trainer,
        lay_out,
        plot_loss,
        prepare,
        ranks_of,
        read_events,
        step_of,
        trackers,
        written,
    )

    out, rank = Path(run.out), rank_of_launcher()
    number = 0 if rank is None else rank.index
    events = EventFile(out / (f"events-rank{number}.jsonl" if number else "events.jsonl"))
    listeners: list[Callable[[Event], None]] = [events, observe, *(() if number else trackers(run))]
    whose = {} if rank is None else {"rank": number}

    def tell(event: Event) -> None:
        fields = {**event.fields, **whose}
        if event.name == "train.update":
            fields["memory_bytes"] = peak_memory_bytes()
        for listener in listeners:
            listener(Event(event.name, fields))

    try:
        place = locate(run.model)
        directory = Path(place) if run.scratch else open_checkpoint(place, offline=run.offline, observe=tell).directory
        model = read_config(directory)
        tokenizer = load_tokenizer(directory, model)
        length = run.data.length or model.n_positions

        def source(name: str, split: str) -> Any:
            samples = read_samples(
                name, split, run.data, tokenizer, model.vocab_size, offline=run.offline, observe=tell
            )
            return samples, lay_out(samples, run.data.layout, length, run.data.within_documents)

        samples, rows = source(run.data.train, run.data.train_split)
        valid_samples, valid = source(run.data.valid, run.data.valid_split) if run.data.valid else (None, None)
        if rows.num_without_target:
            text = f"{rows.num_without_target} of {len(samples)} samples have no target after truncation; not learned"
            tell(Event("warning", {"text": text}))
        if rows.num_cut:
            text = f"{rows.num_cut} of {len(samples)} samples are longer than {length} tokens and were cut"
            tell(Event("warning", {"text": text}))
        digest = samples.digest()
        data = [digest, valid_samples and valid_samples.digest()]
        alike = replace(run, device="auto", out="")  # each has its own device, and only the first writes
        asked = [alike, model, *_files(run, made), *data, last and last.update]
        with ranks(made.layout, asked, run.device) as mesh:
            built = prepare(run, tell, plan=made, mesh=mesh)
            trainer = Trainer(
                built, run, rows, valid, tell, ranks=ranks_of(made, mesh), step=step_of(made, mesh), data_digest=digest
            )
            if last is not None:
                trainer.resume(last)
            with _interruptible() as was_interrupted:
                result = trainer.run(was_interrupted)
        if number == 0:
            try:
                with written(out / "loss.png"):
                    plot_loss(read_events(out / "events.jsonl", tell), out)
            except ConfigError as error:
                tell(Event("warning", {"text": f"no plot of the loss: {error.found}; {error.fix}"}))
        return result
    finally:
        events.close()


def _files(run: TrainConfig, made: Plan) -> list[str]:
    """What the model's files hold, where several ranks read them."""
    from bluejay.build import digest_of_files
    from bluejay.config import RunConfig

    is_read = made.num_devices > 1 and not run.scratch
    return [digest_of_files(RunConfig(model=run.model, offline=run.offline))] if is_read else []


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C asks the loop to save and leave after this update; a second one leaves at once."""
    asked: list[int] = []

    def note(number: int, frame: Any) -> None:
        # Who starts ranks sends SIGTERM after a Ctrl-C that some of them may have heard themselves.
        if number in asked:
            raise KeyboardInterrupt
        asked.append(number)

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _last_line(run: TrainConfig, result: TrainResult) -> str:
    from bluejay.units import format_seconds

    parts = [
        f"{result.stopped} at update {result.update}",
        f"loss {result.loss:.4f}",
        *([f"validation {result.valid_loss:.4f}"] if result.valid_loss is not None else []),
        f"{result.num_tokens:,} tokens"
        + (f" at {result.tokens_per_second:,.0f}/s" if result.tokens_per_second else ""),
        *([f"compiling {format_seconds(result.compile_seconds)}"] if result.compile_seconds > 1 else []),
        *([f"{result.num_skipped} updates skipped for overflow"] if result.num_skipped else []),
        str(result.model) if result.model else f"saved; go on with --resume ({run.out})",
    ]
    return "bluejay: " + ", ".join(parts)


class TrainDisplay:
    """Progress of a run: a bar on a terminal, elsewhere a line now and then. Waiting and warnings are `Display`'s."""

    LINES = 40  # over a whole run, where there is no terminal

    def __init__(self, quiet: bool) -> None:
        self._quiet, self._live = quiet, sys.stderr.isatty()
        self._waiting = Display(quiet)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._recent: deque[tuple[int, float]] = deque(maxlen=20)  # real tokens, seconds

    def __enter__(self) -> TrainDisplay:
        return self

    def __exit__(self, *error: object) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._waiting.__exit__(None, None, None)

    def __call__(self, event: Event) -> None:
        name, fields = event.name, event.fields
        if name == "warning":
            self._say(f"warning: {fields['text']}")
        elif self._quiet:
            return
        elif name == "train.start":
            self._start(fields)
        elif name == "train.update":
            self._update(fields)
        elif name == "train.compiling":
            self._say(f"compiling the step for {fields['what']} of {fields['shape']}: seconds if kept, else minutes")
        elif name == "train.compile":
            self._say(f"compiled the step for {fields['what']} of {fields['shape']} in {fields['seconds']:.1f} s")
        elif name == "train.eval":
            best = ", the best so far" if fields["is_best"] else ""
            self._say(f"update {fields['update']}: validation loss {fields['loss']:.4f}{best}")
        elif name == "train.save":
            self._say(f"saved {fields['folder']}")
        elif not name.startswith("train."):
            self._waiting(event)

    def _start(self, fields: Any) -> None:
        self._say(
            f"{fields['num_trained']:,} of {fields['num_parameters']:,} parameters are trained; "
            f"{fields['rows']:,} rows, "
            f"global batch {fields['rows_per_update']} ({fields['gradient_accumulation']} micro-batches an update), "
            f"{fields['updates_per_epoch']} updates an epoch, {fields['total']} in all"
        )
        if self._live:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = TextColumn("{task.completed}/{task.total}"), BarColumn(), TextColumn("{task.description}")
            self._progress = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
            self._task = self._progress.add_task("", total=fields["total"], completed=fields["update"])
            self._progress.start()

    def _update(self, fields: Any) -> None:
        if not fields["compiled"]:  # such an update's seconds are not those of its tokens
            self._recent.append((fields["num_tokens"], fields["seconds"]))
        update, total = fields["update"], fields["total"]
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=update, description=self._figures(fields))
        elif update % max(1, total // self.LINES) == 0 or update == total:
            from bluejay.units import format_seconds

            left = ""
            if self._recent:
                seconds = sum(s for _, s in self._recent) / len(self._recent)
                left = f", {format_seconds((total - update) * seconds)} left"
            self._say(f"update {update}/{total}, {self._figures(fields)}{left}")

    def _figures(self, fields: Any) -> str:
        from bluejay.units import format_bytes

        rate = ""
        if self._recent:
            tokens, seconds = (sum(part) for part in zip(*self._recent, strict=True))
            rate = f"{tokens / seconds:,.0f} tokens/s, "
        loss = "none" if fields["loss"] is None else f"{fields['loss']:.4f}"
        scale = f", loss scale {fields['loss_scale']:g}" if "loss_scale" in fields else ""
        return f"loss {loss}, rate {fields['learning_rate']:.2e}, {rate}{format_bytes(fields['memory_bytes'])}{scale}"

    def _say(self, text: str) -> None:
        if self._progress is None:
            print(f"bluejay: {text}", file=sys.stderr, flush=True)
        else:
            self._progress.console.print(f"bluejay: {text}", markup=False, highlight=False, soft_wrap=True)
