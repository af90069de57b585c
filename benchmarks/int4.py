"""Four-bit matrix products at 6B width against the machine's ceilings and other libraries.

    python benchmarks/int4.py                 # 28 layers: needs 9 GB of free memory
    python benchmarks/int4.py --layers 4      # needs 5 GB

In every round the ceilings are measured and the contestants take turns, so that a busy moment meets all of them. Each
waits until the threads of the one before it, which look for more work for a while, have gone to sleep, and then
multiplies a layer for a moment until cores that have rested are awake. There are as many matrices as in the model, so
that no cache holds them. Libraries that are not installed are named; of llama.cpp the library of its products, ggml, is
enough (`pip install ggml-python`, or llama-cpp-python).

Ceilings: bytes/s that this machine reads, in small or in large pages, whichever is faster, measured again just before
each measurement, because on a shared host it changes by half from minute to minute; FLOP/s of its bf16 matrix
products, by `measure_gemm`; integer dot products/s, where it has that instruction, by a loop of nothing else in all
threads. The roofline of a product is the longer of reading its weights and of computing it at the ceiling of what
computes it.
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
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import buffer_to_read, measure_read, write_record
from torch import Tensor

from bluejay import kernels
from bluejay.checkpoint import LargePages, has_large_pages
from bluejay.machine import cpu, cxx_compiler, default_cache_folder, measure_gemm

REST_SECONDS = 0.3  # OpenMP of Intel and LLVM keeps threads awake for 0.2
WAKE_SECONDS = 0.1
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
    """A library with the matrices of `layers` layers and of the head, in the model's order.

    One that gives no products of matrices has a whole model as its only product.
    """

    layers: list[list[Product]]
    head: list[Product]
    settings: dict[str, Any] = field(default_factory=dict)
    ceiling: str = ""  # of what computes it
    cost: float = 2  # in units of the ceiling, for one weight and one row
    skip: tuple[int, ...] = ()  # numbers of rows that take it minutes
    taken: dict[int, list[float]] = field(default_factory=lambda: {rows: [] for rows in ROWS})
    reads: dict[int, list[float]] = field(default_factory=lambda: {rows: [] for rows in ROWS})  # just before, bytes/s

    def counted(self, rows: int) -> list[Product]:
        """What one measurement multiplies: all, or with many rows one layer."""
        return self.layers[0] if rows >= MANY_ROWS else [p for part in (*self.layers, self.head) for p in part]


def of_matrices(layers: int, make: Callable[[int, int], Product], **fields: Any) -> Contestant:
    return Contestant([[make(*shape) for shape in LAYER] for _ in range(layers)], [make(*HEAD)], **fields)


def ours(layers: int) -> dict[str, Contestant]:
    """Our own, in pages as large as those that loading a packed model puts its weights into; and where the processor
    has the path, with x in 8 bits."""
    num_weights = sum(outputs * inputs for outputs, inputs in (*LAYER * layers, HEAD))
    large = has_large_pages()
    room = LargePages(num_weights // 2 + num_weights // GROUP * 4, 3 * (len(LAYER) * layers + 1)) if large else None

    def take(content: Tensor) -> Tensor:
        return content.clone() if room is None else room.take(content.shape, content.dtype).copy_(content)

    content = torch.randint(-(2**31), 2**31 - 1, (HEAD[0] * HEAD[1] // 8,), dtype=torch.int32)

    def make(outputs: int, inputs: int) -> Callable[[str], Product]:
        blocks, groups = outputs // 16, inputs // GROUP
        codes = take(content[: outputs * inputs // 8]).view(blocks, inputs // 8, 16)
        scales = take(torch.full((blocks, groups, 16), 0.01).half())
        biases = take(torch.full((blocks, groups, 16), -0.075).half())
        return lambda path: Product(
            lambda x: kernels.int4_linear(x[inputs], codes, scales, biases, None, outputs, GROUP, path),
            codes.nbytes + scales.nbytes + biases.nbytes,
            outputs * inputs,
        )

    made, head = [[make(*shape) for shape in LAYER] for _ in range(layers)], make(*HEAD)

    def by(path: str, cost: float) -> Contestant:
        products = [[of(path) for of in layer] for layer in made]
        return Contestant(products, [head(path)], {"large_pages": large}, "dot_products_per_second", cost)

    # x of 12 bits takes three dot products for two of its values, x of 8 bits two.
    found = {"bluejay int4": by("auto", 1.5)}
    return found | ({"bluejay int4 x8": by("x8", 1)} if "x8" in kernels.available_paths() else {})


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

    return Contestant([[make(LAYER)] for _ in range(layers)], [make((HEAD,))], settings=config)


def ggml_folder() -> Path | None:
    """Where the library of llama.cpp's products is: it comes with either package."""
    for name in ("llama_cpp", "ggml"):
        spec = find_spec(name)
        folder = Path(spec.origin).parent / "lib" if spec and spec.origin else Path()
        if (folder / "libggml-cpu.so").is_file():
            return folder
    return None


