"""Several ranks on one machine: how long stages wait, what is sent, and what two ranks cost and gain.

    python benchmarks/parallel.py waiting
    python benchmarks/parallel.py prepare    # compiles what is measured next, into the store of programs
    python benchmarks/parallel.py decode
    python benchmarks/parallel.py training
    python benchmarks/parallel.py meeting    # a sum over two ranks, with and without what decision 0052 changed

Waiting is measured with stages that sleep instead of computing, through the same schedules and sends, so that it does
not depend on how many cores there are. Bytes are those handed to torch's collectives. Costs are the bundled model's,
one rank with one and two threads against two ranks with one thread each, all in this run.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import ceilings, write_record
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from bluejay.build import build
from bluejay.config import CompileSpec, GenerationConfig, Layout, ModelConfig, RunConfig, Workload, preset
from bluejay.generate import Engine
from bluejay.models import GPTJ
from bluejay.parallel import PlannedStep, Rank, apply, build_mesh, join, leave, place_of, plan, sum_out
from bluejay.train import Batch

SLEEP_SECONDS = 0.04
ROUNDS = 5
MEETINGS = 300
MET_BYTES = (4096, 65536, 1 << 20)
PASSES = [
    ("gpipe", 2, 4, 1),
    ("1f1b", 2, 4, 1),
    ("1f1b", 2, 8, 1),
    ("interleaved", 2, 4, 2),
    ("gpipe", 4, 8, 1),
    ("1f1b", 4, 8, 1),
    ("1f1b", 4, 16, 1),
    ("interleaved", 4, 8, 2),
]
TRAINED = {
    "one rank": Layout(),
    "one rank, 2 threads": Layout(),
    "tensor 2": Layout(tensor=2),
    "pipeline 2": Layout(stages=2, micro_batches=4),
    "data 2": Layout(replicas=2),
    "data 2 shared out": Layout(replicas=2, shard=True),
}
GENERATED = {
    "one rank": Layout(),
    "one rank, 2 threads": Layout(),
    "tensor 2": Layout(tensor=2),
    "pipeline 2": Layout(stages=2),
    "pipeline 2, device loop": Layout(stages=2),
}
DECODES = [
    (name, layout, rows, backend)
    for backend in ("eager", "inductor")
    for rows in (1, 8)
    for name, layout in GENERATED.items()
]


class _Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grad, None


class Sleeper(nn.Module):
    """A layer that takes its time: once forward, twice backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, where: object, cache: object) -> Tensor:
        napped: Tensor = _Nap.apply(x * self.weight, self.seconds)
        return napped


class Sent(TorchDispatchMode):
    """Bytes of the tensors that this rank hands to collectives and sends."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name.startswith("c10d::") and "recv" not in name and "barrier" not in name:
            given = args[1] if "gather" in name or "reduce_scatter" in name else args[0]  # after the output
            # Of a broadcast, who sends it.
            sends = "broadcast" not in name or dist.ProcessGroup.unbox(args[1]).rank() == args[2]
            self.num_bytes += sends * sum(t.nbytes for t in tree_flatten(given)[0] if isinstance(t, Tensor))
        return func(*args, **(kwargs or {}))


def waiting(schedule: str, stages: int, micro: int, chunks: int) -> dict[str, Any] | None:
    """Share of a pass in which a stage neither goes forward nor backward; the formula's beside it."""
    layout = Layout(stages=stages, micro_batches=micro, schedule=schedule, chunks=chunks)  # type: ignore[arg-type]
    config = ModelConfig(vocab_size=8, n_positions=8, n_embd=8, n_layer=stages * chunks, n_head=1, rotary_dim=4)
    mesh = build_mesh(layout)
    if dist.get_rank() >= stages:
        return None
    made = plan(config, layout, Workload(job="train", context=8, gradient_accumulation=micro, dtype="float32"))
    step = PlannedStep(apply(GPTJ(config), made, mesh), made, mesh)
    for piece in step.pieces:
        (number,) = [name for name, _ in piece.transformer.h.named_children()]
        setattr(piece.transformer.h, number, Sleeper(SLEEP_SECONDS / chunks))
    ids = torch.zeros(1, 8, dtype=torch.int64)
    batches = [Batch(ids, ids, None, 8, 8)] * micro
    seconds = []
    for _ in range(1 + ROUNDS):
        started = time.perf_counter()
        step.gradients(batches, torch.tensor(1.0), [0] * micro)
        seconds.append(time.perf_counter() - started)
    wall = statistics.median(seconds[1:])
    busy = 3 * SLEEP_SECONDS * micro
    return {
        "schedule": schedule,
        "stages": stages,
        "micro_batches": micro,
        "chunks": chunks,
        "measured": 1 - busy / wall,
        "formula": made.bubble,
    }


