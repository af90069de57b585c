"""Ranks: how a process joins the others, and the mesh that says what each of them is."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore  # torch.distributed has them without exporting them
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from bluejay.config import Layout
from bluejay.errors import ConfigError, MachineError
from bluejay.parallel.collectives import Group

T = TypeVar("T")

# For one rank to read or write what is everybody's while the others wait: 72 GB of a checkpoint take ten minutes.
# A rank that dies is noticed at once, by its connection.
WORKING_SECONDS = 1800.0
_LAST_WORDS = timedelta(seconds=30)  # for the other ranks to read an answer that is there already
AXES = ("replica", "stage", "tensor")  # neighbors in rank share layers: the axis that moves most bytes is innermost


def build_mesh(layout: Layout, device_type: str = "cpu") -> DeviceMesh:
    """The mesh of a layout over the first ranks; ranks beyond it are in no group of it. All ranks call this.

    Raises:
        ConfigError: fewer ranks than devices in the layout.
    """
    num_devices, world = layout.num_devices, dist.get_world_size()
    if num_devices > world:
        raise ConfigError(
            asked=f"a layout of {num_devices} devices",
            found=f"{world} ranks",
            rule="every device is one rank",
            fix=f"start {num_devices} ranks, or lay the model out over {world}",
        )
    ranks = torch.arange(num_devices).view(layout.replicas, layout.num_stages, layout.tensor)
    mesh = DeviceMesh(device_type, ranks, mesh_dim_names=AXES)
    if mesh.get_coordinate() is not None:
        for axis in AXES:
            if (group := group_of(mesh, axis)) is not None:  # torch's own limits differ by backend and by axis
                _set_pg_timeout(timedelta(seconds=WORKING_SECONDS), group)
    _make_gloo_yield()
    return mesh


def _make_gloo_yield() -> None:
    """Have the threads that watch gloo's connections take no core from the threads that compute and wait.

    Such a thread looks again and again while something moves. Where a rank has one core, a collective may take a turn
    of Linux's scheduler (4 ms) because of it: a sum over two ranks took 0.9 ms on the average instead of 0.3 (kernel
    6.18; benchmarks/parallel.py meeting). A batch thread has the same share of the core, but does not take it from
    another one at the moment it is woken (sched(7)).
    """
    if sys.platform == "linux":
        for name in Path("/proc/self/task").glob("*/comm"):
            with contextlib.suppress(OSError):  # it has ended, or is not ours to change
                if name.read_text().strip() == "gloo_tcp_loop":
                    os.sched_setscheduler(int(name.parent.name), os.SCHED_BATCH, os.sched_param(0))


def group_of(mesh: DeviceMesh, axis: str) -> Group:
    """The ranks that differ from this one along `axis` only; None where the axis has one."""
    return None if mesh.size(AXES.index(axis)) == 1 else mesh.get_group(axis)


def place_of(mesh: DeviceMesh) -> dict[str, int]:
    """This rank's replica, stage and tensor index."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, f"rank {dist.get_rank()} is not in the mesh"
    return dict(zip(AXES, coordinate, strict=True))


@dataclass(frozen=True)
class Rank:
    """One process of several, and where they meet.

    Attributes:
        host, port: where rank 0, or a launcher before it, keeps the store that ranks find each other through.
        keeps_store: false when a launcher keeps it.
        listener: file descriptor of a socket that already listens there, for the rank that keeps the store.
        local: which of its machine's ranks it is.
        attempt: how often a launcher has started the job again; ranks of another attempt are strangers.
    """

    index: int
    count: int
    host: str
    port: int
    keeps_store: bool = True
    listener: int | None = None
    local: int = 0
    attempt: int = 0


def join(rank: Rank, asked: str = "", device_type: str = "cpu", timeout_seconds: float = 600) -> None:
    """Join the other ranks: gloo between CPUs, NCCL between GPUs.

    Args:
        asked: what this rank was asked to do, in one spelling; all ranks must have been asked the same.

    Raises:
        ConfigError: another rank was asked something else; before the first collective, so that none waits.
        MachineError: not all ranks came.
    """
    timeout = timedelta(seconds=timeout_seconds)
    try:
        keeps = rank.index == 0 and rank.keeps_store
        listener = rank.listener if keeps else None
        served = TCPStore(rank.host, rank.port, rank.count, keeps, timeout, master_listen_fd=listener)
        store = PrefixStore(f"bluejay/{rank.attempt}", served)
        mine = hashlib.sha256(asked.encode()).hexdigest()
        store.set(f"asked/{rank.index}", mine)
        theirs = [store.get(f"asked/{i}").decode() for i in range(rank.count)]
    except dist.DistError as error:
        raise _nobody(rank, timeout_seconds, error) from None
    if different := [i for i, digest in enumerate(theirs) if digest != theirs[0]]:
        # The store ends with the rank that keeps it: not before every rank has read why.
        with contextlib.suppress(dist.DistError):
            store.set(f"read/{rank.index}", "")
            if keeps:
                store.wait([f"read/{i}" for i in range(rank.count)], _LAST_WORDS)
        raise ConfigError(
            asked=f"one job on {rank.count} ranks",
            found=f"rank {different[0]} was asked something else than rank 0",
            rule="every rank runs the same model, settings and version on the same input",
            fix="start all ranks with the same command, files and installation",
        )
    backend = "nccl" if device_type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, store=store, rank=rank.index, world_size=rank.count, timeout=timeout)
    except (dist.DistError, RuntimeError) as error:
        raise _nobody(rank, timeout_seconds, error) from None


def _nobody(rank: Rank, timeout_seconds: float, error: Exception) -> MachineError:
    return MachineError(
        asked=f"join {rank.count} ranks at {rank.host}:{rank.port} as rank {rank.index}",
        found=str(error).splitlines()[0],
        rule=f"all ranks come within {timeout_seconds:.0f} seconds",
        fix="look for the rank that did not start, and for a firewall between the hosts",
    )


def from_first(value: T) -> T:
    """Rank 0's value, on every rank; any picklable object."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def from_all(value: T) -> list[T]:
    """Every rank's value, in the order of ranks, on every rank; any picklable object."""
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def leave() -> None:
    """Close what `join` opened."""
    dist.destroy_process_group()
