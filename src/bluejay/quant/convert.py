"""Checkpoints and four bits: a checkpoint that is packed while it is read, and one that is written to disk packed."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bluejay.checkpoint import Checkpoint, PackedWriter, TensorInfo, check_fit
from bluejay.config import DTYPES, QUANT_FORMAT_VERSION, ZERO_CONVENTION, ModelConfig, QuantSpec, digest
from bluejay.errors import CheckpointError, ConfigError
from bluejay.events import Event, Observer, ignore
from bluejay.models import GPTJ, Block
from bluejay.quant.gptq import InputMoments, gptq
from bluejay.quant.linear import PACKED, TensorRecord, needs_calibration, reason_kept, select
from bluejay.quant.packing import Noise, PackedWeight, check_group, pack_rows, row_chunks
from bluejay.units import format_bytes

EMBEDDING, HEAD, HEAD_BIAS = "transformer.wte.weight", "lm_head", "lm_head.bias"
# Calibration sequences that go through a block at once.
_BATCH = 8


class QuantizedSource:
    """A checkpoint whose linear layers are packed while they are read: what `load_weights` takes in its place.

    Nothing is read by making one. Tensors that stay are the checkpoint's own.

    Attributes:
        config: the checkpoint's; a head that was tied to the embedding stands for itself once it is packed.
        layers: the linear layers that are packed, in the model's order, each with the tensor its weight comes from.
        tensors: what can be read.
        zeros: names of tensors that the checkpoint lacks and that count as zeros.

    Raises:
        CheckpointError: already quantized, or not the model that its config describes.
        ConfigError: a pattern that means no layer, or a group larger than a layer's input.
    """

    def __init__(self, checkpoint: Checkpoint, spec: QuantSpec, *, strict: bool = True) -> None:
        refuse_quantized(checkpoint)
        self.checkpoint, self.spec = checkpoint, spec
        self.directory, self.dtype = checkpoint.directory, checkpoint.dtype
        model = hollow_model(checkpoint.config)
        check_fit(model, checkpoint, strict)
        linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        self._shapes: dict[str, tuple[int, int]] = {}
        self.layers: dict[str, str] = {}
        for name in select(linears, spec):
            check_group(f"{name}.weight", linears[name].in_features, spec.group_size)
            self._shapes[name] = (linears[name].out_features, linears[name].in_features)
            own = f"{name}.weight"
            self.layers[name] = own if own in checkpoint.tensors else EMBEDDING
        tied = checkpoint.config.tie_word_embeddings and HEAD in self.layers
        self.config = dataclasses.replace(checkpoint.config, tie_word_embeddings=False) if tied else checkpoint.config
        self.zeros = {HEAD_BIAS} - set(checkpoint.tensors)
        self._layer_of: dict[str, str] = {}
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(dict(self._infos(model, tied)))
        self._current: PackedWeight | None = None

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """One tensor; the three of a packed layer are made together."""
        layer = self._layer_of.get(name)
        if layer is None:
            held = name if name in self.checkpoint.tensors else f"{HEAD}.weight"  # where a tied pair was saved
            return self.checkpoint.read(held, dtype)
        if self._current is None or self._current.name != f"{layer}.weight":
            self._current, _ = self.pack(layer)
        part: Tensor = getattr(self._current, name.rpartition(".")[2])
        if name.endswith(PACKED[-1]):
            self._current = None  # the last of the three
        return part

    def pack(self, layer: str) -> tuple[PackedWeight, Noise]:
        """A layer's weight in four bits, with what that changed.

        Raises:
            ConfigError: the method needs calibration text.  CheckpointError: values that fp16 cannot hold.
        """
        if self.spec.method == "gptq":
            raise needs_calibration(self.spec)
        source = self.layers[layer]

        def rows(start: int, stop: int) -> Tensor:
            return self.checkpoint.read_rows(source, start, stop)

        return pack_rows(rows, self._shapes[layer], self.spec.group_size, self.spec.method, f"{layer}.weight")

    def shape(self, layer: str) -> tuple[int, int]:
        """Outputs and inputs of a layer that is packed."""
        return self._shapes[layer]

    def packed_names(self, layer: str) -> list[str]:
        return [f"{layer}.{part}" for part in PACKED]

    def kept_names(self) -> list[str]:
        """Tensors that are not packed."""
        return [name for name in self.tensors if name not in self._layer_of]

    def _infos(self, model: GPTJ, tied: bool) -> Iterator[tuple[str, TensorInfo]]:
        held = self.checkpoint.tensors
        for name, parameter in model.named_parameters(remove_duplicate=False):
            layer = name.rpartition(".")[0]
            if layer in self.layers and name.endswith(".weight"):
                for part, (shape, dtype) in PackedWeight.layout(self._shapes[layer], self.spec.group_size).items():
                    self._layer_of[f"{layer}.{part}"] = layer
                    yield f"{layer}.{part}", TensorInfo(f"{layer}.{part}", shape, dtype, "")
            elif name in held:
                yield name, held[name]
            elif name == EMBEDDING and tied:  # the checkpoint saved it under the head's name
                yield name, dataclasses.replace(held[f"{HEAD}.weight"], name=name)
            elif name in self.zeros:
                yield name, TensorInfo(name, tuple(parameter.shape), self.dtype, "")


def quantize_checkpoint(
    checkpoint: Checkpoint,
    target: str | Path,
    spec: QuantSpec,
    *,
    calibration: Tensor | None = None,
    strict: bool = True,
    observe: Observer = ignore,
) -> list[TensorRecord]:
    """Write a quantized directory, one tensor at a time; returns what happened to each weight.

    A killed process leaves what it finished beside the target, under a hidden name, and the same call goes on from
    there. The bytes written depend on the checkpoint, the spec and the calibration text alone.

    Args:
        calibration: for `gptq`, token ids [sequences, tokens].

    Raises:
        CheckpointError: already quantized, weights that fp16 cannot hold, or a target that is occupied.
        ConfigError: a pattern that means no layer, a group too large, or calibration text that is absent or of no use.
        MachineError: the disk has no room.
    """
    if (spec.method == "gptq") != (calibration is not None):
        raise needs_calibration(spec) if calibration is None else _no_use(spec)
    source = QuantizedSource(checkpoint, spec, strict=strict)
    identity = digest(
        {
            "format": QUANT_FORMAT_VERSION,
            "spec": spec,
            "torch": torch.__version__,
            "tensors": [[info.name, info.shape, str(info.dtype), info.file] for info in checkpoint.tensors.values()],
            "files": [
                [f, *_stamp(checkpoint.directory / f)] for f in sorted({i.file for i in checkpoint.tensors.values()})
            ],
            "calibration": "" if calibration is None else hashlib.sha256(calibration.numpy().tobytes()).hexdigest(),
        }
    )
    with PackedWriter(target, list(source.tensors.values()), identity) as writer:
        total_bytes = sum(info.num_bytes for info in source.tensors.values())
        done_bytes = 0

        def tell(names: list[str]) -> None:
            nonlocal done_bytes
            done_bytes += sum(source.tensors[name].num_bytes for name in names)
            observe(Event("quantize", {"tensor": names[0], "done_bytes": done_bytes, "total_bytes": total_bytes}))

        def keep(layer: str, packed: PackedWeight, noise: Noise) -> None:
            for name in source.packed_names(layer):
                writer.write(name, getattr(packed, name.rpartition(".")[2]))
            reason = "" if source.layers[layer] == packed.name else f"packed from {EMBEDDING}, which it was tied to"
            record = TensorRecord(packed.name, packed.shape, True, reason, packed.num_bytes, noise.snr_db)
            writer.finish({packed.name: record.as_dict()})

        for name in source.kept_names():
            if name not in writer.done:
                _copy(source, name, writer)
                missing = name in source.zeros
                reason = "the checkpoint lacks it: zeros" if missing else reason_kept(name, spec)
                info = source.tensors[name]
                record = TensorRecord(name, info.shape, False, reason, info.num_bytes)
                writer.finish({name: record.as_dict()})
            tell([name])
        if calibration is None:
            for layer in source.layers:
                if f"{layer}.weight" not in writer.done:
                    keep(layer, *source.pack(layer))
                tell(source.packed_names(layer))
        else:
            with torch.no_grad():
                for layer, made in _calibrated(source, writer, calibration):
                    if made is not None:
                        keep(layer, *made)
                    tell(source.packed_names(layer))
        order = [f"{layer}.weight" for layer in source.layers] + source.kept_names()
        records = [_record(writer.done[name]) for name in order]
        summary = summarize(records, spec)
        content = {
            "format_version": QUANT_FORMAT_VERSION,
            "zero_convention": ZERO_CONVENTION,
            "spec": dataclasses.asdict(spec),
            "summary": summary,
            "tensors": [record.as_dict() for record in records],
        }
        # What stays is not what most bytes had, so a reader could not tell the dtype from that.
        dtype = str(checkpoint.dtype).removeprefix("torch.")
        config = dataclasses.replace(source.config, dtype=dtype) if dtype in DTYPES else source.config
        writer.publish(checkpoint.directory, config, spec, content, card(records, spec, summary))
    return records


def refuse_quantized(checkpoint: Checkpoint) -> None:
    """
    Raises:
        CheckpointError: the checkpoint is quantized already.
    """
    if checkpoint.quantization is not None:
        raise CheckpointError(
            asked=f"quantize {checkpoint.directory}",
            found=f"weights already packed as {checkpoint.quantization.name}",
            rule="packing what is packed only adds error",
            fix="quantize the original checkpoint",
        )


def hollow_model(config: ModelConfig) -> GPTJ:
    """A model without weights."""
    with torch.device("meta"):
        return GPTJ(config)


def summarize(records: list[TensorRecord], spec: QuantSpec) -> dict[str, Any]:
    """Counts and bytes of a conversion. `bits_per_weight` counts scales, biases and padding."""
    packed = [record for record in records if record.converted]
    num_weights = sum(record.shape[0] * record.shape[1] for record in packed)
    packed_bytes = sum(record.num_bytes for record in packed)
    snrs = [record.snr_db for record in packed if record.snr_db is not None]
    return {
        "format": spec.name,
        "packed_tensors": len(packed),
        "kept_tensors": len(records) - len(packed),
        "packed_bytes": packed_bytes,
        "kept_bytes": sum(record.num_bytes for record in records) - packed_bytes,
        "bits_per_weight": round(8 * packed_bytes / num_weights, 4),
        "lowest_snr_db": round(min(snrs), 3) if snrs else None,
    }


def card(records: list[TensorRecord], spec: QuantSpec, summary: Mapping[str, Any]) -> str:
    """The README of a quantized directory."""
    by_kind: dict[str, list[float]] = {}
    for record in records:
        if record.snr_db is not None:
            by_kind.setdefault(record.name.split(".")[-2], []).append(record.snr_db)
    rows = [
        f"| {kind} | {len(snrs)} | {min(snrs):.1f} | {sum(snrs) / len(snrs):.1f} |" for kind, snrs in by_kind.items()
    ]
    group = "one group a row" if spec.group_size == -1 else f"groups of {spec.group_size} inputs"
    return "\n".join(
        [
            f"# {spec.name}",
            "",
            f"A GPT-J checkpoint whose linear layers Bluejay packed to four bits: {group}, method {spec.method}.",
            "Load it with `bluejay generate --model DIRECTORY` or `bluejay.load(DIRECTORY)`. Other software finds no",
            "weights here that it could read, on purpose: filling in random ones would write noise.",
            "",
            "| | |",
            "|---|---|",
            f"| packed | {summary['packed_tensors']} tensors, {format_bytes(summary['packed_bytes'])}, "
            f"{summary['bits_per_weight']:.3f} bits a weight with scales and biases |",
            f"| kept as they were | {summary['kept_tensors']} tensors, {format_bytes(summary['kept_bytes'])} |",
            f"| format | version {QUANT_FORMAT_VERSION}: {ZERO_CONVENTION} |",
            "",
            "Signal over quantization noise of the weights, in dB; quantization.json has it for each tensor, and why",
            "others were kept.",
            "",
            "| layer | tensors | lowest | mean |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _calibrated(
    source: QuantizedSource, writer: PackedWriter, ids: Tensor
) -> Iterator[tuple[str, tuple[PackedWeight, Noise] | None]]:
    """Every layer with its packed weight, in the order of the computation; None for those that are finished.

    Each block is fed what the blocks before it give once they are packed, so one block is in memory at a time. In a
    block, the layers that read the norm come first; the others are fed what those give once they are packed.
    """
    config = source.config
    outer = hollow_model(dataclasses.replace(config, n_layer=1))

    def value(name: str) -> Tensor:
        return torch.zeros(source.tensors[name].shape) if name in source.zeros else source.read(name, torch.float32)

    outer.transformer.wte.weight = nn.Parameter(value(EMBEDDING))
    hidden = [outer.embed(part) for part in ids.split(_BATCH)]
    places = [outer.locate(part, None, None) for part in ids.split(_BATCH)]
    outer.transformer.wte = None  # type: ignore[assignment]  # a large tensor that is needed no more
    with torch.device("meta"):
        empty = Block(config)
    for i in range(config.n_layer):
        prefix = f"transformer.h.{i}"
        block = empty.to_empty(device="cpu").eval()
        for name, parameter in block.named_parameters():
            full = f"{prefix}.{name}"
            layer = full.rpartition(".")[0]
            stored = source.layers.get(layer) if name.endswith(".weight") else None
            parameter.copy_(value(full) if stored is None else source.checkpoint.read(stored, torch.float32))
        early = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.fc_in")
        chosen = [f"{prefix}.{name}" for name in early]
        moments = InputMoments(config.n_embd)
        if _any_left(source, writer, chosen):
            for x in hidden:
                moments.add(block.ln_1(x))
        yield from _round(source, writer, block, prefix, chosen, dict.fromkeys(chosen, moments))
        late = {f"{prefix}.attn.out_proj": block.attn.out_proj, f"{prefix}.mlp.fc_out": block.mlp.fc_out}
        fed = {name: InputMoments(linear.in_features) for name, linear in late.items()}
        if _any_left(source, writer, list(late)):
            hooks = [_watch(linear, fed[name]) for name, linear in late.items()]
            for x, where in zip(hidden, places, strict=True):
                block(x, where, None)
            for hook in hooks:
                hook.remove()
        yield from _round(source, writer, block, prefix, list(late), fed)
        hidden = [block(x, where, None) for x, where in zip(hidden, places, strict=True)]
    if HEAD in source.layers:
        norm = outer.transformer.ln_f.to_empty(device="cpu")
        norm.weight.copy_(value("transformer.ln_f.weight"))
        norm.bias.copy_(value("transformer.ln_f.bias"))
        moments = InputMoments(config.n_embd)
        if _any_left(source, writer, [HEAD]):
            for x in hidden:
                moments.add(norm(x))
        yield from _round(source, writer, None, "", [HEAD], {HEAD: moments})


def _round(
    source: QuantizedSource,
    writer: PackedWriter,
    block: Block | None,
    prefix: str,
    names: list[str],
    moments: Mapping[str, InputMoments],
) -> Iterator[tuple[str, tuple[PackedWeight, Noise] | None]]:
    """Pack those of `names` that are meant, and put what they then stand for into the block."""
    for name in names:
        if name not in source.layers:
            continue
        linear: Any = None if block is None else block.get_submodule(name.removeprefix(f"{prefix}."))
        if f"{name}.weight" in writer.done:
            codes, scales, biases = (writer.read(part) for part in source.packed_names(name))
            packed = PackedWeight(codes, scales, biases, source.shape(name), source.spec.group_size)
            yield name, None
        else:
            stored = source.checkpoint.read(source.layers[name], torch.float32)
            made = gptq(stored, moments[name].sum.clone(), source.spec.group_size, f"{name}.weight")
            packed = made[0]
            yield name, made
        if linear is not None:
            linear.weight.copy_(packed.dequantize())


def _watch(linear: nn.Linear, moments: InputMoments) -> RemovableHandle:
    return linear.register_forward_pre_hook(lambda _, inputs: moments.add(inputs[0]))


def _any_left(source: QuantizedSource, writer: PackedWriter, names: list[str]) -> bool:
    return any(name in source.layers and f"{name}.weight" not in writer.done for name in names)


def _copy(source: QuantizedSource, name: str, writer: PackedWriter) -> None:
    """A tensor that stays as it is, by slices."""
    info = source.tensors[name]
    if name in source.zeros:
        writer.write(name, torch.zeros(info.shape, dtype=info.dtype))
        return
    held = name if name in source.checkpoint.tensors else f"{HEAD}.weight"
    width = info.num_bytes // info.shape[0] // info.dtype.itemsize
    for start, stop in row_chunks((info.shape[0], width)):
        rows = source.checkpoint.read_rows(held, start, stop)
        if not all(bool(extreme.isfinite()) for extreme in rows.aminmax()):
            raise CheckpointError(
                asked=f"quantize {source.directory}",
                found=f"NaN or infinity in {name}",
                rule="weights are finite numbers; one NaN spreads to every logit",
                fix="use an undamaged checkpoint",
            )
        writer.write(name, rows, start)


def _record(raw: Mapping[str, Any]) -> TensorRecord:
    return TensorRecord(**{**raw, "shape": tuple(raw["shape"])})


def _stamp(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def _no_use(spec: QuantSpec) -> ConfigError:
    return ConfigError(
        asked=f"calibration text for {spec.name}",
        found=f"method {spec.method}",
        rule="only gptq measures what layers are fed",
        fix="leave the text out, or take method gptq",
    )
