"""Low-rank adapters as a transform on a finished model, and their files as PEFT reads them.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models"; file layout of the PEFT library.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bluejay.config import LoraConfig
from bluejay.errors import ConfigError

ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"


class LoraLinear(nn.Module):
    """A frozen linear layer plus a trainable product of two thin matrices, scaled by alpha / rank.

    Shapes:
        lora_A: [rank, in]   lora_B: [out, rank], zero at first
    """

    def __init__(self, base: nn.Linear, config: LoraConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.base, self.scale = base, config.alpha / config.rank
        self.drop = nn.Dropout(config.dropout)
        bound = 1 / math.sqrt(base.in_features)
        down = torch.empty(config.rank, base.in_features).uniform_(-bound, bound, generator=generator)
        self.lora_A = nn.Parameter(down.to(base.weight.device))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, config.rank, device=base.weight.device))

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def effective_weight(self) -> Tensor:
        """The weight that base and adapter make up together: what the loss over the head multiplies with."""
        return self.base.weight + self.scale * (self.lora_B @ self.lora_A)

    def forward(self, x: Tensor) -> Tensor:
        adapted = F.linear(F.linear(self.drop(x), self.lora_A), self.lora_B)
        return self.base(x) + self.scale * adapted


def add_lora(model: nn.Module, config: LoraConfig, seed: int) -> nn.Module:
    """Freeze a model and give each of its matrices that the config names an adapter, in place.

    Raises:
        ConfigError: a head that is the embedding too is to be merged: the two would no longer be one.
    """
    merges_head = config.merge and "lm_head" in config.targets
    if merges_head and model.get_parameter("lm_head.weight") is model.get_parameter("transformer.wte.weight"):
        raise ConfigError(
            asked="lora.merge=true with lm_head among lora.targets",
            found="a model whose head and embedding share one matrix",
            rule="an adapter of the head, added in, would change the embedding too",
            fix="leave lm_head out of lora.targets, or set lora.merge=false",
        )
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, module in [*model.named_modules()]:
        owner, _, leaf = name.rpartition(".")
        if leaf in config.targets and isinstance(module, nn.Linear):
            setattr(model.get_submodule(owner), leaf, LoraLinear(module, config, generator))
    return model


@torch.no_grad()
def merged_weights(model: nn.Module, base: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the model without adapters that computes the same, added in fp32, each in its base's dtype.

    Args:
        base: the weights under the adapters by Hugging Face's names, as they are stored: those in the model may have
            been rounded for training.
        trained: the adapters' weights by name, in full precision.
    """
    weights = dict(base)
    for name, module in adapters(model):
        own = base[f"{name}.weight"]
        down, up = (trained[f"{name}.lora_{part}"].to(own.device, torch.float32) for part in "AB")
        weights[f"{name}.weight"] = (own.float() + module.scale * (up @ down)).to(own.dtype)
    return weights


def base_digest(directory: Path) -> str:
    """What tells the weights in a directory from others: SHA-256 of sizes and of 64 KiB out of every MiB.

    A tuned model differs from its base nearly everywhere, and 24 GB read whole would take longer than loading them.
    """
    total = hashlib.sha256()
    for file in sorted(f for pattern in ("*.safetensors", "pytorch_model*.bin") for f in directory.glob(pattern)):
        total.update(f"{file.name} {file.stat().st_size}".encode())
        with file.open("rb") as stream:
            while part := stream.read(1 << 16):
                total.update(part)
                stream.seek((1 << 20) - (1 << 16), 1)
    return total.hexdigest()


def adapters(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """Every adapted layer with its name."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield name, module


def save_adapter(folder: Path, trained: Mapping[str, Tensor], config: LoraConfig, base_model: str) -> None:
    """Write an adapter as PEFT's `PeftModel.from_pretrained` reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"base_model.model.{name}.weight": t.contiguous().cpu() for name, t in trained.items()}
    save_file(tensors, folder / ADAPTER, metadata={"format": "pt"})
    description: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": list(config.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    shutil.copymode(folder / ADAPTER_CONFIG, folder / ADAPTER)  # safetensors: readable for their owner only


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """The adapters' weights by our names."""
    tensors = load_file(folder / ADAPTER)
    return {k.removeprefix("base_model.model.").removesuffix(".weight"): t for k, t in tensors.items()}
