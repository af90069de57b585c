"""Laws 6 and 7, the curve of a plainly written loop, and precisions: can the numbers of training be believed."""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bluejay.build import Built, Programs
from bluejay.config import DataConfig, LoraConfig, ModelConfig, OptimizerConfig, RunConfig, ScheduleConfig, TrainConfig
from bluejay.events import Event
from bluejay.models import GPTJ
from bluejay.train import Alone, Blocks, Rows, Samples, Trainer, TrainingError, Weights, attend_in_tiles, prepare

BASE = TrainConfig(
    steps=10,
    micro_batch=4,
    seed=5,
    precision="fp32",
    compile="eager",
    optimizer=OptimizerConfig(learning_rate=3e-3, weight_decay=0.1),
    schedule=ScheduleConfig("linear", warmup=3),
)
MakeTrainer = Callable[..., Trainer]


def samples_of(num: int = 44, seed: int = 0, learn_from: int = 0) -> Samples:
    """Samples of unequal lengths over the tiny vocabulary."""
    rng = np.random.default_rng(seed)
    return Samples.of([(rng.integers(1, 64, rng.integers(3, 24)).tolist(), learn_from) for _ in range(num)], 64)


@pytest.fixture
def trainer_of(tiny_hf: nn.Module, tiny_config: ModelConfig, tiny_checkpoint: Path, tmp_path: Path) -> MakeTrainer:
    """A trainer over a fresh copy of the tiny model; `events` collects what it tells."""

    def make(
        config: TrainConfig = BASE,
        source: Any = None,
        *,
        name: str = "run",
        layers: int = 2,
        rounded: bool = False,
        tied: bool = False,
        directory: Path = tiny_checkpoint,
        **more: Any,
    ) -> Trainer:
        model = GPTJ(replace(tiny_config, n_layer=layers, tie_word_embeddings=tied)).eval()
        model.load_state_dict(tiny_hf.state_dict(), strict=layers == 2)
        if rounded:
            model.bfloat16().float()
        if config.lora.rank or not config.masters:
            model.to({"bf16": torch.bfloat16, "fp32": torch.float32}[config.precision])
        config = replace(config, out=str(tmp_path / name))
        run = RunConfig(model="tiny")
        tokenizer: Any = None
        built = Built(
            run,
            model.requires_grad_(False),
            tokenizer,
            Programs(run),
            torch.device("cpu"),
            torch.float32,
            32,
            (),
            True,
            directory,
        )
        events: list[Event] = []
        trainer = Trainer(built, config, source or Rows(samples_of(), 32), observe=events.append, **more)
        trainer.events = events  # type: ignore[attr-defined]
        return trainer

    return make


def curve(trainer: Trainer, name: str = "loss") -> list[float]:
    return [e.fields[name] for e in trainer.events if e.name == "train.update"]  # type: ignore[attr-defined]


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weights.values().items()}


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp_min(1e-12))


