"""What each rank of tests/parity/test_parallel.py does: one world of four runs every check and writes what failed.

See world.py.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from world import GROUPS, Checks, run_rank

from bluejay.build import Built, Programs
from bluejay.config import CompileSpec, GenerationConfig, Layout, ModelConfig, QuantSpec, RunConfig, Workload
from bluejay.errors import ConfigError, RequestError
from bluejay.generate import Engine
from bluejay.models import GPTJ
from bluejay.parallel import (
    IGNORED,
    Meeting,
    PlannedStep,
    apply,
    build_mesh,
    cut_part,
    own_part,
    place_of,
    plan,
    whole_tensors,
)
from bluejay.quant import quantize_model
from bluejay.train import Batch

CONFIG = ModelConfig(vocab_size=65, n_positions=32, n_embd=32, n_layer=5, n_head=4, rotary_dim=4)


@dataclass(frozen=True)
class Check:
    """One layout, `accumulation` batches of `layout.micro_batches` micro-batches of `rows` rows on each replica."""

    name: str
    layout: Layout
    rows: int = 3
    accumulation: int = 1
    recompute: bool = False
    settings: dict[str, object] = field(default_factory=dict)


def checks() -> list[Check]:
    found = [
        Check("pipeline 2", Layout(stages=2, micro_batches=2)),
        Check("pipeline 2 gpipe", Layout(stages=2, micro_batches=4, schedule="gpipe"), rows=1, accumulation=3),
        Check("pipeline 2 interleaved", Layout(stages=2, micro_batches=4, schedule="interleaved", chunks=2), rows=1),
        Check("pipeline 3 uneven", Layout(layers_per_device=(1, 3, 1), micro_batches=4), rows=1, accumulation=3),
        Check("pipeline 3 ends without layers", Layout(layers_per_device=(0, 5, 0), micro_batches=2)),
        Check("pipeline 4, one micro-batch", Layout(stages=4, micro_batches=1)),
        Check("pipeline 4", Layout(stages=4, micro_batches=4), rows=1, accumulation=3),
        Check("tensor 2", Layout(tensor=2)),
        Check("tensor 2, accumulated", Layout(tensor=2), rows=1, accumulation=3),
        Check("tensor 4", Layout(tensor=4)),
        Check("tensor 2, recomputed", Layout(tensor=2), recompute=True),
        Check("tensor 2, tied", Layout(tensor=2), settings={"tie_word_embeddings": True}),
        Check("data 2", Layout(replicas=2)),
        Check("data 2, accumulated", Layout(replicas=2), rows=1, accumulation=3),
        Check("data 2 sharded", Layout(replicas=2, shard=True)),
        Check("data 3 sharded, accumulated", Layout(replicas=3, shard=True), rows=1, accumulation=3),
        Check("pipeline 2 x tensor 2", Layout(stages=2, tensor=2, micro_batches=2), accumulation=3),
        Check("pipeline 2 x data 2", Layout(stages=2, replicas=2, micro_batches=4), rows=1, accumulation=3),
        Check("tensor 2 x data 2", Layout(tensor=2, replicas=2), accumulation=3),
        Check("tensor 2 x data 2 sharded", Layout(tensor=2, replicas=2, shard=True)),
    ]
    return found


def noisy_model(config: ModelConfig, large_bias: bool = True) -> GPTJ:
    """Matrices from N(0, 0.3), noise on everything of one dim; one bias that nobody can add twice unnoticed."""
    generator = torch.Generator().manual_seed(5)
    torch.manual_seed(5)
    model = GPTJ(config)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.3
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
        if large_bias:
            model.transformer.h[1].mlp.fc_out.bias[0] = 3.0
    return model.eval()


def batch_of(num_rows: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Rows of 2 to 11 targets each, the next token's id, IGNORED elsewhere."""
    generator = torch.Generator().manual_seed(9)
    ids = torch.randint(0, vocab_size, (num_rows, 12), generator=generator)
    ids[:, 0] = vocab_size - 1  # the last row of the padded vocabulary is used
    targets = ids.roll(-1, dims=1)
    for row in range(num_rows):
        targets[row, 2 + (row * 7) % 10 :] = IGNORED
    return ids, targets


