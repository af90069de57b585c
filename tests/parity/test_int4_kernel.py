"""int4_linear against a weight that the test packs and unpacks by itself, for every path of this machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bluejay import kernels
from bluejay.errors import MachineError
from bluejay.kernels import native
from bluejay.machine import cpu, cxx_compiler

PATHS = ("x8", "portable", "avx2", "avx512", "amx", "torch", "reference")
GROUPS = (16, 32, 64, 128, 256, -1)
# Outputs and inputs: below one block, odd, off the padding, several blocks, a last group that is short, several parts
# of x that are packed apart.
SIZES = ((17, 20), (50, 48), (65, 72), (96, 200), (33, 520), (16, 2120))
ROWS = (1, 2, 7, 16, 33, 64)
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


@pytest.fixture(scope="module", autouse=True)
def _native(program_folder: str) -> None:
    kernels.ensure(Path(program_folder), force=True)


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    """Every path; those whose instructions this processor lacks must be refused."""
    name: str = request.param
    if name not in kernels.available_paths():
        weight = pack(16, 16, 16)
        with pytest.raises(MachineError):
            weight.times(torch.ones(1, 16), name)
        pytest.skip(f"this processor has no {name}")
    return name


@dataclass
class Packed:
    """A weight as the layout text says, and what it stands for in fp64."""

    codes: Tensor
    scales: Tensor
    biases: Tensor
    code: Tensor  # [N, K]
    scale: Tensor  # [N, K] fp64, each group's repeated
    offset: Tensor
    group_size: int

    @property
    def weight(self) -> Tensor:
        return self.scale * self.code + self.offset

    def times(self, x: Tensor, path: str, bias: Tensor | None = None) -> Tensor:
        return kernels.int4_linear(x, self.codes, self.scales, self.biases, bias, len(self.code), self.group_size, path)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pack(outputs: int, inputs: int, group_size: int, *, padding: int = 0, seed: int = 1) -> Packed:
    """A random weight. The codes, scales and biases of the padding are `padding`; -1 makes them random, or NaN."""
    generator = torch.Generator().manual_seed(seed)
    padded_outputs, padded_inputs = -(-outputs // 16) * 16, -(-inputs // 8) * 8
    group = torch.arange(inputs) // (inputs if group_size == -1 else group_size)
    num_groups = int(group[-1]) + 1
    code = torch.randint(0, 16, (outputs, inputs), generator=generator)
    scale = (torch.rand(outputs, num_groups, generator=generator) * 0.2 + 0.05).half()
    offset = (torch.randn(outputs, num_groups, generator=generator) - 7.5 * scale.float()).half()
    full = torch.full((padded_outputs, padded_inputs), padding)
    if padding == -1:
        full = torch.randint(0, 16, full.shape, generator=generator)
    full[:outputs, :inputs] = code
    words = torch.zeros(padded_outputs // 16, padded_inputs // 8, 16, dtype=torch.int64)
    for output in range(padded_outputs):
        for k in range(8):
            words[output // 16, :, output % 16] |= full[output, k::8] << (16 * (k & 1) + 4 * (k >> 1))

    def blocks(part: Tensor) -> Tensor:
        filled = torch.full((padded_outputs, num_groups), torch.nan if padding == -1 else 0.0).half()
        filled[:outputs] = part
        return filled.view(-1, 16, num_groups).transpose(1, 2).contiguous()

    codes = torch.where(words >= 2**31, words - 2**32, words).int()
    wide = (scale.double()[:, group], offset.double()[:, group])
    return Packed(codes, blocks(scale), blocks(offset), code, *wide, group_size)


def bound(packed: Packed, x: Tensor, exact: Tensor, path: str) -> Tensor:
    """How far a path may be from the exact product: half a unit of x's dtype for the result, fp32 sums, and where
    bf16 x is multiplied in integers, the rounding of x to 12 bits, or 8, of its group's largest."""
    wide = x.double()
    terms = wide.abs() @ (packed.scale * packed.code + packed.offset.abs()).T
    inputs = x.shape[1]
    allowed = torch.finfo(x.dtype).eps / 2 * 1.01 * exact.abs() + (inputs + 8) * 2.0**-24 * terms + 1e-7
    if path in ("avx512", "amx", "x8") and x.dtype == torch.bfloat16:
        largest, rounding, start = (127, 1 / 2, 1 / 2) if path == "x8" else (118, 1 / 32, 1 / 256)
        length = min(inputs if packed.group_size == -1 else packed.group_size, 256)
        for begin in range(0, inputs, length):
            part = slice(begin, min(begin + length, inputs))
            unit = wide[:, part].abs().amax(1, keepdim=True) / largest
            count = part.stop - part.start
            allowed += unit * (7.5 * count * rounding * 1.01 + start) * packed.scale[:, begin]
    return allowed


