"""A checkpoint on disk, checked before anything is read, and its weights into a module."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor, nn

from bluejay.checkpoint.files import CONFIG, GENERATION_CONFIG, HEAD_BIAS, contents, is_mask_buffer, listing, read_json
from bluejay.checkpoint.hub import resolve
from bluejay.checkpoint.reader import TensorInfo, WeightFile, check_index, find_weights
from bluejay.config import ModelConfig
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
    """

    directory: Path
    config: ModelConfig
    dtype: torch.dtype
    tensors: Mapping[str, TensorInfo] = dataclasses.field(repr=False)
    warnings: tuple[str, ...]
    _files: Mapping[str, WeightFile] = dataclasses.field(repr=False)

    @property
    def num_bytes(self) -> int:
        return sum(info.num_bytes for info in self.tensors.values())

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """One tensor: mapped without a copy as it is stored, converted by slice when another dtype is asked."""
        info = self.tensors[name]
        file = self._files[info.file]
        return file.read(name) if dtype in (None, info.dtype) else file.convert(name, dtype)


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
            fix="pass the directory that holds config.json, weights and tokenizer",
        )
    raw = read_json(config_file)
    generation_file = directory / GENERATION_CONFIG
    if generation_file.is_file():  # where newer releases keep what ends a text
        raw |= {k: v for k, v in read_json(generation_file).items() if k == "eos_token_id" and v is not None}
    config = ModelConfig.from_hf(raw, str(config_file))
    paths, index, warnings = find_weights(directory)
    files = {path.name: WeightFile(path) for path in paths}
    found = {name: file.tensors() for name, file in files.items()}
    tensors = check_index(index, found, directory) if index else found[paths[0].name]
    tensors = [info for info in tensors if not is_mask_buffer(info.name, info.shape)]
    dtype, dtype_warnings = _choose_dtype(config, tensors)
    if config.ignored_keys:
        warnings.append(f"{CONFIG} has keys that are not known and not used: {', '.join(config.ignored_keys)}")
    if all(info.name != HEAD_BIAS for info in tensors):
        warnings.append(f"{HEAD_BIAS} is missing: an error when strict, zeros otherwise")
    return Checkpoint(
        directory=directory,
        config=config,
        dtype=dtype,
        tensors=MappingProxyType({info.name: info for info in tensors}),
        warnings=(*warnings, *dtype_warnings, *(_held(file) for file in files.values() if not file.is_mapped)),
        _files=MappingProxyType(files),
    )


def load_weights(
    module: nn.Module,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype | None = None,
    strict: bool = True,
    verify: bool = True,
    observe: Observer = ignore,
) -> None:
    """Give a module on the meta device the checkpoint's weights, in `checkpoint.dtype` unless another is asked.

    Weights that need no conversion stay mapped. Parameters that the module shares need one of their names only.
    Nothing is assigned until every tensor has been read and verified.

    Args:
        strict: when false, a missing `lm_head.bias` becomes zeros, as other software does; all else stays an error.
        verify: refuse NaN and infinity.

    Raises:
        CheckpointError: names or shapes differ from the module's, or a weight is not finite.
    """
    dtype = dtype or checkpoint.dtype
    names: dict[nn.Parameter, list[str]] = defaultdict(list)  # more than one where the module ties
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    _check_fit(names, checkpoint, strict)
    owners = {name: parameter for parameter, aliases in names.items() for name in aliases}
    sources: dict[nn.Parameter, str] = {}  # in the order of the files; for shared ones, the first of their names
    for name in checkpoint.tensors:
        sources.setdefault(owners[name], name)
    total_bytes = sum(parameter.numel() * dtype.itemsize for parameter in names)
    weights: dict[nn.Parameter, Tensor] = {}
    broken: list[str] = []
    done_bytes = 0
    for parameter, name in sources.items():
        weights[parameter] = checkpoint.read(name, dtype)
        if verify and not _all_finite(weights[parameter]):
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
        loaded = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
        for name in aliases:
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, loaded)


def _check_fit(names: Mapping[nn.Parameter, list[str]], checkpoint: Checkpoint, strict: bool) -> None:
    """Compare names, shapes and types before any weight is read; every difference is in one error."""
    held = checkpoint.tensors
    shapes = {name: tuple(parameter.shape) for parameter, aliases in names.items() for name in aliases}
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
        "not of a floating type": [f"{info.name} {info.dtype}" for info in known if info.dtype not in _FLOATS],
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
