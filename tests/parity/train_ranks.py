"""What each rank of tests/parity/test_train_parallel.py does: one world of four trains under every layout.

See world.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from world import GROUPS, WORLD, Checks, run_rank

from bluejay.build import Built, Programs
from bluejay.config import DataConfig, Layout, ModelConfig, OptimizerConfig, RunConfig, ScheduleConfig, TrainConfig
from bluejay.errors import BluejayError, ConfigError
from bluejay.events import Event
from bluejay.models import GPTJ
from bluejay.parallel import PlannedStep, apply, as_one, build_mesh
from bluejay.parallel.cut import _own_randomness
from bluejay.parallel.mesh import WORKING_SECONDS
from bluejay.train import Rows, Samples, Trainer, TrainingError, plan_of, ranks_of, step_of

MODEL = ModelConfig(vocab_size=65, n_positions=32, n_embd=32, n_layer=4, n_head=4, rotary_dim=4, dtype="float32")
# Twelve rows an update: in six micro-batches on one replica, in three on each of two. Gradients are clipped every time.
BASE = TrainConfig(
    steps=8,
    micro_batch=2,
    global_batch=12,
    seed=5,
    precision="fp32",
    compile="eager",
    data=DataConfig(valid="given", length=24),
    eval_every=4,
    optimizer=OptimizerConfig(learning_rate=3e-3, weight_decay=0.1, clip_norm=0.5),
    schedule=ScheduleConfig("linear", warmup=3),
)
PIPELINE = Layout(stages=2, micro_batches=2)
LAYOUTS = {
    "pipeline 2": PIPELINE,
    "tensor 2": Layout(tensor=2),
    "data 2": Layout(replicas=2),
    "data 2 sharded": Layout(replicas=2, shard=True),
    "pipeline 2 x tensor 2": Layout(stages=2, tensor=2, micro_batches=3),
}
OTHERS = {
    "pipeline 2, interleaved": Layout(stages=2, schedule="interleaved", chunks=2, micro_batches=6),
    "pipeline 2, zero bubble": Layout(stages=2, schedule="zero-bubble", micro_batches=6),
    "pipeline 2 x tensor 2, zero bubble": Layout(stages=2, tensor=2, schedule="zero-bubble", chunks=2, micro_batches=6),
    "pipeline 3": Layout(layers_per_device=(1, 2, 1), micro_batches=3, schedule="gpipe"),
    "pipeline 2 x data 2": Layout(stages=2, replicas=2, micro_batches=3),
    "pipeline 2 x data 2 sharded": Layout(stages=2, replicas=2, shard=True, micro_batches=1, schedule="gpipe"),
    "tensor 2 x data 2 sharded": Layout(tensor=2, replicas=2, shard=True),
}


def samples_of(num: int, seed: int) -> Samples:
    """Samples of unequal lengths."""
    rng = np.random.default_rng(seed)
    return Samples.of([(rng.integers(1, 64, rng.integers(3, 26)).tolist(), 0) for _ in range(num)], 65)


TRAIN, VALID = Rows(samples_of(40, 0), 24), Rows(samples_of(11, 1), 24)


def noisy_model(config: ModelConfig) -> GPTJ:
    """Matrices from N(0, 0.3), noise on everything of one dim."""
    generator = torch.Generator().manual_seed(5)
    torch.manual_seed(5)
    model = GPTJ(config)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.3
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
    return model.requires_grad_(False)


@dataclass
class Run:
    """A trainer and what it told."""

    trainer: Trainer
    events: list[Event] = field(default_factory=list)

    def curve(self, name: str = "loss", event: str = "train.update") -> list[float]:
        return [e.fields[name] for e in self.events if e.name == event]


FOLDER, NUMBERS = Path(), count()
MESHES: dict[Layout, Any] = {}


def folder_for(what: str) -> str:
    """A fresh folder; only the first rank's is written."""
    return str(FOLDER / f"{what}-{next(NUMBERS)}")


