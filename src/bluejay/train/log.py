"""What a run leaves for people: its events as JSON lines, a plot of its loss, and figures for trackers."""

from __future__ import annotations

import base64
import html
import io
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bluejay.config import TrainConfig
from bluejay.errors import ConfigError
from bluejay.events import Event, Observer, ignore
from bluejay.train.checkpoints import keep_alone, written


class EventFile:
    """An observer that appends every event as one JSON line with its time. NaN is written as "nan".

    While it is open, no other process has a file of events there: it is what keeps runs out of each other's folder, and
    each rank's file that of another job's.

    Raises:
        TrainingError: another process has it open, or it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with written(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
        keep_alone(self._file, path)
        with written(path), path.open("rb+") as file:  # a line that a kill or a full disk left half-written ends here
            file.truncate(file.read().rfind(b"\n") + 1)

    def __call__(self, event: Event) -> None:
        if event.name in ("load", "save"):  # one for each tensor
            return
        line = {"time": round(time.time(), 3), "event": event.name, **_plain(event.fields)}
        with written(self._path):
            self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_events(path: Path, observe: Observer = ignore) -> list[dict[str, Any]]:
    """The events of a file. Damaged lines are left out and named in one warning; a last one that a killed run left
    half-written needs none."""
    events, damaged = [], []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if isinstance(event, dict) and "event" in event:
            events.append(event)
        elif number < len(lines):
            damaged.append(number)
    if damaged:
        numbers = ", ".join(map(str, damaged[:5])) + (f" and {len(damaged) - 5} more" if len(damaged) > 5 else "")
        text = f"line{'s' * (len(damaged) > 1)} {numbers} of {path} {'is' if len(damaged) == 1 else 'are'} damaged"
        observe(Event("warning", {"text": f"{text}: left out of the plot"}))
    return events


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return str(value) if isinstance(value, Path) else value


def plot_loss(events: list[dict[str, Any]], folder: Path) -> tuple[Path, Path]:
    """Draw loss and learning rate over the updates: `loss.png`, and `loss.html`, which needs nothing else.

    An update that a resumed run did again is drawn once, as it was done last.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError(
            asked=f"a plot of the loss in {folder}",
            found="the package `matplotlib` is not installed",
            fix="pip install 'bluejay[train]'",
        ) from error
    updates = {e["update"]: e for e in events if e["event"] == "train.update"}
    evaluations = {e["update"]: e for e in events if e["event"] == "train.eval"}
    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    xs = sorted(updates)
    axes.plot(xs, [_number(updates[x]["loss"]) for x in xs], color="#9db4d0", linewidth=0.8, label="training")
    axes.plot(xs, _smooth([_number(updates[x]["loss"]) for x in xs]), color="#1f4e8c", label="training, smoothed")
    if evaluations:
        points = sorted(evaluations)
        losses = [_number(evaluations[x]["loss"]) for x in points]
        axes.plot(points, losses, "o-", color="#c0504d", markersize=4, label="validation")
    axes.set_xlabel("update")
    axes.set_ylabel("loss, nats per token")
    axes.legend(loc="upper right")
    axes.grid(alpha=0.3)
    right = axes.twinx()
    right.plot(xs, [updates[x]["learning_rate"] for x in xs], color="#8fae5d", linewidth=0.8, linestyle="--")
    right.set_ylabel("learning rate (dashed)")
    png, page = folder / "loss.png", folder / "loss.html"
    figure.savefig(png, dpi=110)
    drawing = io.BytesIO()
    figure.savefig(drawing, format="svg")
    page.write_text(_page(folder, drawing.getvalue(), updates, evaluations), encoding="utf-8")
    return png, page


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _smooth(values: list[float], window: int = 25) -> list[float]:
    """The mean of each value and those before it, a window at a time."""
    half = max(1, min(window, len(values) // 4))
    return [sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i - half + 1) : i + 1])]


def _page(folder: Path, drawing: bytes, updates: dict[int, Any], evaluations: dict[int, Any]) -> str:
    image = base64.b64encode(drawing).decode("ascii")
    shown = sorted(
        {*sorted(updates)[:: max(1, len(updates) // 50)], *evaluations, max(updates, default=0)} & {*updates}
    )
    rows = "".join(
        f"<tr><td>{x}</td><td>{_number(updates[x]['loss']):.4f}</td>"
        f"<td>{format(_number(evaluations[x]['loss']), '.4f') if x in evaluations else ''}</td>"
        f"<td>{updates[x]['learning_rate']:.3g}</td><td>{updates[x]['num_tokens']:,}</td></tr>"
        for x in shown
    )
    title = html.escape(f"Training in {folder}")
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{title}</title>"
        "<style>body{font:15px sans-serif;margin:2em;max-width:60em}table{border-collapse:collapse}"
        "td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}</style>"
        f"<h1>{title}</h1><img alt='loss over the updates' src='data:image/svg+xml;base64,{image}'>"
        "<table><tr><th>update</th><th>loss</th><th>validation</th><th>learning rate</th><th>tokens</th></tr>"
        f"{rows}</table></html>\n"
    )


def trackers(config: TrainConfig) -> list[Observer]:
    """Observers that send figures to TensorBoard and Weights & Biases, where the run asks for them.

    Raises:
        ConfigError: asked for and not installed.
    """
    found: list[Observer] = []
    if config.tensorboard:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            raise _not_installed("tensorboard", error) from error
        writer = SummaryWriter(str(Path(config.out) / "tensorboard"))

        def to_tensorboard(event: Event) -> None:
            if values := figures(event):
                for name, value in values.items():
                    writer.add_scalar(name, value, event.fields["update"])
                writer.flush()  # a run that fails leaves all that it has told
            if event.name == "train.end":
                writer.close()

        found.append(to_tensorboard)
    if config.wandb:
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise _not_installed("wandb", error) from error
        from dataclasses import asdict

        run = wandb.init(project="bluejay", dir=config.out, config=asdict(config))

        def to_wandb(event: Event) -> None:
            if values := figures(event):
                run.log(values, step=event.fields["update"])
            if event.name == "train.end":
                run.finish()

        found.append(to_wandb)
    return found


def figures(event: Event) -> dict[str, float]:
    """What trackers draw, by name."""
    fields = event.fields
    if event.name == "train.update":
        values = {
            f"train/{name}": fields[name] for name in ("loss", "learning_rate", "gradient_norm", "tokens_per_second")
        }
        return {name: value for name, value in values.items() if value is not None}
    return {"valid/loss": fields["loss"]} if event.name == "train.eval" else {}


def _not_installed(package: str, error: Exception) -> ConfigError:
    return ConfigError(
        asked=f"{package}=true",
        found=f"the package is not installed ({error})",
        rule="a tracker that is asked for is never left out",
        fix=f"pip install {package}, or set {package}=false",
    )
