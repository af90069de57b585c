"""Opening a checkpoint and loading its weights: every layout, every way to be incomplete, and exact types."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bluejay.checkpoint import Checkpoint, load_weights, open_checkpoint, save_checkpoint
from bluejay.config import ModelConfig
from bluejay.errors import BluejayError, CheckpointError, ConfigError
from bluejay.events import Event
from bluejay.models import GPTJ

LAYOUTS = ("safetensors", "safetensors-sharded", "bin", "bin-sharded", "bin-legacy")
HEAD = ("transformer.wte.weight", "lm_head.weight")


def write(directory: Path, config: ModelConfig, tensors: Mapping[str, Tensor], layout: str = "safetensors") -> Path:
    """A directory as transformers and others wrote them over the years."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config.to_hf()), encoding="utf-8")
    stem, suffix = ("model", "safetensors") if layout.startswith("safetensors") else ("pytorch_model", "bin")
    shards = {f"{stem}.{suffix}": dict(tensors)}
    if layout.endswith("sharded"):
        names = sorted(tensors)
        files = [f"{stem}-{i:05d}-of-00003.{suffix}" for i in (1, 2, 3)]
        shards = {file: {name: tensors[name] for name in names[i::3]} for i, file in enumerate(files)}
        index = {"metadata": {}, "weight_map": {name: file for file in files for name in shards[file]}}
        (directory / f"{stem}.{suffix}.index.json").write_text(json.dumps(index), encoding="utf-8")
    for file, content in shards.items():
        if suffix == "safetensors":
            save_file({name: t.clone() for name, t in content.items()}, directory / file, metadata={"format": "pt"})
        else:
            zipped = layout != "bin-legacy"
            torch.save(content, directory / file, _use_new_zipfile_serialization=zipped)
    return directory


def load(source: Path | Checkpoint, **options: object) -> GPTJ:
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    with torch.device("meta"):
        model = GPTJ(checkpoint.config)
    load_weights(model, checkpoint, **options)  # type: ignore[arg-type]
    return model.eval()


@pytest.fixture
def weights(tiny_model: GPTJ) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tiny_model.state_dict().items()}


def assert_refused(act: Callable[[], object], *needles: str, error: type[BluejayError] = CheckpointError) -> None:
    with pytest.raises(error) as caught:
        act()
    for needle in needles:
        assert needle in str(caught.value)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_bit_equal(tmp_path: Path, tiny_config: ModelConfig, weights: dict, layout: str) -> None:
    """B-04: a sharded .bin is not found because only its safetensors twin or the single file is looked for."""
    checkpoint = open_checkpoint(write(tmp_path / layout, tiny_config, weights, layout))
    loaded = load(checkpoint).state_dict()
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    assert checkpoint.num_bytes == sum(t.nbytes for t in weights.values())
    assert {info.file for info in checkpoint.tensors.values()} <= {path.name for path in (tmp_path / layout).iterdir()}
    assert [w for w in checkpoint.warnings if "before 1.6" not in w] == []
    assert bool(checkpoint.warnings) == (layout == "bin-legacy")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_conversion_equals_torchs(tmp_path: Path, tiny_config: ModelConfig, weights: dict, layout: str) -> None:
    """A slice converted twice, not at all, or from the wrong place."""
    weights["transformer.wte.weight"] = torch.randn(64, 40_000)  # many slices
    weights["transformer.h.0.mlp.fc_in.weight"] = torch.randn(32, 128).t()  # not contiguous in a .bin
    tensors = weights if layout.startswith("bin") else {name: t.contiguous() for name, t in weights.items()}
    checkpoint = open_checkpoint(write(tmp_path / layout, tiny_config, tensors, layout))
    for name, tensor in weights.items():
        read = checkpoint.read(name, torch.bfloat16)
        assert read.is_contiguous()
        assert torch.equal(read, tensor.to(torch.bfloat16))
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in weights.items())
    assert checkpoint.read("transformer.h.0.mlp.fc_in.weight").is_contiguous()