def trainer_over(config: TrainConfig, out: str, model: ModelConfig = MODEL, mesh: Any = None) -> Run:
    """A trainer over this rank's part of the noisy model, in the folder `out`."""
    config = replace(config, out=out)
    made = plan_of(config, model)
    pieces = apply(noisy_model(model), made, mesh) if mesh is not None else [noisy_model(model)]
    run, tokenizer = RunConfig(model="tiny"), None
    context = model.n_positions
    built = Built(
        run,
        as_one(pieces),
        tokenizer,  # type: ignore[arg-type]
        Programs(run),
        torch.device("cpu"),
        torch.float32,
        context,
        (),
        True,
        FOLDER / "tokenizer",
        None,
        tuple(pieces),
    )
    events: list[Event] = []
    ranks, step = ranks_of(made, mesh), step_of(made, mesh)
    return Run(Trainer(built, config, TRAIN, VALID, events.append, ranks=ranks, step=step), events)


@cache
def alone(config: TrainConfig, model: ModelConfig = MODEL) -> tuple[Run, dict[str, Tensor]]:
    """The run of one process, and its weights at the end."""
    run = trainer_over(replace(config, parallel=Layout()), folder_for(f"alone-{dist.get_rank()}"), model)
    run.trainer.run()
    return run, run.trainer.weights.values()


def in_mesh(layout: Layout) -> Any:
    """The mesh of a layout, or None on a rank that is not in it. All ranks call this."""
    if layout not in MESHES:
        MESHES[layout] = build_mesh(layout)
    return MESHES[layout] if dist.get_rank() < layout.num_devices else None


def same_curve(found: Run, wanted: Run, relative: float) -> None:
    for name, event in (("loss", "train.update"), ("gradient_norm", "train.update"), ("loss", "train.eval")):
        ours, theirs = found.curve(name, event), wanted.curve(name, event)
        assert ours == pytest.approx(theirs, rel=relative), f"{name} of {event}: {ours}, one process {theirs}"


def same_weights(found: dict[str, Tensor], wanted: dict[str, Tensor], relative: float) -> None:
    """Only the first rank has whole ones."""
    if dist.get_rank() > 0:
        return
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        error = float((found[name] - weight).norm() / weight.norm())
        assert error <= relative, f"{name}: relative difference {error:.3g}"


def curve_check(layout: Layout, relative: float = 1e-4, model: ModelConfig = MODEL, **changes: Any) -> None:
    """Eight updates and two evaluations are those of one process."""
    mesh = in_mesh(layout)
    if mesh is None:
        return
    config = replace(BASE, **changes)
    wanted, weights = alone(config, model)
    run = trainer_over(replace(config, parallel=layout), folder_for("curve"), model, mesh)
    result = run.trainer.run()
    found = run.trainer._ranks.whole(run.trainer.weights.values())
    # No collective below: a rank that finds a difference must not leave the others waiting.
    assert result.num_tokens == wanted.trainer._num_tokens
    assert min(wanted.curve("gradient_norm")) > config.optimizer.clip_norm, "nothing is clipped"
    assert [e.fields["num_targets"] for e in run.events if e.name == "train.eval"] == [VALID.num_targets] * 2
    start = run.events[0].fields
    assert start["num_parameters"] == wanted.events[0].fields["num_parameters"]
    same_curve(run, wanted, relative)
    same_weights(found, weights, 10 * relative)


def evaluation_check(replicas: int) -> None:
    """B-58: 11 rows in batches of 4 on several replicas are 11 rows, each once; the last batches are not full."""
    layout = Layout(replicas=replicas)
    mesh = in_mesh(layout)
    if mesh is None:
        return
    config = replace(BASE, micro_batch=4, gradient_accumulation=1, global_batch=0)
    wanted = trainer_over(config, folder_for("alone")).trainer.evaluate(VALID)
    run = trainer_over(replace(config, parallel=layout), folder_for("evaluated"), mesh=mesh)
    found, some = run.trainer.evaluate(VALID), run.trainer.evaluate(VALID, 5)
    assert found == pytest.approx(wanted, rel=1e-6)
    assert some[1] == int(sum(VALID.batch(np.array([row]), 1).num_targets for row in np.sort(VALID.order(0, 0))[:5]))


