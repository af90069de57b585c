"""What each rank of tests/parity/test_plan_bytes.py does: the training loop's own parts, and engines, are weighed.

See world.py.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from world import Checks, run_rank

from bluejay.build import Built, Programs
from bluejay.config import (
    CompileSpec,
    DataConfig,
    GenerationConfig,
    Layout,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
    Workload,
)
from bluejay.generate import Engine
from bluejay.models import GPTJ
from bluejay.parallel import Meeting, apply, as_one, build_mesh, own_values, place_of, plan
from bluejay.train import plan_of, ranks_of, step_of
from bluejay.train.optimizers import Updater
from bluejay.train.packing import Batch
from bluejay.train.precision import DTYPES, Weights

SMALL = ModelConfig(vocab_size=258, n_positions=64, n_embd=64, n_layer=4, n_head=4, rotary_dim=8)
# The head and the embedding weigh more than all layers; heads are rotated whole; weights weigh more than activations.
VOCABULARY = replace(SMALL, vocab_size=8000, n_positions=128)
ROTATED = replace(SMALL, n_positions=256, n_embd=128, n_head=2, rotary_dim=64)
WIDE = replace(SMALL, n_embd=256, rotary_dim=16)
PIPELINE = Layout(stages=2, micro_batches=4)
SHARED = Layout(replicas=2, shard=True)
TRAINED: dict[str, dict[str, Any]] = {
    "one device": {"model": SMALL},
    "one device, large vocabulary, bf16": {"model": VOCABULARY, "precision": "bf16"},
    "one device, recomputed": {"model": ROTATED, "recompute": True},
    "one device, bf16 without masters": {"model": SMALL, "precision": "bf16", "masters": False},
    "one device, muon": {"model": WIDE, "optimizer": "muon"},
    "one device, tied, bf16": {"model": replace(VOCABULARY, tie_word_embeddings=True), "precision": "bf16", "micro": 2},
    "tensor 2, large vocabulary": {"model": VOCABULARY, "layout": Layout(tensor=2), "micro": 2},
    "tensor 2, bf16": {"model": ROTATED, "layout": Layout(tensor=2), "precision": "bf16"},
    "tensor 4, bf16, recomputed": {
        "model": WIDE,
        "layout": Layout(tensor=4),
        "precision": "bf16",
        "recompute": True,
        "micro": 2,
    },
    "pipeline 2, large vocabulary": {"model": VOCABULARY, "layout": PIPELINE, "micro": 4},
    "pipeline 2, bf16, recomputed": {
        "model": ROTATED,
        "layout": PIPELINE,
        "micro": 4,
        "precision": "bf16",
        "recompute": True,
    },
    "pipeline 4, bf16": {
        "model": SMALL,
        "layout": Layout(stages=4, micro_batches=8),
        "micro": 8,
        "precision": "bf16",
    },
    "interleaved, large vocabulary": {
        "model": VOCABULARY,
        "layout": Layout(stages=2, micro_batches=4, schedule="interleaved", chunks=2),
        "micro": 4,
    },
    "data 2, bf16": {"model": WIDE, "layout": Layout(replicas=2), "micro": 2, "precision": "bf16"},
    "data 2 shared out": {"model": SMALL, "layout": SHARED, "micro": 2},
    "data 2 shared out, bf16": {"model": WIDE, "layout": SHARED, "micro": 2, "precision": "bf16"},
}
GENERATED: dict[str, dict[str, Any]] = {
    "one device": {"model": replace(SMALL, n_positions=256)},
    "tensor 2": {"model": replace(SMALL, n_positions=256), "layout": Layout(tensor=2)},
    "pipeline 2": {"model": replace(SMALL, n_positions=256), "layout": Layout(stages=2)},
    "pipeline 2, large vocabulary, bf16": {
        "model": replace(VOCABULARY, n_positions=256),
        "layout": Layout(stages=2),
        "dtype": "bfloat16",
    },
}
MESHES: dict[Layout, Any] = {}


class LiveBytes(TorchDispatchMode):
    """Bytes of tensors made inside that still live, and the most there were at once.

    Args:
        empties: storages are emptied and filled again while they live: look at each one after every operation.
    """

    def __init__(self, empties: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._empties = empties
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(result)[0]:
            tensor = getattr(tensor, "_local_tensor", tensor)  # a wrapper's own storage holds nothing
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                self._note(tensor.untyped_storage())
        if self._empties:
            self.live = sum(storage.nbytes() for known in self._seen.values() if (storage := known()) is not None)
        self.peak = max(self.peak, self.live)
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        known = self._seen.get(key)
        if known is not None and known() is storage:
            return

        def gone(reference: object) -> None:
            self.live -= size
            if self._seen.get(key) is reference:
                del self._seen[key]

        self._seen[key] = weakref.ref(storage, gone)
        self.live += size


def in_mesh(layout: Layout) -> Any:
    """The layout's mesh, made once; all ranks call this."""
    if layout not in MESHES:
        MESHES[layout] = build_mesh(layout)
    return MESHES[layout]