@pytest.mark.parametrize("layout", ["safetensors", "bin"])
def test_training_does_not_write_into_the_file(
    tmp_path: Path, tiny_config: ModelConfig, weights: dict, layout: str
) -> None:
    """A shared mapping: the first optimizer step would change the checkpoint on disk."""
    directory = write(tmp_path / "c", tiny_config, weights, layout)
    model = load(directory)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert torch.equal(load(directory).lm_head.weight, weights["lm_head.weight"])


def test_both_formats_present(tmp_path: Path, tiny_config: ModelConfig, weights: dict) -> None:
    """B-04, second half: which of two formats was read stays unsaid."""
    directory = write(tmp_path, tiny_config, {name: torch.zeros_like(t) for name, t in weights.items()}, "bin-sharded")
    write(directory, tiny_config, weights, "safetensors-sharded")
    checkpoint = open_checkpoint(directory)
    assert torch.equal(load(checkpoint).lm_head.weight, weights["lm_head.weight"])
    (warning,) = checkpoint.warnings
    assert "model.safetensors.index.json" in warning
    assert "pytorch_model.bin.index.json" in warning


@pytest.mark.parametrize("layout", LAYOUTS)
def test_old_mask_buffers(tmp_path: Path, tiny_config: ModelConfig, weights: dict, layout: str) -> None:
    """B-01: strict loading stops on the causal masks of old releases, or a re-save keeps them."""
    masks: dict[str, Tensor] = {}
    for layer, dtype in ((0, torch.uint8), (1, torch.bool)):
        masks[f"transformer.h.{layer}.attn.bias"] = torch.ones(1, 1, 32, 32).tril().to(dtype)
        masks[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e9)
    del masks["transformer.h.1.attn.bias"]  # the variant whose mask was pruned in some layers
    checkpoint = open_checkpoint(write(tmp_path / "old", tiny_config, weights | masks, layout))
    assert not any("attn" in warning for warning in checkpoint.warnings)
    loaded = load(checkpoint).state_dict()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    save_checkpoint(tmp_path / "new", {**loaded, **masks}, checkpoint.config)
    assert load_file(tmp_path / "new" / "model.safetensors").keys() == weights.keys()


@pytest.mark.parametrize(
    "name",
    [
        "transformer.h.0.attn.q_proj.extra",
        "transformer.h.0.attn.q_proj.bias",
        "transformer.h.0.attn.bias",  # as a vector it is a bias of some other model
        "h.0.attn.bias",
        "transformer.h.0.mlp.masked_bias",
    ],
)
def test_unknown_keys(tmp_path: Path, tiny_config: ModelConfig, weights: dict, name: str) -> None:
    """B-01, negative half: ignoring masks by suffix hides a tensor that the model does not have."""
    directory = write(tmp_path, tiny_config, {**weights, name: torch.ones(32)})
    assert_refused(lambda: load(directory), "1 unknown", name)
    assert_refused(lambda: load(directory, strict=False), "1 unknown", name)


def test_missing_head_bias(tmp_path: Path, tiny_config: ModelConfig, weights: dict) -> None:
    """B-02: a lost lm_head.bias goes unnoticed; the text starts well and turns to garbage."""
    assert load(write(tmp_path / "whole", tiny_config, weights)).lm_head.bias.abs().min() > 0
    del weights["lm_head.bias"]
    checkpoint = open_checkpoint(write(tmp_path / "without", tiny_config, weights))
    assert any("lm_head.bias" in warning for warning in checkpoint.warnings)
    assert_refused(lambda: load(checkpoint), "1 missing", "lm_head.bias", "strict=False")
    assert torch.equal(load(checkpoint, strict=False).lm_head.bias, torch.zeros(64))


