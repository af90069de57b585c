"""Quantized models: equal to the dequantized one, and the same however they came to be."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import bluejay
from bluejay.build import build, save
from bluejay.checkpoint import open_checkpoint, save_checkpoint
from bluejay.compile import Store, compile
from bluejay.config import CompileSpec, ModelConfig, QuantSpec, RunConfig
from bluejay.errors import BluejayError, CheckpointError, ConfigError, MachineError
from bluejay.kernels import native
from bluejay.models import GPTJ, resize_vocab
from bluejay.quant import InputMoments, QuantizedLinear, choose_kernel, gptq, quantize_checkpoint, quantize_model

SPEC = QuantSpec(group_size=16)
# fp32: the kernel adds the products of a group before it scales them, the dequantized model scales first. Logits of the
# tiny model reach 30.
BOUND = 2e-4


def dequantized(model: GPTJ) -> GPTJ:
    """A plain model with the weights that a quantized one stands for."""
    plain = copy.deepcopy(model)
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            linear = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
            linear.weight = nn.Parameter(module.packed.dequantize(), requires_grad=False)
            if module.bias is not None:
                linear.bias = module.bias
            owner, _, leaf = name.rpartition(".")
            setattr(plain.get_submodule(owner), leaf, linear)
    return plain


def logits_of(model: GPTJ, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model.eval()(ids)


def packed_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: t for name, t in model.named_buffers() if name.endswith((".codes", ".scales", ".biases"))}


@pytest.mark.parametrize("path", ["auto", "torch"])
@pytest.mark.parametrize("spec", [SPEC, QuantSpec(group_size=24), QuantSpec(group_size=-1, layers=("fc_*", "lm_head"))])
def test_logits_are_those_of_the_dequantized_model(tiny_model: GPTJ, spec: QuantSpec, path: str) -> None:
    """A layer with another's codes, a lost bias, a group that takes its neighbor's scale; for one row and for many."""
    quantize_model(tiny_model, spec)
    choose_kernel(tiny_model, path)
    plain = dequantized(tiny_model)
    for shape in ((1, 1), (3, 9)):
        ids = torch.randint(0, 57, shape, generator=torch.Generator().manual_seed(3))
        want = logits_of(plain, ids)
        assert float((logits_of(tiny_model, ids) - want).abs().max()) < BOUND
        assert float(want.abs().max()) > 1


class Forward(nn.Module):
    """A model's logits as a program: a flat tuple."""

    def __init__(self, model: GPTJ) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        return (self.model(ids),)


def test_compiled_is_eager(tiny_model: GPTJ, program_folder: str) -> None:
    """Packed buffers bound to the wrong input of a program, or cast on their way into it."""
    quantize_model(tiny_model, SPEC)
    ids = torch.randint(0, 57, (2, 5), generator=torch.Generator().manual_seed(3))
    step = Forward(tiny_model.eval())
    (got,) = compile(step, (ids,), CompileSpec(), Store(Path(program_folder))).bind(step)(ids)
    assert float((got - logits_of(tiny_model, ids)).abs().max()) < BOUND
    assert float((got - logits_of(dequantized(tiny_model), ids)).abs().max()) < BOUND


