"""Shared fixtures. The tiny model follows the rules that decide whether a test can fail at all:

matrices from N(0, 0.3) and noise on every 1-D parameter (zero biases and small weights hide lost biases and wrong
rotations), rotary_dim below head_dim, an untied head, more embedding rows than the tokenizer has entries.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

# A deadline per example is an assertion on seconds, which a busy machine breaks.
settings.register_profile("bluejay", deadline=None)
settings.load_profile("bluejay")

# Started in the background of a shell, this process ignores Ctrl-C, and so would every process that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tiny tensors gain nothing from threads, and tests never reach for a network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

if TYPE_CHECKING:
    from transformers import GPTJForCausalLM

    from bluejay.config import ModelConfig
    from bluejay.models import GPTJ

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_ENTRIES = 57  # below vocab_size 64, as 50257 is below 50400


@pytest.fixture(scope="session")
def tiny_config() -> ModelConfig:
    """Two layers, two heads, 64 embedding rows, a window of 32."""
    from bluejay.config import ModelConfig

    return ModelConfig(
        vocab_size=64,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=2,
        rotary_dim=8,
        bos_token_id=0,
        eos_token_ids=(0,),
        dtype="float32",
    )


@pytest.fixture(scope="session")
def tiny_hf(tiny_config: ModelConfig) -> GPTJForCausalLM:
    """transformers' GPT-J with the tiny config, fp32, in eval mode. Shared by all tests: copy it before changing it."""
    import torch
    from transformers import GPTJConfig, GPTJForCausalLM

    model = GPTJForCausalLM(GPTJConfig(**tiny_config.to_hf())).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.3
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
    return model


@pytest.fixture
def tiny_model(tiny_config: ModelConfig, tiny_hf: GPTJForCausalLM) -> GPTJ:
    """Our GPT-J with the weights of `tiny_hf`, fp32, in eval mode; a fresh copy for each test."""
    from bluejay.models import GPTJ

    model = GPTJ(tiny_config).eval()
    model.load_state_dict(tiny_hf.state_dict())
    return model


@pytest.fixture(scope="session")
def _tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory, tiny_hf: GPTJForCausalLM) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    tiny_hf.save_pretrained(directory)
    write_tiny_tokenizer(directory)
    return directory


@pytest.fixture
def tiny_checkpoint(_tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A directory saved from `tiny_hf` by transformers, with a tokenizer; a fresh copy that a test may damage."""
    return Path(shutil.copytree(_tiny_checkpoint, tmp_path / "tiny_checkpoint"))


@pytest.fixture(scope="session")
def nano_dir() -> Path:
    """The bundled model's directory. Read only."""
    import bluejay

    return Path(bluejay.__file__).parent / "assets" / "nano"


def write_tiny_tokenizer(directory: Path) -> None:
    """A byte-level BPE of TOKENIZER_ENTRIES entries over lower-case English: id 0 ends the text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = [*"abcdefghijklmnopqrstuvwxyz", *".,?!'", "\u0120", "\u010a"]  # the last two: space, newline
    pairs = ["\u0120 t", "\u0120 a", "h e", "i n", "r e", "o n", "e r", "\u0120t he", "a t", "n d", "e s", "e n"]
    pairs += ["o r", "\u0120 s", "\u0120 w", "o u", "i t", "i s", "\u0120a nd", "in g", "\u0120 c", "a n", "l l"]
    entries = [END_OF_TEXT, *letters, *("".join(pair.split()) for pair in pairs)]
    assert len(entries) == len(set(entries)) == TOKENIZER_ENTRIES
    bpe = models.BPE(
        vocab={entry: i for i, entry in enumerate(entries)}, merges=[tuple(pair.split()) for pair in pairs]
    )
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    (directory / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