def gradients_of(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """The gradients of a trainer's first update, as they are after the sum over replicas."""
    caught: dict[str, Tensor] = {}

    def note(loss_scale: float) -> float:
        caught.update({one.name: one.gradient.clone() for one in trainer.weights if one.gradient is not None})
        return math.inf

    monkeypatch.setattr(trainer, "_clip", note)
    with pytest.raises(TrainingError):
        trainer.run()
    return caught


# ---- law 6 ---------------------------------------------------------------------------------------------------------


class Threads(Alone):
    """Replicas that are threads of one process: enough for the loop, which only asks for sums."""

    def __init__(self, index: int, barrier: threading.Barrier, board: dict[int, list[Tensor]]) -> None:
        self.count, self.index = barrier.parties, index
        self._barrier, self._board = barrier, board

    def _sums(self, mine: list[Tensor]) -> list[Tensor]:
        self._board[self.index] = [tensor.clone() for tensor in mine]
        self._barrier.wait()
        sums = [torch.stack(parts).sum(0) for parts in zip(*(self._board[i] for i in range(self.count)), strict=True)]
        self._barrier.wait()
        return sums

    def total(self, values: Tensor) -> Tensor:
        return self._sums([values])[0]

    def sum_gradients(self, gradients: list[Tensor]) -> None:
        for gradient, total in zip(gradients, self._sums(gradients), strict=True):
            gradient.copy_(total)


@pytest.mark.parametrize("divided", [(8, 1), (4, 2), (1, 8), (3, 3)])
def test_law_6_micro_batches(
    divided: tuple[int, int], trainer_of: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B-33: the mean of micro-batches' means is not the mean over tokens, when lengths are unequal."""
    source = Rows(samples_of(8), 32)
    micro, accumulation = divided
    config = replace(BASE, micro_batch=micro, gradient_accumulation=accumulation, steps=1)
    trainer = trainer_of(config, source)
    got = gradients_of(trainer, monkeypatch)
    whole = trainer_of(replace(BASE, micro_batch=8, steps=1), source)
    expected = gradients_of(whole, monkeypatch)
    assert trainer.loss == pytest.approx(whole.loss, rel=1e-6)
    assert got.keys() == expected.keys()
    assert max(relative(got[name], expected[name]) for name in expected) < 1e-5


def test_law_6_replicas(trainer_of: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """B-33, across replicas: two of (2, 2) see the gradient of one of 8, though their rows hold unequal targets."""
    source = Rows(samples_of(7), 32)  # seven rows for eight places: one micro-batch is half empty
    expected_trainer = trainer_of(replace(BASE, micro_batch=8, steps=1), source)
    expected = gradients_of(expected_trainer, monkeypatch)
    barrier, board = threading.Barrier(2), dict[int, list[Tensor]]()
    config = replace(BASE, micro_batch=2, gradient_accumulation=2, steps=1)
    trainers = [trainer_of(config, source, ranks=Threads(i, barrier, board), name=f"r{i}") for i in range(2)]
    found: dict[int, dict[str, Tensor]] = {}

    def work(i: int) -> None:
        found[i] = gradients_of(trainers[i], monkeypatch)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    for i in range(2):
        assert trainers[i].loss == pytest.approx(expected_trainer.loss, rel=1e-6)
        assert max(relative(found[i][name], expected[name]) for name in expected) < 1e-5


def test_an_empty_update_leaves_weights_alone(trainer_of: MakeTrainer) -> None:
    """B-35: an update without a target must not divide by zero, nor let decay or momentum move the weights."""
    blocks = Blocks(Samples.of([([1] * 10, 9), ([2] * 11, 1)], 64), 4)
    trainer = trainer_of(replace(BASE, micro_batch=1, steps=5), blocks)
    result = trainer.run()
    losses = curve(trainer)
    assert result.num_empty == losses.count(None) > 0  # type: ignore[arg-type]
    assert all(tensor.isfinite().all() for tensor in trainer.weights.values().values())
    assert any(e.name == "warning" and "none of its" in e.fields["text"] for e in trainer.events)  # type: ignore[attr-defined]


# ---- law 7 ---------------------------------------------------------------------------------------------------------

VARIANTS = {
    "fp32": BASE,
    "accumulation": replace(BASE, micro_batch=2, gradient_accumulation=2),
    "muon": replace(BASE, optimizer=OptimizerConfig("muon", 1e-3, muon_weight_decay=0.1)),
    "bf16": replace(BASE, precision="bf16", ema=0.9),
    "bf16 without masters": replace(BASE, precision="bf16", masters=False),
    "fp16": replace(BASE, precision="fp16", loss_scale=2.0**40),
    "lora": replace(BASE, lora=LoraConfig(rank=2, dropout=0.2)),
}


@pytest.mark.parametrize("stop", [3, 4, 5])
@pytest.mark.parametrize("variant", VARIANTS)
def test_law_7(variant: str, stop: int, trainer_of: MakeTrainer) -> None:
    """B-37: with dropout and shuffling, ten updates straight are a few, a stop, a resume and the rest: bitwise.

    Five updates are an epoch here, so this stops in the middle of one and at its end.
    """
    config = replace(VARIANTS[variant], dropout=0.1)
    source = Rows(samples_of(20), 32)
    straight = trainer_of(config, source, name="straight")
    straight.run()
    first = trainer_of(config, source, name="halves")
    first.run(lambda: first.update == stop)
    assert first.update == stop
    torch.manual_seed(99)
    np.random.seed(99)
    second = trainer_of(config, source, name="halves")
    saved = second.checkpoints.last()
    assert saved is not None
    second.resume(saved)
    second.run()
    assert curve(first) + curve(second) == curve(straight)
    assert curve(first, "learning_rate") + curve(second, "learning_rate") == curve(straight, "learning_rate")
    ours, theirs = weights(second), weights(straight)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    mine, other = second.updater.state(), straight.updater.state()
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[name], other[name]) for name in other)
    assert second._average.keys() == straight._average.keys()
    assert all(torch.equal(second._average[name], straight._average[name]) for name in straight._average)
    if straight.scaler is not None and second.scaler is not None:
        assert straight.scaler.num_skipped > 0
        assert second.scaler.state() == straight.scaler.state()


def test_another_run_is_not_gone_on_with(trainer_of: MakeTrainer) -> None:
    """Catches a resume with another seed, batch or data, which would mix two runs silently."""
    from bluejay.errors import ConfigError

    first = trainer_of(data_digest="a")
    first.run(lambda: True)
    saved = first.checkpoints.last()
    assert saved is not None
    for change, name in (
        ({"seed": 6}, "seed (was 5, is 6)"),
        ({"micro_batch": 2}, "micro_batch"),
        ({"optimizer": OptimizerConfig(learning_rate=1e-3)}, "optimizer.learning_rate"),
    ):
        with pytest.raises(ConfigError) as caught:
            trainer_of(replace(BASE, **change), data_digest="a").resume(saved)  # type: ignore[arg-type]
        assert name in caught.value.found
    with pytest.raises(ConfigError) as caught:
        trainer_of(data_digest="b").resume(saved)
    assert "the training data" in caught.value.found
    trainer_of(replace(BASE, save_every=2, keep=5), data_digest="a").resume(saved)


def test_an_adapter_is_not_gone_on_with_over_other_weights(
    trainer_of: MakeTrainer, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """Catches a resume of an adapter after its base, of the same name, became another model."""
    from bluejay.errors import ConfigError

    base = tmp_path / "base"
    shutil.copytree(tiny_checkpoint, base)
    config = replace(BASE, lora=LoraConfig(rank=2))
    first = trainer_of(config, directory=base)
    first.run(lambda: True)
    saved = first.checkpoints.last()
    assert saved is not None
    trainer_of(config, directory=base).resume(saved)
    save_file({n: 1.001 * t for n, t in load_file(base / "model.safetensors").items()}, base / "model.safetensors")
    with pytest.raises(ConfigError) as caught:
        trainer_of(config, directory=base).resume(saved)
    assert f"the weights under the adapters, in {base}" in caught.value.found


def test_merged_adapters_leave_the_rest_as_it_was(trainer_of: MakeTrainer, tiny_checkpoint: Path) -> None:
    """Catches a base that was rounded to bf16 for training and saved so: what has no adapter comes out bit for bit, the
    rest is added in fp32."""
    from bluejay.build import read_weights

    config = replace(BASE, precision="bf16", steps=3, lora=LoraConfig(rank=2, merge=True))
    trainer = trainer_of(config)
    result = trainer.run()
    assert result.model is not None
    base, merged, adapters = read_weights(tiny_checkpoint), read_weights(result.model), weights(trainer)
    assert merged.keys() == base.keys()
    for name, tensor in base.items():
        owner = name.removesuffix(".weight")
        expected = tensor
        if f"{owner}.lora_A" in adapters:
            expected = tensor + 8.0 * (adapters[f"{owner}.lora_B"] @ adapters[f"{owner}.lora_A"])
            assert not torch.equal(expected, tensor)
        assert torch.equal(merged[name], expected)


# ---- against a loop written plainly --------------------------------------------------------------------------------


def test_the_curve_of_a_plain_loop(trainer_of: MakeTrainer, tiny_checkpoint: Path) -> None:
    """200 updates equal transformers and torch.optim within 1e-5: catches a fault in any part of an update."""
    from transformers import GPTJForCausalLM

    config = replace(
        BASE,
        steps=200,
        micro_batch=2,
        gradient_accumulation=2,
        optimizer=OptimizerConfig(learning_rate=1e-3, weight_decay=0.1, betas=(0.9, 0.98), clip_norm=1.0),
        schedule=ScheduleConfig("linear", warmup=20),
    )
    samples = samples_of(30)
    trainer = trainer_of(config, Rows(samples, 32))
    trainer.run()
    ours = curve(trainer)

    model = GPTJForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32).train()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-3, betas=(0.9, 0.98)
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: (i + 1) / 20 if i < 20 else (200 - i) / 180)
    for update in range(200):
        chosen = trainer.reader.chosen(update)[1]
        rows = [
            torch.from_numpy(samples.ids[samples.starts[i] : samples.starts[i + 1]].astype(np.int64)) for i in chosen
        ]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        assert ours[update] == pytest.approx(loss.item(), abs=1e-5), update
    assert ours[-1] < ours[0] / 2