def trained(name: str, layout: Layout) -> dict[str, Any] | None:
    """Seconds of a training step's gradients, and the bytes it sends, of nano's shape on 8 rows of 128 tokens."""
    config, rows, context = preset("nano"), 8, 128
    mesh = build_mesh(layout)
    if dist.get_rank() >= layout.num_devices:
        return None
    torch.set_num_threads(2 if "2 threads" in name else 1)
    micro = layout.micro_batches or 1
    own = rows // layout.replicas
    work = Workload(job="train", rows=own // micro, context=context, gradient_accumulation=micro, dtype="float32")
    made = plan(config, layout, work)
    step = PlannedStep(apply(GPTJ(config), made, mesh), made, mesh)
    ids = torch.randint(0, config.vocab_size, (own, context), generator=torch.Generator().manual_seed(0))
    batches = [Batch(part, part, None, part.numel(), part.numel()) for part in ids.chunk(micro)]
    scale = torch.tensor(1 / (rows * context))
    gradients = [p for piece in step.pieces for p in piece.parameters()]

    def once() -> None:
        step.gradients(batches, scale, [0] * len(batches))
        step.replicas.sum_gradients([p.grad for p in gradients if p.grad is not None])

    once()
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - started)
    with Sent() as sent:
        once()
    traffic = made.stages[place_of(mesh)["stage"]].traffic
    return {
        "layout": name,
        "seconds": statistics.median(seconds),
        "tokens_per_second": rows * context / statistics.median(seconds),
        "sent_bytes": sent.num_bytes,
        "planned_bytes": traffic.tensor + traffic.pipeline + traffic.data,
    }


def generated(name: str, layout: Layout, rows: int, backend: str, prepare: bool) -> dict[str, Any] | None:
    """Seconds of a decode step of the bundled model, and the bytes it sends."""
    mesh = build_mesh(layout)
    if dist.get_rank() >= layout.num_devices:
        return None
    torch.set_num_threads(2 if "2 threads" in name else 1)
    spec = CompileSpec(backend=backend)  # type: ignore[arg-type]
    loop: Any = "device" if "device loop" in name else "host"
    run = RunConfig("nano", max_rows=rows, context=128, compile=spec, layout=layout, verify=False, loop=loop)
    engine = Engine(build(run, mesh=mesh if layout.num_devices > 1 else None))
    prompts = [[5 + i, 6, 7, 8] for i in range(rows)]
    request = GenerationConfig(max_new_tokens=2 if prepare else 33, ignore_eos=True)
    seconds, sent_bytes = [], 0
    if prepare:
        engine.generate(prompts, request)
        return {"compilations": engine.figures.compilations}
    for _ in range(1 + ROUNDS):
        before = engine.figures
        engine.generate(prompts, request)
        seconds.append((engine.figures.decode_seconds - before.decode_seconds) / 32)
    for tokens in (17, 9):
        with Sent() as sent:
            engine.generate(prompts, GenerationConfig(max_new_tokens=tokens, ignore_eos=True))
        sent_bytes = sent.num_bytes if tokens == 17 else (sent_bytes - sent.num_bytes) // 8
    config = engine.model.config
    made = plan(config, layout, Workload(dtype="float32", rows=rows, context=128))
    traffic = made.stages[place_of(mesh)["stage"]].traffic
    return {
        "layout": name,
        "backend": backend,
        "rows": rows,
        "seconds_per_step": statistics.median(seconds[1:]),
        "tokens_per_second": rows / statistics.median(seconds[1:]),
        "sent_bytes_per_step": sent_bytes,
        "planned_bytes_per_step": traffic.tensor + traffic.pipeline,
    }


