"""The hash of everything that shapes a program: by reflection, minus a short list, so a new field is in by default."""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType
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

# Rooms whose code shapes graphs whatever the module is; a module's own room is added to them.
GRAPH_ROOMS = ("compile", "config", "kernels", "models", "quant")
_PACKAGE = __name__.partition(".")[0]
_PACKAGE_FOLDER = Path(__file__).parents[1]
_PLAIN_MODULE = frozenset(nn.Module().__dict__)
# Elements of a plain tensor whose content is hashed. Programs freeze numbers in, never tables.
_SMALL = 4096


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
            "device": device,
            "threads": threads,
            "sources": source_digests(module, package_folder),
            "environment": environment,
        }
        return Fingerprint.of(canonical(fields, exempt=EXEMPT))
    except TypeError as error:
        raise ConfigError(
            asked=f"a fingerprint of {type(module).__qualname__}",
            found=str(error),
            rule="everything that shapes a program is hashed, so it must have one spelling",
            fix="register tensors as buffers, and use numbers, strings, tuples or dataclasses for other attributes of "
            "modules and for identity",
        ) from None


def describe_module(module: nn.Module) -> dict[str, Any]:
    """Every submodule by its path: class, hooks, and every attribute that is no weight and no submodule.

    Functions among them count with their code, defaults, closure and source file. What they read from variables of
    other files is not followed.

    Raises:
        TypeError: an attribute has no spelling.
    """
    known = {id(tensor): f"weight {name}" for name, tensor in named_weights(module).items()}
    return _describe_tree(module, type(module).__qualname__, known)


def _describe_tree(module: nn.Module, root: str, known: dict[int, str]) -> dict[str, Any]:
    """
    Args:
        known: by its id, the name of each object that is described elsewhere; the modules of this tree are added.
    """
    children = dict(module.named_modules())
    known |= {id(child): f"module {root} {path}" for path, child in children.items()}
    return {path: _describe(child, path or root, known) for path, child in children.items()}


def _describe(module: nn.Module, where: str, known: dict[int, str]) -> dict[str, Any]:
    def spell(name: str, value: Any) -> Any:
        place = f"{where}.{name}"
        return canonical(_spell(value, place, known), exempt=EXEMPT, where=place)

    kept = {name: value for name, value in vars(module).items() if name not in _PLAIN_MODULE or name == "training"}
    attributes = {name: spell(name, value) for name, value in kept.items()}
    hooks = [spell(name, hook) for name in vars(nn.Module()) if "_hooks" in name for hook in _hooks(module, name)]
    local = {name: spell(name, value) for name, value in _local_members(type(module))}
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    optional = {"hooks": hooks, "local": local}
    return {"class": kind, "attributes": attributes, **{name: value for name, value in optional.items() if value}}


def _hooks(module: nn.Module, name: str) -> list[Any]:
    hooks = getattr(module, name)
    return list(hooks.values()) if isinstance(hooks, dict) else []


def _local_members(kind: type) -> Iterator[tuple[str, Any]]:
    """Methods and plain numbers of classes that a function made: its source file does not say which call made them."""
    for base in kind.__mro__:
        for name, value in vars(base).items() if "<locals>" in base.__qualname__ else ():
            is_method = isinstance(value, FunctionType) and name != "__init__"  # what that does is in the attributes
            if is_method or (isinstance(value, int | float | str) and not name.startswith("__")):
                yield f"{base.__qualname__}.{name}", value


def _spell(value: Any, where: str, known: dict[int, str]) -> Any:
    """torch's and Python's own values in canonical terms; containers of them too; the rest unchanged."""
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return str(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if id(value) in known and isinstance(value, Tensor | nn.Module | FunctionType):
        return {"is": known[id(value)]}
    if isinstance(value, FunctionType):
        known[id(value)] = f"function {where}"
        return _spell_function(value, where, known)
    if isinstance(value, MethodType):
        owner, function = _spell(value.__self__, where, known), _spell(value.__func__, where, known)
        return {"self": owner, "function": function}
    if isinstance(value, Tensor):
        return _spell_tensor(value, where)
    if isinstance(value, nn.Module):  # held outside the tree of submodules: its weights are plain tensors
        weights = {name: _spell(tensor, f"{where}.{name}", known) for name, tensor in named_weights(value).items()}
        return {"modules": _describe_tree(value, where, known), "weights": weights}
    if isinstance(value, list | tuple):
        return [_spell(item, where, known) for item in value]
    if isinstance(value, dict):
        return {key: _spell(item, where, known) for key, item in value.items()}
    return value


def _spell_tensor(tensor: Tensor, where: str) -> dict[str, Any]:
    """A tensor that is neither parameter nor buffer, with its content: tracing freezes that into the program."""
    if tensor.is_meta or tensor.numel() > _SMALL:
        raise TypeError(f"{where}: a tensor of shape {list(tensor.shape)} that is neither parameter nor buffer")
    content = bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).tolist())
    return {"tensor": TensorSpec.of("", tensor), "content": content}


def _spell_function(function: FunctionType, where: str, known: dict[int, str]) -> Any:
    name = f"{function.__module__}.{function.__qualname__}"
    if name.startswith("torch."):
        return name  # torch's version covers it
    file = _source_file(function)
    return {
        "function": name,
        "source": _digest_of_files({file.name: file}),
        "code": _spell_code(function.__code__),
        "defaults": _spell([function.__defaults__, function.__kwdefaults__], where, known),
        "closure": [_spell(_content(cell), where, known) for cell in function.__closure__ or ()],
    }


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return "nothing yet"


def _spell_code(code: CodeType) -> dict[str, Any]:
    """What a function does, without where it stands."""
    return {"bytes": code.co_code, "names": code.co_names, "constants": [_spell_constant(c) for c in code.co_consts]}


def _spell_constant(constant: Any) -> Any:
    if isinstance(constant, CodeType):
        return _spell_code(constant)
    if isinstance(constant, tuple):
        return [_spell_constant(item) for item in constant]
    if isinstance(constant, frozenset):
        return sorted(map(repr, constant))
    return [type(constant).__name__, repr(constant)]


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


def _source_file(made: type | FunctionType) -> Path:
    """The file of a class or a function."""
    file = getattr(sys.modules.get(made.__module__), "__file__", None)
    if file is None:
        raise TypeError(f"{made.__qualname__} of {made.__module__} has no source file")
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
