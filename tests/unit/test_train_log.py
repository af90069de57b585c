"""What a run leaves for people: event lines, trackers, and a plot that draws a resumed run once."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bluejay.cli.train import TrainDisplay
from bluejay.config import TrainConfig
from bluejay.events import Event
from bluejay.train import EventFile, TrainingError, plot_loss, read_events, trackers

UPDATE = {"loss": 2.0, "learning_rate": 0.1, "gradient_norm": 1.0, "num_tokens": 50, "seconds": 0.5}
RATES: dict[str, Any] = {"compiled": False, "tokens_per_second": 100.0}


def test_nan_is_written_as_nan(tmp_path: Path) -> None:
    """B-39: a log that hides a NaN behind a default, or writes a line that no JSON reader takes."""
    file = EventFile(tmp_path / "events.jsonl")
    file(Event("train.update", {"update": 1, "loss": math.nan, "norm": math.inf, "where": Path("a")}))
    file.close()
    line = json.loads((tmp_path / "events.jsonl").read_text(), parse_constant=pytest.fail)
    assert (line["loss"], line["norm"], line["where"]) == ("nan", "inf", "a")


def test_a_half_written_last_line_is_passed_over(tmp_path: Path) -> None:
    """Catches a killed run whose events cannot be read any more, a warning about what every kill leaves, and damage in
    the middle that ends the reading or goes unseen."""
    file, told = tmp_path / "events.jsonl", list[Event]()
    file.write_text('{"event": "a"}\n{"event": "b"}\n{"eve')
    assert [event["event"] for event in read_events(file, told.append)] == ["a", "b"]
    assert told == []
    file.write_bytes(b'{"eve\n{"event": "b"}\n"text"\n\xff\xfe{}\n{"event": "c"}\n')
    assert [event["event"] for event in read_events(file, told.append)] == ["b", "c"]
    assert [event.fields["text"] for event in told] == [f"lines 1, 3, 4 of {file} are damaged: left out of the plot"]


def test_a_run_goes_on_after_a_half_written_line(tmp_path: Path) -> None:
    """Catches a resumed run whose first event is glued to what a full disk or a kill left, and an event whose text
    holds another kind of line end."""
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "a"}\n{"eve')
    file = EventFile(path)
    file(Event("b", {"text": "one\u2028two"}))
    file.close()
    assert [event["event"] for event in read_events(path)] == ["a", "b"]


def test_events_are_one_process_s(tmp_path: Path) -> None:
    """Catches a second job whose ranks write into, and cut off, what the ranks of the first are writing."""
    path = tmp_path / "events-rank1.jsonl"
    first = EventFile(path)
    with path.open("a") as half:
        half.write('{"eve')
    with pytest.raises(TrainingError, match=r"another process .* writes events-rank1\.jsonl"):
        EventFile(path)
    assert path.read_text() == '{"eve'
    first.close()
    EventFile(path).close()


def test_the_plot_takes_what_there_is(tmp_path: Path) -> None:
    """Catches a plot that breaks on NaN, on an update without a target, or on one update only; and a table without the
    evaluations or the last update, because it shows one update of many."""
    events = [{"event": "train.update", "update": i, **UPDATE, "loss": loss} for i, loss in enumerate(["nan", None, 2])]
    events.append({"event": "train.eval", "update": 2, "loss": 1.5})
    png, page = plot_loss(events, tmp_path)
    assert png.stat().st_size > 5000
    assert "<td>1.5000</td>" in page.read_text()
    assert "<td>nan</td>" in page.read_text()
    plot_loss(events[2:3], tmp_path)
    many = [{"event": "train.update", "update": i, **UPDATE} for i in range(1, 200)]
    plot_loss([*many, {"event": "train.eval", "update": 101, "loss": 1.25}], tmp_path)
    assert "<td>1.2500</td>" in page.read_text()
    assert "<td>199</td>" in page.read_text()


def test_trackers_get_the_figures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches a tracker that is asked for, installed, and told nothing; and figures that a failing run would lose."""
    told: list[Any] = []
    writer = SimpleNamespace(
        add_scalar=lambda *a: told.append(a), flush=lambda: told.append("flushed"), close=lambda: told.append("closed")
    )
    run = SimpleNamespace(log=lambda values, step: told.append((values, step)), finish=lambda: told.append("finished"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=lambda folder: writer))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **settings: run))
    observers = trackers(TrainConfig(out=str(tmp_path), tensorboard=True, wandb=True))
    for observe in observers:
        observe(Event("train.update", {"update": 3, **UPDATE, **RATES}))
        observe(Event("train.eval", {"update": 3, "loss": 1.5}))
        observe(Event("train.end", {}))
    assert ("train/loss", 2.0, 3) in told
    assert ("train/tokens_per_second", 100.0, 3) in told
    assert ({"valid/loss": 1.5}, 3) in told
    assert told[-1] == "finished"
    assert told.index("flushed") < told.index("closed")
    assert trackers(TrainConfig()) == []


def test_no_rate_of_an_update_that_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches tokens that went through while code was made, over seconds without the making: a rate of nonsense in the
    first line of every compiled run, and in the mean of those after it."""
    counts = {"num_trained": 1, "num_parameters": 1, "rows": 1, "rows_per_update": 1, "gradient_accumulation": 1}
    with TrainDisplay(quiet=False) as display:
        display(Event("train.start", {**counts, "updates_per_epoch": 2, "total": 2, "update": 0}))
        for update, seconds, compiled in ((1, 0.001, True), (2, 0.5, False)):
            figures = {
                **UPDATE,
                "update": update,
                "total": 2,
                "seconds": seconds,
                "memory_bytes": 1,
                "compiled": compiled,
            }
            display(Event("train.update", figures))
    _, first, second = capsys.readouterr().err.splitlines()
    assert "tokens/s" not in first
    assert " left" not in first
    assert "100 tokens/s" in second