@pytest.mark.parametrize("group_size", GROUPS)
def test_every_path_is_the_product_with_the_dequantized_weight(path: str, group_size: int) -> None:
    """Catches a path that is right for one group size, one number of rows, or sizes that fill their blocks (B-43), and
    a short last group that is lost or read past its end (B-42)."""
    for outputs, inputs in SIZES:
        packed = pack(outputs, inputs, group_size)
        for dtype in DTYPES:
            bias = random(outputs, seed=2).to(dtype)
            for rows in ROWS:
                x = random(rows, inputs, seed=rows).to(dtype)
                product = x.double() @ packed.weight.T
                for added in (None, bias):
                    exact = product if added is None else product + added.double()
                    y = packed.times(x, path, added)
                    assert y.dtype == dtype
                    worst = ((y.double() - exact).abs() / bound(packed, x, exact, path)).max().item()
                    assert worst <= 1, f"{worst:.2f} of the bound at {outputs} x {inputs}, {rows} rows, {dtype}"


@pytest.mark.parametrize(("path", "plain", "with_outliers"), [("auto", 1.2, 1.2), ("x8", 3, 7.5)])
def test_what_rounding_x_adds_to_the_rounding_of_the_result(path: str, plain: float, with_outliers: float) -> None:
    """Catches integer products that keep fewer bits of x than they claim: a bound of the worst case lets half of them
    go. With 12 bits the error of a bf16 result is hardly more than its own rounding, with 8 several times that."""
    if path not in ("auto", *kernels.available_paths()):
        pytest.skip(f"this processor has no {path}")
    packed = pack(64, 512, 64)
    for largest, factor in ((1.0, plain), (30.0, with_outliers)):
        x = random(64, 512)
        x[:, ::64] *= largest
        x = x.bfloat16()
        exact = x.double() @ packed.weight.T
        y = packed.times(x, path)
        rounding = (exact.bfloat16().double() - exact).square().mean().sqrt()
        error = (y.double() - exact).square().mean().sqrt()
        assert error < factor * rounding


