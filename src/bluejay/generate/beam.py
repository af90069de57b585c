"""Beam search over one prompt: pure bookkeeping on log-probabilities, no model and no cache.

search = BeamSearch(num_beams=4, n=1, length_penalty=1.0, early_stopping=False, eos_ids=(2,), max_new_tokens=64)
while True:
    step = search.advance(*log_probs.topk(search.num_candidates))  # one row of log_probs per beam
    if step.done:
        break
    ...                                                            # reorder the cache by step.parents, run step.tokens
best = search.results()[0]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, float32, full, inf


@dataclass(frozen=True)
class Hypothesis:
    """A finished continuation.

    Attributes:
        ids: generated ids, without the prompt, with the end-of-text id if it ended with one.
        score: sum of log-probabilities / len(ids) ** length_penalty.
        reason: "eos" (an end-of-text id), "stop" (`is_stopped` said so) or "length" (out of tokens).
    """

    ids: tuple[int, ...]
    score: float
    reason: Literal["eos", "stop", "length"]


@dataclass(frozen=True)
class Step:
    """What to run next: row i continues the former row parents[i] with tokens[i]. Both are empty once done."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    done: bool


class BeamSearch:
    """The `num_beams` best open continuations, and the `num_beams` best finished ones, of one prompt.

    Of the candidates of a step (every beam with every token, by summed log-probability) the first `num_beams` become
    finished hypotheses if they end there, and the first `num_beams` that do not end stay open. An ending candidate
    of lower rank is dropped: it would finish only because better ones had not.

    The search is over when nothing is left open, or when `num_beams` hypotheses are finished and
      - early_stopping True: at once;
      - early_stopping False: the best open beam, if it ended now, would not beat the worst of them;
      - early_stopping "never": the best open beam would not beat it at the most favorable length either, which is
        `max_new_tokens` when length_penalty > 0 and now otherwise.

    Sums and scores are fp32, as in the reference: in fp64 two candidates that the reference holds equal or in rounded
    order could change places. Exact ties go to the lower row, then to the earlier column, then to the older hypothesis.

    Args:
        num_beams: open continuations, and finished ones to keep.
        n: hypotheses to return, at most num_beams.
        length_penalty: exponent of the length; above 0 favors long continuations.
        early_stopping: see above.
        eos_ids: ids that end a continuation; a caller that ignores end of text gives none.
        max_new_tokens: length at which a continuation ends in any case.
        is_stopped: whether generated ids hold a stop string; asked for every candidate that matters, a few per beam.

    Source: beam search of transformers 5.24 (`GenerationMixin.generate` with `do_sample=False`), same ids and scores.
    """

    def __init__(
        self,
        *,
        num_beams: int,
        n: int,
        length_penalty: float,
        early_stopping: bool | Literal["never"],
        eos_ids: tuple[int, ...],
        max_new_tokens: int,
        is_stopped: Callable[[tuple[int, ...]], bool] | None = None,
    ) -> None:
        assert 1 <= n <= num_beams
        assert max_new_tokens >= 1
        self._num_beams, self._n, self._max_new_tokens = num_beams, n, max_new_tokens
        self._length_penalty, self._early_stopping = length_penalty, early_stopping
        self._eos_ids, self._is_stopped = frozenset(eos_ids), is_stopped
        self._length = 0
        self._open: list[tuple[int, ...]] = [()] * num_beams
        self._sums = full((num_beams,), -inf, dtype=float32, device="cpu")  # of the open continuations, best first
        self._sums[0] = 0.0  # all rows hold the prompt: only one of them may continue, or all beams would be the same
        self._finished: list[Hypothesis] = []  # best first
        self._done = False

    @property
    def num_candidates(self) -> int:
        """Tokens to offer per beam: enough that `num_beams` candidates stay open if all end-of-text ids are there."""
        return self._num_beams * max(2, 1 + len(self._eos_ids))

    def advance(self, values: Tensor, tokens: Tensor) -> Step:
        """Take one step, given the best next tokens of each beam; row i is what token i of the last step led to.

        Args:
            values: log-probabilities of the tokens. They are the log-softmax of the logits, with repetition penalty and
                minimum length (-inf for end-of-text ids) applied after it and not normalized again, as the
                reference does in beam search.
            tokens: their ids.

        Shapes: both [num_beams, min(num_candidates, vocabulary)], on any device.
        """
        assert not self._done, "the search is over"
        self._length += 1
        sums = values.float().cpu() + self._sums[:, None]  # [beams, candidates]
        sums, order = sums.flatten().sort(descending=True, stable=True)
        sums, order = sums[: self.num_candidates], order[: self.num_candidates]
        scores = (sums / self._length**self._length_penalty).tolist()
        parents = (order // values.shape[1]).tolist()
        token_ids = tokens.cpu().flatten()[order].tolist()

        stay: list[int] = []  # ranks of candidates that stay open
        for rank, (parent, token) in enumerate(zip(parents, token_ids, strict=True)):
            if scores[rank] == -inf or len(stay) == self._num_beams <= rank:
                break  # the rest is impossible, or can neither stay nor finish
            ids = (*self._open[parent], token)
            reason = self._reason(ids)
            if reason is None:
                stay.append(rank)
            elif rank < self._num_beams:
                self._finished.append(Hypothesis(ids, scores[rank], reason))
        self._finished = sorted(self._finished, key=lambda h: h.score, reverse=True)[: self._num_beams]

        if not stay or self._is_settled(sums[stay[0]]):
            self._done = True
            return Step((), (), True)
        # Stop strings or a tiny vocabulary can leave fewer than num_beams open. The number of rows is fixed, so the
        # rest are copies without any chance.
        missing = self._num_beams - len(stay)
        self._sums = sums[stay + stay[:1] * missing]
        self._sums[len(stay) :] = -inf
        stay += stay[:1] * missing
        self._open = [(*self._open[parents[rank]], token_ids[rank]) for rank in stay]
        return Step(tuple(token_ids[rank] for rank in stay), tuple(parents[rank] for rank in stay), False)

    def results(self) -> list[Hypothesis]:
        """The `n` best finished hypotheses, best first; fewer only if there are not as many continuations."""
        assert self._done, "the search is not over"
        return self._finished[: self._n]

    def leading(self) -> tuple[int, ...]:
        """The best continuation so far, finished or not: what to keep of a search that is given up."""
        if self._finished:
            return self._finished[0].ids
        return self._open[0]

    def _reason(self, ids: tuple[int, ...]) -> Literal["eos", "stop", "length"] | None:
        if ids[-1] in self._eos_ids:
            return "eos"
        if self._is_stopped is not None and self._is_stopped(ids):
            return "stop"
        return "length" if len(ids) >= self._max_new_tokens else None

    def _is_settled(self, best_open_sum: Tensor) -> bool:
        """Whether enough hypotheses are finished and no open beam is expected to join them."""
        if len(self._finished) < self._num_beams:
            return False
        if self._early_stopping is True:
            return True
        until_the_end = self._early_stopping == "never" and self._length_penalty > 0
        length = self._max_new_tokens if until_the_end else self._length
        return float(best_open_sum / length**self._length_penalty) <= self._finished[-1].score
