"""Ranks: how a process joins the others, and the mesh that says what each of them is."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from bluejay.config import Layout
from bluejay.errors import ConfigError
from bluejay.parallel.collectives import Group

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
    return DeviceMesh(device_type, ranks, mesh_dim_names=AXES)


def group_of(mesh: DeviceMesh, axis: str) -> Group:
    """The ranks that differ from this one along `axis` only; None where the axis has one."""
    return None if mesh.size(AXES.index(axis)) == 1 else mesh.get_group(axis)


def place_of(mesh: DeviceMesh) -> dict[str, int]:
    """This rank's replica, stage and tensor index."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, f"rank {dist.get_rank()} is not in the mesh"
    return dict(zip(AXES, coordinate, strict=True))


def join(rank: int, num_ranks: int, address: str, device_type: str = "cpu", timeout_seconds: float = 1800) -> None:
    """Join the other ranks at `address` (host:port). gloo between CPUs, NCCL between GPUs."""
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        init_method=f"tcp://{address}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_seconds),
    )


def leave() -> None:
    """Close what `join` opened."""
    dist.destroy_process_group()