def test_tiles_give_the_bits_of_vectors(tmp_path: Path) -> None:
    """Catches tiles of another shape than their data, rows or chunks that fill none, the end of a weight read past and
    a product that the processor would refuse. On a processor without tiles the same instructions are done in C++."""
    if not {"avx512f", "avx512_vnni"} <= set(cpu().features):
        pytest.skip("this processor has no vectors to compare tiles with")
    compiler = cxx_compiler()
    assert compiler is not None
    if not native._knows_tiles(compiler.path, tmp_path / "probe.o"):
        pytest.skip("this compiler knows no tiles")
    flags = native._ARCHITECTURE["x86_64"]
    objects = []
    for name in ("int4_amx.cpp", "int4_avx512_vnni.cpp"):
        objects.append(str(tmp_path / f"{name}.o"))
        source = str(native.SOURCES / name)
        subprocess.run([compiler.path, *native._FLAGS, *flags[name], "-c", source, "-o", objects[-1]], check=True)
    driver, program = str(Path(__file__).with_name("tiles.cpp")), str(tmp_path / "tiles")
    subprocess.run([compiler.path, *native._FLAGS, f"-I{native.SOURCES}", driver, *objects, "-o", program], check=True)
    run = subprocess.run([program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "products are the same bits" in run.stdout


def test_the_order_of_codes_in_a_word(path: str) -> None:
    """Catches codes taken in another order, or from the wrong half of a word (B-45): written out by hand."""
    codes = torch.zeros(1, 2, 16, dtype=torch.int32)
    codes[0, 1, 3] = 0x87654321 - 2**32
    one, zero = torch.ones(1, 1, 16).half(), torch.zeros(1, 1, 16).half()
    weight = kernels.int4_linear(torch.eye(16), codes, one, zero, None, 16, 16, path).T
    assert weight[3].tolist() == [0] * 8 + [1, 5, 2, 6, 3, 7, 4, 8]
    assert weight.count_nonzero() == 8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_stay_in_their_row(path: str, dtype: torch.dtype, value: float) -> None:
    """Catches rows that share a sum, a scale or a register: an unused cache slot holds NaN. And an infinite x that
    counts as zero: a result is NaN, or the infinity that the weight's sign gives."""
    packed = pack(33, 72, 16)
    for rows in (2, 9):
        x = random(rows, 72).to(dtype)
        expected = packed.times(x, path)
        x[1, 50] = value
        y = packed.times(x, path)
        others = torch.arange(rows) != 1
        assert torch.equal(y[others], expected[others])
        assert (y[1].isnan() | (y[1].double() == packed.weight[:, 50] * value)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_padding_has_no_effect(path: str, dtype: torch.dtype) -> None:
    """Catches a path that multiplies codes beyond the last input, or lets the outputs of the padding in: random codes
    and NaN scales lie there."""
    for rows in (1, 9):
        x = random(rows, 20).to(dtype)
        clean, dirty = (pack(17, 20, 16, padding=padding) for padding in (0, -1))
        dirty.codes[:, :2] = clean.codes[:, :2]  # the inputs that exist in full; those beyond stay random
        code = torch.where(torch.arange(8) < 4, 1, 0)  # of the third word, the inputs that exist
        keep = sum(15 << (16 * (k & 1) + 4 * (k >> 1)) for k in range(8) if code[k])
        dirty.codes[:, 2] = clean.codes[:, 2] & keep | dirty.codes[:, 2] & ~keep
        dirty.scales[0], dirty.biases[0] = clean.scales[0], clean.biases[0]
        dirty.scales[1, :, 0], dirty.biases[1, :, 0] = clean.scales[1, :, 0], clean.biases[1, :, 0]
        assert torch.equal(dirty.times(x, path), clean.times(x, path))


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_threads_and_other_rows_change_no_bit(path: str, dtype: torch.dtype) -> None:
    """Catches outputs that two threads both write or neither, and a sum whose order depends on how many rows there are:
    then the answer to a prompt would depend on who else is in the batch."""
    packed = pack(700, 200, 64)
    x = random(300, 200).to(dtype)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(packed.times(x, path))
    assert torch.equal(*results)
    if path not in ("torch", "reference"):  # theirs is torch's matrix product, whose order is its own
        for rows in (1, 2, 3, 4, 5, 6, 8, 13):
            assert torch.equal(packed.times(x[:rows], path), results[0][:rows])


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_thread_reads_x_before_it_is_packed(path: str, dtype: torch.dtype) -> None:
    """Catches a thread that begins while another still packs its part of x: what the call before left is read then."""
    packed = pack(32, 16384, 256)
    inputs = [random(2, 16384, seed=seed).to(dtype) for seed in range(2)]
    torch.set_num_threads(1)
    expected = [packed.times(x, path) for x in inputs]
    torch.set_num_threads(2)
    for i in range(2 if path in ("torch", "reference") else 150):
        torch.testing.assert_close(packed.times(inputs[i % 2], path), expected[i % 2])


def test_shapes_of_x(path: str) -> None:
    """Catches an x that is not contiguous read as if it were, and shapes with no rows or several row dimensions."""
    packed = pack(33, 48, 16)
    x = random(6, 96)[:, ::2]
    expected = packed.times(x.contiguous(), path)
    assert torch.equal(packed.times(x, path), expected)
    assert torch.equal(packed.times(x.reshape(2, 3, 48), path), expected.view(2, 3, 33))
    assert torch.equal(packed.times(x[0], path), packed.times(x[:1], path)[0])
    assert packed.times(x[:0], path).shape == (0, 33)


@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e30])
def test_tiny_and_huge_x(size: float) -> None:
    """Catches a scale of x that overflows or divides by zero, and one that all groups share: here one group is a
    billion times another."""
    packed = pack(16, 64, 16)
    x = random(3, 64)
    x[:, 16:] *= size
    x = x.bfloat16()
    exact = x.double() @ packed.weight.T
    assert ((packed.times(x, "auto").double() - exact).abs() <= bound(packed, x, exact, "avx512")).all()


@pytest.mark.parametrize("fault", ["group", "codes", "scales", "bias", "dtype"])
def test_what_does_not_fit_is_refused(fault: str) -> None:
    """Catches native code that reads past the end of a tensor that is too small."""
    packed = pack(32, 64, 16)
    x, bias = random(2, 64), random(32)
    if fault == "group":
        packed.group_size = 8
    elif fault == "codes":
        packed.codes = packed.codes[:, :-1].contiguous()
    elif fault == "scales":
        packed.scales = packed.scales[:, :-1].contiguous()
    elif fault == "bias":
        bias = bias[:-1]
    else:
        x = x.double()
    for name in kernels.available_paths():
        if name not in ("torch", "reference"):
            with pytest.raises(RuntimeError, match="int4_linear"):
                packed.times(x, name, bias)


class Linear(nn.Module):
    """A module that computes with a packed weight between other operations."""

    def __init__(self, outputs: int = 50, inputs: int = 72, group_size: int = 32) -> None:
        super().__init__()
        packed = pack(outputs, inputs, group_size)
        for name in ("codes", "scales", "biases"):
            self.register_buffer(name, getattr(packed, name))
        self.outputs, self.group_size = outputs, group_size

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = kernels.int4_linear(
            torch.tanh(x), self.codes, self.scales, self.biases, None, self.outputs, self.group_size, "auto"
        )
        return (y * 2, y.argmax(-1))


IN_A_NEW_PROCESS = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_int4_kernel import Linear, random
from bluejay import kernels
from bluejay.compile import Store, compile
from bluejay.config import CompileSpec

kernels.ensure(Path(sys.argv[2]), force=True)
program = compile(Linear(), (random(5, 72),), CompileSpec(), Store(Path(sys.argv[2])))
torch.save((program.was_compiled, program.bind(Linear())(random(5, 72))), sys.argv[3])
"""


def test_inside_a_compiled_program(program_folder: str, tmp_path: Path) -> None:
    """Catches an operation that tracing takes apart or that a program finds only where it was compiled: the program
    equals eager, and does so again in a new process that finds it and the kernels in the store."""
    expected = Linear()(random(5, 72))
    results = []
    for file in (tmp_path / "first", tmp_path / "second"):
        arguments = [str(Path(__file__).parent), program_folder, str(file)]
        subprocess.run([sys.executable, "-c", IN_A_NEW_PROCESS, *arguments], check=True)
        results.append(torch.load(file))
    (was_compiled, made), (was_compiled_again, found) = results
    assert (was_compiled, was_compiled_again) == (True, False)
    for first, second, eager in zip(made, found, expected, strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, eager, rtol=1e-5, atol=1e-5)
