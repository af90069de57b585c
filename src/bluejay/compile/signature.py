"""What a program takes and returns: names, shapes, dtypes and strides, checked before every call that needs it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bluejay.errors import BluejayError


class SignatureError(BluejayError):
    """A tensor that does not have the shape, dtype, layout or device its program was compiled for."""

    code = "signature"
    exit_code = 2


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its content. Static shapes: nothing here is ever a range."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorSpec:
        return cls(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tuple(tensor.stride()))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TensorSpec:
        return cls(data["name"], tuple(data["shape"]), data["dtype"], tuple(data["stride"]))

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements, without the gaps of its strides."""
        return torch.Size(self.shape).numel() * self.torch_dtype.itemsize

    def fits(self, tensor: Tensor) -> bool:
        """Whether `tensor` can stand here."""
        return tensor.shape == self.shape and tensor.dtype == self.torch_dtype and self.steps_fit(tensor)

    def steps_fit(self, tensor: Tensor) -> bool:
        """Whether strides agree in every dimension that is walked: that of a dimension of size 1 means nothing."""
        walked = zip(tensor.stride(), self.stride, self.shape, strict=True)
        return tensor.numel() == 0 or all(ours == theirs for ours, theirs, size in walked if size > 1)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Signature:
    """The contract of a program.

    Attributes:
        device: kind of device all tensors live on, `cpu` or `cuda`.
        weights: parameters and buffers by their name in the module; bound once.
        inputs: positional arguments of each call; some are changed in place.
        outputs: what a call returns.
    """

    device: str
    weights: tuple[TensorSpec, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Signature:
        def specs(name: str) -> tuple[TensorSpec, ...]:
            return tuple(map(TensorSpec.from_dict, data[name]))

        return cls(data["device"], specs("weights"), specs("inputs"), specs("outputs"))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def gather_weights(self, source: nn.Module | Mapping[str, Tensor]) -> list[Tensor]:
        """The tensors of `source` in the order of `weights`, by reference.

        Raises:
            SignatureError: one is absent or differs.
        """
        named = named_weights(source) if isinstance(source, nn.Module) else source
        if missing := [spec.name for spec in self.weights if spec.name not in named]:
            raise SignatureError(
                asked=f"bind weights to a program that needs {len(self.weights)}",
                found=f"{len(missing)} absent: {', '.join(missing[:5])}",
                rule="a program finds its weights by the names of the module it was compiled from",
                fix="bind the module itself, or a mapping with its names",
            )
        tensors = [named[spec.name] for spec in self.weights]
        self._check("weight", self.weights, tensors)
        return tensors

    def check_inputs(self, tensors: Sequence[Tensor]) -> None:
        """
        Raises:
            SignatureError: another number of tensors, or one that differs; its name is in the message.
        """
        if len(tensors) != len(self.inputs):
            names = [spec.name for spec in self.inputs]
            lost = f"no {', '.join(names[len(tensors) :][:5])}" if len(tensors) < len(names) else "too many"
            raise SignatureError(
                asked=f"a call with {len(tensors)} inputs",
                found=f"a program of {len(names)} inputs: {lost}",
                rule="a program takes the number of inputs it was compiled with",
                fix="pass the inputs in the order of the module's forward",
            )
        self._check("input", self.inputs, tensors)

    def _check(self, role: str, specs: Sequence[TensorSpec], tensors: Sequence[Tensor]) -> None:
        for spec, tensor in zip(specs, tensors, strict=True):
            if not isinstance(tensor, Tensor):
                raise _differs(role, spec, f"a {type(tensor).__name__}", "a program takes tensors only")
            if tensor.shape != spec.shape:
                raise _differs(role, spec, f"shape {list(tensor.shape)}", "a program runs at the shape it was made for")
            if tensor.dtype != spec.torch_dtype:
                raise _differs(role, spec, f"dtype {tensor.dtype}", "a program runs at the dtype it was made for")
            if tensor.device.type != self.device:
                raise _differs(role, spec, f"device {tensor.device}", f"this program runs on {self.device}")
            if tensor.stride() != spec.stride and not spec.steps_fit(tensor):
                found = f"strides {list(tensor.stride())} instead of {list(spec.stride)}"
                raise _differs(role, spec, found, "a program reads memory with the strides it was made for")


def _differs(role: str, spec: TensorSpec, found: str, rule: str) -> SignatureError:
    return SignatureError(
        asked=f"{role} {spec.name} as {spec}",
        found=found,
        rule=rule,
        fix=f"pass {spec.name} as compiled, or compile for the new one",
    )


def named_weights(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; a tied tensor under each of its names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def input_names(module: nn.Module, count: int) -> tuple[str, ...]:
    """The names of `count` positional arguments of the module's forward; `*flat` gives `flat[0]`, `flat[1]`, ..."""
    names: list[str] = []
    for parameter in inspect.signature(module.forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}[{i}]" for i in range(count - len(names))]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return tuple(names[:count])
