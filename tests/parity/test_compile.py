"""Law 2: a compiled step is its module: same answers, same changes to its inputs, at its shapes only."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bluejay.compile import Executable, SignatureError, Store, compile
from bluejay.compile.lowering import FewRows
from bluejay.compile.signature import named_weights
from bluejay.config import CompileSpec, ModelConfig
from bluejay.errors import ConfigError, MachineError
from bluejay.events import Event
from bluejay.models import GPTJ, KVCache
from bluejay.quant import QuantizedLinear

EAGER = CompileSpec(backend="eager")
WINDOW = 24
LENGTHS = (7, 0, 12)


class Step(nn.Module):
    """Logits of one chunk per row over a cache that is an input, and the greedy token."""

    def __init__(self, model: GPTJ) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, positions: Tensor, lengths: Tensor, *flat: Tensor) -> tuple[Tensor, ...]:
        num_layers = self.model.config.n_layer
        cache = KVCache.of(list(flat[:num_layers]), list(flat[num_layers:]), lengths)
        logits = self.model(ids, positions, cache)
        return logits.argmax(-1), logits


def inputs(config: ModelConfig, num_rows: int, width: int, device: str = "cpu") -> tuple[Tensor, ...]:
    """A chunk over rows of unequal lengths, one of them idle; every unused cache slot holds NaN."""
    generator = torch.Generator().manual_seed(1)
    cache = KVCache(config, len(LENGTHS), WINDOW)
    for storage in (*cache.keys, *cache.values):
        storage.fill_(torch.nan)
        for row, length in enumerate(LENGTHS):
            storage[row, :, 1 : 1 + length] = torch.randn(2, length, config.head_dim, generator=generator)
    cache.lengths.copy_(torch.tensor(LENGTHS))
    ids = torch.randint(config.vocab_size, (num_rows, width), generator=generator)
    positions = cache.lengths[:num_rows, None] + torch.arange(width)
    if num_rows > 1:
        positions[1] = -1
    view = cache.view(0, num_rows, 20)
    tensors = (ids, positions, view.lengths, *view.keys, *view.values)
    if device == "cpu":
        return tensors
    # As a caller without memory for them would: same shapes and strides, nothing behind.
    return tuple(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device) for t in tensors)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def make(store: Store, tiny_config: ModelConfig) -> Callable[..., Executable]:
    """Executables of `Step`, each compiled once for all tests here."""

    def make(num_rows: int, width: int, blocks: str = "inline") -> Executable:
        with torch.device("meta"):
            step = Step(GPTJ(tiny_config).eval())
        spec = CompileSpec(blocks=blocks, threads=1)  # type: ignore[arg-type]
        return compile(step, inputs(tiny_config, num_rows, width, "meta"), spec, store, device="cpu")

    return make


def assert_same(left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    for a, b in zip(left, right, strict=True):
        if a.is_floating_point():
            torch.testing.assert_close(a, b, rtol=0, atol=1e-4, equal_nan=True)
        else:
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("num_rows", "width", "blocks"),
    [(1, 1, "inline"), (3, 5, "inline"), (3, 1, "shared")],
)
def test_compiled_equals_eager(
    make: Callable[..., Executable],
    tiny_config: ModelConfig,
    tiny_model: GPTJ,
    num_rows: int,
    width: int,
    blocks: str,
) -> None:
    """Catches a program that reads an unused slot (NaN), writes a cache elsewhere, or mixes up layers. Law 2, B-22."""
    step = Step(tiny_model)
    bound = make(num_rows, width, blocks).bind(step)
    ours, theirs = inputs(tiny_config, num_rows, width), inputs(tiny_config, num_rows, width)
    for _ in range(3):
        with torch.no_grad():
            expected = step(*theirs)
        found = bound(*ours)
        assert_same(found, expected)
        assert all(output.isfinite().all() for output in found)
        assert_same(ours, theirs)  # lengths and caches have changed in the same way, in place
        for tensors in (ours, theirs):
            tensors[1].copy_(torch.where(tensors[1] >= 0, tensors[1] + width, -1).clamp_max(19 - width))


def test_the_cache_is_written_in_place(
    make: Callable[..., Executable], tiny_config: ModelConfig, tiny_model: GPTJ
) -> None:
    """Catches a copy of the cache per step: no allocation inside a call may be as large as one layer's keys."""
    bound = make(1, 1).bind(Step(tiny_model))
    tensors = inputs(tiny_config, 1, 1)
    bound(*tensors)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        bound(*tensors)
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    allocated = [event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0]
    assert allocated
    assert max(allocated) < tensors[3].nbytes


