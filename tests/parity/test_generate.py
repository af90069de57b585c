"""Laws 1 to 3 for the engine: same ids as transformers, whatever shares the batch, however prompts are cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bluejay
from bluejay.config import MAX_BEAMS, MAX_STOP_IDS, GenerationConfig
from bluejay.errors import RequestError
from bluejay.generate import BAD_LOGITS, Engine, NumericsError, sub_seed
from bluejay.generate.runner import RANKED, DecodeCall, PrefillCall
from bluejay.generate.steps import Rows, flatten
from bluejay.models import GPTJ, KVCache

PROMPTS = [[5, 9, 33], [7, 1, 2, 60, 13, 22, 8], [3, 3, 41, 17, 25, 50, 4, 9, 11, 30, 56, 20]]
MakeEngine = Callable[..., Engine]


def reference(hf: Any, prompt: list[int], **options: Any) -> Any:
    """transformers' ids after the prompt, one prompt at a time."""
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, **options}
    with torch.no_grad():
        out = hf.generate(torch.tensor([prompt]), **options)
    sequences = out if isinstance(out, torch.Tensor) else out.sequences
    return [row[len(prompt) :].tolist() for row in sequences]


@pytest.mark.parametrize("max_rows", [1, 2, 4])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_greedy_equals_transformers_in_any_batch(
    make_engine: MakeEngine, tiny_hf: Any, order: tuple[int, ...], max_rows: int
) -> None:
    """B-19, B-22: 3, 7 and 12 tokens together, permuted, in more or fewer rows than prompts, cache full of NaN."""
    engine = make_engine(max_rows=max_rows)
    results = engine.generate([PROMPTS[i] for i in order], max_new_tokens=10)
    for i, result in zip(order, results, strict=True):
        assert list(result.ids) == reference(tiny_hf, PROMPTS[i], max_new_tokens=10)[0]
        assert result.stop_reason == "length"
    assert engine.idle