def met(policy: str, num_bytes: int) -> dict[str, Any]:
    """Seconds of a sum over two ranks with a core each, by gloo and by exchange, with gloo's threads under a policy."""
    mesh = build_mesh(Layout(tensor=2))
    group, index = mesh.get_group("tensor"), dist.get_rank()
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[index % len(os.sched_getaffinity(0))]})
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == "gloo_tcp_loop":
            os.sched_setscheduler(int(task.name), getattr(os, policy), os.sched_param(0))
    x = torch.zeros(num_bytes // 4)
    row: dict[str, Any] = {"policy": policy, "bytes": num_bytes}
    for name, add in {
        "all-reduce": lambda: dist.all_reduce(x, group=group),
        "exchange": lambda: sum_out(x, group),
    }.items():
        seconds = []
        for _ in range(MEETINGS + 20):
            started = time.perf_counter()
            add()
            seconds.append(time.perf_counter() - started)
        of = sorted(seconds[20:])
        row[name] = {
            "mean": statistics.mean(of),
            "median": of[len(of) // 2],
            "of ten the slowest": of[len(of) * 9 // 10],
        }
    return row


def as_rank(index: int, count: int, port: int, file: Path, part: str) -> None:
    """What each rank does; every rank's figures are gathered and the first one's file has them."""
    join(Rank(index, count, "127.0.0.1", port), timeout_seconds=120)
    figures: dict[str, list[Any]] = {"waiting": [], "training": [], "decode": [], "meeting": []}
    if part == "waiting":
        figures["waiting"] = [waiting(*arguments) for arguments in PASSES]
    elif part == "meeting":
        figures["meeting"] = [met(policy, size) for size in MET_BYTES for policy in ("SCHED_OTHER", "SCHED_BATCH")]
    elif part == "training":
        figures["training"] = [trained(name, layout) for name, layout in TRAINED.items()]
    else:
        decodes = [arguments for arguments in DECODES if part == "decode" or arguments[-1] != "eager"]
        figures["decode"] = [generated(*arguments, prepare=part == "prepare") for arguments in decodes]
    everyone: list[Any] = [None] * count
    dist.all_gather_object(everyone, figures)
    if index == 0:
        file.write_text(json.dumps(everyone))
    leave()


def in_world(count: int, part: str) -> list[dict[str, list[Any]]]:
    """Start `count` ranks of this script; returns each rank's figures."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="bluejay-bench-") as folder:
        file = Path(folder) / "figures.json"
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, __file__]
        ranks = [
            subprocess.Popen([*command, str(i), str(count), str(port), str(file), part], env=environment)
            for i in range(count)
        ]
        codes = [rank.wait() for rank in ranks]
        assert not any(codes), f"exit codes {codes}"
        answer: list[dict[str, list[Any]]] = json.loads(file.read_text())
        return answer


def waiting_of_stages() -> None:
    """Measure and record how long stages wait."""
    load = os.getloadavg()[0]
    rows = in_world(4, "waiting")[0]["waiting"]
    for row in rows:
        print(
            f"{row['schedule']:12} {row['stages']} stages, {row['micro_batches']:2} micro-batches, "
            f"{row['chunks']} chunks: stages wait {row['measured']:.1%}, formula {row['formula']:.1%}"
        )
    write_record("parallel_waiting", {"load_before": load, "waiting": rows})


def training_over_ranks() -> None:
    """Measure and record what two ranks send, cost and gain in training."""
    load, measured = os.getloadavg()[0], ceilings((torch.float32,))
    print(f"ceilings: {measured}, load {load:.1f}")
    two = in_world(2, "training")
    training = [[rank["training"][i] for rank in two if rank["training"][i]] for i in range(len(TRAINED))]
    for ranks in training:
        sent = [(rank["sent_bytes"], rank["planned_bytes"]) for rank in ranks]
        print(f"{ranks[0]['layout']:19} {ranks[0]['tokens_per_second']:8.0f} tokens/s, sent, planned: {sent}")
    write_record("parallel_training", {"ceilings": measured, "load_before": load, "training": training})


def decode_over_ranks() -> None:
    """Measure and record what two ranks send, cost and gain in generation."""
    load, measured = os.getloadavg()[0], ceilings((torch.float32,))
    print(f"ceilings: {measured}, load {load:.1f}")
    two = in_world(2, "decode")
    decode = [[rank["decode"][i] for rank in two if rank["decode"][i]] for i in range(len(DECODES))]
    for ranks in decode:
        sent = [(rank["sent_bytes_per_step"], rank["planned_bytes_per_step"]) for rank in ranks]
        print(
            f"{ranks[0]['backend']:8} {ranks[0]['rows']} rows {ranks[0]['layout']:23} "
            f"{ranks[0]['tokens_per_second']:8.0f} tokens/s, sent, planned a step: {sent}"
        )
    write_record("parallel_decode", {"ceilings": measured, "load_before": load, "decode": decode})


def meeting_of_two() -> None:
    """Measure and record what a sum over two ranks takes."""
    rows = in_world(2, "meeting")[0]["meeting"]
    for row in rows:
        told = "; ".join(
            f"{name} {row[name]['mean'] * 1e3:.2f} ms, median {row[name]['median'] * 1e3:.2f}"
            for name in ("all-reduce", "exchange")
        )
        print(f"{row['bytes']:8} bytes, gloo's threads {row['policy']}: {told}")
    write_record("parallel_meeting", {"load_before": os.getloadavg()[0], "meeting": rows})


PARTS = {
    "meeting": meeting_of_two,
    "waiting": waiting_of_stages,
    "training": training_over_ranks,
    "prepare": lambda: print(in_world(2, "prepare")),
    "decode": decode_over_ranks,
}

if __name__ == "__main__":
    if len(sys.argv) == 2:
        PARTS[sys.argv[1]]()
    else:
        as_rank(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])
