"""Law 2 for the engine: compiled programs give the eager engine's ids, in every loop, whatever fills unused slots."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from bluejay.compile.graph import trace
from bluejay.compile.signature import input_names
from bluejay.config import CompileSpec, GenerationConfig
from bluejay.generate import Engine
from bluejay.generate.runner import DecodeCall, PrefillCall
from bluejay.generate.steps import DecodeStep, Rows, flatten
from bluejay.models import GPTJ, KVCache

PROMPTS = [[5, 9, 33], [7, 1, 2, 60, 13, 22, 8], [3, 3, 41, 17, 25, 50, 4, 9, 11, 30, 56, 20]]
GREEDY = GenerationConfig(max_new_tokens=9)
SAMPLED = GenerationConfig(max_new_tokens=9, temperature=1.2, top_k=40, top_p=0.95, min_p=0.001, seed=5)
PENALIZED = GenerationConfig(max_new_tokens=9, temperature=0.9, repetition_penalty=1.4, min_new_tokens=4, seed=8)
MakeEngine = Callable[..., Engine]


# Prompts and answers by the slots that their programs look at: 4 + 5, 13 + 9 and 30 + 12 tokens.
BY_SLOTS = {
    16: ([5, 9, 33, 7], 5),
    32: ([7, 1, 2, 60, 13, 22, 8, 4, 9, 11, 30, 56, 20], 9),
    64: ([*range(1, 31)], 12),
}
ALONE = [(16, 8), (32, 16), (64, 16)]  # slots, and the chunks of the prompt
TOGETHER = (4, 32, 16)  # rows, slots and chunks of PROMPTS: one row stays idle


@pytest.fixture
def make_engine(make_engine: MakeEngine) -> MakeEngine:
    """As everywhere, with a window of 64: part of the keys of programs, so that all engines here share them."""
    return partial(make_engine, window=64)


@pytest.fixture
def compiled(make_engine: MakeEngine, program_folder: str) -> MakeEngine:
    """As `make_engine`, on programs of two batch, two prefill and three slot buckets, compiled together."""

    def make(**run: Any) -> Engine:
        shapes = {"batch_buckets": (1,), "prefill_buckets": (8, 16), "slot_buckets": (16, 32), "cache": program_folder}
        engine = make_engine(**{**shapes, "compile": CompileSpec(threads=1), **run})
        rows, slots, width = TOGETHER
        calls: list[Any] = [PrefillCall(1, slots, width) for slots, width in ALONE]
        calls += [DecodeCall(1, slots, True) for slots, _ in ALONE]
        calls += [PrefillCall(rows, slots, width), *(DecodeCall(rows, slots, greedy) for greedy in (True, False))]
        engine._runner.require(calls)
        return engine

    return make


def ids(engine: Engine, config: GenerationConfig, **settings: Any) -> list[list[tuple[int, ...]]]:
    return [[c.ids for c in result.completions] for result in engine.generate(PROMPTS, config, **settings)]


@pytest.mark.parametrize("config", [GREEDY, SAMPLED, PENALIZED], ids=["greedy", "sampled", "penalized"])
def test_compiled_ids_equal_eager_ones(compiled: MakeEngine, make_engine: MakeEngine, config: GenerationConfig) -> None:
    """Laws 2 and 3, B-22, B-51: three unequal prompts in four rows, the cache full of NaN; then again in used rows."""
    engine = compiled(eos=(44, 9))
    expected = ids(make_engine(eos=(44, 9)), config)
    assert ids(engine, config) == expected
    for tensor in (*engine._cache.keys, *engine._cache.values):
        tensor.fill_(torch.nan)
    assert ids(engine, config) == expected


def of_a_full_forward(model: GPTJ, prompt: list[int], count: int) -> list[int]:
    """The likeliest tokens, each from a forward over everything before it: no cache, no bucket, no padding."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def test_every_bucket_gives_the_ids_of_a_full_forward(compiled: MakeEngine, tiny_model: GPTJ) -> None:
    """Laws 2 and 3, B-22: caches of 16, 32 and 64 slots, chunks of 8 and 16, 1 and 4 rows, all unused slots NaN; each
    alone, then together in rows that hold the former answers' keys."""
    engine = compiled()
    for slots, (prompt, new) in BY_SLOTS.items():
        for tensor in (*engine._cache.keys, *engine._cache.values):
            tensor.fill_(torch.nan)
        expected = of_a_full_forward(tiny_model, prompt, new)
        assert list(engine.generate(prompt, max_new_tokens=new).ids) == expected, slots
    together = engine.generate(PROMPTS, GREEDY)
    assert [list(g.ids) for g in together] == [of_a_full_forward(tiny_model, p, 9) for p in PROMPTS]
    used = engine._runner._programs
    assert {call.slots for call in used} == {16, 32, 64}
    assert {call.num_rows for call in used} == {1, 4}
    assert {call.width for call in used if isinstance(call, PrefillCall)} == {8, 16}
    assert engine.figures.compilations <= 9  # those of the fixture: nothing ran at a shape of its own


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_is_seen_by_no_one(compiled: MakeEngine, tiny_model: GPTJ, side: str) -> None:
    """Law 3, B-19: three unequal prompts in one compiled chunk, padded before or after; then decoded, slots NaN."""
    engine = compiled()
    runner, (num_rows, slots, width) = engine._runner, TOGETHER
    ids, positions = torch.full((2, num_rows, width), -1)
    last = torch.zeros(num_rows, dtype=torch.int64)
    for row, prompt in enumerate(PROMPTS):
        first = width - len(prompt) if side == "left" else 0
        ids[row, first : first + len(prompt)] = torch.tensor(prompt)
        positions[row, first : first + len(prompt)] = torch.arange(len(prompt))
        last[row] = first + len(prompt) - 1
        runner.rows.assign(row, GREEDY, GREEDY.max_new_tokens, [], seed=0)
    (tokens,) = runner.prefill(PrefillCall(num_rows, slots, width), 0, (ids.clamp(0), positions, last, ids.clamp(0)))
    written = [tokens[:3]]
    for row, prompt in enumerate(PROMPTS):
        runner.rows.token[row], runner.rows.position[row], runner.rows.step[row] = tokens[row], len(prompt), 1
    for _ in range(4):
        written.append(runner.decode(DecodeCall(num_rows, slots, True))[0][:3, 0])
    expected = [of_a_full_forward(tiny_model, prompt, 5) for prompt in PROMPTS]
    assert torch.stack(written, dim=1).tolist() == expected