def test_a_run_chooses_the_kernel(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a setting that changes nothing, and a kernel that this machine lacks found out in the middle of a run."""
    chosen = []
    real = torch.ops.bluejay.int4_linear

    def note(*arguments: Any) -> Tensor:
        chosen.append(arguments[-1])
        result: Tensor = real(*arguments)
        return result

    monkeypatch.setattr(torch.ops.bluejay, "int4_linear", note)
    engine = bluejay.load(str(tiny_checkpoint), quantize="int4-g16", kernel="portable", backend="eager")
    engine.generate([[1, 2]], max_new_tokens=1)
    assert set(chosen) == {"portable"}
    monkeypatch.setattr(native, "available_paths", lambda: ("portable", "torch", "reference"))
    monkeypatch.setattr("bluejay.build.load_weights", lambda *arguments, **options: pytest.fail("weights were read"))
    with pytest.raises(MachineError, match="'avx2'"):
        bluejay.load(str(tiny_checkpoint), quantize="int4-g16", kernel="avx2", backend="eager")


@pytest.mark.parametrize(
    ("settings", "word"),
    [({"kernel": "torch"}, "not packed"), ({"kernel": "x8", "quantize": "int4-g16", "dtype": "float32"}, "bfloat16")],
)
def test_a_kernel_that_nothing_would_use_is_refused(tiny_checkpoint: Path, settings: dict[str, str], word: str) -> None:
    """Catches 8 bits that somebody measures to be free, because nothing was rounded to them."""
    with pytest.raises(ConfigError, match=word):
        bluejay.load(str(tiny_checkpoint), backend="eager", **settings)


# ---- three ways to the same model ----------------------------------------------------------------------------------


def variant(directory: Path, config: ModelConfig, **changes: Any) -> Path:
    """A checkpoint with another config or tensors, from a fresh model."""
    model = GPTJ(dataclasses.replace(config, **changes))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    save_checkpoint(directory, model.state_dict(), model.config)
    return directory


def load_dir(directory: Path, quantize: QuantSpec | None = None, **settings: Any) -> Any:
    return build(RunConfig(model=str(directory), quantize=quantize, compile=CompileSpec(backend="eager"), **settings))


@pytest.mark.parametrize("kind", ["plain", "tied", "extra_rows", "half", "subset"])
def test_saved_is_loaded_is_in_place(
    tiny_checkpoint: Path, tiny_config: ModelConfig, tmp_path: Path, kind: str
) -> None:
    """Three computations of one thing: in place, while loading, and through a directory; a head tied to the embedding
    that changes with it, or is lost; rows beyond the tokenizer's."""
    spec = QuantSpec(group_size=16, layers=("fc_*", "q_proj")) if kind == "subset" else SPEC
    source = tiny_checkpoint
    if kind in ("tied", "half"):
        source = variant(tmp_path / kind, tiny_config, tie_word_embeddings=kind == "tied")
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny_checkpoint / file, source / file)
    settings: dict[str, Any] = {}
    plain = load_dir(source, **settings).model
    if kind == "half":
        config = plain.config
        save_checkpoint(source, plain.to(torch.bfloat16).state_dict(), config, overwrite=True)
        plain = load_dir(source).model
    if kind == "extra_rows":
        resize_vocab(plain, 75)
        save_checkpoint(source, plain.state_dict(), plain.config, overwrite=True)
    quantize_model(plain, spec)
    records = quantize_checkpoint(open_checkpoint(source), tmp_path / "out", spec)
    reloaded, on_load = load_dir(tmp_path / "out"), load_dir(source, spec)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    want = logits_of(plain, ids)
    assert bool(want.isfinite().all())
    for built in (reloaded, on_load):
        assert built.model.config.tie_word_embeddings is False
        assert built.dtype == plain.transformer.wte.weight.dtype
        assert torch.equal(logits_of(built.model, ids), want)
        for name, tensor in packed_tensors(plain).items():
            assert torch.equal(packed_tensors(built.model)[name], tensor)
    named = {record.name: record for record in records}
    assert named["transformer.h.1.mlp.fc_in.weight"].converted
    assert not named["transformer.wte.weight"].converted
    assert named["lm_head.weight"].converted == (kind != "subset")
    assert all(record.reason for record in records if not record.converted)
    if kind == "tied":
        assert open_checkpoint(tmp_path / "out").config.tie_word_embeddings is False
        assert "tied" in named["lm_head.weight"].reason
        assert torch.equal(reloaded.model.transformer.wte.weight, load_dir(source).model.transformer.wte.weight)