def close(found: dict[str, int], planned: dict[str, int]) -> str:
    """What is not as planned: 5 % of what is held; at the peak 15 % too much or 3 % too little."""
    wrong = [
        f"{name}: {size} measured, {planned[name]} planned"
        for name, size in found.items()
        if not (
            0.97 * size <= planned[name] <= 1.15 * size if name == "peak" else abs(planned[name] - size) <= 0.05 * size
        )
    ]
    return f"{'; '.join(wrong)} of {planned}" if wrong else ""


def train_check(
    model: ModelConfig,
    layout: Layout | None = None,
    micro: int = 1,
    precision: str = "fp32",
    masters: bool = True,
    recompute: bool = False,
    optimizer: str = "adamw",
) -> str:
    """Two updates with what the loop is made of: weights, gradients, optimizer state, and the peak."""
    layout, rows = layout or Layout(), 2
    config = TrainConfig(
        micro_batch=rows,
        gradient_accumulation=micro,
        precision=precision,  # type: ignore[arg-type]
        masters=masters,
        recompute=recompute,
        compile="eager",
        data=DataConfig(length=model.n_positions),
        parallel=layout,
        optimizer=OptimizerConfig(name=optimizer),  # type: ignore[arg-type]
    )
    made, mesh = plan_of(config, model), in_mesh(layout)
    if dist.get_rank() >= layout.num_devices:
        return ""
    with LiveBytes(empties=layout.shard) as live:
        whole = GPTJ(model).to(torch.float32 if masters else DTYPES[precision])
        pieces = apply(whole, made, mesh)
        built: Any = SimpleNamespace(model=as_one(pieces), pieces=tuple(pieces), device=torch.device("cpu"))
        del whole, pieces
        ranks, step = ranks_of(made, mesh), step_of(made, mesh)(built, config, lambda event: None)
        weights = Weights(built.model, DTYPES[precision], masters)
        updater = Updater(weights, config.optimizer, 1, 0)
        ids = torch.zeros(rows, model.n_positions, dtype=torch.int64)
        batch, live.peak = Batch(ids, ids, None, ids.numel(), ids.numel()), 0
        for update in range(2):
            step.gradients([batch] * micro, torch.tensor(1.0), [0] * micro)
            gradients = weights.gradients()
            ranks.sum_gradients(list(gradients.values()))
            summed = sum(gradient.nbytes for gradient in gradients.values())
            updater.step(update, 1.0)
            weights.forget_gradients()
            del gradients
    memory = made.stages[place_of(mesh)["stage"]].memory
    moments = sum(own_values(value).nbytes for value in updater.state().values() if value.dim())
    kept = sum(one.master.nbytes for one in weights if one.kept and one.master is not one.parameter)
    found = {
        "weights": sum(own_values(p).nbytes for p in built.model.parameters()),
        "optimizer": moments + kept,
        "peak": live.peak,
    }
    planned = {**memory.items(), "peak": memory.total}
    if memory.gradients > 0.9 * summed:  # else the peak is before all gradients are there
        found["gradients"] = summed
    return close(found, planned)


class BytesTokenizer:
    """Ids are bytes: enough for an engine, which only needs ids to text."""

    special_ids: frozenset[int] = frozenset()
    eos_id: int | None = None

    def token_bytes(self, token: int) -> bytes:
        return b"a"


def generate_check(model: ModelConfig, layout: Layout | None = None, dtype: str = "float32") -> str:
    """Eight rows of 250 tokens in one piece, then a sampled token each: weights, cache, and the peak."""
    layout, rows = layout or Layout(), 8
    made, mesh = plan(model, layout, Workload(dtype=dtype, rows=rows)), in_mesh(layout)
    if dist.get_rank() >= layout.num_devices:
        return ""
    run = RunConfig("tiny", max_rows=rows, prefill_buckets=(256,), compile=CompileSpec(backend="eager"))
    tokenizer: Any = BytesTokenizer()
    with LiveBytes() as live:
        torch.manual_seed(0)
        pieces = apply(GPTJ(model).to(getattr(torch, dtype)).requires_grad_(False).eval(), made, mesh)
        meeting = Meeting(mesh) if layout.num_devices > 1 else None
        programs, device = Programs(run, meeting=meeting), torch.device("cpu")
        context, number = model.n_positions, getattr(torch, dtype)
        engine = Engine(Built(run, pieces[0], tokenizer, programs, device, number, context, (), True, None, meeting))
        prompts = torch.randint(0, model.vocab_size, (rows, 250)).tolist()
        live.peak = 0
        engine.generate(prompts, GenerationConfig(max_new_tokens=3, temperature=1.0, seed=1))
    memory = made.stages[place_of(mesh)["stage"]].memory
    found = {
        "weights": sum(p.nbytes for p in pieces[0].parameters()),
        "kv_cache": engine._cache.num_bytes,
        "peak": live.peak,
    }
    return close(found, {**memory.items(), "peak": memory.total})


def everything() -> Checks:
    """Every check by name, in the order in which all ranks do them."""
    every: Checks = []
    every += [(f"train, {name}", partial(train_check, **settings)) for name, settings in TRAINED.items()]
    every += [(f"generate, {name}", partial(generate_check, **settings)) for name, settings in GENERATED.items()]
    return every


if __name__ == "__main__":
    run_rank(everything)