def test_reused_rows_answer_as_fresh_ones(make_engine: MakeEngine) -> None:
    """A row's former tenant must leave nothing behind: cache, repetition table, stop ids, seed, step count."""
    engine = make_engine(max_rows=2)
    expected = [make_engine(max_rows=1).generate(p, max_new_tokens=6) for p in PROMPTS]
    engine.generate(PROMPTS, max_new_tokens=9, temperature=1.5, repetition_penalty=3.0, stop_ids=[1, 2, 3], n=2)
    for tensor in (*engine._cache.keys, *engine._cache.values):
        tensor[:, :, 1:].mul_(1e4)
    for _ in range(2):
        assert [r.ids for r in engine.generate(PROMPTS, max_new_tokens=6)] == [r.ids for r in expected]


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 14), min_size=1, max_size=6),
    buckets=st.sets(st.sampled_from([1, 3, 4, 8, 16]), min_size=1),
    batches=st.sets(st.sampled_from([1, 2, 3]), max_size=2),
    max_rows=st.integers(1, 5),
)
def test_buckets_never_change_the_answer(
    engine_of: MakeEngine, lengths: list[int], buckets: set[int], batches: set[int], max_rows: int
) -> None:
    """Law 3: chunk and batch buckets are a matter of speed alone."""
    torch.manual_seed(0)
    model = _MODEL
    prompts = [torch.randint(64, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in lengths]
    engine = engine_of(
        model,
        max_rows=max_rows,
        prefill_buckets=tuple(sorted(buckets)),
        batch_buckets=tuple(sorted(batches | {1})),
    )
    for prompt, result in zip(prompts, engine.generate(prompts, max_new_tokens=5), strict=True):
        ids = list(prompt)
        for _ in range(5):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        assert list(result.ids) == ids[len(prompt) :]


def _noisy_model() -> GPTJ:
    config = bluejay.ModelConfig(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, rotary_dim=8)
    model = GPTJ(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(0, 0.3, generator=generator)
    return model


_MODEL = _noisy_model()


@pytest.mark.parametrize("num_beams", [2, 4])
@pytest.mark.parametrize(
    ("length_penalty", "early_stopping", "penalty", "min_new"),
    [(1.0, False, 1.0, 0), (2.0, "never", 1.0, 0), (0.0, True, 1.0, 3), (-1.0, False, 1.3, 0), (1.0, True, 1.3, 2)],
)
def test_beam_search_equals_transformers(
    make_engine: MakeEngine,
    tiny_hf: Any,
    num_beams: int,
    length_penalty: float,
    early_stopping: bool | str,
    penalty: float,
    min_new: int,
) -> None:
    """Law 1 for beams, two prompts at once: reordered caches, finished beams, ids and scores, with processors."""
    engine = make_engine(max_rows=8, eos=(44, 9))
    results = engine.generate(
        PROMPTS,
        max_new_tokens=9,
        min_new_tokens=min_new,
        num_beams=num_beams,
        n=2,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        repetition_penalty=penalty,
    )
    for prompt, result in zip(PROMPTS, results, strict=True):
        with torch.no_grad():
            expected = tiny_hf.generate(
                torch.tensor([prompt]),
                do_sample=False,
                num_beams=num_beams,
                num_return_sequences=2,
                max_new_tokens=9,
                min_new_tokens=min_new or None,
                length_penalty=length_penalty,
                early_stopping=early_stopping,
                repetition_penalty=penalty,
                pad_token_id=63,
                eos_token_id=[44, 9],
                return_dict_in_generate=True,
                output_scores=True,
            )
        for i, completion in enumerate(result.completions):
            ids = expected.sequences[i][len(prompt) :].tolist()
            assert list(completion.ids) == ids[: len(completion.ids)]
            assert set(ids[len(completion.ids) :]) <= {63}  # transformers pads the shorter hypotheses
            assert completion.score == pytest.approx(float(expected.sequences_scores[i]), abs=1e-4)


def test_beams_and_samples_share_a_batch(make_engine: MakeEngine) -> None:
    """A beam group and sampled rows in one step: neither may change the other's ids."""
    engine = make_engine(max_rows=8)
    beam = GenerationConfig(max_new_tokens=8, num_beams=3)
    sampled = GenerationConfig(max_new_tokens=5, temperature=1.0, seed=3, n=2)
    alone = [engine.generate(PROMPTS[0], beam), engine.generate(PROMPTS[1], sampled)]
    requests = [engine.submit(PROMPTS[0], beam), engine.submit(PROMPTS[1], sampled)]
    while not engine.idle:
        engine.step()
    together = [engine.collect(r) for r in requests]
    assert [[c.ids for c in g.completions] for g in together] == [[c.ids for c in g.completions] for g in alone]


def test_seeds_do_not_depend_on_neighbors(make_engine: MakeEngine) -> None:
    """A request's samples are a function of its seed alone: other rows, other row numbers, other batch sizes, forks."""
    config = GenerationConfig(max_new_tokens=12, temperature=1.0, top_p=0.95, seed=11)
    alone = make_engine(max_rows=1).generate(PROMPTS[1], config)
    crowd = make_engine(max_rows=4)
    requests = [crowd.submit(PROMPTS[0], GenerationConfig(max_new_tokens=4, temperature=1.0, seed=5))]
    requests += [crowd.submit(PROMPTS[2], GenerationConfig(max_new_tokens=3)), crowd.submit(PROMPTS[1], config)]
    while not crowd.idle:
        crowd.step()
    assert crowd.collect(requests[2]).ids == alone.ids
    many = crowd.generate(PROMPTS[1], config, n=6)  # more answers than rows
    assert many.ids == alone.ids
    assert len({c.ids for c in many.completions}) == 6
    assert make_engine().generate(PROMPTS[1], config, seed=12).ids != alone.ids


def test_answers_that_share_a_prompt_are_what_each_would_be_alone(make_engine: MakeEngine) -> None:
    """Forked rows need all that the prompt left behind, the repetition table too."""
    engine = make_engine(max_rows=3)
    settings_ = {"max_new_tokens": 9, "temperature": 1.0, "repetition_penalty": 3.0}
    together = engine.generate(PROMPTS[2], seed=7, n=3, **settings_)
    for i, completion in enumerate(together.completions):
        assert completion.ids == engine.generate(PROMPTS[2], seed=sub_seed(7, i), **settings_).ids


def test_greedy_limits(make_engine: MakeEngine) -> None:
    """B-25: temperature 0, top_p 0, top_k 1 and a tiny temperature are all greedy."""
    engine = make_engine()
    greedy = engine.generate(PROMPTS[1], max_new_tokens=10).ids
    for settings_ in (
        {"temperature": 1e-6},
        {"temperature": 1.0, "top_p": 0.0},
        {"temperature": 1.0, "top_p": 1e-9},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "min_p": 1.0},
        {"temperature": 0.0, "top_p": 0.5, "top_k": 9},
    ):
        assert engine.generate(PROMPTS[1], max_new_tokens=10, seed=1, **settings_).ids == greedy


def test_repetition_penalty_and_min_new_equal_transformers(make_engine: MakeEngine, tiny_hf: Any) -> None:
    """The penalty covers the prompt's tokens too; end of text is banned until min_new_tokens are written."""
    engine = make_engine(eos=(44, 9))
    for prompt, result in zip(
        PROMPTS,
        engine.generate(PROMPTS, max_new_tokens=12, repetition_penalty=1.5, min_new_tokens=4),
        strict=True,
    ):
        options = {"repetition_penalty": 1.5, "min_new_tokens": 4, "eos_token_id": [44, 9]}
        assert list(result.ids) == reference(tiny_hf, prompt, max_new_tokens=12, **options)[0]


def test_logprobs_equal_a_direct_forward(make_engine: MakeEngine, tiny_model: GPTJ) -> None:
    """B-62: n entries for n prompt tokens, the first None, chunk borders included; before temperature."""
    engine = make_engine(prefill_buckets=(4,))
    for settings_ in (
        {"max_new_tokens": 6},
        {"max_new_tokens": 0},
        {"max_new_tokens": 6, "temperature": 0.7, "seed": 1, "n": 3},
    ):
        for prompt, result in zip(
            PROMPTS, engine.generate(PROMPTS, logprobs=5, prompt_logprobs=5, **settings_), strict=True
        ):
            assert result.prompt_logprobs is not None
            assert [t.id for t in result.prompt_logprobs] == prompt
            assert result.prompt_logprobs[0].logprob is None
            for completion in result.completions:
                ids = prompt + list(completion.ids)
                direct = tiny_model(torch.tensor([ids]))[0].detach().log_softmax(-1)
                known = [*result.prompt_logprobs, *(completion.logprobs or ())]
                assert len(known) == len(ids)
                for i, entry in enumerate(known[1:], start=1):
                    assert entry.id == ids[i]
                    assert entry.logprob == pytest.approx(float(direct[i - 1, ids[i]]), abs=1e-4)
                    values, tokens = direct[i - 1].topk(5)
                    assert [t for t, _ in entry.top] == tokens.tolist()
                    assert [v for _, v in entry.top] == pytest.approx(values.tolist(), abs=1e-4)


def test_window(make_engine: MakeEngine) -> None:
    """B-23: window 32. 32 + 0 works; 30 + 10 is refused with both numbers or cut; a short neighbor keeps its room."""
    engine = make_engine()
    long = list(range(1, 33))
    assert engine.generate(long, max_new_tokens=0).ids == ()
    with pytest.raises(RequestError, match=r"30 prompt tokens.*\n.*32") as refused:
        engine.generate(long[:30], max_new_tokens=10)
    assert "at most 2" in refused.value.fix
    cut = engine.generate(long[:30], max_new_tokens=10, over_window="cut")
    assert (len(cut.ids), cut.stop_reason) == (2, "length")
    both = engine.generate([long, long[:20]], max_new_tokens=12, over_window="cut")
    assert [len(r.ids) for r in both] == [0, 12]
    with pytest.raises(RequestError, match="33 prompt tokens"):
        engine.generate([*long, 1], max_new_tokens=1, over_window="cut")


def test_stopping(make_engine: MakeEngine) -> None:
    """B-60, B-67 in the engine: stop ids, end of text, stop strings across tokens, and both on the last token."""
    engine = make_engine()
    free = engine.generate(PROMPTS[0], max_new_tokens=8)
    assert free.text == "".join(chr(i + 32) for i in free.ids)
    by_id = engine.generate(PROMPTS[0], max_new_tokens=8, stop_ids=free.ids[3])
    assert (by_id.stop_reason, by_id.ids, by_id.text) == ("stop_id", free.ids[:4], free.text[:3])
    across = engine.generate(PROMPTS[0], max_new_tokens=8, stop=free.text[2:5])
    assert (across.stop_reason, across.text, len(across.ids)) == ("stop", free.text[:2], 5)
    last = engine.generate(PROMPTS[0], max_new_tokens=5, stop=free.text[4])
    assert last.stop_reason == "stop"
    eos = make_engine(eos=(free.ids[3],))
    assert eos.generate(PROMPTS[0], max_new_tokens=8).stop_reason == "eos"
    assert eos.generate(PROMPTS[0], max_new_tokens=4).stop_reason == "eos"
    ignored = eos.generate(PROMPTS[0], max_new_tokens=8, ignore_eos=True)
    assert (ignored.ids, ignored.stop_reason) == (free.ids, "length")


def test_beams_stop_at_strings(make_engine: MakeEngine) -> None:
    """A stop string ends a hypothesis as an end of text does; its text is cut before the match."""
    engine = make_engine()
    free = engine.generate(PROMPTS[0], max_new_tokens=8, num_beams=3)
    stopped = engine.generate(PROMPTS[0], max_new_tokens=8, num_beams=3, n=3, stop=free.text[1:3])
    hits = [c for c in stopped.completions if c.stop_reason == "stop"]
    assert hits
    assert all(free.text[1:3] not in c.text for c in stopped.completions)


def test_stream_equals_generate(make_engine: MakeEngine) -> None:
    """Joined pieces per answer are the text; each answer ends with one reason; a left stream frees its rows."""
    engine = make_engine()
    settings_ = {"max_new_tokens": 10, "temperature": 1.0, "seed": 4, "n": 3, "stop": ["#%"]}
    whole = engine.generate(PROMPTS[1], **settings_)
    pieces = list(engine.stream(PROMPTS[1], **settings_))
    for i, completion in enumerate(whole.completions):
        mine = [p for p in pieces if p.sample == i]
        assert "".join(map(str, mine)) == completion.text
        assert [p.stop_reason for p in mine if p.stop_reason] == [completion.stop_reason]
    for _ in engine.stream(PROMPTS[1], max_new_tokens=10):
        break
    assert engine.idle
    first, second = engine.stream(PROMPTS[0], max_new_tokens=9), engine.stream(PROMPTS[1], max_new_tokens=9)
    woven = [(str(a), str(b)) for a, b in zip(first, second, strict=False)]
    assert woven[0][0] == engine.generate(PROMPTS[0], max_new_tokens=9).text[:1]
    first.close()
    second.close()
    assert engine.idle


def test_cancelled_requests_free_their_rows(make_engine: MakeEngine) -> None:
    """B-66's core: cancel while waiting, reading and writing; the others' answers do not change."""
    engine = make_engine(max_rows=2, prefill_buckets=(4,))
    expected = make_engine().generate(PROMPTS[2], max_new_tokens=8).ids
    config = GenerationConfig(max_new_tokens=8)
    requests = [engine.submit(PROMPTS[i], config) for i in (0, 2, 1)]
    for _ in range(3):
        engine.step()
    engine.cancel(requests[0], requests[2])
    assert engine.collect(requests[0]).stop_reason == "cancelled"
    while not engine.idle:
        engine.step()
    assert engine.collect(requests[1]).ids == expected
    engine.cancel(requests[1])
    assert engine.collect(requests[1]).stop_reason == "length"


def test_bad_requests_are_refused_before_anything_runs(make_engine: MakeEngine) -> None:
    """Each wrong request is one RequestError, and the engine stays empty."""
    engine = make_engine()
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        ("", {}, "empty prompt"),
        ([], {"max_new_tokens": 0}, ""),
        ([64], {}, "64"),
        ([-1], {}, "-1"),
        ([1], {"stop_ids": [64]}, "64"),
        ([1], {"num_beams": 9, "max_new_tokens": 3}, "num_beams=9"),
        ([1], {"num_beams": 2, "temperature": 0.5}, "deterministic"),
        ([1], {"n": 2}, "same answer"),
        ([1], {"n": 3, "num_beams": 2}, "at least 3"),
        ([1], {"min_new_tokens": 9, "max_new_tokens": 8}, "exceed"),
        ([1], {"early_stopping": True}, "beam"),
        ([1], {"temperature": -1}, "temperature"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"top_p": 1.5}, "top_p"),
        ([1], {"top_k": 1.5}, "top_k"),
        ([1], {"max_new_tokens": True}, "max_new_tokens"),
        ([1], {"stop": [""]}, "stop"),
        ([1], {"tempature": 1}, "tempature"),
    ]
    for prompt, settings_, message in wrong[:1] + wrong[2:]:
        with pytest.raises(RequestError, match=message):
            engine.generate(prompt, **settings_)
    for prompt in (None, 5, b"the king", {1: 2}, [1.5], [True], [None]):
        with pytest.raises(RequestError):
            engine.generate(prompt, max_new_tokens=2)
    assert engine.generate([]) == []
    assert engine.idle


