"""Laws 4 and 7 for the training loop: many ranks train what one process trains. One world of four gloo ranks."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

RANKS = Path(__file__).with_name("train_ranks.py")


def load_ranks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_ranks", RANKS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_ranks"] = module
    spec.loader.exec_module(module)
    return module


ranks = load_ranks()


@pytest.fixture(scope="session")
def training_reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What every rank says of every check."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(RANKS), str(rank), str(port), str(folder)],
            env=environment,
            stderr=(folder / f"stderr{rank}").open("wb"),
        )
        for rank in range(ranks.WORLD)
    ]
    try:
        for process in processes:
            process.wait(timeout=300)
    finally:
        for process in processes:
            process.kill()
    files = [folder / f"rank{rank}.json" for rank in range(ranks.WORLD)]
    logs = "\n".join((folder / f"stderr{rank}").read_text()[-2000:] for rank in range(ranks.WORLD))
    assert all(file.is_file() for file in files), logs
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("name", [name for name, _ in ranks.everything()])
def test_ranks_train_what_one_process_trains(name: str, training_reports: list[dict[str, str]]) -> None:
    """Catches what makes a run over a plan another run than one process's, each with its own signature.

    B-52 a bias that every rank adds; B-56 gradients scaled by passes or micro-batches; B-33 means of means over
    replicas with unequal targets; B-58 evaluation rows that are counted twice or not at all; clipping by the norm of a
    part, or with what ranks share counted by each; moments cut another way than their weight; an average evaluated
    with gathered weights that are out of date; an overflow, a number that is none, Ctrl-C or a full disk of which only
    one rank learns; dropout that a resume draws anew (law 7, B-37); adapters and rounding over parts of matrices.
    """
    for rank, report in enumerate(training_reports):
        assert name in report, f"rank {rank} did not get here: {[text for text in report.values() if text]}"
        assert not report[name], f"rank {rank}: {report[name]}"