def test_weights_are_shared_not_copied(
    make: Callable[..., Executable], tiny_config: ModelConfig, tiny_model: GPTJ
) -> None:
    """Catches a program that keeps its own copy of the weights, or the first model's for every fine-tune of a shape."""
    executable = make(1, 1)
    step = Step(tiny_model)
    bound = executable.bind(step)
    fine_tune = Step(GPTJ(tiny_config).eval())
    other = executable.bind(dict(fine_tune.named_parameters()))
    with torch.no_grad():
        tiny_model.lm_head.bias += 1.0
        fine_tune.model.lm_head.bias.zero_()
        for each, module in ((bound, step), (other, fine_tune)):
            assert_same(each(*inputs(tiny_config, 1, 1)), module(*inputs(tiny_config, 1, 1)))


def test_a_second_start_compiles_nothing(store: Store, make: Callable[..., Executable]) -> None:
    """Catches a warm start that compiles: the counter must stay where it is."""
    first = make(1, 1)
    before = store.compilations
    again = make(1, 1)
    assert store.compilations == before
    assert (again.was_compiled, again.fingerprint) == (False, first.fingerprint)
    assert again.compile_seconds == first.manifest["compile_seconds"] > 0


def test_equal_layers_share_a_program(make: Callable[..., Executable], tiny_config: ModelConfig) -> None:
    """Catches building one program per layer: a 28-layer model would take minutes."""
    manifest = make(3, 1, "shared").manifest
    assert len(manifest["plan"]["programs"]) == 3
    assert [number for number, *_ in manifest["plan"]["calls"]] == [0, *[1] * tiny_config.n_layer, 2]
    assert len(make(1, 1, "inline").manifest["plan"]["programs"]) == 1


def test_the_manifest_says_what_the_program_is(make: Callable[..., Executable], tiny_config: ModelConfig) -> None:
    """Catches a manifest that cannot answer why a program was not found, or what it will need."""
    manifest = make(1, 1).manifest
    assert manifest["fields"]["environment"]["cpu_features"]
    assert manifest["fields"]["module"]["model"]["attributes"]["config"]["rotary_dim"] == tiny_config.rotary_dim
    assert manifest["fields"]["inputs"][0]["name"] == "ids"
    weights = sum(p.numel() * 4 for p in GPTJ(tiny_config).parameters())
    assert manifest["memory"]["weights_bytes"] == weights
    assert 0 < manifest["memory"]["workspace_bytes_at_most"] < 2**20


# ---- B-51: the shape it was made for, or an error ------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["inductor", "eager"])
@pytest.mark.parametrize(("num_rows", "width"), [(1, 5), (3, 1), (2, 5), (3, 6)])
def test_another_shape_is_refused_by_name(
    make: Callable[..., Executable],
    tiny_config: ModelConfig,
    tiny_model: GPTJ,
    backend: str,
    num_rows: int,
    width: int,
) -> None:
    """Catches a result of the wrong shape, or a read past the end, at any other number of rows or tokens. B-51."""
    executable = make(3, 5)
    if backend == "eager":
        executable = compile(Step(tiny_model), inputs(tiny_config, 3, 5), EAGER)
    bound = executable.bind(Step(tiny_model))
    assert bound(*inputs(tiny_config, 3, 5))[0].shape == (3, 5)
    with pytest.raises(SignatureError) as caught:
        bound(*inputs(tiny_config, num_rows, width))
    assert "input ids as int64[3, 5]" in str(caught.value)
    assert f"[{num_rows}, {width}]" in str(caught.value)
    assert bound(*inputs(tiny_config, 3, 5))[0].shape == (3, 5)


