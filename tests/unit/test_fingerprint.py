"""Law 8: whatever shapes a program is in its fingerprint, by reflection, minus a short written list."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bluejay
import bluejay.compile.fingerprinting as room
from bluejay.compile import Environment, TensorSpec, environment, fingerprint, source_digests
from bluejay.config import CompileSpec, ModelConfig
from bluejay.errors import ConfigError
from bluejay.models import GPTJ
from bluejay.quant import QuantizedLinear

HERE = Environment(
    system="Linux x86_64",
    torch="2.13.0 abc",
    compiler="g++ 12",
    cpu_features=("avx2", "avx512f"),
    cpu_capability="AVX512",
    gpu="",
    cuda="",
    triton="",
)
INPUTS = (TensorSpec("ids", (1, 8), "int64", (8, 1)),)


def key(module: nn.Module, **changes: Any) -> str:
    arguments: dict[str, Any] = {"inputs": INPUTS, "spec": CompileSpec(), "environment": HERE, "device": "cpu"}
    arguments |= {"threads": 2, "identity": None, **changes}
    return fingerprint(module, **arguments).digest


@pytest.fixture
def model(tiny_config: ModelConfig) -> GPTJ:
    with torch.device("meta"):
        return GPTJ(tiny_config).eval()


def another(value: Any) -> Any:
    """A value of the same type that differs."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, tuple | list):
        return type(value)([*value, another(value[-1]) if value else "x"])
    if value is None:
        return 0
    if isinstance(value, torch.dtype):
        return torch.float16
    return pytest.fail(f"no other value for {value!r}")


def test_same_program_same_key(model: GPTJ, tiny_config: ModelConfig) -> None:
    """Catches a key that depends on addresses, weights or the time: nothing would ever be found again."""
    with torch.device("meta"):
        twin = GPTJ(tiny_config).eval()
    real = GPTJ(tiny_config).eval()
    assert key(model) == key(twin) == key(real)


@pytest.mark.parametrize("name", [f.name for f in fields(Environment)])
def test_every_field_of_the_environment_counts(model: GPTJ, name: str) -> None:
    """Catches an artifact that outlives torch, the compiler, the processor or the GPU it was made by. B-49."""
    assert key(model, environment=replace(HERE, **{name: another(getattr(HERE, name))})) != key(model)


OTHER_SPEC: dict[str, Any] = {
    "backend": "eager",
    "blocks": "shared",
    "kernel": "portable",
    "threads": 3,
    "cxx": "clang++",
}


@pytest.mark.parametrize("name", [f.name for f in fields(CompileSpec)])
def test_every_field_of_the_spec_counts_unless_exempt(model: GPTJ, name: str) -> None:
    """Catches a field added to CompileSpec that is not in the key: this test has no value for it. B-47."""
    changed = key(model, spec=replace(CompileSpec(), **{name: OTHER_SPEC[name]}))
    assert (changed == key(model)) == (f"CompileSpec.{name}" in room.EXEMPT)


def test_threads_and_device_count_as_resolved(model: GPTJ) -> None:
    """Catches `threads=0` meaning two things under one key."""
    assert len({key(model), key(model, threads=3), key(model, device="cuda")}) == 3


def config_changes(config: ModelConfig) -> Iterator[tuple[str, ModelConfig]]:
    values: dict[str, Any] = {
        "n_embd": 48,
        "n_head": 4,
        "rotary_dim": 4,
        "activation_function": "relu",
        "tie_word_embeddings": True,
        "layer_norm_epsilon": 1e-6,
        "dtype": "bfloat16",
        "eos_token_ids": (1,),
        "bos_token_id": 1,
        "n_inner": 96,
        **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.1),
    }
    for f in fields(ModelConfig):
        if f.compare:
            value = values[f.name] if f.name in values else another(getattr(config, f.name))
            yield f.name, replace(config, **{f.name: value})


def test_every_field_of_the_model_config_counts_unless_exempt(tiny_config: ModelConfig, model: GPTJ) -> None:
    """Catches two models of equal shapes that share a program: rotary_dim, activation, epsilon. B-47."""
    for name, changed in config_changes(tiny_config):
        with torch.device("meta"):
            other = key(GPTJ(changed).eval())
        assert (other == key(model)) == (f"ModelConfig.{name}" in room.EXEMPT), name


