"""A linear layer over a packed weight, and the one verb that puts it into a finished model."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from bluejay.config import QuantSpec
from bluejay.errors import ConfigError
from bluejay.events import Event, Observer, ignore
from bluejay.kernels import int4_linear
from bluejay.quant.packing import PackedWeight, check_group, pack_rows

PACKED = ("codes", "scales", "biases")


class QuantizedLinear(nn.Module):
    """`nn.Linear` with a packed four-bit weight.

    Args:
        bias: whether the layer adds one; its dtype is the model's.
        path: which kernel; "auto" takes the machine's best.

    Shapes (Np, Kp: outputs padded to 16, inputs to 8; G groups of a row):
        codes: int32 [Np/16, Kp/8, 16]   scales, biases: fp16 [Np/16, G, 16]   bias: [N]
    """

    codes: Tensor
    scales: Tensor
    biases: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group_size: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        path: str = "auto",
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.group_size, self.path = in_features, out_features, group_size, path
        for name, (shape, kind) in PackedWeight.layout((out_features, in_features), group_size).items():
            self.register_buffer(name, torch.zeros(shape, dtype=kind, device=device))
        if bias:
            self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype), requires_grad=False)
        else:
            self.register_parameter("bias", None)

    @classmethod
    def like(cls, linear: nn.Linear, group_size: int, packed: PackedWeight | None = None) -> QuantizedLinear:
        """The quantized form of a layer: with its bias and the packed weight, or without one on the meta device."""
        has_bias, dtype = linear.bias is not None, linear.weight.dtype
        made = cls(linear.in_features, linear.out_features, group_size, bias=has_bias, device="meta", dtype=dtype)
        if has_bias:
            made.bias = linear.bias
        if packed is not None:
            made.codes, made.scales, made.biases = packed.codes, packed.scales, packed.biases
        return made.train(linear.training)

    @property
    def packed(self) -> PackedWeight:
        """The weight, by reference."""
        shape = (self.out_features, self.in_features)
        return PackedWeight(self.codes, self.scales, self.biases, shape, self.group_size)

    def forward(self, x: Tensor) -> Tensor:
        return int4_linear(
            x, self.codes, self.scales, self.biases, self.bias, self.out_features, self.group_size, self.path
        )

    def extra_repr(self) -> str:
        group = "row" if self.group_size == -1 else self.group_size
        return f"{self.in_features}, {self.out_features}, group={group}, bias={self.bias is not None}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        """Move as every module does; a cast to another dtype leaves the packed tensors what they are."""
        kept = [id(getattr(self, name)) for name in PACKED]

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if id(tensor) in kept and moved.dtype != tensor.dtype else moved

        return super()._apply(move, recurse)


@dataclasses.dataclass(frozen=True)
class TensorRecord:
    """What happened to one weight.

    Attributes:
        name: of the tensor in the checkpoint.
        converted: packed to four bits, or kept.
        reason: why it was kept, or what else there is to know.
        snr_db: signal over quantization noise; None for what was kept, and where nothing changed.
        num_bytes: as it is now.
    """

    name: str
    shape: tuple[int, ...]
    converted: bool
    reason: str
    num_bytes: int
    snr_db: float | None = None

    def as_dict(self) -> dict[str, Any]:
        snr = None if self.snr_db is None else round(self.snr_db, 3)
        return {**dataclasses.asdict(self), "shape": list(self.shape), "snr_db": snr}


def quantize_model(model: nn.Module, spec: QuantSpec, observe: Observer = ignore) -> list[TensorRecord]:
    """Replace the linear layers that `spec` means by quantized ones, in place; returns what happened to each parameter.

    Everything is checked and packed before the first layer is replaced: a failure leaves the model as it was. A head
    tied to the embedding gets a packed weight of its own; the embedding stays. On the meta device layers are replaced
    without content, ready for a quantized checkpoint.

    Raises:
        ConfigError: a pattern that means no layer, a group larger than a layer's input, or method `gptq`, which needs
            calibration text (see `quantize_checkpoint`).
        CheckpointError: weights that fp16 cannot hold.
    """
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    chosen = select(linears, spec)
    for name in chosen:
        check_group(f"{name}.weight", linears[name].in_features, spec.group_size)
        if spec.method == "gptq" and not linears[name].weight.is_meta:
            raise needs_calibration(spec)
    replaced: dict[str, QuantizedLinear] = {}
    records = {}
    for done, name in enumerate(chosen, start=1):
        weight = linears[name].weight.detach()
        packed = None
        if not weight.is_meta:
            shape = (weight.shape[0], weight.shape[1])
            packed, noise = pack_rows(_rows_of(weight), shape, spec.group_size, spec.method, f"{name}.weight")
            records[f"{name}.weight"] = TensorRecord(f"{name}.weight", shape, True, "", packed.num_bytes, noise.snr_db)
        replaced[name] = QuantizedLinear.like(linears[name], spec.group_size, packed)
        observe(Event("quantize", {"tensor": f"{name}.weight", "done": done, "total": len(chosen)}))
    kept = {
        name: TensorRecord(name, tuple(p.shape), False, reason_kept(name, spec), p.nbytes)
        for name, p in model.named_parameters(remove_duplicate=False)
        if name not in records
    }
    for name, layer in replaced.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, layer)
    _untie(model, replaced)
    return [*records.values(), *kept.values()]


def choose_kernel(model: nn.Module, path: str) -> None:
    """Let every packed layer multiply by one path of `int4_linear`."""
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.path = path


def _rows_of(weight: Tensor) -> Callable[[int, int], Tensor]:
    return lambda start, stop: weight[start:stop]


def select(names: Iterable[str], spec: QuantSpec) -> list[str]:
    """The layers that a spec's patterns mean, in the order given.

    Raises:
        ConfigError: a pattern that means none of them.
    """
    names = dict.fromkeys(names)
    # A whole name is looked up: a quantized directory names each of its layers, and no two patterns are compared then.
    hits = {p: [p] if p in names else [name for name in names if means(p, name)] for p in spec.layers}
    if idle := [pattern for pattern, found in hits.items() if not found]:
        kinds = sorted({name.rpartition(".")[2] for name in names})
        near = difflib.get_close_matches(idle[0], kinds, n=1)
        raise ConfigError(
            asked=f"quantize layers {', '.join(idle)}",
            found="no linear layer of that name" + (f"; near: {near[0]}" if near else ""),
            rule=f"a pattern means a layer's whole name or its last part; these are {', '.join(kinds)}",
            fix="correct the pattern",
        )
    meant = {name for found in hits.values() for name in found}
    return [name for name in names if name in meant]


def means(pattern: str, name: str) -> bool:
    """Whether a pattern means a layer: its whole name, or its last parts."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def reason_kept(name: str, spec: QuantSpec) -> str:
    """Why a tensor is not packed."""
    owner, _, leaf = name.rpartition(".")
    kind = owner.rpartition(".")[2]
    if leaf == "bias":
        return "biases are added, not multiplied: nothing to gain"
    if kind.startswith("ln_"):
        return "norms are small and sensitive"
    if kind == "wte":
        return "the embedding is looked up, one row a token"
    return f"no pattern of {', '.join(spec.layers)} means {owner}"


def needs_calibration(spec: QuantSpec) -> ConfigError:
    return ConfigError(
        asked=f"{spec.name} while loading",
        found="no calibration text",
        rule="gptq measures what each layer is fed before it rounds",
        fix="run bluejay quantize MODEL OUT --method gptq --calibration FILE, and load OUT; or take minmax or mse",
    )


def _untie(model: nn.Module, replaced: Mapping[str, QuantizedLinear]) -> None:
    config: Any = getattr(model, "config", None)
    if "lm_head" in replaced and getattr(config, "tie_word_embeddings", False):
        model.config = dataclasses.replace(config, tie_word_embeddings=False)