def llama(layers: int, folder: Path) -> Contestant:
    """llama.cpp's products of Q4_0 weights (groups of 32, x rounded to 8 bits): a graph per layer and one of the head.

    Weights lie as llama.cpp lays them for this processor when it loads a model.
    """
    import numpy as np

    base, native = (
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL) for name in ("libggml-base.so", "libggml-cpu.so")
    )
    q4_0, f32, group = 2, 0, 32
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64

    class Parameters(ctypes.Structure):
        _fields_ = (("mem_size", size), ("mem_buffer", pointer), ("no_alloc", ctypes.c_bool))

    def function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
        found = library[name]
        found.restype, found.argtypes = result, arguments
        return found

    init = function(base, "ggml_init", pointer, Parameters)
    new_matrix = function(base, "ggml_new_tensor_2d", pointer, pointer, ctypes.c_int, number, number)
    matmul = function(base, "ggml_mul_mat", pointer, pointer, pointer, pointer)
    new_graph = function(base, "ggml_new_graph", pointer, pointer)
    expand = function(base, "ggml_build_forward_expand", None, pointer, pointer)
    allocate = function(base, "ggml_backend_alloc_ctx_tensors_from_buft", pointer, pointer, pointer)
    fill = function(base, "ggml_backend_tensor_set", None, pointer, pointer, size, size)
    compute = function(base, "ggml_backend_graph_compute", ctypes.c_int, pointer, pointer)
    name_of = function(base, "ggml_backend_buft_name", ctypes.c_char_p, pointer)
    device = function(base, "ggml_backend_reg_dev_get", pointer, pointer, size)(
        function(native, "ggml_backend_cpu_reg", pointer)(), 0
    )
    address = function(base, "ggml_backend_reg_get_proc_address", pointer, pointer, ctypes.c_char_p)(
        function(native, "ggml_backend_cpu_reg", pointer)(), b"ggml_backend_dev_get_extra_bufts"
    )
    plain = function(base, "ggml_backend_dev_buffer_type", pointer, pointer)(device)
    own = ctypes.CFUNCTYPE(ctypes.POINTER(pointer), pointer)(address)(device)[0] or plain
    backend = function(native, "ggml_backend_cpu_init", pointer)()
    function(native, "ggml_backend_cpu_set_n_threads", None, pointer, ctypes.c_int)(backend, torch.get_num_threads())
    blocks = np.random.default_rng(0).integers(0, 256, (HEAD[0] * HEAD[1] // group, 18), dtype=np.uint8)
    blocks[:, :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)  # each group's scale
    kept: dict[tuple[int, int], Any] = {}

    def context() -> Any:
        return init(Parameters(2**20, None, True))

    def input_of(x: Tensor) -> Any:
        """x in fp32 as ggml's tensor, made once."""
        rows, width = x.shape
        if (rows, width) not in kept:
            owner = context()
            tensor = new_matrix(owner, f32, width, rows)
            allocate(owner, plain)
            wide = x.float()
            fill(tensor, wide.data_ptr(), 0, wide.nbytes)
            kept[rows, width] = tensor
        return kept[rows, width]

    def make(shapes: tuple[tuple[int, int], ...]) -> Product:
        owner = context()
        weights = [(new_matrix(owner, q4_0, inputs, outputs), inputs) for outputs, inputs in shapes]
        allocate(owner, own)
        num_bytes = 0
        for (weight, _), (outputs, inputs) in zip(weights, shapes, strict=True):
            count = outputs * inputs // group * 18
            fill(weight, blocks.ctypes.data, 0, count)
            num_bytes += count
        graphs: dict[int, Any] = {}

        def multiply(x: Inputs) -> object:
            rows = len(x[shapes[0][1]])
            if rows not in graphs:
                scratch = context()
                results = [matmul(scratch, weight, input_of(x[inputs])) for weight, inputs in weights]
                graphs[rows] = new_graph(scratch)
                for result in results:
                    expand(graphs[rows], result)
                allocate(scratch, plain)
            assert compute(backend, graphs[rows]) == 0
            return graphs[rows]

        return Product(multiply, num_bytes, sum(outputs * inputs for outputs, inputs in shapes))

    settings = {
        "ggml": function(base, "ggml_version", ctypes.c_char_p)().decode(),
        "type": "Q4_0, groups of 32",
        "layout": name_of(own).decode(),
        "threads": torch.get_num_threads(),
    }
    return Contestant([[make(LAYER)] for _ in range(layers)], [make((HEAD,))], settings=settings)


def ctranslate2(layers: int) -> Contestant:
    """CTranslate2, which has no four bits on a CPU and gives no products: GPT-J in int8 as a whole, one token a row.

    Norms, attention to one token and the logits' copy are within its time: small beside the products.
    """
    import ctranslate2 as ct
    import numpy as np
    from ctranslate2.specs import TransformerDecoderModelSpec
    from ctranslate2.specs.common_spec import Activation

    width, inner, vocabulary = HEAD[1], LAYER[4][0], HEAD[0]
    spec = TransformerDecoderModelSpec.from_config(
        layers,
        16,
        activation=Activation.GELUTanh,
        rotary_dim=64,
        rotary_interleave=False,
        parallel_residual=True,
        shared_layer_norm=True,
    )
    generator = np.random.default_rng(0)

    def fill(part: Any, outputs: int, inputs: int, bias: bool = False) -> None:
        part.weight = generator.integers(-127, 128, (outputs, inputs), dtype=np.int8)
        part.weight_scale = np.full(outputs, 6350, np.float32)  # what a weight is multiplied by to get its code
        if bias:
            part.bias = np.zeros(outputs, np.float32)

    def norm(part: Any) -> None:
        part.gamma, part.beta = np.ones(width, np.float32), np.zeros(width, np.float32)

    decoder = spec.decoder
    decoder.scale_embeddings = False
    fill(decoder.embeddings, vocabulary, width)
    norm(decoder.layer_norm)
    fill(decoder.projection, vocabulary, width, bias=True)
    for layer in decoder.layer:
        norm(layer.shared_layer_norm)
        fill(layer.self_attention.linear[0], 3 * width, width)
        fill(layer.self_attention.linear[1], width, width)
        fill(layer.ffn.linear_0, inner, width, bias=True)
        fill(layer.ffn.linear_1, width, inner, bias=True)
    spec.register_vocabulary([f"<{i}>" for i in range(vocabulary)])
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = "<0>"
    with tempfile.TemporaryDirectory() as folder:
        spec.validate()
        spec.save(folder)
        model = ct.Generator(folder, compute_type="int8", intra_threads=torch.get_num_threads())
    weights = sum(outputs * inputs for outputs, inputs in (*LAYER * layers, HEAD))
    product = Product(lambda x: model.forward_batch([[i] for i in range(len(x[width]))]), weights, weights)
    settings = {"compute_type": model.compute_type, "layers": layers, "of": "a whole model"}
    return Contestant([[product]], [], settings=settings, skip=(512,))


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
    """The loop whose rate is the ceiling of dot products; None where the kernel computes by other instructions."""
    compiler = cxx_compiler()
    if compiler is None or "avx512_vnni" not in cpu().features or "amx" in kernels.available_paths():
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
        times["computing"] = weights * contestant.cost / ceilings[contestant.ceiling]
    return times


def absent() -> Iterator[str]:
    for name in ("openvino", "ctranslate2"):
        if find_spec(name) is None:
            yield name
    if ggml_folder() is None:
        yield "llama.cpp"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28, help="layers of our own matrices")
    parser.add_argument("--peer-layers", type=int, default=4, help="layers of the others, which share the memory")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cache", type=Path, default=default_cache_folder())
    args = parser.parse_args()
    kernels.ensure(args.cache, force=True)
    contestants = {
        **ours(args.layers),
        "torch int4": torch_int4(args.peer_layers),
        "torch bf16": torch_bf16(args.peer_layers),
    }
    if find_spec("openvino"):
        contestants["openvino bf16"] = openvino(args.peer_layers, "bf16", 0)
        contestants["openvino int8"] = openvino(args.peer_layers, "f32", 32)
        contestants["openvino int8"].settings["version"] = version("openvino")
    if folder := ggml_folder():
        contestants["llama.cpp"] = llama(args.peer_layers, folder)
    if find_spec("ctranslate2"):
        contestants["ctranslate2"] = ctranslate2(args.peer_layers)
        contestants["ctranslate2"].settings["version"] = version("ctranslate2")
    inputs = {rows: {width: torch.randn(rows, width).bfloat16() for width in (4096, 16384)} for rows in ROWS}
    rounds: dict[str, list[float]] = {"read_bytes_per_second": [], "gemm_bfloat16_flops": []}
    with torch.inference_mode(), tempfile.TemporaryDirectory() as temporary:
        peak = build_peak(Path(temporary))
        buffer = buffer_to_read()
        for i in range(args.rounds + 1):  # the first warms up
            measured = {"gemm_bfloat16_flops": measure_gemm(torch.bfloat16)}
            if peak:
                measured["dot_products_per_second"] = measure_dot_products(peak)
            for name, value in measured.items():
                rounds.setdefault(name, []).append(value)
            for rows in ROWS:
                for contestant in contestants.values():
                    if rows in contestant.skip:
                        continue
                    products = contestant.counted(rows)
                    time.sleep(REST_SECONDS)
                    read = measure_read(buffer)
                    awake = time.perf_counter() + WAKE_SECONDS
                    while time.perf_counter() < awake:
                        for product in contestant.layers[0]:
                            product.multiply(inputs[rows])
                    started = time.perf_counter()
                    for product in products:
                        product.multiply(inputs[rows])
                    seconds = time.perf_counter() - started
                    if i:
                        contestant.taken[rows].append(seconds)
                        contestant.reads[rows].append(read)
                        rounds["read_bytes_per_second"].append(read)
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
            read = statistics.median(contestant.reads[rows])
            times = roofline(contestant, rows, {**ceilings, "read_bytes_per_second": read})
            pairs = zip(contestant.taken[rows], contestant.reads[rows], strict=True)
            row = {
                "seconds": seconds,
                "over_one_row": seconds / num_bytes / per_byte,
                "bytes_per_second": num_bytes / seconds,
                "read_bytes_per_second": read,
                "share_of_read": statistics.median(num_bytes / taken / before for taken, before in pairs),
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
    record = {
        "config": config,
        "settings": {name: contestant.settings for name, contestant in contestants.items() if contestant.settings},
        "ceilings": ceilings,
        "figures": figures,
        "not_installed": list(absent()),
    }
    write_record("int4", record)


if __name__ == "__main__":
    main()
