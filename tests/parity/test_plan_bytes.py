"""Law 9: the planner's bytes are the run's bytes. One world of four gloo ranks weighs them all."""

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

RANKS = Path(__file__).with_name("plan_bytes_ranks.py")


def load_ranks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plan_bytes_ranks", RANKS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["plan_bytes_ranks"] = module
    spec.loader.exec_module(module)
    return module


ranks = load_ranks()


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What every rank says of every check."""
    folder = tmp_path_factory.mktemp("bytes")
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
            process.wait(timeout=200)
    finally:
        for process in processes:
            process.kill()
    files = [folder / f"rank{rank}.json" for rank in range(ranks.WORLD)]
    logs = "\n".join((folder / f"stderr{rank}").read_text()[-2000:] for rank in range(ranks.WORLD))
    assert all(file.is_file() for file in files), logs
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("name", [name for name, _ in ranks.everything()])
def test_the_planned_bytes_are_the_runs(name: str, reports: list[dict[str, str]]) -> None:
    """Catches a plan that fits where the run does not: bf16 without its fp32 sums and masters, the second gradient of
    an embedding that is added to the first, a head's probabilities counted once too often or forgotten, rows of a
    pipeline's generation counted all at once, what replicas gather.
    """
    for rank, report in enumerate(reports):
        assert name in report, f"rank {rank} did not get here: {[text for text in report.values() if text]}"
        assert not report[name], f"rank {rank}: {report[name]}"