def test_every_attribute_of_every_submodule_counts(tiny_config: ModelConfig) -> None:
    """Catches a number that lives in a module instead of a config, at any depth, training mode included."""
    with torch.device("meta"):
        model = GPTJ(tiny_config).eval()
    base, flipped = key(model), 0
    for path, module in model.named_modules():
        for name in set(vars(module)) - set(vars(nn.Module())) | {"training"}:
            value = getattr(module, name)
            if name in ("config", "inplace"):  # the config has a test of its own
                continue
            setattr(module, name, another(value))
            assert key(model) != base, f"{path}.{name}"
            setattr(module, name, value)
            flipped += 1
    assert flipped > 50
    assert key(model) == base


def test_shapes_dtypes_strides_and_names_of_inputs_and_weights_count(model: GPTJ) -> None:
    """Catches a program for one shape, dtype or layout that answers for another. B-51."""
    spec = INPUTS[0]
    for name, value in {"name": "x", "shape": (1, 9), "dtype": "int32", "stride": (9, 1)}.items():
        assert key(model, inputs=(replace(spec, **{name: value}),)) != key(model)
    assert key(model, inputs=()) != key(model)
    base = key(model)
    assert key(model.to(torch.bfloat16)) != base


@dataclass(frozen=True)
class Plan:
    stages: int = 1


def test_identity_counts_at_any_depth(model: GPTJ) -> None:
    """Catches a plan that shapes the program and is not in its key."""
    keys = {key(model, identity={"plan": Plan(i), "extra": {"deep": [j]}}) for i in (1, 2) for j in (1, 2)}
    assert len(keys | {key(model)}) == 5


def test_the_path_of_a_kernel_and_the_sizes_of_its_groups_count() -> None:
    """Catches a four-bit layer forced onto one kernel that runs another, because their packed weights are alike."""
    layers = [QuantizedLinear(32, 16, size, path=path) for size in (8, 16) for path in ("auto", "torch", "reference")]
    assert len({key(layer) for layer in layers}) == 6
    assert key(QuantizedLinear(32, 16, 8)) == key(layers[0])


def test_hooks_count(model: GPTJ) -> None:
    """Catches a forward hook that changes the graph and not the key."""
    base = key(model)
    handle = model.transformer.h[0].register_forward_hook(lambda module, arguments, output: output * 2)
    assert key(model) != base
    handle.remove()
    assert key(model) == base


def scaled(scale: Any) -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda module, arguments, output: output * scale)
    return module


def with_default(scale: float) -> nn.Module:
    def double(module: nn.Module, arguments: Any, output: Tensor, scale: float = scale) -> Tensor:
        return output * scale

    module = nn.Linear(2, 2)
    module.register_forward_hook(double)
    return module


def nested(scale: float) -> nn.Module:
    def inner(x: Tensor) -> Tensor:
        return x * scale

    return scaled(inner)