@pytest.mark.parametrize("name", ["transformer.h.1.mlp.fc_in.bias", "transformer.ln_f.bias", "lm_head.weight"])
def test_other_missing_keys(tmp_path: Path, tiny_config: ModelConfig, weights: dict, name: str) -> None:
    """A missing tensor other than lm_head.bias is filled in when not strict."""
    del weights[name]
    directory = write(tmp_path, tiny_config, weights)
    assert_refused(lambda: load(directory), "1 missing", name)
    assert_refused(lambda: load(directory, strict=False), "1 missing", name)


def test_all_differences_in_one_error(tmp_path: Path, tiny_config: ModelConfig, weights: dict) -> None:
    """Wrong shapes broadcast, or the user meets one problem a run."""
    weights["transformer.ln_f.weight"] = torch.ones(1)
    weights["lm_head.weight"] = torch.zeros(63, 32)
    weights["transformer.h.0.ln_1.bias"] = torch.zeros(32, dtype=torch.int8)
    del weights["transformer.h.1.ln_1.bias"]
    weights |= {f"extra.{i}": torch.zeros(1) for i in range(9)}
    directory = write(tmp_path, tiny_config, weights)
    assert_refused(
        lambda: load(directory),
        "1 missing: transformer.h.1.ln_1.bias",
        "9 unknown: extra.0, extra.1, extra.2, extra.3, extra.4, ... (9 in all)",
        "lm_head.weight [63, 32] instead of [64, 32]",
        "transformer.ln_f.weight [1] instead of [32]",
        "1 not of a floating type: transformer.h.0.ln_1.bias torch.int8",
    )


@pytest.mark.parametrize("layout", ["safetensors-sharded", "bin-sharded"])
def test_missing_shard(tmp_path: Path, tiny_config: ModelConfig, weights: dict, layout: str) -> None:
    """B-03: files are globbed, the index is never checked, and the model writes noise."""
    directory = write(tmp_path, tiny_config, weights, layout)
    (shard,) = directory.glob("*-00002-of-00003.*")
    shard.unlink()
    assert_refused(lambda: open_checkpoint(directory), shard.name, "1 missing", "3 files")
    index_file = next(directory.glob("*.index.json"))
    index = json.loads(index_file.read_text())
    index["weight_map"] = {name: f"part-{i}-of-30" for i, name in enumerate(index["weight_map"])}
    index_file.write_text(json.dumps(index))
    assert_refused(lambda: open_checkpoint(directory), f"{len(weights)} missing", "part-0-of-30", "in all")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lost", [1, 100, 10**9])
def test_truncated_file(tmp_path: Path, tiny_config: ModelConfig, weights: dict, layout: str, lost: int) -> None:
    """B-03: the last tensor of a cut file is read from beyond its end."""
    directory = write(tmp_path, tiny_config, weights, layout)
    file = sorted([*directory.glob("*.safetensors"), *directory.glob("*.bin")])[-1]
    file.write_bytes(file.read_bytes()[: max(0, file.stat().st_size - lost)])
    assert_refused(lambda: open_checkpoint(directory), file.name, f"{file.stat().st_size} bytes")


def test_longer_safetensors_file(tmp_path: Path, tiny_config: ModelConfig, weights: dict) -> None:
    """A file whose header does not account for all its bytes is damaged."""
    file = write(tmp_path, tiny_config, weights) / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"\0")
    assert_refused(lambda: open_checkpoint(tmp_path), "model.safetensors")


@pytest.mark.parametrize("layout", ["safetensors-sharded", "bin-sharded"])
def test_index_and_shards_disagree(tmp_path: Path, tiny_config: ModelConfig, weights: dict, layout: str) -> None:
    """Shards of two saves mixed: a tensor is not in the shard the index names, or is in none of its lists."""
    directory = write(tmp_path, tiny_config, weights, layout)
    index_file = next(directory.glob("*.index.json"))
    index = json.loads(index_file.read_text())
    del index["weight_map"]["lm_head.bias"]
    file = index["weight_map"]["transformer.ln_f.bias"]
    index["weight_map"]["phantom"] = file
    index_file.write_text(json.dumps(index))
    assert_refused(lambda: open_checkpoint(directory), f"phantom in {file}", "1 that it does not name: lm_head.bias in")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {"a": "../secret"}}', '{"weight_map": {}}'])
