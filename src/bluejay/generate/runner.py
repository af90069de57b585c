"""The device's side of generation: rows, cache, and the two programs at every shape they are needed in.

Knows no requests and no text. Shapes are padded into buckets here and nowhere else.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bluejay.build import Built, Program
from bluejay.generate.buckets import fit
from bluejay.generate.steps import DecodeStep, GenerationStep, PrefillStep, Rows, flatten
from bluejay.models import KVCache

# Without a compiler a new shape costs nothing, so a step looks at few more slots than are in use: multiples of this.
EAGER_SLOTS = 64
# How many likeliest tokens programs return; a request gets the next larger number.
RANKED = (0, 1, 8, 16, 64, 512)


@dataclass
class Seconds:
    """Time spent so far in prefill programs, in decode programs, and in getting programs."""

    prefill: float = 0.0
    decode: float = 0.0
    compile: float = 0.0


@dataclass(frozen=True)
class Prepared:
    """A program that is now in the store: what it is for, whether it had to be compiled, and the seconds it took."""

    label: str
    was_compiled: bool
    seconds: float


@dataclass(frozen=True)
class DecodeCall:
    """One call of a decode program over rows 0 to `num_rows`.

    Attributes:
        greedy: no row samples.
        ranked: likeliest tokens to return.
        unrolled: tokens written by one run of the program.
        repeats: runs of the program before the host looks; rows that have ended are frozen.
    """

    num_rows: int
    slots: int
    greedy: bool
    ranked: int = 0
    unrolled: int = 1
    repeats: int = 1


class Runner:
    """Owns what lies on the device.

    Attributes:
        rows, cache: state of every row; row i of one belongs to row i of the other.
        batch_buckets, prefill_buckets, slot_buckets: padded numbers of rows, chunk lengths and cache lengths.
    """

    def __init__(self, built: Built) -> None:
        run, config = built.run, built.model.config
        self.built = built
        self.seconds = Seconds()
        storage = built.device if built.has_weights else torch.device("meta")
        self.rows = Rows.allocate(run.max_rows, config.vocab_size, storage)
        self.cache = KVCache(config, run.max_rows, built.context, built.dtype, storage)
        self.batch_buckets = (*(b for b in run.batch_buckets if b < run.max_rows), run.max_rows)
        self.prefill_buckets = run.prefill_buckets
        self.compiled = run.compile.backend != "eager"
        granules = range(EAGER_SLOTS, built.context, EAGER_SLOTS)
        chosen = run.slot_buckets or (max(EAGER_SLOTS, built.context // 4),)
        self.slot_buckets = (*(b for b in (chosen if self.compiled else granules) if b < built.context), built.context)
        self._programs: dict[tuple[Any, ...], Program | None] = {}
        self._views: dict[tuple[int, int, int], tuple[Tensor, ...]] = {}

    def slots_for(self, held: int, planned: int) -> int:
        """Cache slots a step should look at: what rows hold now, or where programs cost time, what they may come to."""
        return fit(min(planned if self.compiled else held, self.built.context), self.slot_buckets)

    def prefill(
        self, first_row: int, slots: int, chunk: tuple[Tensor, Tensor, Tensor, Tensor], *, ranked: int, score: bool
    ) -> list[Tensor]:
        """Run a chunk of prompt for the rows from `first_row` on; returns what `PrefillStep` returns, on the host.

        Shapes:
            chunk: ids, positions [B, T], last [B], targets [B, T]; B and T are buckets
        """
        program = self._bound(self._prefill_program(first_row, slots, chunk, ranked, score))
        started = time.perf_counter()
        inputs = [tensor.to(self.built.device) for tensor in chunk]
        outputs = [t.cpu() for t in program(*inputs, *self._view(first_row, chunk[0].shape[0], slots))]
        self.seconds.prefill += time.perf_counter() - started
        return outputs

    def decode(self, call: DecodeCall) -> list[Tensor]:
        """Run a decode call; returns what `DecodeStep` returns for all its iterations, on the host."""
        program = self._bound(self.decode_program(call))
        started = time.perf_counter()
        steps = program.repeat(call.repeats, *self._view(0, call.num_rows, call.slots))
        outputs = [torch.cat(column, dim=1).cpu() for column in zip(*steps, strict=True)]
        self.seconds.decode += time.perf_counter() - started
        return outputs

    def decode_program(self, call: DecodeCall) -> Program | None:
        """The program that `decode` runs for this call, made now if need be."""
        variant = {"greedy": call.greedy, "ranked": call.ranked, "iterations": call.unrolled}
        label = f"decode, {_rows(call.num_rows)} x {call.slots} slots{', greedy' if call.greedy else ', sampling'}"
        label += f", {call.unrolled} tokens unrolled" if call.unrolled > 1 else ""
        return self._program(DecodeStep, (), (0, call.num_rows, call.slots), variant, label)

    def prepare(self) -> Iterator[Prepared]:
        """Make every program that requests without log-probabilities and beams can need; yields each when it is there.

        The host and the device loop share their programs; those of the unrolled loop depend on the request.
        """
        store = self.built.programs.store
        for label, make in self._needed():
            before, started = store.compilations, time.perf_counter()
            make()
            yield Prepared(label, store.compilations > before, time.perf_counter() - started)

    def _needed(self) -> Iterator[tuple[str, Callable[[], object]]]:
        for num_rows, slots in itertools.product(self.batch_buckets, self.slot_buckets):
            where = f"{_rows(num_rows)} x {slots} slots"
            for width in self.prefill_buckets:
                table = torch.zeros(num_rows, width, dtype=torch.int64, device=self.rows.token.device)
                chunk = (table, table, table[:, 0].clone(), table)
                make = partial(self._prefill_program, 0, slots, chunk, ranked=0, score=False)
                yield f"prefill of {width} tokens, {where}", make
            for greedy in (True, False):
                call = DecodeCall(num_rows, slots, greedy)
                yield f"decode, {where}, {'greedy' if greedy else 'sampling'}", partial(self.decode_program, call)

    def _prefill_program(
        self, first_row: int, slots: int, chunk: tuple[Tensor, ...], ranked: int, score: bool
    ) -> Program | None:
        num_rows, width = chunk[0].shape
        # One program for greedy and sampling rows: beside a prompt, the sort that sampling needs is nothing.
        variant = {"greedy": False, "ranked": ranked, "score": score}
        label = f"prefill of {width} tokens, {_rows(num_rows)} x {slots} slots{', scored' if score else ''}"
        return self._program(PrefillStep, chunk, (first_row, num_rows, slots), variant, label)

    def _program(
        self,
        kind: type[GenerationStep],
        inputs: tuple[Tensor, ...],
        where: tuple[int, int, int],
        variant: dict[str, Any],
        label: str,
    ) -> Program | None:
        key = (kind, where[1:], *(tuple(t.shape) for t in inputs), *variant.items())
        if key not in self._programs:
            started = time.perf_counter()
            with torch.inference_mode(False):
                step = kind(self.built.model, **variant)
                examples = (*inputs, *self._view(*where))
                self._programs[key] = self.built.programs.program(step, examples, label, self.built)
            self.seconds.compile += time.perf_counter() - started
        return self._programs[key]

    def _bound(self, program: Program | None) -> Program:
        assert program is not None, "this build has no weights to run with"
        return program

    def _view(self, first_row: int, num_rows: int, slots: int) -> tuple[Tensor, ...]:
        """The tensors of a range of rows. Kept, because programs check only tensors they have not seen."""
        key = (first_row, num_rows, slots)
        if key not in self._views:
            with torch.inference_mode(False):
                rows, cache = self.rows.view(first_row, num_rows), self.cache.view(first_row, num_rows, slots)
                self._views[key] = flatten(rows, cache)
        return self._views[key]


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"
