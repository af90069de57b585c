"""Checkpoints and tokenizers against transformers: what it saved loads here, what is saved here loads there."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, GPTJForCausalLM

from bluejay.checkpoint import load_tokenizer, load_weights, open_checkpoint, save_checkpoint
from bluejay.config import ModelConfig
from bluejay.models import GPTJ, resize_vocab

GPT2 = Path(__file__).parents[2] / ".." / "shared" / "data" / "gpt2-bpe"
IDS = torch.tensor([[3, 17, 5, 42, 63, 8, 21], [60, 1, 1, 9, 30, 2, 11]])


def load(directory: Path) -> GPTJ:
    checkpoint = open_checkpoint(directory)
    with torch.device("meta"):
        model = GPTJ(checkpoint.config)
    load_weights(model, checkpoint)
    return model.eval()


@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"])
def test_transformers_to_bluejay(tmp_path: Path, tiny_hf: GPTJForCausalLM, max_shard_size: str) -> None:
    """Law 1 through the loader, B-02: a tensor in the wrong place, a dropped head bias."""
    tiny_hf.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert open_checkpoint(tmp_path).warnings == ()
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path)(IDS), tiny_hf(IDS).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocab_size", [64, 67])
def test_bluejay_to_transformers(
    tmp_path: Path, tiny_model: GPTJ, max_shard_bytes: int, tied: bool, vocab_size: int
) -> None:
    """A saved directory that transformers refuses, or reads with freshly initialized weights or another tie."""
    model = GPTJ(replace(tiny_model.config, tie_word_embeddings=tied)).eval()
    model.load_state_dict(tiny_model.state_dict())
    resize_vocab(model, vocab_size)
    save_checkpoint(tmp_path / "c", model.state_dict(), model.config, max_shard_bytes=max_shard_bytes)
    reference, info = GPTJForCausalLM.from_pretrained(tmp_path / "c", output_loading_info=True)
    assert not any(info.values()), info
    assert reference.dtype == torch.float32
    assert reference.config.tie_word_embeddings == tied
    with torch.no_grad():
        torch.testing.assert_close(model(IDS), reference.eval()(IDS).logits, atol=1e-4, rtol=0)
        assert torch.equal(load(tmp_path / "c")(IDS), model(IDS))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_default_dtype(tmp_path: Path, tiny_hf: GPTJForCausalLM, tiny_config: ModelConfig, dtype: str) -> None:
    """B-09: a half-precision checkpoint is loaded as fp32 by default."""
    tensors = {name: t.to(getattr(torch, dtype)) for name, t in tiny_hf.state_dict().items()}
    save_checkpoint(tmp_path / "c", tensors, tiny_config)
    reference = GPTJForCausalLM.from_pretrained(tmp_path / "c")
    assert {p.dtype for p in load(tmp_path / "c").parameters()} == {reference.dtype} == {getattr(torch, dtype)}
    saved = load_file(tmp_path / "c" / "model.safetensors")
    assert all(torch.equal(saved[name], tensors[name]) for name in tensors)


# --- tokenizer ---

ODD = [
    "",
    " ",
    "\n  ",
    "\n\n\n    x",
    "\t\tx",
    "y is ?",
    "I don't .",
    "it's  you'll WE'RE 'tis",
    "naïve café 日本語 🙂👩‍👩‍👧 \u200b\ufeff",
    "a\r\nb\u00a0c\u3000d\x00e\x7f",
    "e\u0301 \u0301",
    "1234567 3.14 1e-9",
    "<|endoftext|>",
    "a <|endoftext|> b<|endoftext|>",
    "<|extratoken_1|><|extratoken_14|> x<|extratoken_143|>y <|extratoken_144|>",
    "  <|pad|>  <|user|> hello",
    "x" * 300 + " " * 50,
]
EXTRA = {f"<|extratoken_{i}|>": 50256 + i for i in range(1, 144)}


def tokenizer_directory(directory: Path, layout: str) -> Path:
    """The ways in which GPT-J tokenizers are found on the hub."""
    for name in ("vocab.json", "merges.txt"):
        shutil.copyfile(GPT2 / name, directory / name)
    settings: dict[str, object] = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False}
    if layout != "bare":
        (directory / "added_tokens.json").write_text(json.dumps(EXTRA))
    if layout == "special":
        named = {"eos_token": "<|user|>", "pad_token": {"content": "<|pad|>", "lstrip": True, "rstrip": False}}
        (directory / "special_tokens_map.json").write_text(json.dumps(named))
    if layout == "decoder":
        flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": True, "special": False}
        settings["added_tokens_decoder"] = {str(i): {"content": token, **flags} for token, i in EXTRA.items()}
        settings["pad_token"] = "<|pad|>"
        (directory / "added_tokens.json").unlink()
    if layout == "prefix":
        settings["add_prefix_space"] = True
    if layout == "bos":
        settings["add_bos_token"] = True
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    if layout == "json":
        AutoTokenizer.from_pretrained(directory).save_pretrained(directory)
        for name in ("vocab.json", "merges.txt", "added_tokens.json"):
            (directory / name).unlink(missing_ok=True)
        assert (directory / "tokenizer.json").exists()
    return directory


@pytest.mark.skipif(not GPT2.is_dir(), reason="needs ../shared/data/gpt2-bpe (vocab.json, merges.txt)")
@pytest.mark.parametrize("layout", ["bare", "added", "special", "decoder", "prefix", "bos", "json"])
def test_tokenizer(tmp_path: Path, tiny_config: ModelConfig, layout: str) -> None:
    """B-16, B-13: other ids, other special tokens or another text than transformers gives for the same files."""
    directory = tokenizer_directory(tmp_path, layout)
    ours = load_tokenizer(directory, replace(tiny_config, vocab_size=50_410))
    reference = AutoTokenizer.from_pretrained(directory)
    assert ours.num_entries == len(reference)
    assert ours.eos_id == reference.eos_token_id
    assert ours.special_ids == {i for i, token in reference.added_tokens_decoder.items() if token.special}
    for text in ODD:
        ids = ours.encode(text)
        assert ids == reference(text).input_ids, text
        for skip in (False, True):
            expected = reference.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special=skip) == expected