def reference(model: GPTJ, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits, mean loss over all targets and gradients of one process that sees the whole global batch at once."""
    logits = model(ids)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    loss.backward()
    return logits.detach(), loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def close(name: str, found: Tensor, wanted: Tensor, relative: float) -> None:
    error = float((found - wanted).norm() / wanted.norm().clamp_min(1e-12))
    if not error <= relative:
        raise AssertionError(f"{name}: relative difference {error:.3g}")


def add_gradients(step: PlannedStep, ids: Tensor, targets: Tensor, scale: Tensor, num_micro: int) -> Tensor:
    """What a step makes of these rows in so many micro-batches."""
    pairs = zip(ids.chunk(num_micro), targets.chunk(num_micro), strict=True)
    return step.gradients([Batch(*pair, None, 0, 0) for pair in pairs], scale, [0] * num_micro)


def train_check(check: Check) -> None:
    layout, config = check.layout, replace(CONFIG, **check.settings)  # type: ignore[arg-type]
    micro = layout.micro_batches or 1
    per_call = check.rows * micro
    ids, targets = batch_of(per_call * check.accumulation * layout.replicas, config.vocab_size)
    mesh = build_mesh(layout)
    if dist.get_rank() >= layout.num_devices:
        return
    logits, loss, gradients = reference(noisy_model(config), ids, targets)
    work = Workload(
        job="train",
        rows=check.rows,
        context=12,
        gradient_accumulation=micro,
        recompute=check.recompute,
        dtype="float32",
    )
    made = plan(config, layout, work)
    place = place_of(mesh)
    step = PlannedStep(apply(noisy_model(config), made, mesh), made, mesh)
    mine = per_call * check.accumulation
    own = slice(place["replica"] * mine, (place["replica"] + 1) * mine)
    count = step.replicas.total((targets[own] != IGNORED).sum())
    scale = 1.0 / count
    total = torch.zeros(())
    for inputs, wanted in zip(ids[own].split(per_call), targets[own].split(per_call), strict=True):
        total += add_gradients(step, inputs, wanted, scale, micro)
    parameters = {n: p for piece in step.pieces for n, p in piece.named_parameters() if p.grad is not None}
    one_row = Batch(ids[:1], targets[:1], None, 0, 0)
    step.replicas.sum_gradients([p.grad for p in parameters.values() if p.grad is not None])
    found = {"loss": step.replicas.total(total) / count, "logits": step.logits(ids), "one row": step.loss(one_row)}
    local: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        gradient = parameter.grad
        local[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    names: list[list[str]] = [[] for _ in range(layout.num_devices)]
    dist.all_gather_object(names, sorted(parameters), group=GROUPS[layout.num_devices])
    # No collective below: a rank that finds a difference must not leave the others waiting.
    close("loss", found["loss"], loss, 1e-5)
    close("loss without gradients", found["one row"], _loss(logits[:1], targets[:1]), 1e-4)
    assert torch.allclose(found["logits"], logits, atol=1e-4, rtol=0), "logits"
    for name, gradient in local.items():
        close(name, gradient, cut_part(name, gradients[name], place["tensor"], layout.tensor), 1e-5)
    missing = set(gradients) - {name for held in names for name in held}
    assert not missing, f"no rank has a gradient of {sorted(missing)}"


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


PROGRAMS = Path("programs")  # of this world; below, in the folder of its reports


def int4_check(layout: Layout) -> None:
    """Quantize, then cut: logits of the quantized model in one process (law 5), with a vocabulary that is padded."""
    config = replace(CONFIG, n_embd=64, rotary_dim=8)
    mesh = build_mesh(layout)
    if dist.get_rank() >= layout.num_devices:
        return
    spec = QuantSpec(group_size=16)
    whole, cut = noisy_model(config), noisy_model(config)
    quantize_model(whole, spec)
    quantize_model(cut, spec)
    made = plan(config, layout, Workload(dtype="float32", quantize="int4-g16"))
    step = PlannedStep(apply(cut, made, mesh), made, mesh)
    ids, _ = batch_of(3, config.vocab_size)
    logits = step.logits(ids)
    with torch.no_grad():
        wanted = whole(ids)
    held = sum(t.nbytes for piece in step.pieces for t in (*piece.parameters(), *piece.buffers()))
    assert torch.allclose(logits, wanted, atol=1e-4, rtol=0), f"differs by {float((logits - wanted).abs().max())}"
    planned = made.stages[place_of(mesh)["stage"]].memory.weights
    assert abs(held - planned) <= 0.05 * planned, f"{held} bytes of weights, {planned} planned"


class BytesTokenizer:
    """Ids are bytes: enough for an engine, which only needs ids to text."""

    special_ids: frozenset[int] = frozenset()
    eos_id: int | None = None

    def token_bytes(self, token: int) -> bytes:
        return bytes([token + 32])


def engine_over(model: GPTJ, meeting: Meeting | None = None, **settings: Any) -> Engine:
    """An engine of four rows, eager unless `settings` say otherwise."""
    usual = {"max_rows": 4, "prefill_buckets": (4, 8), "compile": CompileSpec(backend="eager")}
    run = RunConfig("tiny", **{**usual, **settings})
    tokenizer: Any = BytesTokenizer()
    programs, device = Programs(run, meeting=meeting), torch.device("cpu")
    return Engine(Built(run, model, tokenizer, programs, device, torch.float32, 32, (), True, None, meeting))


GENERATED = [
    Layout(tensor=2),
    Layout(tensor=4),
    Layout(stages=2),
    Layout(layers_per_device=(0, 5, 0)),
    Layout(stages=4),
    Layout(stages=2, tensor=2),
]
RESUMED = {
    "tensor 2 to pipeline 2": (Layout(tensor=2), Layout(stages=2, micro_batches=4)),
    "pipeline 2 to data 2 sharded": (Layout(stages=2, micro_batches=2), Layout(replicas=2, shard=True)),
    "data 2 sharded to tensor 2": (Layout(replicas=2, shard=True), Layout(tensor=2)),
}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [64, 7], [5, 35, 8, 9, 7, 9, 3, 2, 3, 8, 4]]
REQUESTS = [
    GenerationConfig(max_new_tokens=8, logprobs=3, prompt_logprobs=2),
    GenerationConfig(max_new_tokens=8, temperature=1.0, top_p=0.9, seed=7, logprobs=2),
    GenerationConfig(max_new_tokens=6, num_beams=3),
    GenerationConfig(max_new_tokens=8, temperature=0.8, seed=3, n=3),
]


def generate_check(layout: Layout, quantized: bool = False) -> None:
    """B-53, B-54: the ids of one rank on all ranks of every layout, whatever each rank's own generator says."""
    config = replace(CONFIG, n_embd=64, rotary_dim=8)
    mesh = build_mesh(layout)
    if dist.get_rank() >= layout.num_devices:
        return
    torch.manual_seed(1000 + dist.get_rank())
    whole, mine = noisy_model(config).requires_grad_(False), noisy_model(config).requires_grad_(False)
    if quantized:
        quantize_model(whole, QuantSpec(group_size=16))
        quantize_model(mine, QuantSpec(group_size=16))
    made = plan(config, layout, Workload(dtype="float32", rows=4, quantize="int4-g16" if quantized else ""))
    alone, spread = engine_over(whole), engine_over(apply(mine, made, mesh)[0], Meeting(mesh))
    answers = [(alone.generate(PROMPTS, request), spread.generate(PROMPTS, request)) for request in REQUESTS]
    cache = spread._cache.num_bytes
    planned = made.stages[place_of(mesh)["stage"]].memory.kv_cache
    assert cache == planned, f"{cache} bytes of cache, {planned} planned"
    for request, (wanted, found) in zip(REQUESTS, answers, strict=True):
        for one, other in zip(wanted, found, strict=True):
            ids = [c.ids for c in one.completions], [c.ids for c in other.completions]
            assert ids[0] == ids[1], f"{request}: {ids}"
            for a, b in zip(one.completions, other.completions, strict=True):
                for x, y in zip(a.logprobs or (), b.logprobs or (), strict=True):
                    assert x.logprob is not None
                    assert y.logprob is not None
                    assert abs(x.logprob - y.logprob) < 1e-4
                    assert [i for i, _ in x.top] == [i for i, _ in y.top]
            for x, y in zip(one.prompt_logprobs or (), other.prompt_logprobs or (), strict=True):
                assert (x.logprob is None) == (y.logprob is None)
                assert x.logprob is None or y.logprob is None or abs(x.logprob - y.logprob) < 1e-4


def compiled_check() -> None:
    """Law 2 over ranks: compiled ids are the eager ids of one rank, with each loop, greedy and sampled, in four bits.

    Ranks of equal shape share their programs, each made by one of them, and a second engine compiles nothing.
    """
    layout, config = Layout(stages=2, tensor=2), replace(CONFIG, n_embd=64, rotary_dim=8, n_layer=2)
    mesh = build_mesh(layout)
    if dist.get_rank() >= layout.num_devices:
        return
    whole, mine = noisy_model(config).requires_grad_(False), noisy_model(config).requires_grad_(False)
    for model in (whole, mine):
        quantize_model(model, QuantSpec(group_size=16))
    made = plan(config, layout, Workload(dtype="float32", rows=4, quantize="int4-g16"))
    piece, meeting = apply(mine, made, mesh)[0], Meeting(mesh)
    shapes: dict[str, Any] = {"batch_buckets": (4,), "prefill_buckets": (8,)}
    settings = {**shapes, "compile": CompileSpec(threads=1), "cache": str(PROGRAMS)}
    alone = engine_over(whole, **shapes)
    spread = [engine_over(piece, meeting, **settings, loop=loop, iterations=3) for loop in ("host", "device")]
    # In one batch, because a batch with a row that samples has one program for all.
    requests = [GenerationConfig(max_new_tokens=8, temperature=heat, seed=7) for heat in (0.0, 1.0, 0.7)]

    def answers(engine: Engine) -> list[tuple[int, ...]]:
        under_way = [engine.submit(prompt, request) for prompt, request in zip(PROMPTS, requests, strict=True)]
        while not all(request.finished for request in under_way):
            engine.step()
        return [engine.collect(request).ids for request in under_way]

    wanted = answers(alone)
    for engine in spread:
        found = answers(engine)
        assert found == wanted, f"loop {engine.built.run.loop}: {found} and {wanted}"
    counts: list[Any] = [None] * layout.num_devices
    mine_made = [engine.figures.compilations for engine in spread]
    dist.all_gather_object(counts, mine_made, group=GROUPS[layout.num_devices])
    kinds = layout.num_stages  # the two stages differ, the parts of their layers do not
    assert sum(first for first, _ in counts) == 2 * kinds, f"programs made by each rank: {counts}"
    assert all(second == 0 for _, second in counts), f"programs made by each rank: {counts}"


def resume_check(first: Layout, then: Layout) -> None:
    """Three AdamW steps under one layout, its state put together, three more under another: six on one process."""
    meshes = [build_mesh(first), build_mesh(then)]
    if dist.get_rank() >= first.num_devices:
        return
    ids, targets = batch_of(12, CONFIG.vocab_size)
    count = (targets != IGNORED).sum()
    model = noisy_model(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    wanted = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = _loss(model(ids), targets) / count
        loss.backward()
        optimizer.step()
        wanted.append(float(loss.detach()))
    found: list[float] = []
    state: dict[str, dict[str, Tensor]] = {}
    for layout, mesh in zip((first, then), meshes, strict=True):
        work = Workload(job="train", rows=3, context=12, gradient_accumulation=layout.micro_batches or 1)
        made = plan(CONFIG, layout, work)
        mine = noisy_model(CONFIG)
        if state:
            mine.load_state_dict(state["weights"])
        step = PlannedStep(apply(mine, made, mesh), made, mesh)
        named = {name: p for piece in step.pieces for name, p in piece.named_parameters()}
        optimizer = torch.optim.AdamW(named.values(), lr=0.01)
        for name, parameter in named.items():
            if state:
                moments = {k: own_part(name, state[k][name], made, mesh) for k in ("exp_avg", "exp_avg_sq")}
                optimizer.state[parameter] = {**moments, "step": torch.tensor(3.0)}
        own = 12 // layout.replicas
        rows = slice(step.replicas.index * own, (step.replicas.index + 1) * own)
        for _ in range(3):
            optimizer.zero_grad()
            total = add_gradients(step, ids[rows], targets[rows], 1.0 / count, layout.micro_batches or 1)
            step.replicas.sum_gradients([p.grad for p in named.values() if p.grad is not None])
            optimizer.step()
            found.append(float(step.replicas.total(total) / count))
        kinds = {"weights": dict(named)}
        kinds |= {k: {n: optimizer.state[p][k] for n, p in named.items()} for k in ("exp_avg", "exp_avg_sq")}
        gathered = [{kind: whole_tensors(parts, made, mesh) for kind, parts in kinds.items()}]
        dist.broadcast_object_list(gathered, src=0, group=GROUPS[first.num_devices])
        state = gathered[0]
    for i, (one, other) in enumerate(zip(wanted, found, strict=True)):
        assert abs(one - other) <= 1e-4 * one, f"loss of step {i}: {wanted} and {found}"
    for name, weight in model.named_parameters():
        close(name, state["weights"][name], weight.detach(), 1e-3)


def other_prompt_check() -> None:
    """B-53: where a rank was given another prompt than the one that samples, all say so, and none waits for it."""
    layout = Layout(tensor=2)
    mesh = build_mesh(layout)
    rank = dist.get_rank()
    if rank >= layout.num_devices:
        return
    made = plan(CONFIG, layout, Workload(dtype="float32"))
    engine = engine_over(apply(noisy_model(CONFIG), made, mesh)[0], Meeting(mesh))
    same = engine.submit([1, 2, 3], GenerationConfig(max_new_tokens=4, temperature=1.0))
    seeds: list[Any] = [None] * 2
    dist.all_gather_object(seeds, same.seed, group=GROUPS[2])
    assert seeds[0] == seeds[1], f"an unseeded request has the seeds {seeds}"
    with pytest.raises(RequestError, match="another prompt"):
        engine.submit([1, 2, 3 + rank], GenerationConfig(max_new_tokens=4))


def large_bias_check() -> None:
    """The bias of the row-parallel matrix at 100: added twice it moves every later layer."""
    layout = Layout(tensor=4)
    mesh = build_mesh(layout)
    whole, cut = noisy_model(CONFIG), noisy_model(CONFIG)
    for model in (whole, cut):
        model.transformer.h[1].mlp.fc_out.bias.data.fill_(100.0)
        model.transformer.h[1].mlp.fc_out.bias.data[::2] = -100.0
    made = plan(CONFIG, layout, Workload(dtype="float32"))
    step = PlannedStep(apply(cut, made, mesh), made, mesh)
    ids, _ = batch_of(3, CONFIG.vocab_size)
    logits = step.logits(ids)
    with torch.no_grad():
        wanted = whole(ids)
    assert torch.allclose(logits, wanted, atol=1e-3, rtol=0), f"differs by {float((logits - wanted).abs().max())}"


def three_chunks_check() -> None:
    """B-56: 8 rows in 3 micro-batches are refused with the numbers, before a rank waits for another."""
    layout = Layout(stages=2, micro_batches=3)
    mesh = build_mesh(layout)
    if dist.get_rank() >= layout.num_devices:
        return
    made = plan(CONFIG, layout, Workload(job="train", context=12, gradient_accumulation=3, dtype="float32"))
    step = PlannedStep(apply(noisy_model(CONFIG), made, mesh), made, mesh)
    ids, targets = batch_of(8, CONFIG.vocab_size)
    with pytest.raises(ConfigError, match="8 over 3 leaves 2"):
        add_gradients(step, ids, targets, torch.ones(()), 8)


def gloo_check() -> None:
    """The policy of gloo's threads, which torch could give another name; what it is good for a benchmark shows."""
    build_mesh(Layout(tensor=2))
    tasks = [task for task in Path("/proc/self/task").iterdir() if "gloo_tcp" in (task / "comm").read_text()]
    policies = {os.sched_getscheduler(int(task.name)) for task in tasks}
    assert policies == {os.SCHED_BATCH}, f"policies of {len(tasks)} threads: {policies}"


def everything() -> Checks:
    """Every check by name, in the order in which all ranks do them."""
    every: Checks = [(c.name, partial(train_check, c)) for c in checks()]
    for layout in (Layout(tensor=2), Layout(tensor=4), Layout(stages=2, tensor=2)):
        every.append((f"int4, pipeline {layout.num_stages} x tensor {layout.tensor}", partial(int4_check, layout)))
    for layout in GENERATED:
        name = f"generation, pipeline {list(layout.layers_per_device) or layout.num_stages} x tensor {layout.tensor}"
        every.append((name, partial(generate_check, layout)))
    every.append(("int4 generation, pipeline 2 x tensor 2", partial(generate_check, GENERATED[-1], True)))
    every.append(("compiled, int4, pipeline 2 x tensor 2", compiled_check))
    for name, layouts in RESUMED.items():
        every.append((f"resumed, {name}", partial(resume_check, *layouts)))
    every.append(("another prompt on one rank", other_prompt_check))
    every.append(("bias of 100", large_bias_check))
    every.append(("8 rows in 3 micro-batches", three_chunks_check))
    if sys.platform == "linux":
        every.append(("gloo's threads are batch threads", gloo_check))
    return every


def prepare(folder: Path) -> None:
    """Say where this world keeps its programs."""
    global PROGRAMS
    PROGRAMS = folder / "programs"


if __name__ == "__main__":
    run_rank(everything, prepare)
