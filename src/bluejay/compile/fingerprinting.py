"""The hash of everything that shapes a program: by reflection, minus a short list, so a new field is in by default."""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from bluejay.compile.signature import TensorSpec, named_weights
from bluejay.config import CompileSpec, canonical, digest
from bluejay.errors import ConfigError
from bluejay.machine import Compiler, cpu_features

# Fields of configurations that are proven not to reach a program, each with its reason.
EXEMPT = frozenset(
    {
        "ModelConfig.bos_token_id",  # read by the tokenizer only
        "ModelConfig.eos_token_ids",  # reaches programs as the tensor of stop ids
        "ModelConfig.dtype",  # what the checkpoint says; the tensors' own dtypes are in the signature
        "CompileSpec.cxx",  # which compiler was asked for; the one found is in the environment
        "CompileSpec.threads",  # 0 means "torch's number"; the resolved one stands beside it
    }
)
# Variables of torch's compiler that name places or what is logged.
EXEMPT_AMBIENT = frozenset({"TORCHINDUCTOR_CACHE_DIR", "TORCH_LOGS", "TORCH_TRACE"})

# Rooms whose code shapes graphs whatever the module is; a module's own room is added to them.
GRAPH_ROOMS = ("compile", "config", "kernels", "models", "quant")
_PACKAGE = __name__.partition(".")[0]
_PACKAGE_FOLDER = Path(__file__).parents[1]
_PLAIN_MODULE = frozenset(nn.Module().__dict__)


@dataclass(frozen=True)
class Environment:
    """The kind of machine and tools a program is made by and for. Two of a kind can exchange programs."""

    system: str
    torch: str
    compiler: str
    cpu_features: tuple[str, ...]
    cpu_capability: str
    gpu: str
    cuda: str
    triton: str


@dataclass(frozen=True)
class Fingerprint:
    """A digest of 64 hex digits, and the fields it was computed from, as plain data."""

    digest: str
    fields: Mapping[str, Any]

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Fingerprint:
        return cls(digest(fields), canonical(fields))


def environment(device: torch.device, compiler: Compiler | None) -> Environment:
    """The kind of this machine, for programs on `device`."""
    gpu = cuda = triton = ""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu, cuda = f"{properties.name} {properties.major}.{properties.minor}", str(torch.version.cuda)
        triton = _version_of_triton()
    return Environment(
        system=f"{platform.system()} {platform.machine()}",
        torch=f"{torch.__version__} {torch.version.git_version}",
        compiler=compiler.version if compiler else "",
        cpu_features=cpu_features(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        gpu=gpu,
        cuda=cuda,
        triton=triton,
    )


def fingerprint(
    module: nn.Module,
    inputs: Sequence[TensorSpec],
    spec: CompileSpec,
    environment: Environment,
    *,
    device: str,
    threads: int,
    identity: Mapping[str, Any] | None = None,
    package_folder: Path = _PACKAGE_FOLDER,
) -> Fingerprint:
    """The fingerprint of `module.forward` at these inputs.

    Args:
        identity: what else shapes the program: a plan, a quantization. Dataclasses, mappings, plain values.

    Raises:
        ConfigError: something that shapes the module has no canonical form.
    """
    try:
        fields = {
            "module": describe_module(module),
            "weights": [TensorSpec.of(name, tensor) for name, tensor in named_weights(module).items()],
            "inputs": list(inputs),
            "identity": dict(identity or {}),
            "spec": spec,
            "ambient": {name: value for name, value in spec.ambient if name not in EXEMPT_AMBIENT},
            "device": device,
            "threads": threads,
            "sources": source_digests(module, package_folder),
            "environment": environment,
        }
        return Fingerprint.of(canonical(fields, exempt=EXEMPT | {"CompileSpec.ambient"}))
    except TypeError as error:
        raise ConfigError(
            asked=f"a fingerprint of {type(module).__qualname__}",
            found=str(error),
            rule="everything that shapes a program is hashed, so it must have one spelling",
            fix="use numbers, strings, tuples or dataclasses for attributes of modules and for identity",
        ) from None


def describe_module(module: nn.Module) -> dict[str, Any]:
    """Every submodule by its path: class, and every attribute that is no tensor and no submodule."""
    return {path: _describe(child, path or type(module).__qualname__) for path, child in module.named_modules()}


def _describe(module: nn.Module, where: str) -> dict[str, Any]:
    attributes = {
        name: _spell(value) for name, value in vars(module).items() if name not in _PLAIN_MODULE or name == "training"
    }
    hooks = [_spell(hook) for name in vars(nn.Module()) if "_hooks" in name for hook in _hooks(module, name)]
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    spelled = canonical(attributes, exempt=EXEMPT, where=where)
    return {"class": kind, "attributes": spelled, **({"hooks": hooks} if hooks else {})}


def _hooks(module: nn.Module, name: str) -> list[Any]:
    hooks = getattr(module, name)
    return list(hooks.values()) if isinstance(hooks, dict) else []


def _spell(value: Any) -> Any:
    """torch's and Python's own values in canonical terms; containers of them too; the rest unchanged."""
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return str(value)
    if isinstance(value, FunctionType | MethodType | type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, Tensor):  # a tensor that is neither parameter nor buffer would be frozen into the program
        return TensorSpec.of("", value)
    if isinstance(value, nn.Module):  # held outside the tree of submodules
        return describe_module(value)
    if isinstance(value, list | tuple):
        return [_spell(item) for item in value]
    if isinstance(value, dict):
        return {key: _spell(item) for key, item in value.items()}
    return value


def source_digests(module: nn.Module, package_folder: Path = _PACKAGE_FOLDER) -> dict[str, str]:
    """SHA-256 of the code that shapes the graph: our rooms as a whole, and the files of other modules' classes.

    Classes of torch are left out: torch's version covers them.
    """
    rooms, files = set(GRAPH_ROOMS), set()
    for kind in {base for child in module.modules() for base in type(child).__mro__}:
        top, *rest = kind.__module__.split(".")
        if top == _PACKAGE:
            rooms.add(rest[0])
        elif top not in ("torch", "builtins"):
            files.add(_source_file(kind))
    digests = {f"{_PACKAGE}.{room}": _digest_of_folder(package_folder / room) for room in sorted(rooms)}
    return digests | {file.name: _digest_of_files({file.name: file}) for file in sorted(files)}


def room_digests(package_folder: Path = _PACKAGE_FOLDER) -> dict[str, str]:
    """SHA-256 of each of our rooms, spelled as in `source_digests`: what the programs of others are compared with."""
    rooms = {file.parent.name for file in package_folder.glob("*/__init__.py")} | set(GRAPH_ROOMS)
    return {f"{_PACKAGE}.{room}": _digest_of_folder(package_folder / room) for room in sorted(rooms)}


def _source_file(kind: type) -> Path:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if file is None:
        raise TypeError(f"class {kind.__qualname__} of {kind.__module__} has no source file")
    return Path(file)


@cache
def _digest_of_folder(folder: Path) -> str:
    """Once per process: code that is loaded does not change when its file does."""
    files = [file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    return _digest_of_files({file.relative_to(folder).as_posix(): file for file in files})


def _digest_of_files(files: Mapping[str, Path]) -> str:
    total = hashlib.sha256()
    for name, file in sorted(files.items()):
        content = file.read_bytes()
        total.update(f"{name}\0{len(content)}\0".encode())
        total.update(content)
    return total.hexdigest()


def _version_of_triton() -> str:
    from importlib import metadata

    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return ""
