"""Law 4: N ranks equal one, in logits, loss and every gradient. One world of four gloo ranks does all checks."""

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

RANKS = Path(__file__).with_name("parallel_ranks.py")


def load_ranks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("parallel_ranks", RANKS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["parallel_ranks"] = module
    spec.loader.exec_module(module)
    return module


ranks = load_ranks()


@pytest.fixture(scope="session")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
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
def test_ranks_equal_one_process(name: str, reports: list[dict[str, str]]) -> None:
    """Catches what makes many ranks another model than one, each with its own signature (logits, loss, gradients).

    B-52 a row-parallel bias added by every rank, or its gradient divided; layer-norm gradients that lack the other
    ranks' part; B-56 pipeline gradients scaled by micro-batches or passes, and rows that do not divide; B-33 means of
    means over unequal token counts; a vocabulary of 65 whose padding is counted;
    law 5 a quantization group that two ranks share.
    """
    for rank, report in enumerate(reports):
        assert name in report, f"rank {rank} did not get here: {[text for text in report.values() if text]}"
        assert not report[name], f"rank {rank}: {report[name]}"
