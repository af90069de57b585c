"""Growing the vocabulary."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bluejay.checkpoint import load_weights, open_checkpoint, save_checkpoint
from bluejay.config import ModelConfig, QuantSpec
from bluejay.errors import ConfigError
from bluejay.models import GPTJ, resize_vocab
from bluejay.quant import quantize_model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_everything_grows_together(
    tmp_path: Path, tiny_model: GPTJ, tiny_config: ModelConfig, tied: bool, dtype: torch.dtype
) -> None:
    """B-08: the head or its bias stays behind, old rows change, or growing ties or unties the head."""
    model = GPTJ(replace(tiny_config, tie_word_embeddings=tied))
    model.load_state_dict(tiny_model.state_dict())
    model.tie_weights()
    model.to(dtype).eval()
    model.lm_head.bias.requires_grad_(False)
    old = {name: t.clone() for name, t in model.state_dict().items()}
    ids = torch.tensor([[5, 9, 33, 2, 60, 7]])
    old_logits = model(ids)
    assert resize_vocab(model, 67) is model
    assert model.config.vocab_size == model.transformer.wte.num_embeddings == model.lm_head.out_features == 67
    assert (model.lm_head.weight is model.transformer.wte.weight) == tied
    for name in ("transformer.wte.weight", "lm_head.weight", "lm_head.bias"):
        new = model.state_dict()[name]
        assert new.dtype == dtype
        assert new.shape == (67, *old[name].shape[1:])
        assert torch.equal(new[:64], old[name])
        assert all(torch.equal(row, old[name].float().mean(0).to(dtype)) for row in new[64:])
    assert model.lm_head.weight.requires_grad
    assert not model.lm_head.bias.requires_grad
    logits = model(ids)
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    assert torch.allclose(logits[..., :64], old_logits, atol=tolerance)
    assert torch.allclose(logits[..., 64:], old_logits.mean(-1, keepdim=True), atol=tolerance)
    model(torch.tensor([[64, 65, 66]])).sum().backward()
    save_checkpoint(tmp_path / "grown", model.state_dict(), model.config)
    with torch.device("meta"):
        reloaded = GPTJ(open_checkpoint(tmp_path / "grown").config)
    load_weights(reloaded, open_checkpoint(tmp_path / "grown"))
    assert torch.equal(reloaded.eval()(ids), logits)


def test_never_shrinks(tiny_model: GPTJ) -> None:
    """B-06: resized "to fit" the tokenizer, which has fewer entries than the embedding has rows."""
    with pytest.raises(ConfigError) as caught:
        resize_vocab(tiny_model, 57)
    assert "57" in str(caught.value)
    assert "64" in str(caught.value)
    embedding = tiny_model.transformer.wte.weight
    assert resize_vocab(tiny_model, 64).transformer.wte.weight is embedding
    with pytest.raises(ConfigError):
        resize_vocab(tiny_model, 0)


def test_a_packed_head_does_not_grow(tiny_model: GPTJ) -> None:
    """An AttributeError, after the embedding has grown."""
    quantize_model(tiny_model, QuantSpec(group_size=16, layers=("lm_head",)))
    with pytest.raises(ConfigError, match="quantize"):
        resize_vocab(tiny_model, 80)
    assert tiny_model.transformer.wte.num_embeddings == tiny_model.config.vocab_size == 64