def test_the_checkpoint_loads_in_transformers(trainer_of: MakeTrainer, tmp_path: Path) -> None:
    """Catches names, dtype or a stale copy in the result: transformers must compute our logits, for the result and for
    every checkpoint of the run."""
    from transformers import GPTJForCausalLM

    trainer = trainer_of(replace(BASE, save_every=5))
    result = trainer.run()
    ids = torch.tensor([[3, 9, 27, 41, 5, 60, 7]])
    assert result.model is not None
    expected = trainer.built.model.eval()(ids)
    for folder in (result.model, tmp_path / "run" / "checkpoints" / "update-00000010" / "model"):
        theirs = GPTJForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            torch.testing.assert_close(theirs(ids).logits, expected, atol=1e-4, rtol=0)


# ---- what must not change the numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{"recompute": True}, {"compile": "inductor"}])
def test_ways_of_computing(change: dict[str, Any], trainer_of: MakeTrainer) -> None:
    """Catches a recomputed or compiled step with other gradients than the eager one."""
    source = Blocks(samples_of(8), 16)  # one shape only
    plain = trainer_of(replace(BASE, steps=4), source, layers=1)
    plain.run()
    other = trainer_of(replace(BASE, steps=4, **change), source, name="other", layers=1)
    result = other.run()
    assert (result.compile_seconds > 0) is ("compile" in change)
    assert curve(other) == pytest.approx(curve(plain), rel=1e-5)
    ours, theirs = weights(other), weights(plain)
    assert max(relative(ours[name], theirs[name]) for name in theirs) < 1e-3