def test_each_wrong_input_is_named(make: Callable[..., Executable], tiny_config: ModelConfig, tiny_model: GPTJ) -> None:
    """Catches another dtype, layout, device or number of arguments that is read as the compiled one. B-51."""
    bound = make(3, 5).bind(Step(tiny_model))
    good = list(inputs(tiny_config, 3, 5))
    cases: list[tuple[int, Any, str]] = [
        (0, good[0].int(), "ids"),
        (1, good[1].t().contiguous().t(), "positions"),
        (0, good[0].to("meta"), "ids"),
        (4, good[4].double(), "flat[1]"),
        (3, good[3].contiguous(), "flat[0]"),  # compiled for a view of a longer cache
        (1, 5, "positions"),
    ]
    for index, wrong, name in cases:
        with pytest.raises(SignatureError) as caught:
            bound(*good[:index], wrong, *good[index + 1 :])
        assert f"input {name} as" in str(caught.value)
    for count, said in ((len(good) - 1, "no flat[3]"), (len(good) + 1, "too many"), (0, "no ids, positions")):
        with pytest.raises(SignatureError, match=f"{count} inputs") as caught:
            bound(*(good * 2)[:count])
        assert said in caught.value.found


def test_wrong_weights_are_named(make: Callable[..., Executable], tiny_model: GPTJ) -> None:
    """Catches a checkpoint of another width or dtype bound to a program that reads past its end."""
    executable = make(1, 1)
    weights = dict(Step(tiny_model).named_parameters())
    name = "model.transformer.h.1.mlp.fc_in.weight"
    for wrong in (weights[name][:-1], weights[name].half(), weights[name].t().contiguous().t()):
        with pytest.raises(SignatureError) as caught:
            executable.bind({**weights, name: wrong})
        assert f"weight {name}" in str(caught.value)
    del weights[name]
    with pytest.raises(SignatureError, match="1 absent"):
        executable.bind(weights)


# ---- what cannot be compiled ---------------------------------------------------------------------------------------


class Table(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x + torch.tensor([1.0, 2.0]),)


def test_a_table_in_the_code_is_refused(tmp_path: Path) -> None:
    """Catches data frozen into a program, or lost from it: a crash or garbage at the first call."""
    with pytest.raises(ConfigError, match="constant tensor"):
        compile(Table(), (torch.ones(2),), CompileSpec(threads=1), Store(tmp_path))
    assert Store(tmp_path).entries() == []


def test_without_a_compiler(tmp_path: Path, make: Callable[..., Executable], store: Store, tiny_model: GPTJ) -> None:
    """Catches a traceback from the depths of a library where a person lacks one package."""
    spec = CompileSpec(cxx="no-such-compiler", threads=1)
    with pytest.raises(MachineError) as caught:
        compile(nn.Identity(), (torch.ones(2),), spec, Store(tmp_path))
    assert "no-such-compiler" in caught.value.found
    assert "g++" in caught.value.fix or "xcode" in caught.value.fix
    assert "--backend eager" in caught.value.fix


