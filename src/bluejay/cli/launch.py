"""Ranks of one job: started here with `--devices N`, or by torchrun, Slurm or Kubernetes; one of them is heard.

The starter of local ranks gives each its own cores and loopback addresses, and ends all when one ends badly.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bluejay.cli.environment import rank_of_launcher
from bluejay.errors import BluejayError, ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from bluejay.config import Layout

POLL_SECONDS = 0.05
GRACE_SECONDS = 5.0  # for a rank to leave when another has failed, before it is killed
LAST_WORDS = 2000  # characters of a failed rank's stderr that are shown


class RankError(BluejayError):
    """A rank of a job failed or was killed, and the job with it."""

    code = "rank"


def layout_of(devices: int, stages: int) -> Layout:
    """The layout that `--devices` and `--stages` mean: what is not stages is tensor parallel.

    Raises:
        ConfigError: the devices do not divide into the stages.
    """
    from bluejay.config import Layout

    if devices % stages:
        fitting = [n for n in range(1, devices + 1) if devices % n == 0]
        raise ConfigError(
            asked=f"{stages} stages on {devices} devices",
            found=f"{devices} over {stages} leaves {devices % stages}",
            rule="each stage has equally many devices",
            fix=f"use --stages {', '.join(map(str, fitting))}",
        )
    return Layout(stages=stages, tensor=devices // stages)


def is_starter(devices: int) -> bool:
    """Whether this process is to start the ranks: several are asked for, and it is not one of them.

    Raises:
        ConfigError: a launcher started another number of ranks.
    """
    rank = rank_of_launcher()
    if rank is not None and rank.count != devices:
        raise ConfigError(
            asked=f"--devices {devices}",
            found=f"rank {rank.index} of {rank.count}",
            rule="every device is one rank",
            fix=f"use --devices {rank.count}, or start {devices} ranks",
        )
    return devices > 1 and rank is None


@contextmanager
def ranks(layout: Layout, asked: Sequence[Any], device: str) -> Iterator[DeviceMesh | None]:
    """Inside, this rank has joined the others and has the mesh; None when the layout is one device.

    Ranks other than the first write nothing to stdout; of stderr their errors remain.

    Args:
        asked: what every rank must have been asked alike: settings as plain data, versions, the model's config.
    """
    rank = rank_of_launcher()
    if rank is None or layout.num_devices == 1:
        yield None
        return
    import bluejay
    from bluejay.config import canonical_json
    from bluejay.parallel import build_mesh, join, leave

    device_type = "cuda" if device.startswith("cuda") else "cpu"
    join(rank, canonical_json([bluejay.__version__, *asked]), device_type)
    silenced = sys.stdout
    if rank.index > 0:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  # lives as long as the process
    try:
        yield build_mesh(layout, device_type)
        leave()
    finally:
        sys.stdout = silenced


def start_ranks(argv: Sequence[str], count: int) -> int:
    """Run this command as `count` local ranks; returns 0, or the exit code of the first rank, which has said why.

    Raises:
        RankError: another rank failed or was killed; the others were ended.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="bluejay-ranks-") as folder:
        logs = [Path(folder) / f"rank{index}" for index in range(count)]
        processes = [_start(argv, index, count, port, log) for index, log in enumerate(logs)]
        try:
            return _watch(processes, logs)
        finally:
            _end(processes)


def _start(argv: Sequence[str], index: int, count: int, port: int, log: Path) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RANK": str(index),
        "LOCAL_RANK": str(index),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    }
    cores = _cores_of(index, count)
    if cores:
        environment.setdefault("OMP_NUM_THREADS", str(len(cores)))
    heard = index == 0
    return subprocess.Popen(
        [sys.executable, "-m", "bluejay", *argv],
        env=environment,
        stdin=None if heard else subprocess.DEVNULL,
        stdout=None if heard else subprocess.DEVNULL,
        stderr=None if heard else log.open("wb"),
        preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,
    )


def _cores_of(index: int, count: int) -> list[int]:
    """A rank's own cores: an equal run of those that this process may use; empty where there are too few."""
    if sys.platform != "linux":
        return []
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // count
    return cores[index * share : (index + 1) * share]


def _watch(processes: list[subprocess.Popen[bytes]], logs: list[Path]) -> int:
    """Wait until all ranks are done, or one has failed."""
    while True:
        codes = [process.poll() for process in processes]
        if all(code == 0 for code in codes):
            return 0
        if any(codes):
            break
        time.sleep(POLL_SECONDS)
    time.sleep(10 * POLL_SECONDS)  # whose connection broke because of it may fail in the same moment
    codes = [process.poll() for process in processes]
    killed = [index for index, code in enumerate(codes) if code is not None and code < 0]
    others = [index for index, code in enumerate(codes) if code and index > 0]
    if not killed and codes[0] and (not others or codes[0] == 2):
        return codes[0]
    failed = killed or others
    code = codes[failed[0]] or 1
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    words = logs[failed[0]].read_text(errors="replace")[-LAST_WORDS:].strip() if logs[failed[0]].exists() else ""
    raise RankError(
        asked=f"a job of {len(processes)} ranks",
        found=f"rank {failed[0]} {how}" + (f":\n{words}" if words else ""),
        rule="ranks hold parts of one model: none can go on without the others",
        fix="look at what that rank says; if it was killed, at the memory that bluejay plan says a rank needs",
    )


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """End the ranks that still run, first politely."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for process in processes:
        try:
            process.wait(timeout=max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
