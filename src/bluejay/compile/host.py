"""Operations that a program leaves to the host: what ranks tell each other between two parts of a step.

A module names such an operation; the graph is cut there, and who binds the program says what the name means. So a
program knows neither groups nor addresses, and ranks that hold equal shapes share it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bluejay.compile.signature import SignatureError

# Takes the operation's tensor, or None, and returns one of this shape, dtype and device.
HostFunction = Callable[[Tensor | None, tuple[int, ...], torch.dtype, torch.device], Tensor]
HostFunctions = Mapping[str, HostFunction]


@torch.library.custom_op("bluejay::on_host", mutates_args=())
def _on_host(
    name: str, x: Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:  # pragma: no cover
    raise RuntimeError(f"{name} was to be run between two programs, never inside one")


@_on_host.register_fake
def _(name: str, x: Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def on_host(
    name: str, x: Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """While a module is traced: a tensor that the host function `name` makes of `x`, between two programs.

    The function is given a copy that is its own, which it may change and return.
    """
    own = None if x is None else x.clone(memory_format=torch.contiguous_format)
    made: Tensor = _on_host(name, own, list(shape), dtype, torch.device(device))
    return made


OPERATION = torch.ops.bluejay.on_host.default


@dataclass(frozen=True)
class HostCall:
    """One run of a host function: its name, the place of its input (None: it takes none) and of what it makes."""

    name: str
    input: int | None
    output: int
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> HostCall:
        return cls(data["name"], data["input"], data["output"], tuple(data["shape"]), data["dtype"])


def function_of(call: HostCall, functions: HostFunctions, device: torch.device) -> Callable[[Tensor | None], Tensor]:
    """What `call` does to its input.

    Raises:
        SignatureError: no function of that name.
    """
    if call.name not in functions:
        raise SignatureError(
            asked=f"bind a program that leaves {call.name} to the host",
            found=f"functions for {', '.join(sorted(functions)) or 'nothing'}",
            rule="a program of one rank of several needs to be told how to reach the others",
            fix="bind it with the functions of this rank's mesh",
        )
    function, dtype = functions[call.name], getattr(torch, call.dtype)
    return lambda x: function(x, call.shape, dtype, device)
