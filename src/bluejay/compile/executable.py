"""What compiling gives: an executable without weights, and the callable it becomes when weights are bound to it."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bluejay.compile.host import HostFunctions
from bluejay.compile.signature import Signature, named_weights

Run = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]


class Backend(Protocol):
    """What a back-end gives an executable: a function of the inputs, once the weights are known."""

    def start(self, weights: list[Tensor], host: HostFunctions) -> Run: ...


@dataclass(frozen=True)
class Executable:
    """A program for fixed shapes.

    Attributes:
        signature: what it takes and returns.
        fingerprint: the hash of everything that shaped it; "" where nothing was compiled.
        manifest: what is known of it, as plain data.
        was_compiled: made by this call rather than found in the store.
        compile_seconds: what making it took, whenever that was.
    """

    signature: Signature
    backend: Backend
    fingerprint: str
    manifest: Mapping[str, Any]
    was_compiled: bool
    compile_seconds: float

    def bind(self, weights: nn.Module | Mapping[str, Tensor], host: HostFunctions | None = None) -> Bound:
        """This program with these weights, which are referred to and never copied.

        Args:
            host: what the program leaves to the host, by name (see `on_host`).

        Raises:
            SignatureError: a weight is absent, or has another shape, dtype, layout or device; no such host function.
        """
        return Bound(self.signature, self.backend.start(self.signature.gather_weights(weights), host or {}))


class Bound:
    """An executable with weights: `outputs = bound(*inputs)`. Some inputs are changed in place, as the module does."""

    def __init__(self, signature: Signature, run: Run) -> None:
        self.signature = signature
        self._run = run
        self._checked: tuple[Tensor, ...] | None = None

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """
        Raises:
            SignatureError: another number of inputs, or one of another shape, dtype, layout or device.
        """
        self._check(inputs)
        return self._run(inputs)

    def repeat(self, count: int, *inputs: Tensor) -> list[tuple[Tensor, ...]]:
        """`count` device iterations in one call: the program again and again on inputs that it changes in place.

        Raises:
            SignatureError: as a call.
        """
        self._check(inputs)
        return [self._run(inputs) for _ in range(count)]

    def _check(self, inputs: tuple[Tensor, ...]) -> None:
        # A loop passes the same tensors over and over: those of the last call are not looked at again.
        known = self._checked
        if known is None or len(inputs) != len(known) or any(map(operator.is_not, inputs, known)):
            self.signature.check_inputs(inputs)
            self._checked = inputs


class Eager:
    """The back-end without a compiler: the module itself, with the bound tensors as its weights."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def start(self, weights: list[Tensor], host: HostFunctions) -> Run:
        # Copied with a memo that holds every tensor, a module shares them all, here under the bound ones' identity.
        own = named_weights(self._module)
        memo: dict[int, Any] = {}
        for tensor, bound in zip(own.values(), weights, strict=True):
            is_parameter = isinstance(tensor, nn.Parameter) and not isinstance(bound, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(bound, requires_grad=False) if is_parameter else bound
        module = copy.deepcopy(self._module, memo)

        def run(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
            with torch.no_grad():
                return tuple(module(*inputs))

        return run
