"""Low-rank adapters as a transform on a finished model, and their files as PEFT reads them.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models"; file layout of the PEFT library.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bluejay.config import LoraConfig

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
    """Freeze a model and give each of its matrices that the config names an adapter, in place."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, module in [*model.named_modules()]:
        owner, _, leaf = name.rpartition(".")
        if leaf in config.targets and isinstance(module, nn.Linear):
            setattr(model.get_submodule(owner), leaf, LoraLinear(module, config, generator))
    return model


@torch.no_grad()
def merged_weights(model: nn.Module, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the model without adapters that computes the same, by Hugging Face's names.

    Args:
        trained: the adapters' weights by name, in full precision.
    """
    weights = {name: tensor for name, tensor in model.state_dict().items() if ".lora_" not in name}
    for name, module in adapters(model):
        down, up = trained[f"{name}.lora_A"], trained[f"{name}.lora_B"]
        base = weights[f"{name}.base.weight"]
        weights[f"{name}.base.weight"] = (base.float() + module.scale * (up.float() @ down.float())).to(base.dtype)
    return {name.replace(".base.", "."): tensor for name, tensor in weights.items()}


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


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """The adapters' weights by our names."""
    tensors = load_file(folder / ADAPTER)
    return {k.removeprefix("base_model.model.").removesuffix(".weight"): t for k, t in tensors.items()}
