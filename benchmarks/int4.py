"""Four-bit matrix products at 6B width against the machine's ceilings and other libraries.

    python benchmarks/int4.py                 # 28 layers: needs 6 GB of free memory
    python benchmarks/int4.py --layers 4      # in a minute

In every round the ceilings are measured and the contestants take turns, so that a busy moment meets all of them. There
are as many matrices as in the model, so that no cache holds them. Libraries that are not installed are named.

Ceilings: bytes/s that this machine reads, by `measure_read_bandwidth`; FLOP/s of its bf16 matrix products, by
`measure_gemm`; integer dot products/s, where it has that instruction, by a loop of nothing else in all threads. The
roofline of a product is the longer of reading its weights and of computing it at the ceiling of what computes it.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import write_record
from torch import Tensor

from bluejay import kernels
from bluejay.machine import cpu, cxx_compiler, default_cache_folder, measure_gemm, measure_read_bandwidth

GROUP = 64
LAYER = ((4096, 4096),) * 4 + ((16384, 4096), (4096, 16384))
HEAD = (50400, 4096)
ROWS = (1, 2, 4, 8, 16, 32, 64, 512)
# From this many rows on a contestant multiplies one layer's matrices only: it no longer matters where they come from.
MANY_ROWS = 32

Inputs = dict[int, Tensor]  # x by its width


@dataclass
class Product:
    """Some matrices that are multiplied in one call."""

    multiply: Callable[[Inputs], object]
    num_bytes: int
    num_weights: int


@dataclass
class Contestant:
    """A library with the matrices of `layers` layers and of the head, in the model's order."""

    layers: list[list[Product]]
    head: list[Product]
    ceiling: str = ""  # of what computes it
    skip: tuple[int, ...] = ()  # numbers of rows that take it minutes
    taken: dict[int, list[float]] = field(default_factory=lambda: {rows: [] for rows in ROWS})

    def counted(self, rows: int) -> list[Product]:
        """What one measurement multiplies: all, or with many rows one layer."""
        return self.layers[0] if rows >= MANY_ROWS else [p for part in (*self.layers, self.head) for p in part]


def of_matrices(layers: int, make: Callable[[int, int], Product], **fields: Any) -> Contestant:
    return Contestant([[make(*shape) for shape in LAYER] for _ in range(layers)], [make(*HEAD)], **fields)


