"""A model's tensors between layouts: whole ones out of every rank's parts, and a rank's part of whole ones.

Weights, gradients and an optimizer's moments have the same shapes and are cut alike, so one pair of functions serves
all of them, and what one layout has written another can go on from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from bluejay.models import cut_dim, parameter_shapes
from bluejay.parallel.collectives import Group
from bluejay.parallel.cut import cut_part
from bluejay.parallel.mesh import group_of, place_of
from bluejay.parallel.plan import Plan


def whole_tensors(parts: Mapping[str, Tensor], plan: Plan, mesh: DeviceMesh) -> dict[str, Tensor]:
    """Every rank's tensors, put together under the model's names: on the first rank of the mesh, in the CPU's memory.

    All ranks of the mesh call this, each with tensors for all the parameters that it holds; the others get nothing.
    Names may have a path before them, such as `exp_avg/transformer.wte.weight`.
    """
    place = place_of(mesh)
    replicas, tensor, stages = (group_of(mesh, axis) for axis in ("replica", "tensor", "stage"))
    shapes = parameter_shapes(plan.model)
    held: dict[str, Tensor] = {}
    for name in sorted(parts):
        part = parts[name].detach()
        if own_values(part) is not part:
            part = _from_replicas(part, replicas)
        if place["replica"] > 0:
            continue
        dim = cut_dim(name) if part.dim() else None  # a count of updates is the same everywhere
        if dim is not None and tensor is not None:
            pieces = [torch.empty_like(part) for _ in range(plan.layout.tensor)] if place["tensor"] == 0 else None
            dist.gather(part.contiguous(), pieces, group=tensor, group_dst=0)
            if pieces is None:
                continue
            size = shapes[name.rpartition("/")[2]][dim]  # without the vocabulary's padding
            part = torch.cat(pieces, dim).narrow(dim, 0, size)
        if place["tensor"] == 0:
            held[name] = part.cpu()
    if place["replica"] > 0 or place["tensor"] > 0:
        return {}
    return held if stages is None else _from_stages(held, stages, torch.device(mesh.device_type))


def _from_replicas(part: Tensor, replicas: Group) -> Tensor:
    """On the first replica, all rows of a tensor that replicas share out: runs of equally many, the last ones fewer."""
    count, mine = dist.get_world_size(replicas), own_values(part)
    rows = mine.new_zeros((-(-part.shape[0] // count), *part.shape[1:]))
    rows[: len(mine)] = mine
    pieces = [torch.empty_like(rows) for _ in range(count)] if dist.get_rank(replicas) == 0 else None
    dist.gather(rows, pieces, group=replicas, group_dst=0)
    return rows if pieces is None else torch.cat(pieces)[: part.shape[0]]


def _from_stages(held: dict[str, Tensor], stages: dist.ProcessGroup, device: torch.device) -> dict[str, Tensor]:
    """Every stage's tensors, on the first one. They are sent one by one: no more than one is held twice."""
    mine = [(name, part.shape, part.dtype) for name, part in held.items()]
    listed: list[Any] = [None] * dist.get_world_size(stages)
    dist.all_gather_object(listed, mine, group=stages)
    if dist.get_rank(stages) > 0:
        for part in held.values():
            dist.send(part.to(device).contiguous(), group=stages, group_dst=0)
        return {}
    for stage, tensors in enumerate(listed[1:], 1):
        for name, shape, dtype in tensors:
            part = torch.empty(shape, dtype=dtype, device=device)
            dist.recv(part, group=stages, group_src=stage)
            held[name] = part.cpu()
    return held


def own_values(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: itself, or its part of one that replicas share out."""
    held: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return held


def own_part(name: str, whole: Tensor, plan: Plan, mesh: DeviceMesh) -> Tensor:
    """This rank's part of a whole tensor, cut as parameter `name` is, and shared out over replicas where that is."""
    if not whole.dim():
        return whole
    part = cut_part(name, whole, place_of(mesh)["tensor"], plan.layout.tensor)
    if not plan.layout.shard:
        return part
    from torch.distributed.tensor import DTensor, Shard

    rows = -(-part.shape[0] // plan.layout.replicas)
    start = min(place_of(mesh)["replica"] * rows, part.shape[0])
    mine = part[start : start + rows].to(mesh.device_type)
    shape, stride = part.shape, part.stride()
    return DTensor.from_local(mine, mesh["replica"], [Shard(0)], run_check=False, shape=shape, stride=stride)
