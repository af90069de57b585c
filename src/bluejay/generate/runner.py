"""The device's side of generation: rows, cache, and the two programs at every shape they are needed in.

Knows no requests and no text. Shapes are padded into buckets here and nowhere else.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from bluejay.build import Built, Program
from bluejay.generate.buckets import fit, useful
from bluejay.generate.steps import DecideStep, DecodeStep, GenerationStep, PrefillStep, Rows, flatten
from bluejay.models import Block, KVCache

# Without a compiler a new shape costs nothing, so a step looks at few more slots than are in use: multiples of this.
EAGER_SLOTS = 64
# How many likeliest tokens programs return; a request gets the next larger number.
RANKED = (0, 1, 8, 16, 64, 256, 1024)


@dataclass
class Seconds:
    """Time spent so far in prefill programs, in decode programs, and in getting programs."""

    prefill: float = 0.0
    decode: float = 0.0
    compile: float = 0.0


@dataclass(frozen=True)
class PrefillCall:
    """One chunk of prompt for `num_rows` rows.

    Attributes:
        width: tokens of the chunk, padding included.
        ranked: likeliest tokens to return.
        score: also the log-probabilities of the prompt's own tokens.
    """

    num_rows: int
    slots: int
    width: int
    ranked: int = 0
    score: bool = False

    @property
    def label(self) -> str:
        return f"prefill of {self.width} tokens, {_where(self)}{', scored' if self.score else ''}{_ranked(self)}"


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

    @property
    def label(self) -> str:
        unrolled = f", {self.unrolled} tokens unrolled" if self.unrolled > 1 else ""
        return f"decode, {_where(self)}, {'greedy' if self.greedy else 'sampling'}{_ranked(self)}{unrolled}"


Call = PrefillCall | DecodeCall


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
        blocks = list(built.model.transformer.h)  # of a planned model, those that this rank holds
        self.cache = KVCache(
            config,
            run.max_rows,
            built.context,
            built.dtype,
            storage,
            num_layers=len(blocks),
            num_heads=cast(Block, blocks[0]).attn.n_head if blocks else config.n_head,
        )
        self.batch_buckets = (*(b for b in run.batch_buckets if b < run.max_rows), run.max_rows)
        self.prefill_buckets = run.prefill_buckets
        self.compiled = run.compile.backend != "eager"
        granules = range(EAGER_SLOTS, built.context, EAGER_SLOTS)
        chosen = run.slot_buckets or (max(EAGER_SLOTS, built.context // 4),)
        self.slot_buckets = (*(b for b in (chosen if self.compiled else granules) if b < built.context), built.context)
        self._programs: dict[Call, Program] = {}
        self._views: dict[tuple[int, int, int], tuple[Tensor, ...]] = {}

    def slots_for(self, held: int, planned: int) -> int:
        """Cache slots a step should look at: what rows hold now, or where programs cost time, what they may come to."""
        return fit(min(planned if self.compiled else held, self.built.context), self.slot_buckets)

    def prefill(self, call: PrefillCall, first_row: int, chunk: tuple[Tensor, Tensor, Tensor, Tensor]) -> list[Tensor]:
        """Run a chunk of prompt for the rows from `first_row` on; returns what `PrefillStep` returns, on the host.

        Shapes:
            chunk: ids, positions [B, T], last [B], targets [B, T], with the call's B and T
        """
        program = self._program(call)
        started = time.perf_counter()
        inputs = [tensor.to(self.built.device) for tensor in chunk]
        under_way = []
        for rows in self._groups(call):
            view = self._view(first_row + rows.start, len(rows), call.slots)
            made = program(*[tensor[rows.start : rows.stop] for tensor in inputs], *view)
            under_way.append(self._settled(call, made))
        outputs = [torch.cat(column).cpu() for column in zip(*(wait() for wait in under_way), strict=True)]
        self.seconds.prefill += time.perf_counter() - started
        return outputs

    def decode(self, call: DecodeCall) -> list[Tensor]:
        """Run a decode call; returns what `DecodeStep` returns for all its iterations, on the host."""
        program = self._program(call)
        started = time.perf_counter()
        if self.built.meeting is None:
            steps = program.repeat(call.repeats, *self._view(0, call.num_rows, call.slots))
            outputs = [torch.cat(column, dim=1).cpu() for column in zip(*steps, strict=True)]
        else:
            outputs = self._decode_over_ranks(call, program)
        self.seconds.decode += time.perf_counter() - started
        return outputs

    def _decode_over_ranks(self, call: DecodeCall, program: Program) -> list[Tensor]:
        """Group after group of rows goes through the stages; a group's next token begins when its last one is known.

        So with several iterations a call, no stage waits for a step to end, as long as there are as many groups.
        """
        groups = self._groups(call)
        views = [self._view(rows.start, len(rows), call.slots) for rows in groups]
        states = [self.rows.view(rows.start, len(rows)) for rows in groups]
        steps: list[list[tuple[Tensor, ...]]] = [[] for _ in groups]
        under_way: list[Callable[[], list[Tensor]] | None] = [None for _ in groups]

        def take(group: int) -> None:
            wait = under_way[group]
            if wait is not None:
                tokens, *ranked = wait()
                steps[group].append((states[group].take(tokens), *ranked))

        for _ in range(call.repeats):
            for group, view in enumerate(views):
                take(group)
                under_way[group] = self._settled(call, program(*view))
        for group in range(len(groups)):
            take(group)
        of_groups = [[torch.stack(column, dim=1) for column in zip(*made, strict=True)] for made in steps]
        return [torch.cat(column).cpu() for column in zip(*of_groups, strict=True)]

    def require(self, calls: Iterable[Call]) -> None:
        """See to it that these calls find their programs; those that do not exist yet are compiled together."""
        wanted = {call: None for call in map(self._program_of, calls) if call not in self._programs}
        if wanted and self.compiled:
            started = time.perf_counter()
            with torch.inference_mode(False):
                jobs = [(self._step(call), self._examples(call), call.label) for call in wanted]
                self.built.programs.ensure(jobs, self.built)
            self.seconds.compile += time.perf_counter() - started

    def all_calls(self) -> list[Call]:
        """Every call that requests without log-probabilities and beams can need.

        The host and the device loop share their programs; those of the unrolled loop depend on the request.
        """
        calls: list[Call] = []
        for num_rows, slots in itertools.product(self.batch_buckets, self.slot_buckets):
            calls += [PrefillCall(num_rows, slots, width) for width in useful(slots, self.prefill_buckets)]
            calls += [DecodeCall(num_rows, slots, greedy) for greedy in (True, False)]
        return calls

    def _program(self, call: Call) -> Program:
        call = self._program_of(call)
        if call not in self._programs:
            started = time.perf_counter()
            with torch.inference_mode(False):
                program = self.built.programs.program(self._step(call), self._examples(call), call.label, self.built)
            assert program is not None, "this build has no weights to run with"
            self._programs[call] = program
            self.seconds.compile += time.perf_counter() - started
        return self._programs[call]

    def _step(self, call: Call) -> GenerationStep:
        model, meeting = self.built.model, self.built.meeting
        chooses = meeting is None or meeting.chooses
        if not chooses:  # a stage before the last does the same whatever is chosen from it
            kind = PrefillStep if isinstance(call, PrefillCall) else DecideStep
            return kind(model, greedy=True, chooses=False)
        if isinstance(call, PrefillCall):
            # One program for greedy and sampling rows: beside a prompt, the sort that sampling needs is nothing.
            return PrefillStep(model, greedy=False, ranked=call.ranked, score=call.score)
        if meeting is not None:
            return DecideStep(model, greedy=call.greedy, ranked=call.ranked)
        return DecodeStep(model, greedy=call.greedy, ranked=call.ranked, iterations=call.unrolled)

    def _program_of(self, call: Call) -> Call:
        """The call without what its program does not depend on."""
        call = replace(call, num_rows=len(self._groups(call)[0]))
        return replace(call, repeats=1) if isinstance(call, DecodeCall) else call

    def _groups(self, call: Call) -> list[range]:
        """The call's rows as they go through programs: all together, but in groups through the stages of a pipeline."""
        meeting = self.built.meeting
        size = call.num_rows if meeting is None else meeting.rows_at_once(call.num_rows)
        return [range(first, first + size) for first in range(0, call.num_rows, size)]

    def _settled(self, call: Call, made: tuple[Tensor, ...]) -> Callable[[], list[Tensor]]:
        """Waits for what a program of any rank chose, as all ranks have it; `made` is what this rank's returned."""
        meeting = self.built.meeting
        if meeting is None:
            return lambda: list(made)
        return meeting.begin(made if meeting.chooses else self._blank(call))

    def _blank(self, call: Call) -> list[Tensor]:
        """Tensors like those that the last stage's program returns."""
        num_rows = len(self._groups(call)[0])
        shapes: list[tuple[tuple[int, ...], torch.dtype]] = [((num_rows,), torch.int64)]
        if call.ranked:
            shapes += _scores((num_rows,), call.ranked)
        if isinstance(call, PrefillCall) and call.score:
            shapes += _scores((num_rows, call.width), max(call.ranked, 1))
        return [torch.empty(shape, dtype=dtype, device=self.built.device) for shape, dtype in shapes]

    def _examples(self, call: Call) -> tuple[Tensor, ...]:
        """Tensors of the shapes that the call's program takes."""
        view = self._view(0, call.num_rows, call.slots)
        if isinstance(call, DecodeCall):
            return view
        table = torch.zeros(call.num_rows, call.width, dtype=torch.int64, device=self.rows.token.device)
        return (table, table, table[:, 0].clone(), table, *view)

    def _view(self, first_row: int, num_rows: int, slots: int) -> tuple[Tensor, ...]:
        """The tensors of a range of rows. Kept, because programs check only tensors they have not seen."""
        key = (first_row, num_rows, slots)
        if key not in self._views:
            with torch.inference_mode(False):
                rows, cache = self.rows.view(first_row, num_rows), self.cache.view(first_row, num_rows, slots)
                self._views[key] = flatten(rows, cache)
        return self._views[key]


def _scores(shape: tuple[int, ...], ranked: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Log-probabilities of tokens of this shape, and the likeliest ones with their ids: shapes and dtypes."""
    return [(shape, torch.float32), ((*shape, ranked), torch.float32), ((*shape, ranked), torch.int64)]


def _where(call: Call) -> str:
    return f"{call.num_rows} row{'s' if call.num_rows > 1 else ''} x {call.slots} slots"


def _ranked(call: Call) -> str:
    return f", {call.ranked} log-probabilities" if call.ranked else ""