def test_a_second_compiled_run_starts_warm(trainer_of: MakeTrainer) -> None:
    """Catches a step that every process traces, differentiates and plans anew, though its code is kept."""
    import torch._dynamo

    source = Blocks(samples_of(8), 16)
    for name in ("first", "second"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        trainer_of(replace(BASE, steps=1, compile="inductor"), source, layers=1, name=name).run()
    assert torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"] == 1


def test_a_compiled_run_leaves_the_model_as_it_was(trainer_of: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches tiles that stay in an instance, which no program can be made of then; and a rate that counts the tokens
    of an update that compiled."""
    import bluejay.train.step as module

    calls: list[bool] = []

    def attend(*tensors: Tensor, **how: Any) -> Tensor:
        calls.append(True)
        return attend_in_tiles(*tensors, **how)

    monkeypatch.setattr(module, "attend_in_tiles", attend)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    trainer = trainer_of(replace(BASE, steps=3, precision="bf16", compile="inductor"), Blocks(samples_of(), 16))
    result = trainer.run()
    assert len(calls) == 3 * 2
    assert all("attend" not in vars(block.attn) for block in trainer.built.model.transformer.h)
    updates = [e.fields for e in trainer.events if e.name == "train.update"]  # type: ignore[attr-defined]
    assert [fields["compiled"] for fields in updates] == [True, False, False]
    assert updates[0]["tokens_per_second"] is None
    tokens, seconds = (sum(fields[name] for fields in updates[1:]) for name in ("num_tokens", "seconds"))
    assert result.tokens_per_second == pytest.approx(tokens / seconds)


def test_recomputing_draws_the_same_dropout(trainer_of: MakeTrainer) -> None:
    """Catches a layer that is computed again with another dropout mask, which makes its gradient that of nothing."""
    config = replace(BASE, steps=4, dropout=0.3)
    plain, again = trainer_of(config), trainer_of(replace(config, recompute=True), name="again")
    plain.run()
    again.run()
    assert curve(again) == pytest.approx(curve(plain), rel=1e-6)


def test_attention_within_documents(trainer_of: MakeTrainer, tiny_model: GPTJ) -> None:
    """Catches a packed document that sees the one before it: its loss must be what it is alone."""
    samples = samples_of(6)
    blocks = Blocks(samples, 200, within_documents=True)
    packed, num = trainer_of(BASE, blocks).evaluate(blocks)
    total = 0.0
    for i in range(len(samples)):
        ids = torch.from_numpy(samples.ids[samples.starts[i] : samples.starts[i + 1]].astype(np.int64))[None]
        with torch.no_grad():
            total += float(nn.functional.cross_entropy(tiny_model(ids[:, :-1])[0], ids[0, 1:], reduction="sum"))
    assert num == len(samples.ids) - len(samples)
    assert packed == pytest.approx(total / num, rel=1e-5)
    across = Blocks(samples, 200)
    assert trainer_of(BASE, across).evaluate(across)[0] != pytest.approx(packed, rel=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_trained_for_packing(precision: str, trainer_of: MakeTrainer) -> None:
    """Catches a rounding in training that is not packing's own: the saved model, packed, gives the logits that the
    trained one had in its last forward pass; and its weights did move between codes."""
    from bluejay.build import read_weights
    from bluejay.config import QuantSpec
    from bluejay.quant import quantize_model

    config = replace(BASE, precision=precision, qat="int4-g16", steps=6)
    trainer = trainer_of(config)
    before = weights(trainer)
    result = trainer.run()
    assert result.model is not None
    ids = torch.tensor([[3, 9, 27, 41, 5, 60, 7, 11]])
    model = trainer.built.model.eval()
    with torch.no_grad():
        where = model.locate(ids, None, None)
        x = model.embed(ids).to({"fp32": torch.float32, "bf16": torch.bfloat16}[precision])
        for block in model.transformer.h:
            x = block(x, where, None)
        expected = model.logits(x).float()
    packed = GPTJ(model.config).eval()
    packed.load_state_dict(dict(read_weights(result.model)))
    plain = packed(ids)
    quantize_model(packed, QuantSpec.parse("int4-g16"))
    tolerance = 1e-4 if precision == "fp32" else 0.02 * float(expected.abs().max())
    torch.testing.assert_close(packed(ids), expected, atol=tolerance, rtol=0)
    assert float((plain - expected).abs().max()) > 10 * tolerance or precision == "bf16"
    after = weights(trainer)
    name = "transformer.h.0.mlp.fc_in.weight"
    assert bool((after[name] != before[name]).any())
    assert curve(trainer)[-1] < curve(trainer)[0]


# ---- precisions ----------------------------------------------------------------------------------------------------


def test_precisions_agree(trainer_of: MakeTrainer) -> None:
    """fp16 and bf16 with masters follow the fp32 curve: every loss within 0.5 % and 2 %.

    Catches products or sums in half precision where fp32 was meant, and a loss scale that is left in the gradients.
    """
    config = replace(BASE, steps=20, micro_batch=8, optimizer=OptimizerConfig(learning_rate=1e-3))
    curves = {}
    for precision in ("fp32", "bf16", "fp16"):
        trainer = trainer_of(replace(config, precision=precision), name=precision)
        trainer.run()
        curves[precision] = np.array(curve(trainer))
    assert curves["fp32"][-1] < 0.9 * curves["fp32"][0]
    assert np.abs(curves["bf16"] / curves["fp32"] - 1).max() < 0.02
    assert np.abs(curves["fp16"] / curves["fp32"] - 1).max() < 0.005


def test_precisions_agree_on_nano(tmp_path: Path) -> None:
    """The bundled model: three losses in bf16 with masters are within 0.2 % of fp32's, in fp16 within 0.02 %.

    Catches what random weights of a toy hide: activations that leave fp16's range, a head or norm in half precision.
    """
    words = np.random.default_rng(0).integers(1, 4096, 2 * 16 * 3 + 1).tolist()
    curves = {}
    for precision in ("fp32", "bf16", "fp16"):
        config = replace(BASE, model="nano", steps=3, micro_batch=2, precision=precision, out=str(tmp_path / precision))
        config = replace(config, optimizer=OptimizerConfig(learning_rate=1e-3), schedule=ScheduleConfig("constant"))
        config = replace(config, loss_scale=256.0)  # 65,536 overflows at first: a skipped update is another curve
        events: list[Event] = []
        trainer = Trainer(prepare(config), config, Blocks(Samples.of([(words, 0)], 4096), 16), observe=events.append)
        trainer.events = events  # type: ignore[attr-defined]
        trainer.run()
        curves[precision] = np.array(curve(trainer))
    assert np.abs(curves["bf16"] / curves["fp32"] - 1).max() < 0.002, curves
    assert np.abs(curves["fp16"] / curves["fp32"] - 1).max() < 0.0002, curves


def test_gradients_of_half_precision(trainer_of: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a loss scale that is left in the gradients, or taken out twice: Adam's updates hardly depend on it, so no
    curve shows it; clipping and Muon do. bf16 is within 3 % of fp32's gradient, fp16 within 0.5 %."""
    found: dict[str, Tensor] = {}
    for precision in ("fp32", "bf16", "fp16"):
        trainer = trainer_of(replace(BASE, steps=1, micro_batch=8, precision=precision), name=precision)

        def note(*step: object, weights: Weights = trainer.weights, precision: str = precision) -> None:
            found[precision] = torch.cat([gradient.flatten() for gradient in weights.gradients().values()])

        monkeypatch.setattr(trainer.updater, "step", note)
        trainer.run()
    assert float(found["fp32"].norm()) == pytest.approx(1.0, rel=1e-4)  # clipped
    assert relative(found["bf16"], found["fp32"]) < 0.03
    assert relative(found["fp16"], found["fp32"]) < 0.005


def test_gradient_of_a_frequent_token(trainer_of: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an embedding, shared with the head, that adds up a row for every occurrence of a token in bf16: after
    some hundred the sum stops growing, and the commonest tokens learn least."""
    source = Blocks(Samples.of([([7] * 2049, 0)], 64), 32)
    found: dict[str, Tensor] = {}
    for precision in ("fp32", "bf16"):
        config = replace(BASE, steps=1, micro_batch=64, precision=precision)
        trainer = trainer_of(config, source, name=precision, tied=True)
        found[precision] = gradients_of(trainer, monkeypatch)["transformer.wte.weight"]
    assert relative(found["bf16"], found["fp32"]) < 0.03


def test_masters_move_in_bf16(trainer_of: MakeTrainer) -> None:
    """B-38: at a rate of 5e-6 no bf16 weight moves, and no error says so; the masters must, as fp32 weights do.

    The weights begin as numbers that bf16 holds, so that rounding them is no movement.
    """
    moved, curves = {}, {}
    for precision in ("fp32", "bf16"):
        config = replace(
            BASE,
            steps=50,
            precision=precision,
            optimizer=OptimizerConfig(learning_rate=5e-6),
            schedule=ScheduleConfig("constant"),
        )
        trainer = trainer_of(config, name=precision, rounded=True)
        before = weights(trainer)
        trainer.run()
        after = trainer.weights.values()
        moved[precision] = {name: after[name] != before[name] for name in before}
        curves[precision] = np.array(curve(trainer))
    assert np.abs(curves["bf16"] / curves["fp32"] - 1).max() < 0.02
    both = sum(int((moved["fp32"][name] & moved["bf16"][name]).sum()) for name in moved["fp32"])
    assert both >= 0.9 * sum(int(m.sum()) for m in moved["fp32"].values())


def test_without_masters_it_warns_and_moves(trainer_of: MakeTrainer) -> None:
    """B-38: a user who refuses masters is told; stochastic rounding moves as far as fp32 does, on average."""
    config = replace(BASE, steps=40, optimizer=OptimizerConfig(learning_rate=1e-4), schedule=ScheduleConfig("constant"))
    full = trainer_of(config)
    rounded = trainer_of(replace(config, precision="bf16", masters=False), name="bf16")
    assert any(e.name == "warning" and "without fp32 masters" in e.fields["text"] for e in rounded.events)  # type: ignore[attr-defined]
    before = {name: t.float() for name, t in weights(rounded).items()}
    start = weights(full)
    full.run()
    rounded.run()
    name = "transformer.h.0.mlp.fc_in.weight"
    wanted = weights(full)[name] - start[name]
    got = weights(rounded)[name].float() - before[name]
    slope = float((got * wanted).sum() / (wanted * wanted).sum())
    assert slope == pytest.approx(1, abs=0.15)


def test_an_overflow_is_skipped_and_counted(trainer_of: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an infinite gradient that reaches the weights, and one that is skipped without a word."""
    trainer = trainer_of(replace(BASE, precision="fp16", steps=4))
    step = trainer._step
    gradients = step.gradients

    def overflow_once(batches: Any, scale: Tensor, seeds: Any) -> Tensor:
        loss = gradients(batches, scale, seeds)
        if trainer.update == 1:
            next(iter(trainer.weights)).parameter.grad[0, 0] = math.inf  # type: ignore[index]
        return loss

    monkeypatch.setattr(step, "gradients", overflow_once)
    before: dict[str, Tensor] = {}
    result = trainer.run(lambda: before.update(weights(trainer)) or False if trainer.update == 1 else False)
    assert result.num_skipped == 1
    assert curve(trainer, "num_skipped") == [0, 1, 1, 1]
    assert curve(trainer, "loss_scale") == [65536.0, 32768.0, 32768.0, 32768.0]
    assert all(t.isfinite().all() for t in trainer.weights.values().values())


def test_nan_stops_the_run(trainer_of: MakeTrainer) -> None:
    """B-39: a loss that is not a number is named, with the last good checkpoint, before it reaches the weights."""
    trainer = trainer_of(replace(BASE, save_every=2, precision="fp32"))

    def poison() -> bool:
        if trainer.update == 3:
            trainer.built.model.transformer.ln_f.bias.data[0] = math.nan
        return False

    with pytest.raises(TrainingError) as caught:
        trainer.run(poison)
    assert "a loss of nan" in caught.value.found
    assert "update 4 of 10" in caught.value.asked
    assert "update-00000002" in caught.value.fix
    assert trainer.checkpoints.last().update == 2  # type: ignore[union-attr]


def test_a_validation_loss_that_is_none_stops_the_run(trainer_of: MakeTrainer) -> None:
    """B-39: nothing is less than nan, so a first evaluation that gives it would stay the best to the end."""
    valid = Blocks(Samples.of([([5] * 9, 8)], 64), 4)  # its first block has no target
    config = replace(BASE, data=DataConfig(valid="given"), eval_every=2, eval_rows=1, save_every=1)
    with pytest.raises(TrainingError) as caught:
        trainer_of(config, valid=valid).run()
    assert "nan over 0 targets" in caught.value.found
    assert "update-00000001" in caught.value.fix


def test_saving_beside_the_next_updates(trainer_of: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a checkpoint that mixes weights of one update with those of the next: written while training goes on,
    each is the one that would have been written at once. And a failed one must not go unnoticed."""
    import bluejay.train.loop as module

    config = replace(BASE, save_every=3, keep=9, ema=0.9, steps=7)
    at_once = trainer_of(config, name="at once")
    at_once.run()
    beside = trainer_of(replace(config, async_save=True), name="beside")
    write, updated = module.save, threading.Event()

    def write_late(*arguments: Any) -> None:
        assert beside.update == 7 or updated.wait(30)
        write(*arguments)

    def note() -> bool:
        if beside.update in (5, 7):
            updated.set()  # two updates after the snapshot
        return False

    with monkeypatch.context() as patched:
        patched.setattr(module, "save", write_late)
        beside.run(note)
    saves = [e.fields["update"] for e in beside.events if e.name == "train.save"]  # type: ignore[attr-defined]
    assert saves == [3, 6, 7]
    for a, b in zip(at_once.checkpoints.all(), beside.checkpoints.all(), strict=True):
        for file in ("model/model.safetensors", "state.safetensors"):
            assert (a.folder / file).read_bytes() == (b.folder / file).read_bytes()

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save", full)
    failing = trainer_of(replace(config, async_save=True), name="failing")
    with pytest.raises(TrainingError) as caught:
        failing.run()
    assert "No space left" in caught.value.found
    assert failing.checkpoints.all() == []


def test_early_stopping_and_the_best(trainer_of: MakeTrainer) -> None:
    """Catches a patience that counts updates, a best checkpoint that is deleted, and a result that is the last."""
    valid = Rows(samples_of(6, seed=9), 32)
    config = replace(
        BASE,
        data=DataConfig(valid="given"),
        steps=60,
        eval_every=2,
        patience=3,
        result="best",
        keep=1,
        optimizer=OptimizerConfig(learning_rate=0.02),
    )
    trainer = trainer_of(config, Rows(samples_of(4), 32), valid=valid)
    result = trainer.run()
    evaluations = [e.fields for e in trainer.events if e.name == "train.eval"]  # type: ignore[attr-defined]
    best = min(evaluations, key=lambda e: e["loss"])
    assert result.stopped == "early"
    assert result.best_update == best["update"] == result.update - 6
    assert {saved.update for saved in trainer.checkpoints.all()} == {best["update"], result.update}
    from bluejay.build import read_weights

    assert result.model is not None
    chosen = read_weights(trainer.checkpoints.folder / f"update-{best['update']:08d}" / "model")
    stored = read_weights(result.model)
    assert all(torch.equal(stored[name], chosen[name]) for name in chosen)
    assert any(not torch.equal(stored[name], tensor) for name, tensor in trainer.weights.values().items())


def test_the_moving_average_is_the_result(trainer_of: MakeTrainer) -> None:
    """Catches an average that lags by an update, one that is evaluated but not saved, and one that replaces the weights
    that are trained."""
    from bluejay.build import read_weights

    valid = Rows(samples_of(5, seed=9), 32)
    config = replace(BASE, ema=0.8, data=DataConfig(valid="given"))
    trainer = trainer_of(config, valid=valid)
    plain = trainer_of(BASE, name="plain")
    average = {"": weights(plain)}

    def follow() -> bool:
        now = plain.weights.values()
        average[""] = {name: 0.8 * old + 0.2 * now[name] for name, old in average[""].items()}
        return False

    plain.run(follow)
    result = trainer.run()
    assert curve(trainer) == curve(plain)
    assert result.model is not None
    stored = read_weights(result.model)
    for name, expected in average[""].items():
        torch.testing.assert_close(stored[name], expected, atol=1e-6, rtol=1e-5)
    plain.weights.set(average[""])
    assert result.valid_loss == pytest.approx(plain.evaluate(valid)[0], rel=1e-5)


def test_the_model_stops_where_its_samples_did(trainer_of: MakeTrainer) -> None:
    """B-32 end to end: over-fitted to four samples, the model ends each of them with the end of text."""
    ids = [[5, 9, 13, 0], [6, 9, 14, 21, 33, 0], [7, 40, 0], [8, 40, 41, 42, 0]]
    source = Rows(Samples.of([(one, 1) for one in ids], 64), 32)
    trainer = trainer_of(replace(BASE, steps=60, optimizer=OptimizerConfig(learning_rate=0.01)), source)
    trainer.run()
    model = trainer.built.model.eval()
    for sample in ids:
        written = sample[:1]
        while len(written) < 12 and written[-1] != 0:
            written.append(int(model(torch.tensor([written]))[0, -1].argmax()))
        assert written == sample


def test_alone_is_nothing() -> None:
    """Catches a single replica that changes what it is given."""
    values = torch.tensor([1.0, 2.0])
    assert Alone().total(values) is values