def test_compiled_logits_equal_eager_ones(compiled: MakeEngine, make_engine: MakeEngine) -> None:
    """Law 2: log-probabilities within 1e-4; B-02 in the compiled path, where the head's bias could be lost."""
    settings: dict[str, Any] = {"logprobs": 8, "prompt_logprobs": 8}
    for ours, theirs in zip(
        compiled().generate(PROMPTS, GREEDY, **settings),
        make_engine().generate(PROMPTS, GREEDY, **settings),
        strict=True,
    ):
        pairs = [*zip(ours.prompt_logprobs or (), theirs.prompt_logprobs or (), strict=True)][1:]
        pairs += zip(ours.completions[0].logprobs or (), theirs.completions[0].logprobs or (), strict=True)
        assert len(pairs) == len(ours.prompt_ids) - 1 + 9
        for one, other in pairs:
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [v for _, v in one.top] == pytest.approx([v for _, v in other.top], abs=1e-4)


@pytest.mark.parametrize("loop", ["device", "unrolled"])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_all_loops_give_the_same_ids(compiled: MakeEngine, make_engine: MakeEngine, loop: str, backend: str) -> None:
    """Rows of unequal lengths that end at different tokens inside a call freeze there, and stop strings still cut."""
    run: dict[str, Any] = {"eos": (44, 9), "loop": loop, "iterations": 4}
    engine = make_engine(**run) if backend == "eager" else compiled(**run)
    host = make_engine(eos=(44, 9))
    for config in (GREEDY, SAMPLED):
        assert ids(engine, config) == ids(host, config)
        stop = host.generate(PROMPTS[1], config).text[2:4]
        for ours, theirs in zip(
            engine.generate(PROMPTS, config, stop=stop), host.generate(PROMPTS, config, stop=stop), strict=True
        ):
            assert (ours.text, ours.ids, ours.stop_reason) == (theirs.text, theirs.ids, theirs.stop_reason)
    assert engine.idle


def test_a_warm_start_compiles_nothing(compiled: MakeEngine) -> None:
    """The counter that shipping relies on; and figures keep compiling apart from running."""
    compiled().generate(PROMPTS, GREEDY)
    again = compiled()
    again.generate(PROMPTS, GREEDY)
    assert again.figures.compilations == 0
    assert again.figures.compile_seconds > 0


def test_an_unrolled_step_compiles_each_kind_of_part_once(tiny_model: GPTJ) -> None:
    """Before, between and after the layers, and a layer: four programs however many tokens are written out."""
    step = DecodeStep(tiny_model, greedy=True, iterations=3)
    inputs = flatten(Rows.allocate(4, 64, torch.device("cpu")), KVCache(tiny_model.config, 4, 32))
    traced = trace(step, inputs, input_names(step, len(inputs)), "cpu", "shared")
    assert len(traced.parts) == 4
    assert [call.program for call in traced.calls] == [0, 1, 1, 2, 1, 1, 2, 1, 1, 3]
