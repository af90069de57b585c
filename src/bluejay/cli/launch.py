"""Ranks of one job: started here with `--devices N`, or by torchrun, Slurm or Kubernetes; one of them is heard.

The starter of local ranks gives each its own cores and loopback addresses, and ends all when one ends badly.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bluejay.cli.environment import rank_of_launcher
from bluejay.errors import BluejayError, ConfigError, MachineError
from bluejay.files import temporary_folder

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from bluejay.config import Layout

POLL_SECONDS = 0.05
GATHER_SECONDS = 0.3  # in which ranks that fall with one that was killed, or with the first, are seen to fall too
GRACE_SECONDS = 5.0  # for a rank to say what it fell of when another has failed, and to leave before it is killed
LAST_WORDS = 2000  # characters of a failed rank's stderr that are shown
INTERRUPTED = 130  # exit code of a rank that was asked to leave; all that train do so together, once they have saved
LOST = 75  # exit code of a rank that cannot go on because another one is gone
_ASK_TO_DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


class RankError(BluejayError):
    """A rank of a job failed or was killed, and the job with it."""

    code = "rank"


class LostRankError(RankError):
    """Another rank is gone: a consequence, of which that rank knows the cause."""

    exit_code = LOST


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


def is_heard() -> bool:
    """Whether this process may write: the only one of a job, or its first rank."""
    rank = rank_of_launcher()
    return rank is None or rank.index == 0


def device_of_rank(device: str) -> str:
    """The device of this rank when all were asked for `device`: on GPUs, each of a machine's ranks has its own.

    Raises:
        ConfigError: one GPU is named for several ranks.  MachineError: fewer GPUs than ranks on this machine.
    """
    rank = rank_of_launcher()
    if rank is None or rank.count == 1:
        return device
    import torch

    from bluejay.build import pick_device

    picked = pick_device(device)
    if picked.type != "cuda":
        return str(picked)
    if device not in ("auto", "cuda"):
        raise ConfigError(
            asked=f"--device {device} for {rank.count} ranks",
            found="one GPU",
            rule="each rank takes the GPU with its own number on its machine",
            fix="use --device cuda",
        )
    if rank.local >= torch.cuda.device_count():
        raise MachineError(
            asked=f"a GPU for rank {rank.index}, number {rank.local} on its machine",
            found=f"{torch.cuda.device_count()} GPUs",
            rule="each rank has a GPU of its own",
            fix=f"start {torch.cuda.device_count()} ranks on this machine, or use --device cpu",
        )
    return f"cuda:{rank.local}"


@contextmanager
def ranks(layout: Layout, asked: Sequence[Any], device: str) -> Iterator[DeviceMesh | None]:
    """Inside, this rank has joined the others and has the mesh; None when the layout is one device.

    Ranks other than the first write nothing to stdout; of stderr their errors remain.

    Args:
        asked: what every rank must have been asked alike, as plain data: settings, and what the model's files hold.
        device: of this rank (`device_of_rank`).

    Raises:
        LostRankError: the connection to another rank broke.
    """
    rank = rank_of_launcher()
    if rank is None or layout.num_devices == 1:
        yield None
        return
    import torch

    import bluejay
    from bluejay.config import canonical_json
    from bluejay.parallel import build_mesh, join, leave

    device_type = "cuda" if device.startswith("cuda") else "cpu"
    with contextlib.ExitStack() as stack:
        if rank.index > 0:
            nowhere = stack.enter_context(Path(os.devnull).open("w", encoding="utf-8", errors="replace"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        join(rank, canonical_json([bluejay.__version__, torch.__version__, *asked]), device_type)
        try:
            yield build_mesh(layout, device_type)
        except (torch.distributed.DistError, RuntimeError) as error:
            if not _is_of_connection(error):
                raise
            raise LostRankError(
                asked=f"rank {rank.index} of {rank.count} to go on",
                found=f"the connection to another rank broke ({str(error).splitlines()[0]})",
                rule="ranks hold parts of one model: none can go on without the others",
                fix="look at the rank that ended first",
            ) from error
        leave()


def _is_of_connection(error: Exception) -> bool:
    """Whether torch says with this error that it cannot reach another rank."""
    import torch

    words = ("gloo", "NCCL", "Connection")
    return isinstance(error, torch.distributed.DistError) or any(word in str(error) for word in words)


def start_ranks(argv: Sequence[str], count: int, grace_seconds: float = GRACE_SECONDS) -> int:
    """Run this command as `count` local ranks; returns 0, or the exit code of the first rank, which has said why.

    Args:
        grace_seconds: what ranks get to leave by themselves after Ctrl-C or a signal to end, which is sent on to them.

    Raises:
        RankError: another rank failed or was killed; the others were ended.
    """
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())  # ours from here on: no other job can take its port
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        folder = stack.enter_context(temporary_folder())
        logs = [Path(folder) / f"rank{index}" for index in range(count)]
        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, processes)
        stack.enter_context(_leaving_on_signals())
        for index, log in enumerate(logs):
            processes.append(_start(argv, index, count, listener, log))
        try:
            return _watch(processes, logs)
        except (KeyboardInterrupt, SystemExit):
            _end(processes, grace_seconds)
            raise


@contextmanager
def _leaving_on_signals() -> Iterator[None]:
    """Inside, what schedulers and terminals send to end a process unwinds it, so that it ends its ranks."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    chosen = [signal.SIGTERM, signal.SIGHUP]
    before = {number: signal.signal(number, leave) for number in chosen}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(argv: Sequence[str], index: int, count: int, listener: socket.socket, log: Path) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RANK": str(index),
        "LOCAL_RANK": str(index),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listener.getsockname()[1]),
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    }
    cores = _cores_of(index, count)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, len(cores))))
    heard = index == 0
    if heard:
        environment["BLUEJAY_LISTENER"] = str(listener.fileno())
    # With -m, Python looks for modules in the current folder first; only where it did so for us.
    flags = [] if sys.path[0] in ("", str(Path.cwd())) else ["-P"]
    with contextlib.ExitStack() as stack:
        return subprocess.Popen(
            [sys.executable, *flags, "-m", "bluejay", *argv],
            env=environment,
            stdin=None if heard else subprocess.DEVNULL,
            stdout=None if heard else subprocess.DEVNULL,
            stderr=None if heard else stack.enter_context(log.open("wb")),
            preexec_fn=_before_start(cores),
            pass_fds=(listener.fileno(),) if heard else (),
        )


