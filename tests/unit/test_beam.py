"""Beam search against transformers, token for token and score for score, and against its own definition."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bluejay.generate import BeamSearch, Hypothesis

if TYPE_CHECKING:
    from transformers import GPTJForCausalLM

Early = bool | Literal["never"]
Scorer = Callable[[list[list[int]]], Tensor]  # generated ids of each row -> log-probabilities [rows, vocabulary]


def search(scorer: Scorer, num_beams: int, **options: Any) -> list[Hypothesis]:
    """Run a beam search to its end with `scorer` in the place of a model."""
    beams = BeamSearch(num_beams=num_beams, **options)
    rows: list[list[int]] = [[] for _ in range(num_beams)]
    while True:
        log_probs = scorer(rows)
        step = beams.advance(*log_probs.topk(min(beams.num_candidates, log_probs.shape[1])))
        if step.done:
            assert step.tokens == step.parents == ()
            return beams.results()
        rows = [[*rows[parent], token] for parent, token in zip(step.parents, step.tokens, strict=True)]


@dataclass(frozen=True)
class Case:
    num_beams: int
    length_penalty: float
    early_stopping: Early
    max_new_tokens: int
    n: int
    eos_ids: tuple[int, ...]
    sharpness: float  # factor on the logits before the bias: how sure the model is
    eos_bias: float
    min_new_tokens: int
    stop_modulus: int  # generated ids whose sum it divides count as holding a stop string; 0 for none
    prompt: tuple[int, ...]

    def is_stopped(self, ids: Sequence[int]) -> bool:
        return self.stop_modulus > 0 and sum(ids) % self.stop_modulus == 0


def draw_case(seed: int) -> Case:
    """Settings that cover the product of modes as the seed goes up, the rest at random."""
    pick = random.Random(seed)
    num_beams = 2 + seed % 4
    max_new_tokens = pick.choice([1, 2, 3, 5, 8, 12, 20])
    return Case(
        num_beams=num_beams,
        length_penalty=[-1.0, 0.0, 0.5, 1.0, 2.0][seed % 5],
        early_stopping=(False, True, "never")[seed % 3],
        max_new_tokens=max_new_tokens,
        n=pick.randint(1, num_beams),
        eos_ids=tuple(pick.sample(range(64), pick.choice([1, 1, 2, 3]))),
        sharpness=pick.choice([0.3, 1.0, 3.0]),
        eos_bias=pick.choice([0.0, 1.0, 2.0, 3.0, 4.0, 6.0]),  # from "hardly ends" to "ends at once"
        min_new_tokens=pick.choice([0, 0, 0, min(2, max_new_tokens)]),
        stop_modulus=pick.choice([0, 0, 0, 2, 5]),
        prompt=tuple(pick.choices(range(64), k=6)),
    )


def reference(model: GPTJForCausalLM, case: Case) -> list[tuple[tuple[int, ...], float]]:
    """Ids without prompt and padding, and scores, of transformers' generate."""
    output = model.generate(
        torch.tensor([case.prompt]),
        attention_mask=torch.ones(1, len(case.prompt), dtype=torch.long),
        do_sample=False,
        use_cache=False,
        num_beams=case.num_beams,
        num_return_sequences=case.n,
        length_penalty=case.length_penalty,
        early_stopping=case.early_stopping,
        eos_token_id=list(case.eos_ids),
        pad_token_id=case.eos_ids[0],
        max_new_tokens=case.max_new_tokens,
        min_new_tokens=case.min_new_tokens,
        stopping_criteria=[
            lambda ids, _: torch.tensor([case.is_stopped(row[len(case.prompt) :]) for row in ids.tolist()])
        ],
        return_dict_in_generate=True,
        output_scores=True,
    )
    rows = output.sequences[:, len(case.prompt) :].tolist()
    lengths = (output.beam_indices >= 0).sum(1).tolist()
    scores = output.sequences_scores.tolist()
    return [(tuple(row[:length]), score) for row, length, score in zip(rows, lengths, scores, strict=True)]


def ours(model: GPTJForCausalLM, case: Case) -> list[Hypothesis]:
    def scorer(rows: list[list[int]]) -> Tensor:
        ids = torch.tensor([[*case.prompt, *row] for row in rows])
        output = model(ids, attention_mask=torch.ones_like(ids), use_cache=False, logits_to_keep=1)
        log_probs = output.logits[:, -1].log_softmax(-1)
        if len(rows[0]) < case.min_new_tokens:
            log_probs[:, list(case.eos_ids)] = -torch.inf
        return log_probs

    with torch.no_grad():
        return search(
            scorer,
            num_beams=case.num_beams,
            n=case.n,
            length_penalty=case.length_penalty,
            early_stopping=case.early_stopping,
            eos_ids=case.eos_ids,
            max_new_tokens=case.max_new_tokens,
            is_stopped=case.is_stopped,
        )


def biased(tiny_hf: GPTJForCausalLM, case: Case) -> GPTJForCausalLM:
    model = copy.deepcopy(tiny_hf)
    with torch.no_grad():
        model.lm_head.weight *= case.sharpness
        model.lm_head.bias *= case.sharpness
        model.lm_head.bias[list(case.eos_ids)] += case.eos_bias * case.sharpness
    return model


