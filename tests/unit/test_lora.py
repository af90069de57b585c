"""Adapters: nothing at first, trained alone, merged and saved without a difference; PEFT reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bluejay.checkpoint import open_checkpoint
from bluejay.config import LORA_TARGETS, LoraConfig
from bluejay.errors import CheckpointError
from bluejay.models import GPTJ
from bluejay.train import LoraLinear, add_lora, merged_weights, read_adapter, save_adapter

CONFIG = LoraConfig(rank=3, alpha=12.0, targets=LORA_TARGETS)
IDS = torch.tensor([[5, 17, 3, 44, 8, 9, 61, 2]])


def filled(model: GPTJ, config: LoraConfig = CONFIG) -> GPTJ:
    """The model with adapters whose second factors are not zero."""
    add_lora(model, config, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(0, 0.1, generator=generator)
    return model


def trained_of(model: GPTJ) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def test_adapters_begin_as_nothing(tiny_model: GPTJ) -> None:
    """Catches adapters that disturb the model before the first update, and base weights that are trained."""
    before = tiny_model(IDS)
    add_lora(tiny_model, CONFIG, seed=1)
    assert torch.equal(tiny_model(IDS), before)
    trained = trained_of(tiny_model)
    assert all(".lora_" in name for name in trained)
    assert len(trained) == 2 * (6 * 2 + 1)


def test_merged_computes_the_same(tiny_model: GPTJ, tiny_config: Any) -> None:
    """Catches a scale that is lost or applied twice when merging, and a head left behind."""
    base = {name: tensor.clone() for name, tensor in tiny_model.state_dict().items()}
    model = filled(tiny_model)
    expected = model(IDS)
    plain = GPTJ(tiny_config).eval()
    plain.load_state_dict(merged_weights(model, base, trained_of(model)))
    torch.testing.assert_close(plain(IDS), expected, atol=1e-4, rtol=0)


def test_effective_weight_is_what_forward_multiplies_with(tiny_model: GPTJ) -> None:
    """Catches a loss over the head that is not the model's own: the loop multiplies with this weight."""
    model = filled(tiny_model)
    head = model.lm_head
    assert isinstance(head, LoraLinear)
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(torch.nn.functional.linear(x, head.effective_weight(), head.bias), head(x))


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), LORA_TARGETS])
def test_peft_reads_the_adapter(
    targets: tuple[str, ...], tiny_model: GPTJ, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """Catches names, scale or factor order that PEFT reads as another adapter: logits must be the same."""
    from peft import PeftModel
    from transformers import GPTJForCausalLM

    config = LoraConfig(rank=3, alpha=12.0, targets=targets)
    model = filled(tiny_model, config)
    save_adapter(tmp_path / "adapter", trained_of(model), config, str(tiny_checkpoint))
    theirs = PeftModel.from_pretrained(GPTJForCausalLM.from_pretrained(tiny_checkpoint), tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(IDS).logits, model(IDS), atol=1e-4, rtol=0)
        without = theirs.get_base_model().transformer(IDS).last_hidden_state
    assert without.isfinite().all()
    back = read_adapter(tmp_path / "adapter")
    assert back.keys() == trained_of(model).keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in trained_of(model).items())
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 3
    assert len({file.stat().st_mode for file in (tmp_path / "adapter").iterdir()}) == 1  # who may read one reads all


def test_an_adapter_is_not_taken_for_a_model(tiny_model: GPTJ, tmp_path: Path) -> None:
    """Catches advice that leads nowhere: nobody can pass a directory with a config.json here."""
    save_adapter(tmp_path, trained_of(filled(tiny_model)), CONFIG, "nano")
    with pytest.raises(CheckpointError, match=r"lora\.merge=true"):
        open_checkpoint(tmp_path)


def test_a_shared_head_is_not_merged_into(tiny_config: Any) -> None:
    """Catches a run whose result cannot be saved, or loses its head's adapter: one matrix cannot be two."""
    from dataclasses import replace

    from bluejay.errors import ConfigError

    model = GPTJ(replace(tiny_config, tie_word_embeddings=True))
    with pytest.raises(ConfigError) as caught:
        add_lora(model, replace(CONFIG, merge=True), seed=1)
    assert "share one matrix" in caught.value.found
    add_lora(model, CONFIG, seed=1)