def ours(layers: int) -> Contestant:
    content = torch.randint(-(2**31), 2**31 - 1, (HEAD[0] * HEAD[1] // 8,), dtype=torch.int32)

    def make(outputs: int, inputs: int) -> Product:
        blocks, groups = outputs // 16, inputs // GROUP
        codes = content[: outputs * inputs // 8].clone().view(blocks, inputs // 8, 16)
        scales = torch.full((blocks, groups, 16), 0.01).half()
        biases = torch.full((blocks, groups, 16), -0.075).half()
        return Product(
            lambda x: kernels.int4_linear(x[inputs], codes, scales, biases, None, outputs, GROUP),
            codes.nbytes + scales.nbytes + biases.nbytes,
            outputs * inputs,
        )

    return of_matrices(layers, make, ceiling="dot_products_per_second")


def torch_int4(layers: int) -> Contestant:
    """torch's own operation for the CPU, with groups of the same size."""

    def make(outputs: int, inputs: int) -> Product:
        codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        scales = torch.full((inputs // GROUP, outputs, 2), 0.01, dtype=torch.bfloat16)
        return Product(
            lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x[inputs], packed, GROUP, scales),
            packed.nbytes + scales.nbytes,
            outputs * inputs,
        )

    return of_matrices(layers, make, skip=(512,))


def torch_bf16(layers: int) -> Contestant:
    def make(outputs: int, inputs: int) -> Product:
        weight = torch.full((outputs, inputs), 0.01, dtype=torch.bfloat16)
        return Product(lambda x: F.linear(x[inputs], weight), weight.nbytes, outputs * inputs)

    return of_matrices(layers, make, ceiling="gemm_bfloat16_flops")


def openvino(layers: int, precision: str, int8_group: int) -> Contestant:
    """OpenVINO: a program per layer and one of the head, so that a call costs it little beside the products.

    Args:
        precision: "bf16" or "f32", of the products.
        int8_group: inputs that share a scale where it rounds x to int8, its own default; 0 keeps x as it is.
    """
    import numpy as np
    import openvino as ov
    from openvino import opset13 as ops

    config = {
        "INFERENCE_PRECISION_HINT": precision,
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "NUM_STREAMS": 1,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": int8_group,
    }
    generator = np.random.default_rng(0)
    kept: dict[tuple[int, ...], Any] = {}

    def as_tensor(x: Tensor) -> Any:
        """x in fp32, made once."""
        if x.shape not in kept:
            kept[x.shape] = ov.Tensor(x.float().numpy())
        return kept[x.shape]

    def make(shapes: tuple[tuple[int, int], ...]) -> Product:
        names = {inputs: f"x{inputs}" for _, inputs in shapes}
        parameters = {inputs: ops.parameter([-1, inputs], ov.Type.f32, name=name) for inputs, name in names.items()}
        results, constants, num_bytes = [], [], 0
        for outputs, inputs in shapes:
            groups = outputs * inputs // GROUP
            content = generator.integers(0, 256, groups * GROUP // 2, dtype=np.uint8)
            middle = np.full(groups // 2, 0x88, np.uint8)
            scales = np.full((outputs, inputs // GROUP, 1), 0.01, np.float16)
            constants.append((content, middle, scales))
            code = ops.constant(ov.Tensor(content, [outputs, inputs // GROUP, GROUP], ov.Type.u4))
            zero = ops.constant(ov.Tensor(middle, [outputs, inputs // GROUP, 1], ov.Type.u4))
            weight = ops.multiply(
                ops.subtract(ops.convert(code, "f16"), ops.convert(zero, "f16")), ops.constant(scales)
            )
            flat = ops.convert(ops.reshape(weight, ops.constant(np.array([outputs, inputs])), False), "f32")
            results.append(ops.result(ops.matmul(parameters[inputs], flat, False, True)))
            num_bytes += content.nbytes + middle.nbytes + scales.nbytes
        model = ov.Model(results, [*parameters.values()], "products")
        request = ov.Core().compile_model(model, "CPU", config).create_infer_request()

        def multiply(x: Inputs, constants: object = constants) -> object:  # which the program reads, and does not hold
            for inputs, name in names.items():
                request.set_tensor(name, as_tensor(x[inputs]))
            return request.infer(share_outputs=True)

        return Product(multiply, num_bytes, sum(outputs * inputs for outputs, inputs in shapes))

    return Contestant([[make(LAYER)] for _ in range(layers)], [make((HEAD,))])


# Dot products of four bytes in each of 16 lanes, into twelve registers so that none waits for another.
PEAK = """
extern "C" void peak(long repeats) {
  for (long i = 0; i < repeats; ++i)
    asm volatile(
        ".irp n, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11\\n vpdpbusd %%zmm12, %%zmm12, %%zmm\\\\n\\n .endr" ::
        : "zmm0", "zmm1", "zmm2", "zmm3", "zmm4", "zmm5", "zmm6", "zmm7", "zmm8", "zmm9", "zmm10", "zmm11");
}
"""


def build_peak(folder: Path) -> ctypes.CDLL | None:
    """The loop whose rate is the ceiling of dot products; None where the processor has no such instruction."""
    compiler = cxx_compiler()
    if compiler is None or "avx512_vnni" not in cpu().features:
        return None
    (folder / "peak.cpp").write_text(PEAK)
    flags = ["-O2", "-mavx512f", "-mavx512vnni", "-shared", "-fPIC"]
    subprocess.run([compiler.path, *flags, "peak.cpp", "-o", "peak.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "peak.so"))


def measure_dot_products(peak: ctypes.CDLL, repeats: int = 100_000_000) -> float:
    """Products of a code and an x, per second, in all threads: 64 an instruction.

    A seventh of a second and more: torch's threads still wait actively for work in the first milliseconds.
    """
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads) as pool:
        started = time.perf_counter()
        list(pool.map(peak.peak, [ctypes.c_long(repeats)] * threads))
        return threads * repeats * 12 * 64 / (time.perf_counter() - started)


def roofline(contestant: Contestant, rows: int, ceilings: dict[str, float]) -> dict[str, float]:
    """Seconds that reading the weights takes, and computing, each at its ceiling."""
    products = contestant.counted(rows)
    times = {"reading": sum(p.num_bytes for p in products) / ceilings["read_bytes_per_second"]}
    weights = sum(p.num_weights for p in products) * rows
    if contestant.ceiling in ceilings:
        # x of 12 bits takes three dot products for two of its values; a FLOP is half a multiply-add.
        cost = 1.5 if contestant.ceiling == "dot_products_per_second" else 2
        times["computing"] = weights * cost / ceilings[contestant.ceiling]
    return times


def absent() -> Iterator[str]:
    for name in ("openvino", "ctranslate2", "llama_cpp"):
        if find_spec(name) is None:
            yield name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28, help="layers of our own matrices")
    parser.add_argument("--peer-layers", type=int, default=4, help="layers of the others, which share the memory")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cache", type=Path, default=default_cache_folder())
    args = parser.parse_args()
    kernels.ensure(args.cache, force=True)
    contestants = {
        "bluejay int4": ours(args.layers),
        "torch int4": torch_int4(args.peer_layers),
        "torch bf16": torch_bf16(args.peer_layers),
    }
    if find_spec("openvino"):
        contestants["openvino bf16"] = openvino(args.peer_layers, "bf16", 0)
        contestants["openvino int8"] = openvino(args.peer_layers, "f32", 32)
    inputs = {rows: {width: torch.randn(rows, width).bfloat16() for width in (4096, 16384)} for rows in ROWS}
    rounds: dict[str, list[float]] = {"read_bytes_per_second": [], "gemm_bfloat16_flops": []}
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        peak = build_peak(Path(folder))
        for i in range(args.rounds + 1):  # the first warms up
            measured = {
                "read_bytes_per_second": measure_read_bandwidth(),
                "gemm_bfloat16_flops": measure_gemm(torch.bfloat16),
            }
            if peak:
                measured["dot_products_per_second"] = measure_dot_products(peak)
            for name, value in measured.items():
                rounds.setdefault(name, []).append(value)
            for rows in ROWS:
                for contestant in contestants.values():
                    if rows in contestant.skip:
                        continue
                    products = contestant.counted(rows)
                    started = time.perf_counter()
                    for product in products:
                        product.multiply(inputs[rows])
                    if i:
                        contestant.taken[rows].append(time.perf_counter() - started)
    ceilings = {name: statistics.median(values) for name, values in rounds.items()}
    print(", ".join(f"{name} {value:.4g}" for name, value in ceilings.items()), f"{torch.get_num_threads()} threads")
    print(
        f"{'':15} {'rows':>4} {'ms':>9} {'/ 1 row':>8} {'GB/s':>6} {'of read':>8} {'TFLOP/s':>8}  roofline in ms, share"
    )
    figures: dict[str, dict[str, Any]] = {}
    for name, contestant in contestants.items():
        figures[name] = {}
        for rows in ROWS:
            if not contestant.taken[rows]:
                continue
            products = contestant.counted(rows)
            num_bytes, flop = sum(p.num_bytes for p in products), 2 * rows * sum(p.num_weights for p in products)
            seconds = statistics.median(contestant.taken[rows])
            if rows == 1:
                per_byte = seconds / num_bytes
            times = roofline(contestant, rows, ceilings)
            row = {
                "seconds": seconds,
                "over_one_row": seconds / num_bytes / per_byte,
                "bytes_per_second": num_bytes / seconds,
                "share_of_read": num_bytes / seconds / ceilings["read_bytes_per_second"],
                "flops": flop / seconds,
                "roofline_seconds": times,
                "share_of_roofline": max(times.values()) / seconds,
            }
            figures[name][str(rows)] = row
            print(
                f"{name:15} {rows:4d} {seconds * 1e3:9.2f} {row['over_one_row']:8.2f} {num_bytes / seconds / 1e9:6.1f}"
                f" {row['share_of_read']:8.2f} {flop / seconds / 1e12:8.3f}  "
                + ", ".join(f"{what} {value * 1e3:.2f}" for what, value in times.items())
                + f", {row['share_of_roofline']:.2f}"
            )
    for name in absent():
        print(f"{name} is not installed")
    config = {"layers": args.layers, "peer_layers": args.peer_layers, "rounds": args.rounds, "group_size": GROUP}
    write_record("int4", {"config": config, "ceilings": ceilings, "figures": figures, "not_installed": list(absent())})


if __name__ == "__main__":
    main()