def resume_check(first: Layout, then: Layout, bitwise: bool = False, **changes: Any) -> None:
    """Five updates under one layout, a stop, the rest under another: one process's eight, or straight ones' bits."""
    meshes = in_mesh(first), in_mesh(then)
    if meshes[0] is None or meshes[1] is None:
        return
    config = replace(BASE, ema=0.9, **changes)
    out = [folder_for("resume")]
    dist.broadcast_object_list(out, group=GROUPS[first.num_devices])
    one = trainer_over(replace(config, parallel=first), out[0], mesh=meshes[0])
    stopped = one.trainer.run(lambda: dist.get_rank() == 1 and one.trainer.update == 5)  # noticed on one rank only
    two = trainer_over(replace(config, parallel=then), out[0], mesh=meshes[1])
    saved = two.trainer.checkpoints.last()
    assert saved is not None
    two.trainer.resume(saved)
    two.trainer.run()
    ranks = two.trainer._ranks
    found, average = ranks.whole(two.trainer.weights.values()), ranks.whole(two.trainer._average)
    if bitwise:
        straight = trainer_over(replace(config, parallel=first), folder_for("straight"), mesh=meshes[0])
        straight.trainer.run()
        theirs = straight.trainer._ranks
        wanted = theirs.whole(straight.trainer.weights.values()), theirs.whole(straight.trainer._average)
        assert one.curve() + two.curve() == straight.curve()
        assert all(torch.equal(found[name], wanted[0][name]) for name in wanted[0])
        assert all(torch.equal(average[name], wanted[1][name]) for name in wanted[1])
        return
    whole, weights = alone(config)
    assert stopped.stopped == "interrupted"
    assert one.curve() + two.curve() == pytest.approx(whole.curve(), rel=1e-4)
    same_weights(found, weights, 1e-3)
    same_weights(average, whole.trainer._average, 1e-3)


def rows_check() -> None:
    """A checkpoint that does not say how many rows its updates have is one replica's: it goes on with as many."""
    layout = LAYOUTS["data 2"]
    mesh = in_mesh(layout)
    if mesh is None:
        return
    out = [folder_for("rows")]
    dist.broadcast_object_list(out, group=GROUPS[2])
    config = replace(BASE, parallel=layout, global_batch=0, gradient_accumulation=3, eval_every=0)
    run = trainer_over(config, out[0], mesh=mesh)
    run.trainer.run(lambda: True)
    saved = run.trainer.checkpoints.last()
    assert saved is not None
    state = saved.state()
    del state["rows_per_update"]
    with pytest.raises(ConfigError, match=r"were 6, are 12"):
        run.trainer._check_same(saved, state)


def patience_check() -> None:
    """Ranks wait longer for the first one's checkpoint than they do for each other to come."""
    mesh = in_mesh(Layout(replicas=WORLD))  # the axis is the whole world, whose limit is `join`'s
    backend = mesh.get_group("replica")._get_backend(torch.device("cpu"))
    assert backend.options._timeout.total_seconds() == WORKING_SECONDS


def stale_check(layout: Layout) -> None:
    """Weights that change after an evaluation are those of the next pass, forward and backward."""
    mesh = in_mesh(layout)
    if mesh is None:
        return
    run = trainer_over(replace(BASE, parallel=layout), folder_for("stale"), mesh=mesh)
    batch, step = TRAIN.batch(np.arange(2), 2), run.trainer._step
    assert isinstance(step, PlannedStep)
    losses = [float(step.loss(batch))]
    run.trainer.weights.set({name: value * 0.5 for name, value in run.trainer.weights.values().items()})
    losses += [float(step.loss(batch)), float(step.gradients([batch], torch.ones(()), [0]))]
    run.trainer.weights.forget_gradients()
    losses.append(float(step.loss(batch)))
    assert losses[1:] == pytest.approx([losses[3]] * 3, rel=1e-6), losses
    assert losses[0] != pytest.approx(losses[1], rel=0.01), "the weights did not change"


