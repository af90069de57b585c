"""ModelConfig: sizes are checked, never guessed; Hugging Face files are read strictly; presets are what they say."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from bluejay.config import ModelConfig, parse_model, preset, preset_names
from bluejay.errors import CheckpointError, ConfigError

SIZES = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "rotary_dim")


def raw(config: ModelConfig, **change: Any) -> dict[str, Any]:
    return {**config.to_hf(), **change}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"n_head": 3}, "must divide n_embd=32; near ones: [1, 2, 4, 8]"),
        ({"rotary_dim": 7}, "even and between 2 and head_dim=16"),
        ({"rotary_dim": 18}, "head_dim=16"),
        ({"rotary_dim": True}, "even"),
        ({"n_layer": 0}, "above 0"),
        ({"n_layer": 2.0}, "above 0"),
        ({"vocab_size": True}, "above 0"),
        ({"n_inner": -1}, "0 (4 * n_embd)"),
        ({"activation_function": "tanh"}, "one of gelu_new"),
        ({"layer_norm_epsilon": 0.0}, "above 0"),
        ({"attn_pdrop": 1.0}, "below 1"),
        ({"bos_token_id": 64}, "below vocab_size=64"),
        ({"eos_token_ids": (3, 64)}, "below vocab_size=64"),
        ({"dtype": "float64"}, "one of float32"),
    ],
)
def test_impossible_sizes_are_refused(tiny_config: ModelConfig, change: dict[str, Any], text: str) -> None:
    """Catches a size that fails deep inside a matrix product, or a rotation wider than the head."""
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(tiny_config, **change)
    assert text in caught.value.rule
    assert str(next(iter(change))).split("_ids")[0].removeprefix("bos_").removeprefix("eos_") in caught.value.asked


def test_derived_sizes(tiny_config: ModelConfig) -> None:
    """Catches n_inner assumed to be 4 * n_embd (B-12)."""
    assert tiny_config.head_dim == 16
    assert tiny_config.inner_dim == 128
    assert dataclasses.replace(tiny_config, n_inner=40).inner_dim == 40


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"n_inner": 40},
        {"eos_token_ids": (1, 2)},
        {"eos_token_ids": ()},
        {"tie_word_embeddings": True},
        {"dtype": ""},
    ],
)
def test_there_and_back(tiny_config: ModelConfig, change: dict[str, Any]) -> None:
    """Catches a field lost when a checkpoint is saved and loaded again."""
    config = dataclasses.replace(tiny_config, **change)
    assert ModelConfig.from_hf(config.to_hf()) == config


def test_transformers_reads_what_we_write(tiny_config: ModelConfig) -> None:
    """Catches a config.json that the reference understands differently."""
    from transformers import GPTJConfig

    config = dataclasses.replace(tiny_config, n_inner=40, eos_token_ids=(1, 2), layer_norm_epsilon=1e-6)
    theirs = GPTJConfig(**config.to_hf())
    assert ModelConfig.from_hf(theirs.to_dict()) == config
    assert ModelConfig.from_hf(theirs.to_dict()).ignored_keys == ()


@pytest.mark.parametrize("size", SIZES)
def test_sizes_are_never_guessed(tiny_config: ModelConfig, size: str) -> None:
    """Catches B-12: rotary_dim null taken for 64, or any size taken from the 6B model."""
    without = {key: value for key, value in raw(tiny_config).items() if key != size}
    for source in (without, raw(tiny_config, **{size: None})):
        with pytest.raises(CheckpointError, match=size):
            ModelConfig.from_hf(source)


@pytest.mark.parametrize(
    "change",
    [{"model_type": "gpt2"}, {"rotary": False}, {"scale_attn_weights": False}, {"quantization_config": {"bits": 4}}],
)
def test_another_architecture_is_refused(tiny_config: ModelConfig, change: dict[str, Any]) -> None:
    """Catches a model that loads and writes noise because its constants are not GPT-J's."""
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_hf(raw(tiny_config, **change))
    assert next(iter(change)) in caught.value.found


