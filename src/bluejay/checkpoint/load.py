"""A checkpoint on disk, checked before anything is read, and its weights into a module."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bluejay.checkpoint.files import (
    CONFIG,
    GENERATION_CONFIG,
    HEAD_BIAS,
    PACKED_ENDINGS,
    QUANTIZATION_RECORD,
    QUANTIZED,
    WEIGHTS,
    contents,
    is_mask_buffer,
    listing,
    read_json,
)
from bluejay.checkpoint.hub import resolve
from bluejay.checkpoint.pages import LargePages, has_large_pages
from bluejay.checkpoint.reader import TensorInfo, WeightFile, check_index, find_weights
from bluejay.config import QUANT_FORMAT_VERSION, QUANT_METHOD, ZERO_CONVENTION, ModelConfig, QuantSpec
from bluejay.errors import CheckpointError
from bluejay.events import Event, Observer, ignore

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: complete on disk, no weight read yet.

    Attributes:
        dtype: what config.json says, else the tensors' (the one that most bytes have).
        tensors: by name, in the order in which they are best read; mask buffers of old releases are not among them.
        num_bytes: of the tensors as stored.
        warnings: what the user should know, by name: config keys that were ignored, files not read, mixed dtypes.
        quantization: how its linear layers were packed; None for a plain checkpoint.
    """

    directory: Path
    config: ModelConfig
    dtype: torch.dtype
    tensors: Mapping[str, TensorInfo] = dataclasses.field(repr=False)
    warnings: tuple[str, ...]
    _files: Mapping[str, WeightFile] = dataclasses.field(repr=False)
    quantization: QuantSpec | None = None

    @property
    def num_bytes(self) -> int:
        return sum(info.num_bytes for info in self.tensors.values())

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """One tensor: mapped without a copy as it is stored, converted by slice when another dtype is asked."""
        info = self.tensors[name]
        file = self._files[info.file]
        return file.read(name) if dtype in (None, info.dtype) else file.convert(name, dtype)

    def read_into(self, name: str, target: Tensor) -> None:
        """One tensor of a safetensors file into another of its shape and type, without mapping it."""
        self._files[self.tensors[name].file].read_into(name, target)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """A copy of some rows of a tensor, as stored; what was read before is not kept in memory."""
        return self._files[self.tensors[name].file].rows(name, start, stop)


class WeightSource(Protocol):
    """What weights are loaded from: a checkpoint, or what makes tensors of one while they are read."""

    @property
    def directory(self) -> Path: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...
    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor: ...


def open_checkpoint(
    source: str | Path, *, revision: str | None = None, offline: bool = False, observe: Observer = ignore
) -> Checkpoint:
    """Open a Hugging Face directory, or a hub id such as `EleutherAI/gpt-j-6b`; reads headers, no weights.

    Raises:
        CheckpointError: absent, incomplete, damaged, or not a GPT-J checkpoint.
        ConfigError: `revision` with a local directory.
    """
    directory = resolve(source, revision=revision, offline=offline, observe=observe)
    config_file = directory / CONFIG
    if not config_file.is_file():
        raise CheckpointError(
            asked=f"open the checkpoint {directory}",
            found=f"no {CONFIG}; the directory holds {contents(directory)}",
            rule="config.json says which model the weights are",
            fix="train it with lora.merge=true, which writes a whole model, or load it with peft"
            if (directory / "adapter_config.json").is_file()
            else "pass the directory that holds config.json, weights and tokenizer",
        )
    raw = read_json(config_file)
    generation_file = directory / GENERATION_CONFIG
    if generation_file.is_file():  # where newer releases keep what ends a text
        raw |= {k: v for k, v in read_json(generation_file).items() if k == "eos_token_id" and v is not None}
    quantization = quantization_of(raw, config_file)
    config = ModelConfig.from_hf(raw, str(config_file))
    paths, index, warnings = find_weights(directory, WEIGHTS if quantization is None else (QUANTIZED,))
    files = {path.name: WeightFile(path) for path in paths}
    found = {name: file.tensors() for name, file in files.items()}
    tensors = check_index(index, found, directory) if index else found[paths[0].name]
    tensors = [info for info in tensors if not is_mask_buffer(info.name, info.shape)]
    plain = [info for info in tensors if quantization is None or not info.name.endswith(PACKED_ENDINGS)]
    dtype, dtype_warnings = _choose_dtype(config, plain)
    if config.ignored_keys:
        warnings.append(f"{CONFIG} has keys that are not known and not used: {', '.join(config.ignored_keys)}")
    if quantization is not None and not (directory / QUANTIZATION_RECORD).is_file():
        warnings.append(
            f"{QUANTIZATION_RECORD} is missing: weights do not need it, but it told what packing did to each"
        )
    if all(info.name != HEAD_BIAS for info in tensors):
        warnings.append(f"{HEAD_BIAS} is missing: an error when strict, zeros otherwise")
    return Checkpoint(
        directory=directory,
        config=config,
        dtype=dtype,
        tensors=MappingProxyType({info.name: info for info in tensors}),
        warnings=(*warnings, *dtype_warnings, *(_held(file) for file in files.values() if not file.is_mapped)),
        _files=MappingProxyType(files),
        quantization=quantization,
    )


