"""The training configuration: strict, one place for each thing, booleans that mean what they say. B-39, B-40."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bluejay.config import TrainConfig, as_yaml, parse_train, read_train, train_preset_names
from bluejay.errors import ConfigError


@pytest.mark.parametrize("name", train_preset_names())
def test_presets_parse_and_come_back(name: str, tmp_path: Path) -> None:
    """Catches a preset with a misspelled key, and a saved configuration that reads back as another."""
    config = read_train(name)
    assert config != TrainConfig()
    file = tmp_path / "run.yaml"
    file.write_text(as_yaml(config))
    assert read_train(file) == config


def test_a_misspelled_preset_names_the_near_ones() -> None:
    """Catches an errno in place of what was meant."""
    with pytest.raises(ConfigError, match="near ones: nano-lora") as caught:
        read_train("nano-lra")
    assert "Errno" not in str(caught.value)


def test_a_file_builds_on_a_preset(tmp_path: Path) -> None:
    """Catches a section that replaces the preset's whole section, and settings that do not reach below it."""
    file = tmp_path / "run.yaml"
    file.write_text("preset: gptj-6b-lora\noptimizer: {learning_rate: 1e-3}\n")
    config = read_train(file, ["optimizer.betas=0.8, 0.9", "lora.targets=q_proj,fc_in", "steps=7"])
    base = read_train("gptj-6b-lora")
    assert config.optimizer == replace(base.optimizer, learning_rate=1e-3, betas=(0.8, 0.9))
    assert config.lora == replace(base.lora, targets=("q_proj", "fc_in"))
    assert (config.steps, config.global_batch) == (7, base.global_batch)


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        ({"optimiser": {}}, "optimizer"),
        ({"optimizer": {"learning_rat": 1.0}}, "learning_rate"),
        ({"optimizer": 3}, "optimizer=3"),
        ({"steps": "ten"}, "steps='ten'"),
        ({"steps": True}, "steps=True"),
        ({"micro_batch": 0}, "micro_batch=0"),
        ({"precision": "float32"}, "precision='float32'"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"lora": {"targets": ["q"]}}, "('q',)"),
        ({"lora": {"targets": []}}, "()"),
        ({"data": {"learn": "answer"}}, "without data.answer"),
        ({"result": "best"}, "without data.valid"),
        ({"precision": "fp16", "masters": False}, "masters=false"),
        ({"optimizer": {"learning_rate": float("nan")}}, "nan"),
        ({"epochs": float("inf")}, "epochs=inf"),
        ({"micro_batch": 4, "global_batch": 10}, "and 1 replicas"),
    ],
)
def test_what_is_wrong_is_named(raw: dict[str, object], found: str) -> None:
    """Catches a key that is ignored, a wrong type that is taken, and settings that contradict each other silently."""
    with pytest.raises(ConfigError) as caught:
        parse_train(raw, "test")
    assert found in str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"), [("False", False), ("false", False), ("no", False), ("0", False), ("True", True), ("on", True)]
)
def test_booleans_mean_what_they_say(text: str, value: bool) -> None:
    """B-39: a flag read as text makes "False" true."""
    assert read_train(settings=[f"recompute={text}", "masters=true"]).recompute is value


def test_no_boolean_is_refused() -> None:
    """B-39: `maybe` is neither."""
    with pytest.raises(ConfigError) as caught:
        read_train(settings=["recompute=maybe"])
    assert "recompute='maybe'" in caught.value.found


@pytest.mark.parametrize("setting", ["steps", "=3", "a..b=3", "steps=1.5", "optimizer.learning_rate=fast"])
def test_settings_that_are_none(setting: str) -> None:
    """Catches a malformed --set that is dropped."""
    with pytest.raises(ConfigError):
        read_train(settings=[setting])


@pytest.mark.parametrize(
    ("accumulation", "batch", "replicas", "effective"),
    [(0, 0, 1, 1), (3, 0, 1, 3), (0, 12, 1, 3), (3, 12, 1, 3), (0, 24, 2, 3), (3, 24, 2, 3)],
)
def test_one_effective_accumulation(accumulation: int, batch: int, replicas: int, effective: int) -> None:
    """B-40: set in one place, the other, or both alike, there is one value, and the global batch follows from it."""
    config = TrainConfig(micro_batch=4, gradient_accumulation=accumulation, global_batch=batch)
    assert config.accumulation(replicas) == effective
    assert config.rows_per_update(replicas) == 4 * effective * replicas


@pytest.mark.parametrize(("accumulation", "batch"), [(2, 12), (0, 10), (4, 4), (2, 16)])
def test_two_places_that_differ(accumulation: int, batch: int) -> None:
    """B-40: two different values must not both be used, one in the loop and one in the log."""
    with pytest.raises(ConfigError) as caught:
        TrainConfig(micro_batch=4, gradient_accumulation=accumulation, global_batch=batch).accumulation()
    assert "global batch = micro-batch x gradient accumulation x replicas" in caught.value.rule