def test_unknown_keys_are_kept_for_the_warning(tiny_config: ModelConfig) -> None:
    """Catches a key dropped in silence; the well-known ones without influence do not warn."""
    config = ModelConfig.from_hf(raw(tiny_config, use_cache=True, my_scaling=3))
    assert config.ignored_keys == ("my_scaling",)
    assert config == tiny_config


def test_both_spellings_of_the_dtype(tiny_config: ModelConfig) -> None:
    """Catches B-09: an older file's torch_dtype overlooked."""
    base = raw(dataclasses.replace(tiny_config, dtype=""))
    assert ModelConfig.from_hf({**base, "torch_dtype": "float16"}).dtype == "float16"
    assert ModelConfig.from_hf({**base, "dtype": "torch.bfloat16"}).dtype == "bfloat16"
    assert ModelConfig.from_hf(base).dtype == ""


def test_no_tie_flag_means_untied(tiny_config: ModelConfig) -> None:
    """Catches B-08: transformers' general default of tied embeddings, which GPT-J never had."""
    without = {key: value for key, value in raw(tiny_config).items() if key != "tie_word_embeddings"}
    assert ModelConfig.from_hf(without).tie_word_embeddings is False


def test_presets(tiny_config: ModelConfig) -> None:
    """Catches a preset that is not the model of its name, or one that is left out of the package."""
    assert preset_names() == ("gptj-6b", "nano", "tiny")
    assert preset("tiny") == tiny_config
    big = preset("gptj-6b")
    assert [getattr(big, size) for size in SIZES] == [50400, 2048, 4096, 28, 16, 64]
    assert (big.bos_token_id, big.eos_token_ids, big.dtype) == (50256, (50256,), "float16")
    nano = preset("nano")
    assert [getattr(nano, size) for size in SIZES] == [4096, 512, 256, 6, 4, 32]


def test_unknown_preset_names_the_near_ones() -> None:
    """Catches a misspelling answered without help."""
    with pytest.raises(ConfigError) as caught:
        preset("gptj6b")
    assert "near ones: gptj-6b" in caught.value.found
    assert "gptj-6b, nano, tiny" in caught.value.rule


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"n_layers": 2}, "near ones: n_layer"),
        ({"ignored_keys": ["x"]}, "no setting of that name"),
        ({"layer_norm_epsilon": "1e-5"}, "a value of type str"),  # what YAML makes of 1e-5
        ({"n_layer": True}, "a value of type bool"),
        ({"n_layer": "2"}, "a value of type str"),
        ({"eos_token_ids": 0}, "a value of type int"),
        ({"tie_word_embeddings": "no"}, "a value of type str"),
    ],
)
def test_plain_data_is_read_strictly(tiny_config: ModelConfig, change: dict[str, Any], text: str) -> None:
    """Catches a setting that is ignored because it is misspelled, or text taken for a number or for true."""
    given = {field.name: getattr(tiny_config, field.name) for field in dataclasses.fields(tiny_config)}
    given = {key: list(value) if isinstance(value, tuple) else value for key, value in given.items()}
    del given["ignored_keys"]
    assert parse_model(given, "here") == tiny_config
    with pytest.raises(ConfigError) as caught:
        parse_model({**given, **change}, "here")
    assert text in caught.value.found
    assert "here" in caught.value.asked


def test_plain_data_without_a_size_is_refused() -> None:
    """Catches a size filled in from a default."""
    with pytest.raises(ConfigError) as caught:
        parse_model({"vocab_size": 8, "n_embd": 4}, "here")
    assert caught.value.found == "no n_positions, n_layer, n_head, rotary_dim"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layer_norm_epsilon", "1e-5"),
        ("attn_pdrop", "0.1"),
        ("tie_word_embeddings", "no"),
        ("eos_token_id", "x"),
        ("eos_token_id", [1.5]),
        ("n_inner", "64"),
        ("vocab_size", "64"),
        ("bos_token_id", True),
        ("activation_function", 3),
    ],
)
def test_json_of_the_wrong_type_is_refused_by_name(tiny_config: ModelConfig, name: str, value: object) -> None:
    """A string where a number belongs raised a bare TypeError, and "no" tied the embeddings."""
    with pytest.raises(CheckpointError, match=name):
        ModelConfig.from_hf({**tiny_config.to_hf(), name: value})