def test_bad_index(tmp_path: Path, tiny_config: ModelConfig, content: str) -> None:
    """A broken index ends in a traceback, or leads out of the directory."""
    write(tmp_path, tiny_config, {}, "bin-sharded")
    (tmp_path / "pytorch_model.bin.index.json").write_text(content)
    assert_refused(lambda: open_checkpoint(tmp_path), "pytorch_model.bin.index.json")


def test_what_is_no_checkpoint(tmp_path: Path, tiny_config: ModelConfig, weights: dict) -> None:
    """A bare FileNotFoundError that does not say what was looked for, what is there and what to do."""
    directory = write(tmp_path / "model", tiny_config, weights)
    assert_refused(lambda: open_checkpoint(tmp_path / "modle"), "no such directory; beside it: model")
    assert_refused(lambda: open_checkpoint(tmp_path / "a" / "b"), "nor ")
    assert_refused(lambda: open_checkpoint(directory / "config.json"), "a file; its directory is")
    assert_refused(lambda: open_checkpoint(tmp_path), "no config.json", "model")
    assert_refused(lambda: open_checkpoint(directory, revision="main"), "main", error=ConfigError)
    (directory / "model.safetensors").rename(directory / "weights.safetensors")
    assert_refused(lambda: open_checkpoint(directory), "config.json, weights.safetensors", "pytorch_model.bin")
    (directory / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert_refused(lambda: open_checkpoint(directory), "Git LFS pointer", "git lfs pull")


def test_pickles_are_never_executed(tmp_path: Path, tiny_config: ModelConfig, weights: dict) -> None:
    """A .bin from a stranger runs code as it is opened."""
    flag = tmp_path / "executed"

    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return exec, (f"open({str(flag)!r}, 'w')",)

    for zipped in (True, False):
        directory = write(tmp_path / str(zipped), tiny_config, {})
        (directory / "model.safetensors").unlink()
        content = {**weights, "trap": Trap()}
        torch.save(content, directory / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
        assert_refused(lambda: open_checkpoint(directory), "pytorch_model.bin")  # noqa: B023
    assert not flag.exists()


def test_nested_state_dict(tmp_path: Path, tiny_config: ModelConfig, weights: dict) -> None:
    """A trainer's own file with the weights one level down is taken for an empty model."""
    directory = write(tmp_path, tiny_config, weights, "bin")
    torch.save({"model": weights, "step": 3}, directory / "pytorch_model.bin")
    assert_refused(lambda: open_checkpoint(directory), "not a flat mapping", "state_dict")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["safetensors", "bin"])
def test_non_finite_weights(
    tmp_path: Path, tiny_config: ModelConfig, weights: dict, value: float, dtype: torch.dtype, layout: str
) -> None:
    """A damaged weight spreads NaN into every logit, and the server answers noise."""
    weights["transformer.h.1.mlp.fc_in.weight"][-1, -1] = value
    weights["lm_head.bias"][0] = value
    directory = write(tmp_path, tiny_config, {name: t.to(dtype) for name, t in weights.items()}, layout)
    checkpoint = open_checkpoint(directory)
    with torch.device("meta"):
        model = GPTJ(tiny_config)
    assert_refused(lambda: load_weights(model, checkpoint), "lm_head.bias", "transformer.h.1.mlp.fc_in.weight")
    assert all(parameter.is_meta for parameter in model.parameters())
    load(checkpoint, verify=False)


def test_conversion_that_overflows(tmp_path: Path, tiny_config: ModelConfig, weights: dict) -> None:
    """fp32 weights above 65504 become infinity in fp16."""
    weights["lm_head.weight"][3, 3] = 1e5
    directory = write(tmp_path, tiny_config, weights)
    assert_refused(lambda: load(directory, dtype=torch.float16), "lm_head.weight", "65504", "bfloat16")


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("said", ["float32", "bfloat16", "float16", ""])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype(
    tmp_path: Path, tiny_config: ModelConfig, weights: dict, stored: torch.dtype, said: str, key: str
) -> None:
    """B-09: the config's dtype is lost and memory doubles, or one of its two spellings is not read."""
    directory = write(tmp_path, tiny_config, {name: t.to(stored) for name, t in weights.items()})
    raw = {name: value for name, value in tiny_config.to_hf().items() if "dtype" not in name}
    (directory / "config.json").write_text(json.dumps(raw | ({key: said} if said else {})))
    checkpoint = open_checkpoint(directory)
    expected = getattr(torch, said) if said else stored
    assert checkpoint.dtype == expected
    assert {p.dtype for p in load(checkpoint).parameters()} == {expected}
    assert bool(checkpoint.warnings) == (expected != stored)
    for asked in (torch.float32, torch.bfloat16, torch.float64):
        assert {p.dtype for p in load(checkpoint, dtype=asked).parameters()} == {asked}


def test_mixed_dtypes(tmp_path: Path, tiny_config: ModelConfig, weights: dict) -> None:
    """Layer norms in fp32 beside fp16 matrices decide the whole model's dtype, or modules end up mixed."""
    mixed = {name: t if "ln_" in name else t.half() for name, t in weights.items()}
    checkpoint = open_checkpoint(write(tmp_path, replace(tiny_config, dtype=""), mixed))
    assert checkpoint.dtype == torch.float16
    assert any("float16, float32" in warning for warning in checkpoint.warnings)
    assert {p.dtype for p in load(checkpoint).parameters()} == {torch.float16}


def test_tied(tmp_path: Path, tiny_config: ModelConfig, weights: dict) -> None:
    """B-08: a tied checkpoint with one of the two matrices does not load, or loads as two."""
    config = replace(tiny_config, tie_word_embeddings=True)
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    for present in (("transformer.wte.weight",), ("lm_head.weight",), HEAD):
        chosen = {name: t for name, t in weights.items() if name not in HEAD or name in present}
        directory = write(tmp_path / "-".join(present), config, chosen)
        for dtype in (torch.float32, torch.bfloat16):
            model = load(directory, dtype=dtype)
            assert model.lm_head.weight is model.transformer.wte.weight
            assert torch.equal(model.lm_head.weight, weights["lm_head.weight"].to(dtype))
        model = load(directory)
        save_checkpoint(tmp_path / "saved", model.state_dict(), config, overwrite=True)
        assert "lm_head.weight" not in load_file(tmp_path / "saved" / "model.safetensors")
        assert torch.equal(load(tmp_path / "saved").lm_head.weight, weights["lm_head.weight"])
    weights["lm_head.weight"] = weights["lm_head.weight"] + 1
    directory = write(tmp_path / "contradiction", config, weights)
    assert_refused(lambda: load(directory), "tied by config.json and yet different", *HEAD)
    without = {name: t for name, t in weights.items() if name not in HEAD}
    assert_refused(lambda: load(write(tmp_path / "neither", config, without)), "1 missing")


def test_untied_by_default(tmp_path: Path, tiny_config: ModelConfig, weights: dict) -> None:
    """B-08: no flag is read as tied, and the head is lost or shares the embedding's memory."""
    directory = write(tmp_path, tiny_config, weights)
    raw = {name: value for name, value in tiny_config.to_hf().items() if name != "tie_word_embeddings"}
    (directory / "config.json").write_text(json.dumps(raw))
    model = load(directory)
    head, embedding = model.lm_head.weight, model.transformer.wte.weight
    assert head.untyped_storage().data_ptr() != embedding.untyped_storage().data_ptr()
    assert not torch.equal(head, embedding)


def test_no_size_literal(tmp_path: Path) -> None:
    """B-12: sizes of the 6B model assumed for another shape; an explicit n_inner taken for 4 * n_embd."""
    config = ModelConfig(
        vocab_size=37, n_positions=19, n_embd=48, n_layer=3, n_head=3, rotary_dim=6, n_inner=40, eos_token_ids=(7, 9)
    )
    torch.manual_seed(0)
    model = GPTJ(config)
    save_checkpoint(tmp_path / "odd", model.state_dict(), config, max_shard_bytes=10_000)
    checkpoint = open_checkpoint(tmp_path / "odd")
    assert checkpoint.config == replace(config, dtype="float32")
    ids = torch.arange(10)[None]
    assert torch.equal(load(checkpoint)(ids), model.eval()(ids))
    raw = json.loads((tmp_path / "odd" / "config.json").read_text())
    for value in (None, 7, 18):
        (tmp_path / "odd" / "config.json").write_text(json.dumps(raw | {"rotary_dim": value}))
        assert_refused(lambda: open_checkpoint(tmp_path / "odd"), "rotary_dim")


def test_config_keys(tmp_path: Path, tiny_config: ModelConfig, weights: dict) -> None:
    """A setting that we do not know is dropped in silence; a broken config.json ends in a traceback."""
    directory = write(tmp_path, tiny_config, weights)
    raw = tiny_config.to_hf()
    (directory / "config.json").write_text(json.dumps(raw | {"sliding_window": 5, "use_cache": True}))
    (warning,) = open_checkpoint(directory).warnings
    assert "sliding_window" in warning
    assert "use_cache" not in warning
    (directory / "config.json").write_text(json.dumps(raw | {"quantization_config": {"bits": 4}}))
    assert_refused(lambda: open_checkpoint(directory), "quantization_config")
    for broken in (b"{", b"\xff\xfe", b"[]"):
        (directory / "config.json").write_bytes(broken)
        assert_refused(lambda: open_checkpoint(directory), "config.json")


def test_progress(tmp_path: Path, tiny_config: ModelConfig, weights: dict) -> None:
    """A progress bar that never reaches its end, or counts stored bytes while it makes others."""
    events: list[Event] = []
    load(write(tmp_path, tiny_config, weights), dtype=torch.bfloat16, observe=events.append)
    fields = [event.fields for event in events if event.name == "load"]
    assert {f["tensor"] for f in fields} == weights.keys()
    assert {f["total_bytes"] for f in fields} == {sum(t.nbytes for t in weights.values()) // 2}
    assert fields[-1]["done_bytes"] == fields[-1]["total_bytes"]
    assert [f["done_bytes"] for f in fields] == sorted(f["done_bytes"] for f in fields)


def test_ends_of_text_come_from_the_generation_config(tiny_checkpoint: Path) -> None:
    """Newer releases add an instruct model's end of turn there only: without it, answers run on."""
    (tiny_checkpoint / "generation_config.json").write_text('{"eos_token_id": [0, 7], "temperature": 0.5}')
    assert open_checkpoint(tiny_checkpoint).config.eos_token_ids == (0, 7)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_those_of_the_tensor(tmp_path: Path, tiny_config: ModelConfig, weights: dict, layout: str) -> None:
    """Catches slices that all begin at a tensor's first row, or at another tensor's: a model is packed from them."""
    checkpoint = open_checkpoint(write(tmp_path, tiny_config, weights, layout))
    for name in ("transformer.wte.weight", "transformer.h.1.mlp.fc_in.weight", "lm_head.bias"):
        assert torch.equal(checkpoint.read_rows(name, 3, 7), weights[name][3:7])