def test_logits_that_are_not_numbers_are_an_error(make_engine: MakeEngine, tiny_model: GPTJ) -> None:
    """NaN must not become token 0 ("!!!!"): the request fails by name and the engine serves the next one."""
    engine = make_engine()
    expected = engine.generate(PROMPTS[0], max_new_tokens=3).ids
    weight = tiny_model.transformer.ln_f.weight
    good = weight.detach().clone()
    for settings_ in ({}, {"temperature": 1.0}, {"num_beams": 2}):
        weight.data[0] = torch.nan
        with pytest.raises(NumericsError, match="NaN"):
            engine.generate(PROMPTS[0], max_new_tokens=3, **settings_)
        weight.data.copy_(good)
        assert engine.idle
        assert engine.generate(PROMPTS[0], max_new_tokens=3).ids == expected


@pytest.mark.parametrize("bad_row", [0, 1, 2])
def test_bad_logits_end_one_request_and_no_other(make_engine: MakeEngine, monkeypatch: Any, bad_row: int) -> None:
    """A NaN in one row must not cost its neighbors a token, nor leave the engine with rows that never end."""
    engine = make_engine()
    expected = [r.ids for r in engine.generate(PROMPTS, max_new_tokens=8)]
    requests = [engine.submit(p, GenerationConfig(max_new_tokens=8)) for p in PROMPTS]
    decode, calls = engine._runner.decode, itertools.count()

    def spoiled(call: Any) -> Any:
        tokens, *rest = decode(call)
        if next(calls) == 3:
            tokens[bad_row] = BAD_LOGITS
        return [tokens, *rest]

    monkeypatch.setattr(engine._runner, "decode", spoiled)
    while not engine.idle:
        engine.step()
    for i, request in enumerate(requests):
        if i == bad_row:
            with pytest.raises(NumericsError):
                engine.collect(request)
        else:
            assert engine.collect(request).ids == expected[i]


