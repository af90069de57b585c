"""The ranks along one axis of a mesh, as modules keep them: what they do together, eagerly and in a program.

Run as it is, a module calls torch.distributed. Traced, it leaves a name in the graph (`compile.on_host`), and the
program's host calls the function of that name between two parts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from bluejay.compile import HostFunctions, on_host
from bluejay.parallel.collectives import Group, copy_in, gather_last, sum_out
from bluejay.parallel.mesh import group_of


@dataclass(frozen=True)
class Ranks:
    """The ranks that differ from this one along `axis` only.

    Which of them this is shapes no program and is no part of a fingerprint.
    """

    axis: str
    count: int
    index: int = field(compare=False)
    group: Group = field(compare=False, repr=False)
    _sent: list[tuple[dist.Work, Tensor]] = field(default_factory=list, compare=False, repr=False)

    @classmethod
    def along(cls, mesh: DeviceMesh, axis: str) -> Ranks:
        group = group_of(mesh, axis)
        return cls(axis, 1 if group is None else dist.get_world_size(group), mesh.get_local_rank(axis), group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self  # copies of a module are on the same ranks

    def __reduce__(self) -> tuple[Any, ...]:
        return Ranks, (self.axis, self.count, 0, None)  # another process traces the module, and meets nobody

    def copy_in(self, x: Tensor) -> Tensor:
        """What every rank goes on from; each computes a part, so the gradients that come back are added up."""
        return x if torch.compiler.is_exporting() else copy_in(x, self.group)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x`, in place."""
        if torch.compiler.is_exporting():
            return on_host(f"{self.axis}.sum", x, x.shape, x.dtype, x.device)
        return sum_out(x, self.group)

    def gather(self, x: Tensor) -> Tensor:
        """Every rank's `x`, side by side along the last dim."""
        if torch.compiler.is_exporting():
            shape = (*x.shape[:-1], self.count * x.shape[-1])
            return on_host(f"{self.axis}.gather", x, shape, x.dtype, x.device)
        return gather_last(x, self.group)

    def send(self, x: Tensor) -> Tensor:
        """Hand `x` to the next rank, who receives it when it is ready to; returns an empty tensor.

        That stands for the sending in a graph, which would be without consequence otherwise.
        """
        if torch.compiler.is_exporting():
            return on_host(f"{self.axis}.send", x, (0,), x.dtype, x.device)
        while len(self._sent) > 1:  # a tensor lives until it has left; one may be waited for by who comes next
            self._sent.pop(0)[0].wait()
        x = x.contiguous()
        work = dist.isend(x, group=self.group, group_dst=self.index + 1)
        assert work is not None
        self._sent.append((work, x))
        return x.new_empty(0)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """What the rank before this one has sent."""
        if torch.compiler.is_exporting():
            return on_host(f"{self.axis}.receive", None, shape, dtype, device)
        x = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(x, group=self.group, group_src=self.index - 1)
        return x

    def host_functions(self) -> HostFunctions:
        """The same, by the names that stand in a program."""

        def given(x: Tensor | None) -> Tensor:
            assert x is not None
            return x

        return {
            f"{self.axis}.sum": lambda x, shape, dtype, device: self.sum(given(x)),
            f"{self.axis}.gather": lambda x, shape, dtype, device: self.gather(given(x)),
            f"{self.axis}.send": lambda x, shape, dtype, device: self.send(given(x)),
            f"{self.axis}.receive": lambda x, shape, dtype, device: self.receive(shape, dtype, device),
        }
