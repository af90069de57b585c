"""What all benchmarks share: a random checkpoint of any width, a fresh process per contestant, and the record.

A claim is a ratio in one run: the ceilings (read bandwidth, GEMM rate) are measured in the same run as the contestants,
the contestants take turns, and medians of at least five runs are kept.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bluejay
from bluejay.checkpoint import LargePages, has_large_pages, save_checkpoint
from bluejay.config import ModelConfig
from bluejay.machine import describe, measure_gemm, measure_read_bandwidth
from bluejay.models import GPTJ

NANO = Path(bluejay.__file__).parent / "assets" / "nano"
RESULTS = Path(__file__).parent / "results"


def fill_randomly(model: GPTJ) -> None:
    """Give a model on the meta device random weights with fixed seed: norms 1, biases 0, matrices N(0, 0.02)."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in [*model.named_parameters()]:
        tensor = torch.zeros(parameter.shape, dtype=parameter.dtype)
        if name.endswith(("ln_1.weight", "ln_f.weight")):
            tensor.fill_(1.0)
        elif parameter.dim() > 1:
            tensor.normal_(0, 0.02, generator=generator)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(tensor, requires_grad=False))


@contextmanager
def random_checkpoint(config: ModelConfig, dtype: torch.dtype) -> Iterator[Path]:
    """A temporary checkpoint directory with random weights, made with fixed seed and removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="bluejay-bench-") as folder:
        with torch.device("meta"):
            model = GPTJ(config).to(dtype)
        fill_randomly(model)
        directory = Path(folder) / "model"
        save_checkpoint(directory, model.state_dict(), config, tokenizer_from=NANO)
        del model
        yield directory


def in_fresh_process(script: Path, *arguments: str) -> dict[str, Any]:
    """Run a contestant by itself, so that its peak memory is its own; its last line of output is its JSON answer."""
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """The median of every figure over the rounds."""
    return {
        key: statistics.median(r[key] for r in rounds) for key in rounds[0] if isinstance(rounds[0][key], int | float)
    }


def ceilings(dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)) -> dict[str, float]:
    """Bytes/s this machine reads and FLOP/s of its matrix products, now."""
    rates = {f"gemm_{str(d).removeprefix('torch.')}_flops": measure_gemm(d) for d in dtypes}
    return {"read_bytes_per_second": measure_read_bandwidth(), **rates}


def buffer_to_read() -> Tensor:
    """Memory for `measure_read`, in large pages where the system gives them."""
    shape = torch.Size((2**25,))
    buffer = LargePages(2**28, 1).take(shape, torch.int64) if has_large_pages() else torch.empty(shape).long()
    return buffer.fill_(1)


def measure_read(buffer: Tensor) -> float:
    """Bytes/s that this machine reads: of memory as torch allocates it, or in `buffer` if that is faster."""
    seconds = []
    for _ in range(7):
        started = time.perf_counter()
        buffer.sum()
        seconds.append(time.perf_counter() - started)
    return max(measure_read_bandwidth(), buffer.nbytes / statistics.median(seconds))


def write_record(name: str, body: dict[str, Any], show: Callable[[str], None] = print) -> Path:
    """Write `results/<name>.json`: the body plus date, machine and versions."""
    report = describe(Path(tempfile.gettempdir()), measure=False).as_dict()
    machine = {k: report[k] for k in ("system", "cpu", "num_threads", "memory_bytes", "devices")}
    record = {
        "benchmark": name,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": report["versions"],
        "machine": machine,
        **body,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    show(f"record: {path.relative_to(RESULTS.parent.parent)}")
    return path


def config_dict(config: ModelConfig) -> dict[str, Any]:
    return {k: v for k, v in asdict(config).items() if k != "ignored_keys"}
