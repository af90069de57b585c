"""Four-bit matrix products at 6B width against the machine's ceilings and other libraries.

    python benchmarks/int4.py                 # 28 layers: needs 5 GB of free memory
    python benchmarks/int4.py --layers 4      # in half a minute

In every round the ceilings are measured and the contestants take turns, so that a busy moment meets all of them. There
are as many matrices as in the model, so that no cache holds them. Libraries that are not installed are named.

Ceilings: bytes/s that this machine reads, by `measure_read_bandwidth`; products/s of its integer dot-product
instruction where it has one, by a loop of nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import write_record
from torch import Tensor

from bluejay import kernels
from bluejay.machine import default_cache_folder, measure_gemm, measure_read_bandwidth

GROUP = 64
LAYER = ((4096, 4096),) * 4 + ((16384, 4096), (4096, 16384))
HEAD = (50400, 4096)
ROWS = (1, 2, 4, 8, 16, 32, 64, 512)
# From this many rows on a contestant multiplies one layer's matrices only: it no longer matters where they come from.
MANY_ROWS = 32

Multiply = Callable[[Tensor], object]
# The matrices of a contestant in the model's order: their outputs, inputs, bytes, and the product with x.
Matrices = list[tuple[int, int, int, Multiply]]


def shapes(layers: int) -> list[tuple[int, int]]:
    return [*LAYER * layers, HEAD]


def ours(layers: int) -> Matrices:
    content = torch.randint(-(2**31), 2**31 - 1, (HEAD[0] * HEAD[1] // 8,), dtype=torch.int32)

    def make(outputs: int, inputs: int) -> tuple[int, Multiply]:
        blocks, groups = outputs // 16, inputs // GROUP
        codes = content[: outputs * inputs // 8].clone().view(blocks, inputs // 8, 16)
        scales = torch.full((blocks, groups, 16), 0.01).half()
        biases = torch.full((blocks, groups, 16), -0.075).half()
        num_bytes = codes.nbytes + scales.nbytes + biases.nbytes
        return num_bytes, lambda x: kernels.int4_linear(x, codes, scales, biases, None, outputs, GROUP)

    return [(outputs, inputs, *make(outputs, inputs)) for outputs, inputs in shapes(layers)]


def torch_int4(layers: int) -> Matrices:
    """torch's own operation for the CPU, with groups of the same size."""

    def make(outputs: int, inputs: int) -> tuple[int, Multiply]:
        codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        scales = torch.full((inputs // GROUP, outputs, 2), 0.01, dtype=torch.bfloat16)
        num_bytes = packed.nbytes + scales.nbytes
        return num_bytes, lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, scales)

    return [(outputs, inputs, *make(outputs, inputs)) for outputs, inputs in shapes(layers)]


def torch_bf16(layers: int) -> Matrices:
    def make(outputs: int, inputs: int) -> tuple[int, Multiply]:
        weight = torch.full((outputs, inputs), 0.01, dtype=torch.bfloat16)
        return weight.nbytes, lambda x: F.linear(x, weight)

    return [(outputs, inputs, *make(outputs, inputs)) for outputs, inputs in shapes(layers)]


def seconds(matrices: Matrices, inputs: dict[int, Tensor], layers: int) -> float:
    """Of one pass over all matrices; with many rows, of one layer and the head, scaled to all."""
    if len(inputs[4096]) >= MANY_ROWS:
        matrices, times = [*matrices[: len(LAYER)]], layers
    else:
        times = 1
    started = time.perf_counter()
    for _, width, _, multiply in matrices:
        multiply(inputs[width])
    return (time.perf_counter() - started) * times


def work(matrices: Matrices, rows: int) -> tuple[int, int]:
    """Bytes of weights and FLOP of what `seconds` speaks of."""
    counted = matrices[:-1] if rows >= MANY_ROWS else matrices
    return sum(m[2] for m in counted), sum(2 * m[0] * m[1] for m in counted) * rows


def absent() -> Iterator[str]:
    for name in ("openvino", "ctranslate2", "llama_cpp"):
        if find_spec(name) is None:
            yield name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cache", type=Path, default=default_cache_folder())
    parser.add_argument("--bf16-layers", type=int, default=4, help="layers of the bf16 contestant, 16 bits a weight")
    args = parser.parse_args()
    kernels.ensure(args.cache, force=True)
    contestants: dict[str, tuple[Matrices, int]] = {
        "bluejay int4": (ours(args.layers), args.layers),
        "torch int4": (torch_int4(args.bf16_layers), args.bf16_layers),
        "torch bf16": (torch_bf16(args.bf16_layers), args.bf16_layers),
    }
    inputs = {rows: {width: torch.randn(rows, width).bfloat16() for width in (4096, 16384)} for rows in ROWS}
    taken: dict[tuple[str, int], list[float]] = {(name, rows): [] for name in contestants for rows in ROWS}
    read, gemm = [], []
    with torch.inference_mode():
        for _ in range(args.rounds):
            read.append(measure_read_bandwidth())
            gemm.append(measure_gemm(torch.bfloat16))
            for rows in ROWS:
                for name, (matrices, layers) in contestants.items():
                    if rows == ROWS[-1] and name == "torch int4":
                        continue  # a minute a round
                    taken[name, rows].append(seconds(matrices, inputs[rows], layers))
    bandwidth, flops = statistics.median(read), statistics.median(gemm)
    print(f"read {bandwidth / 1e9:.1f} GB/s, bf16 GEMM {flops / 1e12:.3f} TFLOP/s, {torch.get_num_threads()} threads")
    print(f"{'':14} {'rows':>5} {'ms':>9} {'/ 1 row':>8} {'GB/s':>7} {'of read':>8} {'TFLOP/s':>8}")
    figures: dict[str, dict[str, Any]] = {}
    for name, (matrices, _) in contestants.items():
        figures[name] = {}
        first = statistics.median(taken[name, 1]) / work(matrices, 1)[0]
        for rows in ROWS:
            if not taken[name, rows]:
                continue
            median = statistics.median(taken[name, rows])
            num_bytes, flop = work(matrices, rows)
            row = {
                "seconds": median,
                "over_one_row": median / num_bytes / first,
                "bytes_per_second": num_bytes / median,
                "share_of_read": num_bytes / median / bandwidth,
                "flops": flop / median,
            }
            figures[name][str(rows)] = row
            print(
                f"{name:14} {rows:5d} {median * 1e3:9.2f} {row['over_one_row']:8.2f} {num_bytes / median / 1e9:7.1f}"
                f" {row['share_of_read']:8.2f} {flop / median / 1e12:8.3f}"
            )
    for name in absent():
        print(f"{name} is not installed")
    config = {"layers": args.layers, "bf16_layers": args.bf16_layers, "rounds": args.rounds, "group_size": GROUP}
    measured = {"read_bytes_per_second": bandwidth, "gemm_bfloat16_flops": flops}
    write_record(
        "int4",
        {"config": config, "ceilings": measured, "figures": figures, "not_installed": list(absent())},
    )


if __name__ == "__main__":
    main()
