"""compile(module, examples, spec, store): the one way from a module to an executable."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bluejay.compile import inductor
from bluejay.compile.executable import Eager, Executable
from bluejay.compile.fingerprinting import Fingerprint, environment, fingerprint
from bluejay.compile.host import HostCall
from bluejay.compile.pristine import pristine
from bluejay.compile.signature import Signature, TensorSpec, input_names, named_weights
from bluejay.compile.store import Store, make_entry
from bluejay.config import CompileSpec
from bluejay.errors import MachineError
from bluejay.events import Event, Observer, ignore
from bluejay.files import temporary_folder
from bluejay.machine import Compiler, cxx_compiler, how_to_install_compiler

if TYPE_CHECKING:
    from bluejay.compile.graph import Part


def compile(
    module: nn.Module,
    example_inputs: Sequence[Tensor],
    spec: CompileSpec,
    store: Store | None = None,
    observe: Observer = ignore,
    *,
    device: torch.device | str | None = None,
    identity: Mapping[str, Any] | None = None,
    label: str = "",
) -> Executable:
    """An executable of `module.forward` at the shapes of `example_inputs`: found in the store, or made and kept there.

    No weight and no input is read: both may be on the meta device. `forward` takes tensors and returns a flat tuple of
    tensors; it may change inputs in place, and the executable does as well.

    Args:
        store: where programs are kept; None makes one for this process only.
        device: where the executable will run; None takes that of the examples (the CPU if they are on meta).
        identity: what shapes the program besides module, shapes and `spec` (a plan): part of the fingerprint.
        label: what this is, in words, for lists and progress.

    Raises:
        MachineError: there is no C++ compiler that works, and the store does not have the program.
        ConfigError: the module cannot be compiled as it is written; the message says why.
    """
    device = torch.device(device or _device_of(example_inputs))
    names = input_names(module, len(example_inputs))
    inputs = tuple(TensorSpec.of(name, tensor) for name, tensor in zip(names, example_inputs, strict=True))
    if spec.backend == "eager":
        weights = tuple(TensorSpec.of(name, tensor) for name, tensor in named_weights(module).items())
        signature = Signature(device.type, weights, inputs, outputs=())
        return Executable(signature, Eager(module), "", {"label": label, "backend": "eager"}, False, 0.0)

    threads = spec.threads or torch.get_num_threads()
    compiler = cxx_compiler(spec.cxx)
    wanted = _wanted(module, inputs, spec, compiler, device, identity)

    def tell(name: str, **fields: Any) -> None:
        observe(Event(name, {**fields, "label": label, "fingerprint": wanted.digest}))

    def build(folder: Path) -> dict[str, Any]:
        cxx = require(compiler, spec, label).path
        started = time.perf_counter()
        tell("compile.start")
        programs = []
        try:
            with pristine():
                from bluejay.compile.graph import trace  # a quarter of a second that a program found in the store saves

                traced = trace(module, example_inputs, names, device.type, spec.blocks)
                for number, part in enumerate(traced.parts):
                    tell("compile.part", part=number + 1, parts=len(traced.parts))
                    name = f"program-{number}"
                    if store is None or len(traced.parts) == 1:
                        inductor.build(part, folder, name, device.type, threads, cxx)
                    else:
                        _take_part(part, folder, name, store, device, threads, cxx, wanted)
                    inputs = [TensorSpec.of(f"input[{i}]", example) for i, example in enumerate(part.examples)]
                    programs.append({"file": f"{name}.so", "inputs": inputs})
        except BaseException:  # an interrupt too: who shows that it runs must know that it no longer does
            tell("compile.failed")
            raise
        seconds = time.perf_counter() - started
        tell("compile.done", seconds=seconds)
        signature = traced.signature
        return {
            "label": label,
            "backend": spec.backend,
            "compile_seconds": seconds,
            "signature": signature,
            "plan": {
                "programs": programs,
                "calls": [
                    asdict(call) if isinstance(call, HostCall) else [call.program, call.inputs, call.outputs]
                    for call in traced.calls
                ],
                "returns": traced.returns,
                "num_values": traced.num_values,
            },
            "memory": {
                "weights_bytes": sum(spec.num_bytes for spec in signature.weights),
                "inputs_bytes": sum(spec.num_bytes for spec in signature.inputs),
                "outputs_bytes": sum(spec.num_bytes for spec in signature.outputs),
                "workspace_bytes_at_most": traced.workspace_bytes,
            },
        }

    def load(folder: Path, manifest: Mapping[str, Any]) -> inductor.Chain:
        plan = manifest["plan"]
        return inductor.Chain([inductor.load(folder / p["file"], device) for p in plan["programs"]], plan, device)

    if store is not None:
        chain, manifest, built = store.obtain(wanted, build, load, lambda event: tell(event.name, **event.fields))
    else:
        with temporary_folder() as work:  # what is loaded outlives its file
            manifest, built = make_entry(wanted, build, work), True
            chain = load(work, manifest)
    signature = Signature.from_dict(manifest["signature"])
    return Executable(signature, chain, wanted.digest, manifest, built, manifest["compile_seconds"])


def _take_part(
    part: Part, folder: Path, name: str, store: Store, device: torch.device, threads: int, cxx: str, whole: Fingerprint
) -> None:
    """Write the library of a part into `folder`: another program's with the same part, or a new one."""

    def build(work: Path) -> dict[str, Any]:
        started = time.perf_counter()
        inductor.build(part, work, "part", device.type, threads, cxx)
        return {"label": "", "compile_seconds": time.perf_counter() - started}

    def take(work: Path, manifest: Mapping[str, Any]) -> None:
        for file in manifest["files"]:
            shutil.copyfile(work / file, folder / file.replace("part", name, 1))

    shared = ("device", "threads", "sources", "environment")
    wanted = Fingerprint.of({"part": part.spelling, **{field: whole.fields[field] for field in shared}})
    store.parts.obtain(wanted, build, take)