def _before_start(cores: list[int]) -> Callable[[], None] | None:
    """What a rank does first: it takes its cores, and asks to be ended when the starter dies, however that dies."""
    if sys.platform != "linux":
        return None
    control = ctypes.CDLL(None).prctl

    def prepare() -> None:
        control(_ASK_TO_DIE_WITH_PARENT, signal.SIGTERM)
        if cores:
            os.sched_setaffinity(0, cores)

    return prepare


def _cores_of(index: int, count: int) -> list[int]:
    """A rank's own cores: an equal run of those that this process may use; empty where there are too few."""
    if sys.platform != "linux":
        return []
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // count
    return cores[index * share : (index + 1) * share]


@dataclasses.dataclass(frozen=True)
class _Fall:
    """A rank that ended badly. Causes sort before consequences, and what was seen first before the rest."""

    order: int
    rank: int
    code: int

    @property
    def is_cause(self) -> bool:
        """Whether no other rank has more to say: this one was ended from outside, or is the first and has said why."""
        killed = self.code < 0 and self.code != -signal.SIGABRT
        return killed or (self.rank == 0 and self.code not in (LOST, -signal.SIGABRT))

    @property
    def likelihood(self) -> tuple[int, int]:
        """Smaller is likelier to be the cause."""
        lost = self.code in (LOST, -signal.SIGABRT)  # what a lost connection makes of a rank, by our code or by torch's
        plain = not lost and (self.code < 0 or self.code == 2)  # ended from outside, or a request it could not take
        return 2 if lost else 0 if plain else 1, self.order if self.rank else -1  # the first rank has said why


def _watch(processes: list[subprocess.Popen[bytes]], logs: list[Path]) -> int:
    """Wait until all ranks are done, or one has failed."""
    fallen: dict[int, _Fall] = {}
    deadline = float("inf")
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if all(code in (0, INTERRUPTED) for code in codes):
            return max(code or 0 for code in codes)
        for rank, code in enumerate(codes):
            if code and rank not in fallen:
                fallen[rank] = _Fall(len(fallen), rank, code)
                patience = GATHER_SECONDS if fallen[rank].is_cause else GRACE_SECONDS
                if code != INTERRUPTED:
                    deadline = min(deadline, time.monotonic() + patience)
        if len(fallen) == len(processes):
            break
        time.sleep(POLL_SECONDS)
    cause = min(fallen.values(), key=lambda fall: fall.likelihood)
    if cause.rank == 0 and cause.code > 0:
        return 1 if cause.code == LOST else cause.code
    words = logs[cause.rank].read_text(errors="replace")[-LAST_WORDS:].strip() if logs[cause.rank].exists() else ""
    raise RankError(
        asked=f"a job of {len(processes)} ranks",
        found=f"rank {cause.rank} {_how(cause.code)}" + (f":\n{words}" if words else ""),
        rule="ranks hold parts of one model: none can go on without the others",
        fix="look at the memory that bluejay plan says a rank needs, and at who may have killed it"
        if cause.code == -signal.SIGKILL
        else "look at what that rank says",
    )


def _how(code: int) -> str:
    if code >= 0:
        return f"failed with exit code {code}"
    names = {int(known): known.name for known in signal.Signals}
    return f"was killed by {names.get(-code, f'signal {-code}')}"


def _end(processes: list[subprocess.Popen[bytes]], grace_seconds: float = GRACE_SECONDS) -> None:
    """End the ranks that still run, first politely."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + grace_seconds
    for process in processes:
        try:
            process.wait(timeout=max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