def test_scoring_alone_needs_one_row(make_engine: MakeEngine) -> None:
    """No new token, but more answers than rows: nothing may be freed twice, and no decode program is asked for."""
    engine = make_engine(max_rows=2)
    result = engine.generate(PROMPTS[1], max_new_tokens=0, n=5, temperature=1.0, prompt_logprobs=2)
    assert [c.ids for c in result.completions] == [()] * 5
    assert len(result.prompt_logprobs or ()) == 7
    assert engine.generate(PROMPTS[0][:1], max_new_tokens=0).stop_reason == "length"
    assert all(isinstance(call, PrefillCall) for call in engine._runner._programs)
    assert engine.idle


def test_a_scored_prompt_does_not_change_the_decode_program(make_engine: MakeEngine) -> None:
    """What the prompt's scores need must not be asked of the programs that write."""
    engine = make_engine()
    engine.generate(PROMPTS[1], max_new_tokens=3, prompt_logprobs=2)
    assert [call.ranked for call in engine._runner._programs if isinstance(call, DecodeCall)] == [0]


def test_pieces_of_a_finished_request_are_kept(make_engine: MakeEngine) -> None:
    """Driving one request finishes others on the way: their text must still come out."""
    engine = make_engine()
    config = GenerationConfig(max_new_tokens=6)
    first, second = engine.submit(PROMPTS[0], config), engine.submit(PROMPTS[1], config)
    list(engine.pieces(second))
    assert "".join(map(str, engine.pieces(first))) == engine.collect(first).text != ""


