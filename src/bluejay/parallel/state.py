"""A model's tensors between layouts: whole ones out of every rank's parts, and a rank's part of whole ones.

Weights, gradients and an optimizer's moments have the same shapes and are cut alike, so one pair of functions serves
all of them, and what one layout has written another can go on from.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from bluejay.models import cut_dim, parameter_shapes
from bluejay.parallel.cut import cut_part
from bluejay.parallel.mesh import group_of, place_of
from bluejay.parallel.plan import Plan


def whole_tensors(parts: Mapping[str, Tensor], plan: Plan, mesh: DeviceMesh) -> dict[str, Tensor]:
    """Every rank's tensors, put together under the model's names: on the first rank of the mesh, in the CPU's memory.

    All ranks of the mesh call this, each with tensors for all the parameters that it holds; the others get nothing.
    Names may have a path before them, such as `exp_avg/transformer.wte.weight`.
    """
    place, tensor, stages = place_of(mesh), group_of(mesh, "tensor"), group_of(mesh, "stage")
    shapes = parameter_shapes(plan.model)
    held: dict[str, Tensor] = {}
    for name in sorted(parts):
        part = parts[name].detach()
        part = part.full_tensor() if hasattr(part, "full_tensor") else part  # gathers what replicas share out
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
    if stages is not None:
        everyone: list[dict[str, Tensor]] | None = [{}] * plan.layout.num_stages if place["stage"] == 0 else None
        dist.gather_object(held, everyone, group=stages, group_dst=0)
        held = {name: value for found in everyone or [] for name, value in found.items()}
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
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(part, mesh["replica"], [Shard(0)])