# Most draws do not tell close readings apart. These do, found by putting each fault in: too few candidates for several
# end ids; "never" as False; "never" with a negative penalty; the length after this step; "never" as True; endings of
# low rank taken; spare rows with a chance.
TELLING = (248, 333, 383, 854, 254, 308, 374, 1430, 93, 144, 159, 189, 74, 128, 94, 95, 103, 289, 298)


@pytest.mark.parametrize("seed", [*range(40), *TELLING])
def test_equals_transformers(tiny_hf: GPTJForCausalLM, seed: int) -> None:
    """Catches any other reading of num_beams, length_penalty, early_stopping, n, end ids, minimum length and stops.

    Both sides compute the same batches, so ids and scores are equal to the last bit.
    """
    case = draw_case(seed)
    model = biased(tiny_hf, case)
    found = ours(model, case)
    assert [(h.ids, h.score) for h in found] == reference(model, case), case
    for h in found:
        assert h.reason == ("eos" if h.ids[-1] in case.eos_ids else "stop" if case.is_stopped(h.ids) else "length")


def table_scorer(seed: int, vocabulary: int) -> Scorer:
    """A model of random log-probabilities that depend on all ids of a row and on nothing else."""

    def row_of(ids: list[int]) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, *ids)) % 2**63)
        return (3 * torch.randn(vocabulary, generator=generator)).log_softmax(-1)

    return lambda rows: torch.stack([row_of(row) for row in rows])


@settings(deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([-1.0, 0.0, 1.0, 2.0]), st.booleans(), st.integers(1, 8))
def test_one_beam_is_greedy(seed: int, length_penalty: float, early: bool, max_new_tokens: int) -> None:
    """Catches a candidate lost or an end-of-text of lower rank taken: one beam follows the best token to its end."""
    scorer, eos = table_scorer(seed, 6), 2
    ids: list[int] = []
    total = torch.tensor(0.0)
    while len(ids) < max_new_tokens and eos not in ids:
        best = scorer([ids])[0].max(0)
        ids, total = [*ids, int(best.indices)], total + best.values
    [found] = search(
        scorer,
        num_beams=1,
        n=1,
        length_penalty=length_penalty,
        early_stopping=early,
        eos_ids=(eos,),
        max_new_tokens=max_new_tokens,
    )
    assert found.ids == tuple(ids)
    assert found.score == (total / len(ids) ** length_penalty).item()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([-1.0, 0.0, 1.0, 2.0]))
def test_enough_beams_find_the_best_of_all_continuations(seed: int, length_penalty: float) -> None:
    """Catches beams that start equal, a finished hypothesis that is lost, and a search that ends too early.

    Three tokens, one of them the end, up to four long: 31 continuations, all within reach of 32 beams.
    """
    scorer, eos, max_new_tokens = table_scorer(seed, 3), 0, 4
    every: dict[tuple[int, ...], float] = {}
    open_rows: dict[tuple[int, ...], Tensor] = {(): torch.tensor(0.0)}
    for length in range(1, max_new_tokens + 1):
        grown = {
            (*row, token): total + value
            for row, total in open_rows.items()
            for token, value in enumerate(scorer([list(row)])[0])
        }
        ended = {row for row in grown if row[-1] == eos or length == max_new_tokens}
        every |= {row: (grown[row] / length**length_penalty).item() for row in ended}
        open_rows = {row: total for row, total in grown.items() if row not in ended}
    found = search(
        scorer,
        num_beams=32,
        n=32,
        length_penalty=length_penalty,
        early_stopping="never",
        eos_ids=(eos,),
        max_new_tokens=max_new_tokens,
    )
    assert [(h.ids, h.score) for h in found] == sorted(every.items(), key=lambda item: -item[1])


def test_rows_continue_their_parents() -> None:
    """Catches a cache reordered by the wrong index: both open beams come from the second row here."""
    beams = BeamSearch(num_beams=2, n=2, length_penalty=1.0, early_stopping=False, eos_ids=(9,), max_new_tokens=3)
    assert beams.num_candidates == 4
    first = beams.advance(torch.tensor([[-1.0, -1.5, -9.0, -9.5]] * 2), torch.tensor([[4, 5, 6, 7]] * 2))
    assert (first.tokens, first.parents, first.done) == ((4, 5), (0, 0), False)
    values = torch.tensor([[-7.0, -8.0, -9.0, -9.5], [-0.5, -0.7, -9.0, -9.5]])
    second = beams.advance(values, torch.tensor([[1, 2, 3, 4], [8, 6, 5, 4]]))
    assert (second.tokens, second.parents, second.done) == ((8, 6), (1, 1), False)
    values = torch.tensor([[-5.0, -6.0, -7.0, -8.0], [-0.1, -0.2, -9.0, -9.5]])
    assert beams.advance(values, torch.tensor([[1, 2, 3, 4], [9, 3, 5, 4]])).done
    assert [(h.ids, h.reason) for h in beams.results()] == [((5, 6, 9), "eos"), ((5, 6, 3), "length")]


def test_end_of_text_on_the_last_token_is_the_reason() -> None:
    """Catches "length" for a row that ended by itself on its last token (B-67)."""
    beams = BeamSearch(num_beams=1, n=1, length_penalty=1.0, early_stopping=False, eos_ids=(2,), max_new_tokens=1)
    assert beams.advance(torch.tensor([[-0.5, -1.0]]), torch.tensor([[2, 3]])).done
    assert beams.results() == [Hypothesis((2,), -0.5, "eos")]