def of_a_local_class(scale: float) -> nn.Module:
    class Scale(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (x * scale,)

    return Scale()


def of_a_local_number(number: float) -> nn.Module:
    class Scale(nn.Module):
        scale = number

    return Scale()


def bound(scale: float) -> nn.Module:
    """A module that holds a method of a module outside its tree."""
    module, other = nn.Linear(2, 2), nn.PReLU(1, init=scale)
    module.kept = [other.forward]  # type: ignore[assignment]
    return module


def plain_tensor(scale: float) -> nn.Module:
    module = nn.Linear(2, 2)
    module.scale = torch.tensor(scale)
    return module


MAKERS = [scaled, with_default, nested, of_a_local_class, of_a_local_number, bound, plain_tensor]


@pytest.mark.parametrize("make", MAKERS)
def test_numbers_that_tracing_freezes_count_wherever_they_are_kept(make: Any) -> None:
    """Catches two modules of one factory that share a program: a plain tensor, a closure, a default, a local class."""
    assert key(make(2.0)) == key(make(2.0))
    assert key(make(2.0)) != key(make(3.0))


def test_two_lambdas_of_one_place_differ() -> None:
    """Catches functions that are told apart by their name alone."""
    keys = set()
    for hook in (lambda m, a, o: o * 2, lambda m, a, o: o * 3, lambda m, a, o: o + 2):
        module = nn.Linear(2, 2)
        module.register_forward_hook(hook)
        keys.add(key(module))
    assert len(keys) == 3


@pytest.mark.parametrize("tensor", [torch.zeros(5000), torch.zeros((), device="meta")])
def test_a_plain_tensor_without_known_content_is_refused(tensor: Tensor) -> None:
    """Catches a table hashed by its shape; a buffer is an input of the program and needs no content."""
    module = nn.Linear(2, 2)
    module.register_buffer("table", tensor)
    key(module)
    del module.table
    module.table = tensor
    with pytest.raises(ConfigError, match=r"Linear\.table.*neither parameter nor buffer(.|\n)*register"):
        key(module)


def test_references_to_weights_and_to_itself_are_spelled_by_name() -> None:
    """Catches an endless description, and weights hashed by content because an attribute names them too."""

    def make() -> nn.Module:
        module = nn.Linear(100, 100)
        module.own = [module.forward, module.weight]  # type: ignore[assignment]
        return module

    assert key(make()) == key(make())


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of our sources that a test may change."""
    folder = Path(bluejay.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__", "assets")
    return Path(shutil.copytree(folder, tmp_path / "bluejay", ignore=ignored))


OURS = ["compile/lowering.py", "compile/include/regex", "models/gptj.py", "config/model.py"]
OURS += ["kernels/int4.py", "kernels/csrc/int4.cpp", "quant/linear.py"]


@pytest.mark.parametrize("file", OURS)
def test_a_byte_of_our_own_code_counts(model: GPTJ, package: Path, file: str) -> None:
    """Catches a program of yesterday's lowering that answers for today's. B-49."""
    before = key(model, package_folder=package)
    assert before == key(model)
    source = package / file
    source.write_bytes(source.read_bytes() + b"\n")
    room._digest_of_folder.cache_clear()
    assert key(model, package_folder=package) != before


def test_code_that_shapes_no_graph_does_not_count(model: GPTJ, package: Path) -> None:
    """Catches a recompilation of everything because a help text changed."""
    before = key(model, package_folder=package)
    (package / "cli" / "main.py").write_text("")
    room._digest_of_folder.cache_clear()
    assert key(model, package_folder=package) == before


def test_the_file_of_a_class_that_is_not_ours_counts(tmp_path: Path) -> None:
    """Catches a user's module whose forward changed."""

    def load(code: str) -> nn.Module:
        file = tmp_path / "theirs.py"
        file.write_text(code)
        spec = util.spec_from_file_location("theirs", file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules["theirs"] = module = util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.Step()

    code = "from torch import nn\nclass Step(nn.Module):\n    def forward(self, x):\n        return (x + {},)\n"
    try:
        keys = [key(load(code.format(number))) for number in (1, 2)]
    finally:
        del sys.modules["theirs"]
    assert keys[0] != keys[1]


def test_an_attribute_without_a_spelling_is_refused() -> None:
    """Catches an object hashed by its address, or left out in silence."""
    module = nn.Linear(2, 2)
    module.helper = object()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="helper"):
        key(module)


def test_the_exempt_list_is_short_and_names_fields_that_exist() -> None:
    """Catches an exemption that outlives its field, and the list growing into the hand-kept kind. B-47."""
    known = {f"{kind.__name__}.{f.name}" for kind in (ModelConfig, CompileSpec) for f in fields(kind)}
    assert known >= room.EXEMPT
    assert len(room.EXEMPT) <= 6


def test_sources_are_those_of_the_rooms_in_use(model: GPTJ) -> None:
    """Catches a room of graph code that is missing from the digests."""
    assert {"bluejay.compile", "bluejay.models", "bluejay.config"} <= set(source_digests(model))

    class Local(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (x,)

    assert Path(__file__).name in source_digests(Local())


def test_this_machine_has_an_environment() -> None:
    """Catches an environment without processor features, which any other machine would equal."""
    found = environment(torch.device("cpu"), None)
    assert found.cpu_features
    assert found.torch.startswith(torch.__version__)
    assert found.compiler == ""
