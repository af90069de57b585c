"""The processes that train one model together: what they add up, agree on, and let the first of them do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from bluejay.errors import BluejayError
from bluejay.models import cut_dim, parameter_shapes
from bluejay.parallel.mesh import AXES, group_of, place_of
from bluejay.parallel.plan import Plan
from bluejay.parallel.state import own_part, own_values, whole_tensors

T = TypeVar("T")


class Replicas:
    """The other copies of the model, each with its own rows of the global batch."""

    def __init__(self, mesh: DeviceMesh, shard: bool = False) -> None:
        self.count, self.index = mesh.size(0), mesh.get_local_rank("replica")
        self._group, self._shard = group_of(mesh, "replica"), shard

    def total(self, values: Tensor) -> Tensor:
        """The sum of a tensor over all replicas."""
        if self._group is not None:
            values = values.clone()
            dist.all_reduce(values, group=self._group)
        return values

    def sum_gradients(self, gradients: list[Tensor]) -> None:
        """Replace each replica's gradients by their sum, in place; those that are shared out are summed already."""
        if self._group is None or self._shard:
            return
        works = [dist.all_reduce(gradient, group=self._group, async_op=True) for gradient in gradients]
        for work in works:
            work.wait()


class PlannedRanks(Replicas):
    """All ranks of a plan, as the training loop sees them. Every method is called by all of them, in the same order.

    Attributes:
        is_first: this rank writes, and is heard.
    """

    def __init__(self, plan: Plan, mesh: DeviceMesh) -> None:
        super().__init__(mesh, plan.layout.shard)
        self._plan, self._mesh = plan, mesh
        self._device = torch.device(mesh.device_type)
        place = place_of(mesh)
        self.is_first = not any(place.values())
        self._is_first_of_tensor = place["tensor"] == 0
        # Innermost first, and the same on all ranks. Sums over them are the same bits everywhere.
        self._groups = {axis: group for axis in reversed(AXES) if (group := group_of(mesh, axis)) is not None}

    def norm(self, gradients: Mapping[str, Tensor]) -> float:
        """The norm of the whole model's gradient, each element counted once however many ranks hold it."""
        mine = [own_values(gradients[name]) for name in gradients if self._counts(name)]
        norms = torch._foreach_norm(mine, 2) if mine else ()
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for norm in norms:
            total += norm.double().square()
        for axis, group in self._groups.items():
            if axis != "replica" or self._shard:
                dist.all_reduce(total, group=group)
        return math.sqrt(total) if total >= 0 else math.nan

    def _counts(self, name: str) -> bool:
        """Whether this rank's values of a parameter are in no other tensor parallel rank's count."""
        return self._is_first_of_tensor or cut_dim(name) is not None

    def num_elements(self, parameters: Mapping[str, Tensor]) -> int:
        """Elements of these parameters in the whole model, without padding."""
        shapes = parameter_shapes(self._plan.model)
        mine = sum(math.prod(shapes.get(name, tuple(value.shape))) for name, value in parameters.items())
        total = torch.tensor(mine, dtype=torch.int64, device=self._device)
        if "stage" in self._groups:
            dist.all_reduce(total, group=self._groups["stage"])
        return int(total)

    def whole(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every rank's tensors put together, on the first rank; the others get nothing."""
        return whole_tensors(parts, self._plan, self._mesh)

    def own(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor that belongs to parameter `name`."""
        return own_part(name, whole, self._plan, self._mesh)

    def highest(self, value: int) -> int:
        """The largest of all ranks' values."""
        most = torch.tensor(value, dtype=torch.int64, device=self._device)
        for group in self._groups.values():
            dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        return int(most)

    def first(self, work: Callable[[], T]) -> T:
        """Let the first rank do it; all get what it returns, or raise what it raised.

        Raises:
            BluejayError: the first rank's.
        """
        outcome: list[Any] = [None, None]
        if self.is_first:
            try:
                outcome[0] = work()
            except BluejayError as error:
                parts = {name: getattr(error, name) for name in ("asked", "found", "rule", "fix")}
                outcome[1] = type(error), parts
                if not self._groups:
                    raise
        for group in self._groups.values():
            dist.broadcast_object_list(outcome, group=group, group_src=0)
        if outcome[1] is not None:
            kind, parts = outcome[1]
            raise kind(**parts)
        result: T = outcome[0]
        return result