def quantization_of(raw: Mapping[str, Any], source: Path) -> QuantSpec | None:
    """What our own `quantization_config` in a config.json says; another tool's is refused by `ModelConfig.from_hf`.

    Raises:
        CheckpointError: packed by a release that this one cannot read.
    """
    stated = raw.get("quantization_config")
    if not isinstance(stated, dict) or stated.get("quant_method") != QUANT_METHOD:
        return None
    version, convention = stated.get("format_version"), stated.get("zero_convention")
    if version != QUANT_FORMAT_VERSION or convention != ZERO_CONVENTION:
        raise CheckpointError(
            asked=f"read the packed weights that {source} describes",
            found=f"format_version: {version!r}, zero_convention: {convention!r}",
            rule=f"this release reads version {QUANT_FORMAT_VERSION}, where {ZERO_CONVENTION}",
            fix="quantize the original checkpoint again with this release, or use the release that wrote it",
        )
    known = {"quant_method", "format_version", "zero_convention"}
    return QuantSpec.from_dict({key: value for key, value in stated.items() if key not in known})


def load_weights(
    module: nn.Module,
    checkpoint: WeightSource,
    *,
    dtype: torch.dtype | None = None,
    strict: bool = True,
    verify: bool = True,
    large_pages: bool = False,
    observe: Observer = ignore,
) -> None:
    """Give a module on the meta device the checkpoint's weights, in `checkpoint.dtype` unless another is asked.

    Buffers (the packed weights of quantized layers) keep the dtype that the module gives them. Weights that need no
    conversion stay mapped. Parameters that the module shares need one of their names only. Nothing is assigned until
    every tensor has been read and verified.

    Args:
        strict: when false, a missing `lm_head.bias` becomes zeros, as other software does; all else stays an error.
        verify: refuse NaN and infinity.
        large_pages: put packed weights into memory of large pages, where the system has them, rather than map them.

    Raises:
        CheckpointError: names or shapes differ from the module's, or a weight is not finite.
    """
    dtype = dtype or checkpoint.dtype
    names = check_fit(module, checkpoint, strict)
    owners = {name: parameter for parameter, aliases in names.items() for name in aliases}
    sources: dict[Tensor, str] = {}  # in the order of the files; for shared ones, the first of their names
    for name in checkpoint.tensors:
        sources.setdefault(owners[name], name)
    dtypes = {tensor: dtype if isinstance(tensor, nn.Parameter) else tensor.dtype for tensor in names}
    total_bytes = sum(tensor.numel() * dtypes[tensor].itemsize for tensor in names)
    weights: dict[Tensor, Tensor] = {}
    # Packed models are small because memory is short: looking at their weights must not bring them all into it.
    packed = checkpoint if isinstance(checkpoint, Checkpoint) and checkpoint.quantization else None
    broken = [name for name in sources.values() if not _stored_finite(packed, name)] if verify and packed else []
    done_bytes = 0
    buffers = [tensor for tensor in sources if not isinstance(tensor, nn.Parameter)] if large_pages else []
    room: LargePages | None = None
    if buffers and has_large_pages():
        with suppress(OSError):  # a limit of this process: mapped weights need no memory of its own
            room = LargePages(sum(b.nbytes for b in buffers), len(buffers))
    for parameter, name in sources.items():
        if room is None or isinstance(parameter, nn.Parameter):
            weights[parameter] = checkpoint.read(name, dtypes[parameter])
        else:
            weights[parameter] = room.take(parameter.shape, parameter.dtype)
            if packed:
                packed.read_into(name, weights[parameter])
            else:
                weights[parameter].copy_(checkpoint.read(name))
        if verify and packed is None and not _all_finite(weights[parameter]):
            broken.append(name)
        done_bytes += weights[parameter].nbytes
        observe(Event("load", {"tensor": name, "done_bytes": done_bytes, "total_bytes": total_bytes}))
    if broken:
        raise CheckpointError(
            asked=f"load {checkpoint.directory} as {dtype}".replace("torch.", ""),
            found=f"NaN or infinity in {listing(broken)}",
            rule="weights are finite numbers; one NaN spreads to every logit, and float16 ends at 65504",
            fix="use an undamaged checkpoint, or bfloat16 or float32 if the conversion overflowed",
        )
    for parameter, aliases in names.items():
        tensor = weights.get(parameter)
        if tensor is None:  # lm_head.bias, not strict
            tensor = torch.zeros(parameter.shape, dtype=dtype)
        is_parameter = isinstance(parameter, nn.Parameter)
        loaded = nn.Parameter(tensor, requires_grad=parameter.requires_grad) if is_parameter else tensor
        for name in aliases:
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, loaded)


