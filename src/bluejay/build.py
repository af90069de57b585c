"""The only assembler: from a RunConfig to a model with its weights and its tokenizer, ready for an engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from bluejay.checkpoint import Tokenizer, load_tokenizer, load_weights, open_checkpoint
from bluejay.config import RunConfig
from bluejay.errors import ConfigError, MachineError
from bluejay.events import Event, Observer, ignore
from bluejay.models import GPTJ

BUNDLED = Path(__file__).parent / "assets"


@dataclass(frozen=True)
class Built:
    """A model on its device, its tokenizer, and the run it was built for.

    Attributes:
        context: tokens a row may hold.
        warnings: what the checkpoint made us doubt, by name.
    """

    run: RunConfig
    model: GPTJ
    tokenizer: Tokenizer
    device: torch.device
    dtype: torch.dtype
    context: int
    warnings: tuple[str, ...]


def build(run: RunConfig, observe: Observer = ignore) -> Built:
    """Read a checkpoint and put its model on the device, in evaluation mode.

    Raises:
        CheckpointError, TokenizerError: the model's directory is incomplete, damaged or not GPT-J.
        ConfigError: `context` exceeds the model's window.
        MachineError: no such device here.
    """
    device = pick_device(run.device)
    source = BUNDLED / "nano" if run.model == "nano" else run.model
    checkpoint = open_checkpoint(source, offline=run.offline, observe=observe)
    config = checkpoint.config
    context = run.context or config.n_positions
    if context > config.n_positions:
        raise ConfigError(
            asked=f"a context of {context} tokens",
            found=f"the model's window is {config.n_positions}",
            rule="rotary positions beyond the trained window give noise",
            fix=f"set context to at most {config.n_positions}",
        )
    tokenizer = load_tokenizer(checkpoint.directory, config)
    with torch.device("meta"):
        model = GPTJ(config)
    dtype = getattr(torch, run.dtype) if run.dtype else checkpoint.dtype
    load_weights(model, checkpoint, dtype=dtype, strict=run.strict, verify=run.verify, observe=observe)
    warnings = list(checkpoint.warnings)
    if device.type == "cpu" and dtype == torch.float16:
        warnings.append("float16 is slow on most CPUs; bfloat16 computes the same model faster (--dtype bfloat16)")
    for warning in warnings:
        observe(Event("warning", {"text": warning}))
    model = model.to(device).eval().requires_grad_(False)
    return Built(run, model, tokenizer, device, dtype, context, tuple(warnings))


def pick_device(name: str) -> torch.device:
    """The device of that name; "auto" is CUDA where there is one.

    Raises:
        ConfigError: not a device name.  MachineError: this machine has no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            asked=f"device {name!r}", found="no such kind", rule="auto, cpu, cuda or cuda:N", fix="name one of them"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise MachineError(
            asked=f"device {name!r}",
            found=f"{torch.cuda.device_count()} CUDA devices",
            fix="use --device cpu, or install a CUDA build of torch and a driver",
        )
    return device