class Growing(nn.Module):
    """Layers with values of several kinds across their borders: views of inputs, in-place changes, reused results."""

    def __init__(self, end: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.end = end

    def forward(self, x: Tensor, count: Tensor, total: Tensor) -> tuple[Tensor, ...]:
        last, early = count[:, -1], x * 2  # a view of an input that changes below; a value used at the very end
        for layer in self.layers:
            x = layer(x) + last[:, None]
            count.add_(1)
            total[:, 0] += x.sum(-1)
        return x, early, total.sum(1) * self.end


def test_parts_keep_views_and_changes_apart(store: Store) -> None:
    """Catches a cut that turns a view into a copy, so that a later part no longer sees what an earlier one changed; and
    parts that two programs have in common and are compiled for each."""

    def tensors() -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        return torch.randn(2, 4), torch.randn(2, 3), torch.zeros(2, 2)

    for end in (1, 2):
        module = Growing(end)
        before = len(store.parts.entries())
        bound = compile(module, tensors(), CompileSpec(blocks="shared", threads=1), store).bind(module)
        ours, theirs = tensors(), tensors()
        with torch.no_grad():
            assert_same(bound(*ours), module(*theirs))
        assert_same(ours, theirs)
    assert len(store.parts.entries()) == before + 1  # what comes before and in the layers is that of the first


def test_a_program_outlives_its_parts(make: Callable[..., Executable], store: Store) -> None:
    """Catches an entry that needs more than its own folder: parts are there to save compiling, and go at any time."""
    make(3, 1, "shared")
    store.parts.clear()
    assert not make(3, 1, "shared").was_compiled
    assert [info.problem for info in store.entries(verify=True) if info.problem] == []


class Packed(nn.Module):
    """Equal layers whose products are one custom operation over packed integers."""

    def __init__(self, path: str = "auto") -> None:
        super().__init__()
        self.layers = nn.ModuleList(QuantizedLinear(20, 20, 16, path=path) for _ in range(3))
        generator = torch.Generator().manual_seed(0)
        for name, tensor in named_weights(self).items():
            if name.endswith("codes"):
                tensor.random_(-(2**31), 2**31 - 1, generator=generator)
            else:
                tensor.data.normal_(0, 0.1, generator=generator)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        for layer in self.layers:
            x = layer(x)
        return (x,)


# The same program in a process of its own, which never saw it compiled.
ELSEWHERE = """
import json, sys, torch
from importlib import import_module
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from bluejay.compile import Store, compile
from bluejay.config import CompileSpec
module, x = import_module(sys.argv[2]).Packed(), torch.linspace(-1, 1, 40).reshape(2, 20)
store = Store(Path(sys.argv[3]))
bound = compile(module, (x,), CompileSpec(blocks="shared", threads=1), store).bind(module)
print(json.dumps([store.compilations, bound(x)[0].tolist()]))
"""


def test_custom_operations_in_shared_layers(store: Store) -> None:
    """Catches packed integers bound to the wrong layer, an operation that the cut or the package loses, and a library
    whose description of that operation stays behind: then it runs in the process that made it and in no other."""
    module, x = Packed(), torch.linspace(-1, 1, 40).reshape(2, 20)
    executable = compile(module, (x,), CompileSpec(blocks="shared", threads=1), store)
    plan = executable.manifest["plan"]
    assert ([number for number, *_ in plan["calls"]], len(plan["programs"])) == ([0, 0, 0], 1)
    assert (
        sorted(spec.dtype for spec in executable.signature.weights) == ["float16"] * 6 + ["float32"] * 3 + ["int32"] * 3
    )
    torch.testing.assert_close(executable.bind(module)(x), module(x))
    command = [sys.executable, "-c", ELSEWHERE, str(Path(__file__).parent), __name__, str(store.folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    compilations, found = json.loads(done.stdout)
    assert compilations == 0
    torch.testing.assert_close(torch.tensor(found), module(x)[0])


# ---- the two rewritten operations ----------------------------------------------------------------------------------


def test_few_rows_and_one_query_compute_the_same(tiny_config: ModelConfig, tiny_model: GPTJ) -> None:
    """Catches a rewritten operation that differs, without waiting for a compiler: same logits under the rewriting."""
    for num_rows, width in ((1, 1), (3, 1), (1, 8)):
        with torch.no_grad():
            expected = Step(tiny_model)(*inputs(tiny_config, num_rows, width))
            with FewRows():
                found = Step(tiny_model)(*inputs(tiny_config, num_rows, width))
        assert_same(found, expected)
        assert not torch.equal(found[1], expected[1])  # it did take the other way


def test_a_query_that_sees_nothing_stays_finite() -> None:
    """Catches NaN from a softmax over nothing, which would spread from idle rows. B-28."""
    q, k, v = (torch.randn(1, 2, n, 4) for n in (1, 6, 6))
    with FewRows():
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=torch.zeros(1, 1, 1, 6, dtype=torch.bool))
    assert mixed.isfinite().all()


def test_scores_are_scaled_before_they_can_overflow() -> None:
    """Catches fp16 scores that overflow: 20 in all of 256 channels gives 102400 unscaled. B-27."""
    q, k = (torch.full((1, 1, n, 256), 20.0, dtype=torch.float16) for n in (1, 2))
    v = torch.tensor([1.0, 3.0], dtype=torch.float16)[None, None, :, None].expand(1, 1, 2, 256)
    with FewRows():
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(1, 1, 1, 2, dtype=torch.bool))
    assert mixed.eq(2.0).all()


def test_events_tell_what_is_being_built(tmp_path: Path) -> None:
    """Catches a silent minute."""

    class Add(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (x + 1,)

    events: list[Event] = []
    compile(Add(), (torch.ones(2),), CompileSpec(threads=1), Store(tmp_path), events.append, label="an addition")
    assert [event.name for event in events] == ["compile.start", "compile.part", "compile.done"]
    assert events[0].fields["label"] == "an addition"
    assert events[-1].fields["seconds"] > 0