def is_stored(
    module: nn.Module,
    example_inputs: Sequence[Tensor],
    spec: CompileSpec,
    store: Store,
    *,
    device: torch.device | str | None = None,
    identity: Mapping[str, Any] | None = None,
) -> bool:
    """Whether `compile` with these arguments would find its program in the store."""
    device = torch.device(device or _device_of(example_inputs))
    names = input_names(module, len(example_inputs))
    inputs = tuple(TensorSpec.of(name, tensor) for name, tensor in zip(names, example_inputs, strict=True))
    return store.has(_wanted(module, inputs, spec, cxx_compiler(spec.cxx), device, identity))


def _wanted(
    module: nn.Module,
    inputs: Sequence[TensorSpec],
    spec: CompileSpec,
    compiler: Compiler | None,
    device: torch.device,
    identity: Mapping[str, Any] | None,
) -> Fingerprint:
    threads = spec.threads or torch.get_num_threads()
    here = environment(device, compiler)
    return fingerprint(module, inputs, spec, here, device=device.type, threads=threads, identity=identity)


def _device_of(tensors: Sequence[Tensor]) -> torch.device:
    return next((tensor.device for tensor in tensors if tensor.device.type != "meta"), torch.device("cpu"))


def require(compiler: Compiler | None, spec: CompileSpec, label: str) -> Compiler:
    """The compiler, once it has built something.

    Raises:
        MachineError: there is none, or it cannot.
    """
    if compiler is None:
        raise MachineError(
            asked=f"compile {label or 'a program'}",
            found=f"no working C++ compiler named {spec.cxx}" if spec.cxx else "no C++ compiler on this machine",
            rule="the inductor back-end writes C++ and needs a compiler to build it",
            fix=f"install one ({how_to_install_compiler()}), import programs made elsewhere (bluejay cache import), "
            "or use --backend eager",
        )
    if problem := inductor.compiler_problem(compiler.path):
        raise inductor.cannot_build(compiler.path, problem)
    return compiler