def test_cancelled_answers_keep_what_they_wrote(make_engine: MakeEngine) -> None:
    """Text and ids agree, beams included."""
    engine = make_engine()
    for settings_ in ({}, {"num_beams": 3}):
        request = engine.submit(PROMPTS[0], GenerationConfig(max_new_tokens=9, **settings_))
        for _ in range(4):
            engine.step()
        engine.cancel(request)
        answer = engine.collect(request)
        assert answer.stop_reason == "cancelled"
        assert len(answer.ids) >= 3
        assert answer.text == "".join(chr(i + 32) for i in answer.ids)


def test_most_beams_and_stop_ids_fit_a_program() -> None:
    """The largest request that the config allows must find a number of ranked tokens."""
    assert RANKED[-1] >= MAX_BEAMS * (1 + MAX_STOP_IDS)


def test_every_row_is_aligned(tiny_config: Any) -> None:
    """Compiled GPU programs copy inputs that do not start at a multiple of 16 bytes, and lose what is written there."""
    rows = Rows.allocate(5, 65, torch.device("cpu"))
    cache = KVCache(tiny_config, 5, 32)
    for first in range(5):
        for tensor in flatten(rows.view(first, 1), cache.view(first, 1)):
            assert tensor.data_ptr() % 16 == 0


def test_figures_count_real_tokens(make_engine: MakeEngine) -> None:
    """No padding, nothing after an end, no idle row."""
    engine = make_engine(prefill_buckets=(8,))
    engine.generate(PROMPTS, max_new_tokens=5)
    assert engine.figures.prompt_tokens == sum(map(len, PROMPTS))
    assert engine.figures.decoded_tokens == 3 * 4  # the first of each comes from the prefill program
