"""A checkpoint onto disk: whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from bluejay.checkpoint.files import (
    CONFIG,
    EMBEDDING,
    HEAD,
    HEAD_BIAS,
    SAFETENSORS,
    SAFETENSORS_INDEX,
    TOKENIZER_FILES,
    contents,
    is_mask_buffer,
    is_weight_file,
    listing,
)
from bluejay.config import DTYPES, ModelConfig
from bluejay.errors import CheckpointError, MachineError, TokenizerError
from bluejay.events import Event, Observer, ignore
from bluejay.files import flush
from bluejay.units import format_bytes


def save_checkpoint(
    directory: str | Path,
    tensors: Mapping[str, Tensor],
    config: ModelConfig,
    *,
    tokenizer_from: str | Path | None = None,
    max_shard_bytes: int = 5 * 10**9,
    overwrite: bool = False,
    observe: Observer = ignore,
) -> None:
    """Write a Hugging Face directory: safetensors (sharded over `max_shard_bytes`), config.json, tokenizer files.

    Everything is written beside the target and renamed into place, so that no reader ever meets half a checkpoint and
    a failure leaves what was there. With `overwrite`, an older checkpoint's weights and config are replaced (its
    tokenizer too, when `tokenizer_from` is given); other files in its directory are kept. Tied weights are saved once.
    config.json gets the dtype that the tensors have.

    Raises:
        CheckpointError: the directory is occupied, the tensors contradict the config, or writing failed.
        TokenizerError: `tokenizer_from` holds no tokenizer.
        MachineError: the disk has no room.
    """
    target = Path(directory).expanduser().resolve()
    _check_target(target, overwrite)
    weights = _weights_to_save(tensors, config, target)
    tokenizer = _tokenizer_files(tokenizer_from)
    target.parent.mkdir(parents=True, exist_ok=True)
    total_bytes = sum(tensor.nbytes for tensor in weights.values())
    free_bytes = shutil.disk_usage(target.parent).free
    if total_bytes > free_bytes:
        raise MachineError(
            asked=f"write {format_bytes(total_bytes)} to {target}",
            found=f"{format_bytes(free_bytes)} free on that disk",
            rule="the new checkpoint is written whole before an old one is removed",
            fix="free some space or choose another disk",
        )
    token = secrets.token_hex(4)
    staging = target.with_name(f".{target.name}.{token}.new")
    try:
        staging.mkdir()
        _write(staging, weights, _with_dtype(config, weights), max_shard_bytes, total_bytes, observe)
        for file in tokenizer:
            shutil.copyfile(file, staging / file.name)
        for file in staging.iterdir():
            flush(file)
        flush(staging)
        _publish(staging, target, target.with_name(f".{target.name}.{token}.old"), bool(tokenizer))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            asked=f"save a checkpoint to {target}",
            found=f"{type(error).__name__}: {error}",
            rule="the directory holds the old checkpoint or the new one, never a part of one",
            fix="correct the cause and save again",
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _check_target(target: Path, overwrite: bool) -> None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    replaceable = target.is_dir() and (target / CONFIG).is_file()
    if not (overwrite and replaceable):
        raise CheckpointError(
            asked=f"save a checkpoint to {target}",
            found=contents(target) if target.is_dir() else "a file of that name",
            rule="only a directory that holds a checkpoint is overwritten, and only when asked",
            fix="allow overwriting, or choose another directory" if replaceable else "choose another directory",
        )


def _weights_to_save(tensors: Mapping[str, Tensor], config: ModelConfig, target: Path) -> dict[str, Tensor]:
    """What goes into the files: no mask buffers, tied weights once, and sizes as config.json will state them."""

    def contradiction(found: str, fix: str) -> CheckpointError:
        return CheckpointError(
            asked=f"save {len(tensors)} tensors to {target}",
            found=found,
            rule="a checkpoint's tensors and its config.json describe one model",
            fix=fix,
        )

    weights = {name: t.detach() for name, t in tensors.items() if not is_mask_buffer(name, tuple(t.shape))}
    unloaded = [name for name, tensor in weights.items() if tensor.is_meta]
    if unloaded:
        raise contradiction(f"no values in {listing(unloaded)}", "load or initialize the weights first")
    for name in (EMBEDDING, HEAD, HEAD_BIAS):
        if name in weights and weights[name].shape[0] != config.vocab_size:
            raise contradiction(
                f"{weights[name].shape[0]} rows in {name}, vocab_size={config.vocab_size} in the config",
                "resize embedding, head and config together with resize_vocab",
            )
    if EMBEDDING in weights and HEAD in weights:
        same = weights[EMBEDDING].data_ptr() == weights[HEAD].data_ptr()
        if same and not config.tie_word_embeddings:
            raise contradiction(
                f"{EMBEDDING} and {HEAD} share their memory, tie_word_embeddings=False in the config",
                "clone one of them, or set tie_word_embeddings=True",
            )
        if config.tie_word_embeddings and not same and not torch.equal(weights[EMBEDDING], weights[HEAD]):
            raise contradiction(
                f"{EMBEDDING} and {HEAD} differ, tie_word_embeddings=True in the config",
                "call model.tie_weights(), or set tie_word_embeddings=False",
            )
    if config.tie_word_embeddings and HEAD in weights:
        weights = {EMBEDDING: weights[HEAD], **weights}
        del weights[HEAD]
    return weights


def _tokenizer_files(source: str | Path | None) -> list[Path]:
    if source is None:
        return []
    directory = Path(source).expanduser()
    files = [directory / name for name in TOKENIZER_FILES if (directory / name).is_file()]
    if not files:
        raise TokenizerError(
            asked=f"copy the tokenizer of {directory}",
            found=contents(directory) if directory.is_dir() else "no such directory",
            rule=f"tokenizer files are {', '.join(TOKENIZER_FILES)}",
            fix="pass the directory that holds them",
        )
    return files


def _with_dtype(config: ModelConfig, weights: Mapping[str, Tensor]) -> ModelConfig:
    sizes: Counter[str] = Counter()
    for tensor in weights.values():
        sizes[str(tensor.dtype).removeprefix("torch.")] += tensor.nbytes
    dtype = next((name for name, _ in sizes.most_common() if name in DTYPES), config.dtype)
    return dataclasses.replace(config, dtype=dtype)


def _write(
    staging: Path,
    weights: Mapping[str, Tensor],
    config: ModelConfig,
    max_shard_bytes: int,
    total_bytes: int,
    observe: Observer,
) -> None:
    config_file = staging / CONFIG
    write_json(config_file, config.to_hf())
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in weights.items():
        if shards[-1] and sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > max_shard_bytes:
            shards.append({})
        shards[-1][name] = tensor
    weight_map: dict[str, str] = {}
    done_bytes = 0
    for number, shard in enumerate(shards, 1):
        file = SAFETENSORS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: t.contiguous() for name, t in shard.items()}, staging / file, metadata={"format": "pt"})
        shutil.copymode(config_file, staging / file)  # safetensors makes its files readable for their owner only
        weight_map |= dict.fromkeys(shard, file)
        done_bytes += sum(tensor.nbytes for tensor in shard.values())
        observe(Event("save", {"file": file, "done_bytes": done_bytes, "total_bytes": total_bytes}))
    if len(shards) > 1:
        write_json(staging / SAFETENSORS_INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


def write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _publish(staging: Path, target: Path, retired: Path, with_tokenizer: bool) -> None:
    """Rename into place. A directory cannot be replaced in one step, so the old one steps aside first and comes back
    if the second step fails; a process killed between the two leaves both, complete, under hidden names."""
    if not target.exists() or not any(target.iterdir()):
        os.replace(staging, target)
    else:
        os.rename(target, retired)
        try:
            os.rename(staging, target)
        except BaseException:
            os.rename(retired, target)
            raise
        for entry in retired.iterdir():
            replaced = is_weight_file(entry.name) or (with_tokenizer and entry.name in TOKENIZER_FILES)
            if not replaced and not (target / entry.name).exists():
                os.rename(entry, target / entry.name)
        shutil.rmtree(retired)
    flush(target.parent)
