"""A world of four gloo ranks on this machine: each does the same checks in the same order and writes what it found.

A test starts it with `reports_of`; what a rank does is a script beside it, which ends in `run_rank`:

    python SCRIPT RANK PORT FOLDER [ONLY]
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from bluejay.parallel import Rank, join, leave

WORLD = 4
GROUPS: dict[int, Any] = {}  # the first ranks, by how many they are
Checks = list[tuple[str, Callable[[], str | None]]]
Reports = list[dict[str, str]]


def reports_of(script: str, folder: Path) -> Reports:
    """What every rank says of every check: "" where it held."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name(script)), str(rank), str(port), str(folder)],
            env=environment,
            stderr=(folder / f"stderr{rank}").open("wb"),
        )
        for rank in range(WORLD)
    ]
    try:
        for process in processes:
            process.wait(timeout=300)
    finally:
        for process in processes:
            process.kill()
    files = [folder / f"rank{rank}.json" for rank in range(WORLD)]
    logs = "\n".join((folder / f"stderr{rank}").read_text()[-2000:] for rank in range(WORLD))
    assert all(file.is_file() for file in files), logs
    return [json.loads(file.read_text()) for file in files]


def assert_held(name: str, reports: Reports) -> None:
    """Every rank came to this check, and it held on all."""
    for rank, report in enumerate(reports):
        assert name in report, f"rank {rank} did not get here: {[text for text in report.values() if text]}"
        assert not report[name], f"rank {rank}: {report[name]}"


def run_rank(everything: Callable[[], Checks], prepare: Callable[[Path], None] = lambda folder: None) -> None:
    """Be one rank. A check says what is wrong, by an error or by what it returns."""
    index, port, folder, *only = sys.argv[1:]
    join(Rank(int(index), WORLD, "127.0.0.1", int(port)), timeout_seconds=60)
    for size in range(1, WORLD + 1):
        GROUPS[size] = dist.new_group(list(range(size)))
    prepare(Path(folder))
    dist.barrier()
    found: dict[str, str] = {}
    for name, check in everything():
        if only and only[0] not in name:
            continue
        try:
            found[name] = check() or ""
        except (AssertionError, pytest.fail.Exception):
            found[name] = traceback.format_exc()
        except Exception:
            found[name] = traceback.format_exc()
            break  # the ranks no longer agree on what comes next
    (Path(folder) / f"rank{index}.json").write_text(json.dumps(found))
    leave()