def overflow_check(layout: Layout) -> None:
    """fp16: what one process skips, all ranks skip, and the curve goes on as one process's."""
    mesh = in_mesh(layout)
    if mesh is None:
        return
    config = replace(BASE, precision="fp16", loss_scale=2.0**40)
    wanted, _ = alone(config)
    run = trainer_over(replace(config, parallel=layout), folder_for("overflow"), mesh=mesh)
    run.trainer.run()
    scales, theirs = run.curve("loss_scale"), wanted.curve("loss_scale")
    skipped = run.curve("num_skipped")
    agreed: list[Any] = [None] * layout.num_devices
    dist.all_gather_object(agreed, (scales, skipped), group=GROUPS[layout.num_devices])
    assert all(one == agreed[0] for one in agreed)
    assert skipped[-1] > 0
    assert scales == theirs
    assert run.curve() == pytest.approx(wanted.curve(), rel=0.01)


def nan_check(layout: Layout) -> None:
    """B-39: numbers that are none end the run on all ranks, in the same update, with the last good checkpoint named."""
    mesh = in_mesh(layout)
    if mesh is None:
        return
    optimizer = replace(BASE.optimizer, learning_rate=1e30, clip_norm=0.0)
    config = replace(BASE, parallel=layout, optimizer=optimizer, save_every=1, eval_every=0)
    run = trainer_over(config, str(FOLDER / f"nan-{layout.num_devices}"), mesh=mesh)
    with pytest.raises(TrainingError, match=r"update-0000000\d") as caught:
        run.trainer.run()
    told: list[Any] = [None] * layout.num_devices
    dist.all_gather_object(told, caught.value.found, group=GROUPS[layout.num_devices])
    assert all("loss of" in text and text == told[0] for text in told), told


def disk_check(layout: Layout, in_background: bool) -> None:
    """A checkpoint that the first rank cannot write ends the run on all ranks with its cause."""
    mesh = in_mesh(layout)
    if mesh is None:
        return
    config = replace(BASE, parallel=layout, save_every=2, async_save=in_background)
    run = trainer_over(config, folder_for("disk"), mesh=mesh)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    run.trainer.checkpoints.save = _failing(run.trainer.checkpoints.save, full)  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match="No space left"):
        run.trainer.run()
    assert math.isfinite(run.trainer.loss)


def _failing(save: Callable[..., Any], full: Callable[..., None]) -> Callable[..., Any]:
    return lambda update, write, *rest: save(update, full if update == 4 else write, *rest)


def dropout_check() -> None:
    """Two ranks that share a layer drop the same of its two sums, and of their own heads each its own."""
    layout = LAYOUTS["tensor 2"]
    mesh = in_mesh(layout)
    if mesh is None:
        return
    made = plan_of(replace(BASE, parallel=layout), MODEL)
    whole, cut = noisy_model(MODEL), apply(noisy_model(MODEL), made, mesh)[0]
    block: Any = whole.transformer.h[0]
    part: Any = cut.transformer.h[0].train()
    part.drop.p = 0.5
    x = torch.randn(2, 6, MODEL.n_embd, generator=torch.Generator().manual_seed(1))
    where = whole.locate(torch.zeros(2, 6, dtype=torch.int64), None, None)
    torch.manual_seed(3)
    found = part(x, where, None)
    torch.manual_seed(3)
    kept = [torch.nn.functional.dropout(torch.ones_like(x), 0.5) for _ in range(2)]
    normed = block.ln_1(x)
    wanted = block.attn(normed, where, None) * kept[0] + block.mlp(normed) * kept[1] + x
    part.attn.dropout = 0.5
    torch.manual_seed(4)
    result = part(x, where, None)
    after = torch.rand(3)
    with _own_randomness(dist.get_rank(), torch.device("cpu")):
        own = torch.rand(3)
    told: list[Any] = [None] * 2
    dist.all_gather_object(told, (result, after, own, torch.rand(3)), group=GROUPS[2])
    assert torch.allclose(found, wanted, atol=1e-4)
    for i in (0, 1, 3):
        assert torch.equal(told[0][i], told[1][i]), i
    assert not torch.equal(told[0][2], told[1][2])