def test_a_missing_head_bias(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """A tensor that is missing and becomes zeros without a word (law 10)."""
    weights = load_file(tiny_checkpoint / "model.safetensors")
    del weights["lm_head.bias"]
    save_file(weights, tiny_checkpoint / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(tiny_checkpoint)
    with pytest.raises(CheckpointError, match=r"lm_head\.bias"):
        quantize_checkpoint(checkpoint, tmp_path / "out", SPEC)
    records = quantize_checkpoint(checkpoint, tmp_path / "out", SPEC, strict=False)
    (record,) = (record for record in records if record.name == "lm_head.bias")
    assert "zeros" in record.reason
    assert not load_dir(tmp_path / "out").model.lm_head.bias.any()


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.fixture
def packed(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    quantize_checkpoint(open_checkpoint(tiny_checkpoint), tmp_path / "packed", SPEC)
    return tmp_path / "packed"


@pytest.mark.parametrize("key", ["format_version", "zero_convention"])
def test_another_version_is_refused(packed: Path, key: str) -> None:
    """A file whose zero means something else, read as if it did not: text of exclamation marks (B-45)."""
    content = json.loads((packed / "config.json").read_text())
    content["quantization_config"][key] = 2 if key == "format_version" else "w = scale * (code - zero - 1)"
    (packed / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=key):
        load_dir(packed)


def test_a_missing_record_changes_nothing_and_is_said(packed: Path) -> None:
    """Part of a directory that was lost without a word; or weights that are read differently without it."""
    ids = torch.arange(12).view(2, 6)
    expected = logits_of(load_dir(packed).model, ids)
    assert not any("quantization.json" in warning for warning in open_checkpoint(packed).warnings)
    (packed / "quantization.json").unlink()
    assert any("quantization.json is missing" in warning for warning in open_checkpoint(packed).warnings)
    assert torch.equal(logits_of(load_dir(packed).model, ids), expected)


def test_what_is_packed_is_not_packed_again(packed: Path, tmp_path: Path) -> None:
    """Error on top of error, without a word."""
    with pytest.raises(CheckpointError, match="already packed"):
        quantize_checkpoint(open_checkpoint(packed), tmp_path / "again", SPEC)
    with pytest.raises(CheckpointError, match="already packed"):
        load_dir(packed, SPEC)


def test_a_plain_loader_gets_no_weights(packed: Path) -> None:
    """transformers skips a `quant_method` that it does not know with a warning, and fills in random weights (B-46)."""
    from transformers import AutoModelForCausalLM, GPTJForCausalLM

    for loader in (AutoModelForCausalLM, GPTJForCausalLM):
        with pytest.raises(OSError, match="no file named"):
            loader.from_pretrained(packed)


def test_packed_tensors_of_another_shape_or_type_are_refused(packed: Path) -> None:
    """Scales cast to bf16 by someone who rewrote the file; codes of another group."""
    file = packed / "model.int4.safetensors"
    weights = load_file(file)
    for name, change in (("scales", torch.Tensor.bfloat16), ("codes", lambda t: t[:, :-1].contiguous())):
        full = f"transformer.h.0.mlp.fc_in.{name}"
        save_file({**weights, full: change(weights[full])}, file)
        with pytest.raises(CheckpointError, match=full.replace(".", r"\.")):
            load_dir(packed)


def test_gptq_needs_text(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """A method that quietly becomes another one."""
    spec = dataclasses.replace(SPEC, method="gptq")
    with pytest.raises(ConfigError, match="calibration"):
        load_dir(tiny_checkpoint, spec)
    with pytest.raises(ConfigError, match="calibration"):
        quantize_checkpoint(open_checkpoint(tiny_checkpoint), tmp_path / "out", spec)
    with pytest.raises(ConfigError, match="gptq"):
        quantize_checkpoint(
            open_checkpoint(tiny_checkpoint), tmp_path / "out", SPEC, calibration=torch.zeros(1, 4).long()
        )
    assert list(tmp_path.glob("*out*")) == []


def test_a_quantized_model_is_not_saved_as_a_plain_one(packed: Path, tmp_path: Path) -> None:
    """Packed tensors in a directory that says nothing of them."""
    with pytest.raises(BluejayError, match="four bits"):
        save(load_dir(packed), tmp_path / "saved")


@pytest.mark.parametrize("name", ["transformer.wte.weight", "transformer.h.1.ln_1.bias", "lm_head.bias"])
def test_what_stays_is_finite_too(tiny_checkpoint: Path, tmp_path: Path, name: str) -> None:
    """A directory that took an hour to write and that no load accepts."""
    file = tiny_checkpoint / "model.safetensors"
    weights = load_file(file)
    weights[name].view(-1)[-1] = torch.nan
    save_file(weights, file)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        quantize_checkpoint(open_checkpoint(tiny_checkpoint), tmp_path / "out", SPEC)
    assert list(tmp_path.glob(".out*")) == []


def test_the_dtype_is_that_of_the_original(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """A model in bf16 whose config.json names no dtype, and whose embedding in fp32 alone stays to tell it."""
    file = tiny_checkpoint / "model.safetensors"
    save_file({n: t if "wte" in n else t.bfloat16() for n, t in load_file(file).items()}, file)
    raw = json.loads((tiny_checkpoint / "config.json").read_text())
    config = {key: value for key, value in raw.items() if key not in ("dtype", "torch_dtype")}
    (tiny_checkpoint / "config.json").write_text(json.dumps(config))
    quantize_checkpoint(open_checkpoint(tiny_checkpoint), tmp_path / "out", SPEC)
    assert load_dir(tmp_path / "out").dtype == load_dir(tiny_checkpoint, SPEC).dtype == torch.bfloat16


# ---- gptq ----------------------------------------------------------------------------------------------------------


def test_gptq_beats_minmax_on_nano(nano_dir: Path, tmp_path: Path) -> None:
    """Error feedback with the wrong sign, along the wrong dimension, or from another layer's inputs.

    The text is nano's own, so a model's expected loss on it is the original's plus their divergence, and that can be
    told on few tokens. Perplexity on books is in docs/quantization.md.
    """
    engine = bluejay.load("nano", backend="eager", max_rows=24)
    written = engine.generate([[0]] * 24, max_new_tokens=159, temperature=1.0, ignore_eos=True, seed=1)
    texts = torch.tensor([[0, *result.ids] for result in written])
    calibration, held_out = texts[:16], texts[16:]
    spec = QuantSpec(group_size=128, method="gptq")
    quantize_checkpoint(open_checkpoint(nano_dir), tmp_path / "gptq", spec, calibration=calibration)
    original = logits_of(engine.model, held_out).log_softmax(-1)

    def divergence(model: GPTJ) -> float:
        return float((original.exp() * (original - logits_of(model, held_out).log_softmax(-1))).sum(-1).mean())

    minmax = divergence(load_dir(nano_dir, dataclasses.replace(spec, method="minmax")).model)
    assert 0 < divergence(load_dir(tmp_path / "gptq").model) < 0.75 * minmax


def test_gptq_feeds_layers_what_packed_ones_give(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Layers rounded for the inputs that the original model gives them: the error of those before is then never made
    good. Within a block (out_proj after q, k, v) and between blocks (q_proj of the second)."""
    ids = torch.randint(0, 64, (4, 24), generator=torch.Generator().manual_seed(3))
    spec = QuantSpec(group_size=16, method="gptq")
    quantize_checkpoint(open_checkpoint(tiny_checkpoint), tmp_path / "gptq", spec, calibration=ids)
    original, packed = load_dir(tiny_checkpoint).model, load_dir(tmp_path / "gptq").model

    def rounded_for(model: GPTJ, name: str) -> Tensor:
        """Codes of a layer of the original, for what `model` feeds that layer."""
        moments = InputMoments(model.config.n_embd)
        hook = model.get_submodule(name).register_forward_pre_hook(lambda _, inputs: moments.add(inputs[0]))
        logits_of(model, ids)
        hook.remove()
        weight = original.get_submodule(name).weight
        return gptq(weight.detach(), moments.sum, spec.group_size, name)[0].codes

    for name in ("transformer.h.0.attn.out_proj", "transformer.h.1.attn.q_proj"):
        codes = packed.get_submodule(name).codes
        assert torch.equal(rounded_for(dequantized(packed), name), codes)
        assert not torch.equal(rounded_for(original, name), codes)


def test_load_weights_keeps_the_packed_dtypes(packed: Path) -> None:
    """`dtype=` that casts scales: three of eleven bits lost."""
    built = load_dir(packed, dtype="bfloat16")
    for name, tensor in packed_tensors(built.model).items():
        assert tensor.dtype == (torch.int32 if name.endswith("codes") else torch.float16)
    assert built.model.lm_head.bias.dtype == torch.bfloat16


def test_memory_that_is_refused_is_done_without(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a limit of the process that ends loading, where mapped weights need no memory of their own; and weights
    read from another place of the file than they are mapped from."""
    placed = load_dir(packed).model
    refused: list[int] = []

    def refuse(num_bytes: int, num_tensors: int) -> None:
        refused.append(num_bytes)
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr("bluejay.checkpoint.load.has_large_pages", lambda: True)
    monkeypatch.setattr("bluejay.checkpoint.load.LargePages", refuse)
    mapped = load_dir(packed).model
    assert refused
    assert all(torch.equal(a, b) for a, b in zip(placed.buffers(), mapped.buffers(), strict=True))


def test_a_file_that_has_become_shorter_is_refused(packed: Path) -> None:
    """Catches weights that are zeros from somewhere on."""
    checkpoint = open_checkpoint(packed)
    name, info = next(reversed(checkpoint.tensors.items()))  # the last in the file
    os.truncate(packed / info.file, (packed / info.file).stat().st_size - 1)
    with pytest.raises(CheckpointError, match="bytes missing"):
        checkpoint.read_into(name, torch.zeros(info.shape, dtype=info.dtype))