def check_fit(module: nn.Module, checkpoint: WeightSource, strict: bool = True) -> dict[Tensor, list[str]]:
    """Compare a module's tensors with a checkpoint's before any is read; returns the module's with all their names.

    Raises:
        CheckpointError: names, shapes or types differ; every difference is in one error.
    """
    names: dict[Tensor, list[str]] = defaultdict(list)  # more than one where the module ties
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    for name, buffer in module.named_buffers(remove_duplicate=False):
        names[buffer].append(name)
    held = checkpoint.tensors
    shapes = {name: tuple(parameter.shape) for parameter, aliases in names.items() for name in aliases}
    packed = {name: t.dtype for t, aliases in names.items() if not isinstance(t, nn.Parameter) for name in aliases}
    missing = [aliases[0] for aliases in names.values() if not any(name in held for name in aliases)]
    if not strict:
        missing = [name for name in missing if name != HEAD_BIAS]
    known = [info for info in held.values() if info.name in shapes]
    differences = {
        "missing": missing,
        "unknown": [name for name in held if name not in shapes],
        "of another shape": [
            f"{info.name} {list(info.shape)} instead of {list(shapes[info.name])}"
            for info in known
            if info.shape != shapes[info.name]
        ],
        "not of a floating type": [
            f"{info.name} {info.dtype}" for info in known if info.name not in packed and info.dtype not in _FLOATS
        ],
        "not of a packed weight's type": [
            f"{info.name} {info.dtype}" for info in known if packed.get(info.name, info.dtype) != info.dtype
        ],
        "tied by config.json and yet different": [
            " and ".join(present)
            for present in ([name for name in aliases if name in held] for aliases in names.values())
            if len(present) > 1
            and held[present[0]].shape == held[present[1]].shape
            and not torch.equal(checkpoint.read(present[0]), checkpoint.read(present[1]))
        ],
    }
    found = "; ".join(f"{len(which)} {what}: {listing(which)}" for what, which in differences.items() if which)
    if found:
        raise CheckpointError(
            asked=f"load {checkpoint.directory} into a model with {len(shapes)} parameters",
            found=found,
            rule="a checkpoint holds exactly the model's parameters, with the shapes that its config.json gives",
            fix="check that config.json and weights belong together"
            + (f"; strict=False takes a missing {HEAD_BIAS} as zeros" if HEAD_BIAS in missing else ""),
        )
    return names


def _stored_finite(checkpoint: Checkpoint, name: str) -> bool:
    """Whether a tensor on disk is finite, read by slices that are not kept."""
    info = checkpoint.tensors[name]
    step = max(2**22 // max(info.num_bytes // info.shape[0], 1), 1)
    starts = range(0, info.shape[0], step) if info.dtype.is_floating_point else ()
    return all(_all_finite(checkpoint.read_rows(name, at, min(at + step, info.shape[0]))) for at in starts)


def _all_finite(tensor: Tensor) -> bool:
    """One pass without a temporary: the extremes are NaN or infinite if any element is."""
    return tensor.numel() == 0 or all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(tensor))


def _choose_dtype(config: ModelConfig, tensors: list[TensorInfo]) -> tuple[torch.dtype, list[str]]:
    sizes: Counter[torch.dtype] = Counter()
    for info in tensors:
        if info.dtype in _FLOATS:
            sizes[info.dtype] += info.num_bytes
    stored = sizes.most_common(1)[0][0] if sizes else torch.float32
    chosen = getattr(torch, config.dtype) if config.dtype else stored
    if set(sizes) <= {chosen}:
        return chosen, []
    held = ", ".join(f"{dtype}" for dtype, _ in sizes.most_common())
    source = f"{CONFIG} says" if config.dtype else "most of them have"
    return chosen, [f"weights are stored as {held}; {source} {chosen}, which is used".replace("torch.", "")]


def _held(file: WeightFile) -> str:
    return f"{file.path.name} is in the format of torch before 1.6: it cannot be mapped and is held in memory whole"