def refused_check() -> None:
    """Catches adapters, packing, Muon and half a master over parts of matrices, which would train something else."""
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"qat": "int4-g64", "parallel": Layout(tensor=2)}, "qat=int4-g64 over"),
        ({"optimizer": OptimizerConfig("muon"), "parallel": Layout(tensor=2)}, "optimizer.name=muon over"),
        ({"optimizer": OptimizerConfig("muon"), "parallel": Layout(replicas=2, shard=True)}, "muon over"),
        ({"precision": "bf16", "masters": False, "parallel": Layout(replicas=2, shard=True)}, "masters=false"),
    ]
    for changes, word in wrong:
        with pytest.raises(BluejayError, match=word):
            replace(BASE, **changes)


def everything() -> Checks:
    """Every check by name, in the order in which all ranks do them."""
    every: Checks = []
    for name, layout in {**LAYOUTS, **OTHERS}.items():
        every.append((f"curve, {name}", partial(curve_check, layout)))
    shared = Layout(stages=2, replicas=2, shard=True, schedule="interleaved", chunks=2, micro_batches=2)
    every.append(("curve, sharded interleaved", partial(curve_check, shared, micro_batch=1, ema=0.9)))
    every += [(f"11 rows, data {n}", partial(evaluation_check, n)) for n in (2, 3, 4)]
    smoothed = {"label_smoothing": 0.1, "recompute": True}
    for name in ("tensor 2", "pipeline 2"):
        every.append((f"smoothed, {name}", partial(curve_check, LAYOUTS[name], **smoothed)))
    for name in ("tensor 2", "data 2 sharded"):
        tied = partial(curve_check, LAYOUTS[name], model=replace(MODEL, tie_word_embeddings=True))
        every.append((f"tied, {name}", tied))
    # Muon orthogonalizes in bf16, which makes last digits of gradients the third of an update.
    muon = {"optimizer": OptimizerConfig("muon", 1e-3, clip_norm=0.5)}
    every.append(("muon, pipeline 2", partial(curve_check, PIPELINE, 2e-3, **muon)))
    for name in ("pipeline 2", "tensor 2", "data 2 sharded"):
        every.append((f"bf16, {name}", partial(curve_check, LAYOUTS[name], 0.02, precision="bf16")))
    zero = OTHERS["pipeline 2, zero bubble"]
    every.append(("bf16, pipeline 2, zero bubble", partial(curve_check, zero, 0.02, precision="bf16")))
    every.append(("resumed, tensor 2 to pipeline 2", partial(resume_check, LAYOUTS["tensor 2"], PIPELINE)))
    sharded = LAYOUTS["data 2 sharded"]
    every.append(("resumed, pipeline 2 to data 2 sharded", partial(resume_check, PIPELINE, sharded, async_save=True)))
    every.append(("resumed, data 2 sharded to tensor 2", partial(resume_check, sharded, LAYOUTS["tensor 2"])))
    for name in ("pipeline 2", "tensor 2", "data 2 sharded", "data 2"):
        again = partial(resume_check, LAYOUTS[name], LAYOUTS[name], bitwise=True, dropout=0.1)
        every.append((f"bitwise, {name}", again))
    every += [("rows of an earlier checkpoint", rows_check), ("patience", patience_check)]
    every.append(("changed after an evaluation", partial(stale_check, sharded)))
    for name in ("pipeline 2", "tensor 2", "data 2 sharded"):
        every.append((f"overflow, {name}", partial(overflow_check, LAYOUTS[name])))
    for name in ("pipeline 2 x tensor 2", "data 2 sharded"):
        every.append((f"nan, {name}", partial(nan_check, LAYOUTS[name])))
    for in_background in (False, True):
        every.append((f"full disk, {in_background}", partial(disk_check, PIPELINE, in_background)))
    every.append(("dropout, tensor 2", dropout_check))
    every.append(("refused", refused_check))
    return every


def prepare(folder: Path) -> None:
    """Say where this world keeps its runs."""
    global FOLDER
    FOLDER = folder
    (folder / "tokenizer").mkdir(exist_ok=True)
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")  # only copied


if __name__ == "__main__":
    run_rank(everything, prepare)
