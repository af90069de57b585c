"""The back-end that makes native code: one shared library per part, through torch.export and AOTInductor.

Weights are inputs of the programs, so a library holds no data and every fine-tune of one shape shares it.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bluejay.compile.host import HostCall, HostFunctions, function_of
from bluejay.compile.signature import TensorSpec
from bluejay.errors import MachineError
from bluejay.files import temporary_folder
from bluejay.machine import how_to_install_compiler

if TYPE_CHECKING:
    from bluejay.compile.graph import Part

# A program takes its inputs as a list and returns its outputs as a list.
Program = Callable[[list[Tensor]], list[Tensor]]
# A program, the places of what it takes and makes, and what the former must look like.
_Step = tuple[Program, list[int], list[int], tuple[TensorSpec, ...]]

# The least that a compiler must build: the language of the generated code, the standard library, a shared library.
_TRIAL = """#include <cmath>
#include <vector>
extern "C" double one() { return std::vector<double>(1, std::cos(0.0))[0]; }
"""

# What compilers said to the first program of ours that they could not build.
_failed: dict[str, str] = {}


def options(device: str, threads: int, cxx: str) -> dict[str, Any]:
    """What we ask of Inductor. A constant here needs no place in a fingerprint: this file's bytes have one."""
    chosen: dict[str, Any] = {
        # Copies of weights in another layout would double the memory, and weights are unknown when compiling.
        "freezing": False,
        "cpp.threads": threads,
        "cpp.dynamic_threads": False,  # a fixed number lets small loops stay serial: 8% of a nano step
        "cpp.cxx": (None, cxx),
        "cpp.enable_floating_point_contract_flag": "fast",  # fused multiply-add: 8% of a nano step
        # The patterns find nothing in a GPT-J step that the loop fusion does not, and cost a second per program.
        "pattern_matcher": False,
        "compile_threads": 1,  # no pool of worker processes: a part's kernels are one file
        # Debug tables are three quarters of a library's bytes.
        "aot_inductor.enable_line_tables": False,
        "aot_inductor.enable_frame_pointer": False,
    }
    if device != "cpu":
        chosen["aot_inductor.embed_kernel_binary"] = True  # one file is the whole program
    return chosen


def build(part: Part, folder: Path, name: str, device: str, threads: int, cxx: str) -> None:
    """Write the library of a part as `folder/name.so`.

    Raises:
        MachineError: the compiler cannot build what Inductor wrote.
    """
    import torch._inductor  # two seconds to import, and a program found in the store never needs it

    work = folder / f"{name}-work"
    work.mkdir()
    wanted = {**options(device, threads, cxx), "aot_inductor.output_path": str(work)}
    with torch.no_grad(), warnings.catch_warnings(), _compiler_errors(cxx):
        warnings.simplefilter("ignore", FutureWarning)  # Inductor's use of torch's own pytree
        library = Path(str(torch._inductor.aot_compile(part.graph, part.examples, options=wanted)))
    library.rename(folder / f"{name}.so")
    # Operations without a C entry point are described in a file that the loader looks for beside the library.
    with contextlib.suppress(FileNotFoundError):
        library.with_suffix(".json").rename(folder / f"{name}.json")
    shutil.rmtree(work)


def compiler_problem(cxx: str) -> str:
    """What keeps a compiler that answers from building, in its own words, or nothing.

    One that has failed at a program is not asked for another by this process: each would take seconds to fail.
    """
    return _failed.get(cxx) or _trial(cxx)


@cache
def _trial(cxx: str) -> str:
    """What the compiler says to the least it must build. A tenth of a second, once."""
    with temporary_folder() as folder:
        source = folder / "trial.cpp"
        source.write_text(_TRIAL)
        command = [cxx, "-std=c++20", "-shared", "-fPIC", "-o", str(source.with_suffix(".so")), str(source)]
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    return _first_error(ended.stderr + ended.stdout) if ended.returncode else ""


def cannot_build(cxx: str, problem: str) -> MachineError:
    """The error of a machine whose compiler fails."""
    return MachineError(
        asked=f"build a program with {cxx}",
        found=f"the compiler failed: {problem}",
        rule="the inductor back-end writes C++20 and needs a compiler with its standard library to build it",
        fix=f"repair it ({how_to_install_compiler()}), name another one in CXX, import programs made elsewhere "
        "(bluejay cache import), or use --backend eager",
    )


@contextlib.contextmanager
def _compiler_errors(cxx: str) -> Iterator[None]:
    """Failures of the C++ compiler, however deep, as what they are: this machine cannot build programs."""
    try:
        yield
    except Exception as error:
        problem = _problem_within(error)
        if problem is None:
            raise
        _failed[cxx] = problem
        raise cannot_build(cxx, problem) from error


def _problem_within(error: BaseException | None) -> str | None:
    """What the compiler said first, if that is what lies at the bottom of `error`."""
    from torch._inductor import exc

    while error is not None:
        if isinstance(error, exc.CppCompileError | subprocess.CalledProcessError):
            output = error.output or ""
            return _first_error(output.decode(errors="replace") if isinstance(output, bytes) else output)
        if isinstance(error, exc.InvalidCxxCompiler):
            return str(error)
        error = error.__cause__ or error.__context__
    return None


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), (lines or ["it does not say why"])[0])


def load(path: Path, device: torch.device) -> Program:
    """The program in a library.

    Raises:
        RuntimeError: the library cannot be loaded here.
    """
    if device.type == "cpu":
        return torch._C._aoti.AOTIModelContainerRunnerCpu(str(path), 1).run
    return torch._C._aoti.AOTIModelContainerRunnerCuda(str(path), 1, str(device)).run


class Chain:
    """Programs called one after the other over a table of values: weights, inputs, what the programs make.

    Between them stands what is left to the host, if anything.
    """

    def __init__(self, programs: Sequence[Program], plan: Mapping[str, Any], device: torch.device) -> None:
        self._programs, self._plan, self._device = programs, plan, device

    def start(self, weights: list[Tensor], host: HostFunctions) -> Callable[[Sequence[Tensor]], tuple[Tensor, ...]]:
        """The function of the inputs alone.

        Raises:
            SignatureError: a host function is missing.
        """
        plan = self._plan
        calls = [self._on_host(call, host) if isinstance(call, dict) else self._call(*call) for call in plan["calls"]]
        returns, num_values = plan["returns"], plan["num_values"]
        checked = False

        def run(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
            nonlocal checked
            values: list[Any] = [*weights, *inputs]
            values += [None] * (num_values - len(values))
            for program, taken, made, specs in calls:
                arguments = [values[place] for place in taken]
                if not checked:
                    for argument, spec in zip(arguments, specs, strict=bool(specs)):
                        assert spec.fits(argument), f"a part expects {spec} with strides {spec.stride}"
                for place, result in zip(made, program(arguments), strict=True):
                    values[place] = result
            checked = True
            return tuple(values[place] for place in returns)

        return run

    def _call(self, number: int, taken: list[int], made: list[int]) -> _Step:
        specs = tuple(map(TensorSpec.from_dict, self._plan["programs"][number]["inputs"]))
        return self._programs[number], taken, made, specs

    def _on_host(self, data: Mapping[str, Any], functions: HostFunctions) -> _Step:
        call = HostCall.from_dict(data)
        function = function_of(call, functions, self._device)
        taken = [] if call.input is None else [call.input]
        return lambda arguments: [function(*arguments or [None])], taken, [call.output], ()
