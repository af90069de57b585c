"""One engine for one or many prompts of unequal lengths: chunked prefill, decode over rows, rows leave when they end.

The host's part of a step is small: admit groups, call a prefill program for rows that still have prompt, call the
decode program for the rest, and turn token ids into text. Everything per token and per layer is inside the programs.
"""

from __future__ import annotations

import operator
import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from bluejay.build import Built, build
from bluejay.config import MAX_STOP_IDS, CompileSpec, GenerationConfig, QuantSpec, RunConfig, digest
from bluejay.errors import BluejayError, RequestError
from bluejay.events import Observer, ignore
from bluejay.generate.beam import BeamSearch
from bluejay.generate.buckets import cover, fit
from bluejay.generate.detokenizer import StreamDecoder
from bluejay.generate.runner import RANKED, DecodeCall, PrefillCall, Runner
from bluejay.generate.sampler import BAD_LOGITS, sub_seed
from bluejay.generate.scheduler import Scheduler, Slot
from bluejay.generate.steps import IDLE
from bluejay.generate.stop import StopMatcher

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

StopReason = Literal["eos", "stop_id", "stop", "length", "cancelled", "error"]
Prompt = str | Sequence[int]

# What one more program call is worth in prompt tokens: about the tokens whose arithmetic takes as long as reading the
# weights once. It only steers how prompts are cut into chunks.
CALL_COST_TOKENS = 32
CALL_COST_ROWS = 1


class NumericsError(BluejayError):
    """The model computed logits that are not numbers."""

    code = "numerics"


@dataclass(frozen=True)
class TokenLogprob:
    """A token, its log-probability (None for a prompt's first), and the likeliest tokens in its place."""

    id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes:
        text: the answer, without a stop string and without the text of a stop id.
        ids: every token written, a final stop id included.
        stop_reason: "eos", "stop_id", "stop" (a stop string), "length", "cancelled", or "error" (see
            `Engine.collect`).
        logprobs: one entry per id, when asked for.
        score: a beam's length-normalized sum of log-probabilities.
    """

    text: str
    ids: tuple[int, ...]
    stop_reason: StopReason
    logprobs: tuple[TokenLogprob, ...] | None = None
    score: float | None = None


@dataclass(frozen=True)
class Generation:
    """The answers to one prompt. `text` and `ids` are those of the first.

    Attributes:
        seed: what sampling was seeded with; given again, it repeats the answers.
        first_token_seconds: from submission to the first token, waiting included; None when none was written.
    """

    prompt_ids: tuple[int, ...]
    seed: int
    completions: tuple[Completion, ...]
    prompt_logprobs: tuple[TokenLogprob, ...] | None
    first_token_seconds: float | None

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def ids(self) -> tuple[int, ...]:
        return self.completions[0].ids

    @property
    def stop_reason(self) -> StopReason:
        return self.completions[0].stop_reason


@dataclass(frozen=True)
class Piece:
    """Text that became final, of answer number `sample`; its last piece carries the reason it ended.

    `str(piece)` is the text.
    """

    text: str
    sample: int = 0
    stop_reason: StopReason | None = None

    def __str__(self) -> str:
        return self.text


@dataclass
class Figures:
    """What the programs did since the engine was made. Real tokens only: no padding, nothing after an end.

    Attributes:
        prompt_tokens, prefill_seconds: prompt tokens read and the time in prefill programs.
        decoded_tokens, decode_seconds: tokens written by decode programs and the time in them.
        wasted_tokens: tokens that decode programs computed for nobody, because an answer ended inside a call.
        compile_seconds: finding, compiling and loading programs; in none of the other figures.
        compilations: programs that were compiled; 0 when all were found.
    """

    prompt_tokens: int = 0
    prefill_seconds: float = 0.0
    decoded_tokens: int = 0
    decode_seconds: float = 0.0
    wasted_tokens: int = 0
    compile_seconds: float = 0.0
    compilations: int = 0


@dataclass(eq=False)
class Answer(Slot):
    """One row's worth of a request: a sample, or one beam."""

    request: Request = field(kw_only=True)
    sample: int = field(kw_only=True)
    pending: tuple[int, ...] = ()  # prompt tokens still to prefill
    filled: int = 0  # prompt tokens in the cache
    reads_all: bool = False  # the whole prompt, so that the prefill program writes the first token
    decoding: bool = False
    written: int = 0
    ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    decoder: StreamDecoder = field(kw_only=True)
    matcher: StopMatcher = field(kw_only=True)

    @property
    def num_to_decode(self) -> int:
        """Tokens that decode programs still have to write for this answer, at most."""
        from_prefill = 1 if self.reads_all and self.written == 0 else 0
        return self.request.max_new - self.written - from_prefill

    @property
    def scores_prompt(self) -> bool:
        return self.request.config.prompt_logprobs is not None

    def push(self, tail: str, final: bool) -> tuple[str, bool]:
        """Text that may be shown once `tail` is known, and whether a stop string ended it."""
        text, hit = self.matcher.push(tail)
        if final and hit is None:
            text += self.matcher.flush()
        self.text.append(text)
        return text, hit is not None


@dataclass(eq=False)
class Request:
    """A prompt under way: hand it to `Engine.collect`, `Engine.stream_request` or `Engine.cancel`."""

    prompt_ids: tuple[int, ...]
    config: GenerationConfig
    max_new: int
    stop_ids: tuple[int, ...]
    seed: int
    submitted: float
    groups: list[list[Answer]] = field(default_factory=list)
    beams: BeamSearch | None = None
    pieces: deque[Piece] = field(default_factory=deque)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    done: dict[int, Completion] = field(default_factory=dict)
    first_token: float | None = None
    error: NumericsError | None = None
    expected: int = 0  # answers to come; fewer than asked only where the vocabulary has no more beams to give

    def __post_init__(self) -> None:
        self.expected = self.config.n

    @property
    def answers(self) -> list[Answer]:
        return [answer for group in self.groups for answer in group]

    @property
    def finished(self) -> bool:
        return len(self.done) == self.expected

    def finish(self, index: int, completion: Completion, text: str) -> None:
        """Answer number `index` is complete; `text` is its last piece."""
        self.done[index] = completion
        self.pieces.append(Piece(text, index, completion.stop_reason))


class Engine:
    """Continues prompts with one model on one device. Not thread-safe: one thread drives it.

    `generate` answers prompts, `stream` yields text as it becomes final. `submit`, `step`, `collect` and `cancel` are
    the same in pieces, for servers.
    """

    def __init__(self, built: Built) -> None:
        self.built = built
        self.tokenizer = built.tokenizer
        self.model = built.model
        self.context = built.context
        self.max_rows = built.run.max_rows
        self._runner = Runner(built)
        self._rows, self._cache = self._runner.rows, self._runner.cache
        self._scheduler: Scheduler[Answer] = Scheduler(self.max_rows)
        self._figures = Figures()

    @property
    def figures(self) -> Figures:
        """What was done since the engine was made."""
        seconds = self._runner.seconds
        return replace(
            self._figures,
            prefill_seconds=seconds.prefill,
            decode_seconds=seconds.decode,
            compile_seconds=seconds.compile,
            compilations=self.built.programs.store.compilations,
        )

    # ---- the two ways most people use ------------------------------------------------------------------------------

    @overload
    def generate(
        self, prompts: str | list[int], config: GenerationConfig | None = None, **settings: Any
    ) -> Generation: ...
    @overload
    def generate(
        self, prompts: list[str] | list[list[int]], config: GenerationConfig | None = None, **settings: Any
    ) -> list[Generation]: ...
    def generate(
        self, prompts: Prompt | Sequence[Prompt], config: GenerationConfig | None = None, **settings: Any
    ) -> Generation | list[Generation]:
        """Continue one prompt (text or token ids), or several at once.

        Args:
            prompts: a string or a list of ids for one; a list of either for several.
            config: settings; `settings` override them by name (see `GenerationConfig`).

        Raises:
            RequestError: settings that do not exist or contradict; an empty prompt; prompt and request over the window.
            NumericsError: the model gave logits that are not numbers.
        """
        if not isinstance(prompts, str) and not hasattr(prompts, "__getitem__"):
            raise self._not_a_prompt(prompts)
        single = isinstance(prompts, str | bytes | dict) or (len(prompts) > 0 and _is_id(prompts[0]))
        config = GenerationConfig.of(config, **settings)
        requests: list[Request] = []
        try:
            for prompt in [prompts] if single else prompts:
                requests.append(self.submit(prompt, config))  # type: ignore[arg-type]
            while not all(request.finished for request in requests):
                self.step()
        finally:
            self.cancel(*requests)
        results = [self.collect(request) for request in requests]
        return results[0] if single else results

    def stream(self, prompt: Prompt, config: GenerationConfig | None = None, **settings: Any) -> Iterator[Piece]:
        """Yield text as it becomes final; a prompt's pieces joined per sample are what `generate` returns.

        Raises: as `generate`, before the first piece.
        """
        request = self._request(prompt, GenerationConfig.of(config, **settings))

        def run() -> Iterator[Piece]:
            self._enqueue(request)  # only now, so that a stream nobody reads costs nothing
            yield from self.pieces(request)

        return run()

    # ---- the same in pieces ----------------------------------------------------------------------------------------

    def submit(self, prompt: Prompt, config: GenerationConfig) -> Request:
        """Queue a prompt; nothing is computed yet. Over several ranks, all of them submit the same, in the same order.

        Raises:
            RequestError: as `generate`.
        """
        request = self._request(prompt, config)
        self._enqueue(request)
        return request

    def pieces(self, request: Request) -> Iterator[Piece]:
        """Run the engine until the request is finished and yield its pieces; leaving the loop early cancels it."""
        try:
            while True:
                while request.pieces:
                    yield request.pieces.popleft()
                if request.finished:
                    break
                self.step()
        finally:
            self.cancel(request)
        if request.error is not None:
            raise request.error

    def collect(self, request: Request) -> Generation:
        """The finished request's answers.

        Raises:
            NumericsError: the model gave logits that are not numbers.
        """
        if request.error is not None:
            raise request.error
        assert request.finished, f"{len(request.done)} of {request.expected} answers are done"
        return Generation(
            prompt_ids=request.prompt_ids,
            seed=request.seed,
            completions=tuple(request.done[i] for i in range(request.expected)),
            prompt_logprobs=tuple(request.prompt_logprobs) if request.config.prompt_logprobs is not None else None,
            first_token_seconds=None if request.first_token is None else request.first_token - request.submitted,
        )

    def cancel(self, *requests: Request) -> None:
        """End requests now, keeping what they have written; finished ones are left alone."""
        for request in requests:
            answers = request.answers
            self._scheduler.withdraw(set(answers))
            self._release([a for a in answers if a.row >= 0])
            for index in range(request.expected):
                if index not in request.done:
                    self._cut_off(request, index, "cancelled")

    @property
    def idle(self) -> bool:
        return not self._scheduler.rows and not self._scheduler.waiting

    @torch.inference_mode()
    def step(self) -> None:
        """Admit what fits, read one chunk of each unread prompt, write one token of each read one."""
        entered = self._scheduler.admit()
        for group in entered:
            self._enter(group)
        self._leave()
        reading = self._runs([a for a in self._scheduler.rows if a.pending])
        if entered and self._scheduler.rows:
            # Whoever waits for a compiler waits before the first word, not after it.
            prefills = [call for answers, num_rows in reading for call in self._prefill_calls(answers, num_rows)]
            decodes = [self._decode_call()] if any(a.num_to_decode for a in self._scheduler.rows) else []
            self._runner.require([*prefills, *decodes])
        for answers, num_rows in reading:
            self._prefill(answers, num_rows)
        have_read = [a for answers, _ in reading for a in answers if not a.pending]
        for answer in have_read:
            if not answer.reads_all:
                self._prompt_read(next(g for g in answer.request.groups if g[0] is answer))
        self._leave()  # only now: rows move up when others leave
        if any(a.decoding for a in self._scheduler.rows):
            self._decode()

    # ---- entering --------------------------------------------------------------------------------------------------

    def _request(self, prompt: Prompt, config: GenerationConfig) -> Request:
        ids = self._ids_of(prompt)
        request = Request(
            prompt_ids=ids,
            config=config,
            max_new=self._allowed_new_tokens(ids, config),
            stop_ids=tuple(dict.fromkeys((*self._eos_ids(config), *config.stop_ids))),
            seed=self._seed(ids, config),
            submitted=self._clock(),
        )
        if len(request.stop_ids) > MAX_STOP_IDS:
            raise RequestError(
                asked=f"{len(config.stop_ids)} stop_ids",
                found=f"{len(request.stop_ids)} with the checkpoint's {len(self._eos_ids(config))} ends of text",
                rule=f"a row watches for at most {MAX_STOP_IDS} ids",
                fix="give fewer, or set ignore_eos",
            )
        if config.num_beams > self.max_rows:
            raise RequestError(
                asked=f"num_beams={config.num_beams}",
                found=f"an engine of {self.max_rows} rows",
                rule="all beams of a prompt run at once, one row each",
                fix=f"load with max_rows={config.num_beams} or ask for fewer beams",
            )
        if config.num_beams > 1 and request.max_new > 0:
            request.beams = self._beam_search(request)
        num_rows = max(config.n, config.num_beams) if request.max_new else 1  # without an answer: the prompt's scores
        answers = [self._answer(request, sample) for sample in range(num_rows)]
        for first in range(0, len(answers), self.max_rows):
            group = answers[first : first + self.max_rows]
            # Only the first of a group reads the prompt; the others copy its cache. The prompt's last token is left for
            # the decode step, where each draws its own first token from the same logits.
            group[0].reads_all = len(group) == 1 and request.max_new > 0
            group[0].pending = ids if group[0].reads_all else ids[:-1]
            request.groups.append(group)
        return request

    def _seed(self, ids: tuple[int, ...], config: GenerationConfig) -> int:
        """The request's seed, the same on all ranks that hold the model, which must have been given the same request.

        Raises:
            RequestError: a rank was given another request than the one that samples; raised on all of them.
        """
        seed = secrets.randbits(62) if config.seed is None else config.seed
        meeting = self.built.meeting
        if meeting is None:
            return seed
        mine = int(digest([list(ids), config])[:15], 16)
        theirs, seed = meeting.agree(torch.tensor([mine, seed], device=self.built.device)).tolist()
        if not meeting.all_hold(mine == theirs, self.built.device):  # so that none goes on into a wait without end
            raise RequestError(
                asked=f"a continuation of {len(ids)} tokens over several ranks",
                found="another prompt or other settings on a rank than on the one that samples",
                rule="all ranks that hold a model are given the same requests in the same order",
                fix="read the input on one rank and send it to the others, or seed what shuffles it",
            )
        return seed

    def _ids_of(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode(prompt))
        try:
            if isinstance(prompt, bytes | bytearray | dict | set) or any(isinstance(i, bool) for i in prompt):
                raise TypeError("these have numbers in them that were not meant as token ids")
            return tuple(map(operator.index, prompt))
        except TypeError:
            raise self._not_a_prompt(prompt) from None

    def _not_a_prompt(self, value: object) -> RequestError:
        return RequestError(
            asked=f"a continuation of {str(value)[:60]}",
            found=f"a {type(value).__name__}, or something else than whole numbers in it",
            rule="a prompt is a text or a list of token ids",
            fix="pass a string, or ids from engine.tokenizer.encode",
        )

    def _enqueue(self, request: Request) -> None:
        for group in request.groups:
            self._scheduler.submit(group)

    def _allowed_new_tokens(self, ids: tuple[int, ...], config: GenerationConfig) -> int:
        if not ids:
            raise RequestError(
                asked="a continuation of an empty prompt",
                found="0 tokens",
                rule="GPT-J predicts a token from the ones before it",
                fix="give at least one token, for example <|endoftext|> to start a document",
            )
        vocab_size = self.model.config.vocab_size
        wrong = [i for i in ids if not 0 <= i < vocab_size]
        wrong += [i for i in config.stop_ids if i >= vocab_size]
        if wrong:
            raise RequestError(
                asked=f"token ids {wrong[:5]}",
                found=f"a vocabulary of {vocab_size} entries",
                rule="ids are whole numbers from 0 and below the vocabulary's size",
                fix="encode with this checkpoint's own tokenizer",
            )
        room = self.context - len(ids)
        if room < 0 or (room < config.max_new_tokens and config.over_window == "refuse"):
            raise RequestError(
                asked=f"{len(ids)} prompt tokens + max_new_tokens={config.max_new_tokens}",
                found=f"a window of {self.context} tokens",
                rule=f"prompt and answer share the window ({len(ids)} + {config.max_new_tokens} > {self.context})",
                fix=f"ask for at most {max(room, 0)} new tokens, shorten the prompt"
                + ("" if room < 0 else ', or set over_window="cut" to end there with reason "length"'),
            )
        return min(config.max_new_tokens, room)

    def _eos_ids(self, config: GenerationConfig) -> tuple[int, ...]:
        if config.ignore_eos:
            return ()
        known = self.model.config.eos_token_ids
        return known or (() if self.tokenizer.eos_id is None else (self.tokenizer.eos_id,))

    def _beam_search(self, request: Request) -> BeamSearch:
        config = request.config
        return BeamSearch(
            num_beams=config.num_beams,
            n=config.n,
            length_penalty=config.length_penalty,
            early_stopping=config.early_stopping,
            eos_ids=request.stop_ids,
            max_new_tokens=request.max_new,
            is_stopped=(lambda ids: self._text_of(ids, request)[1]) if config.stop else None,
        )

    def _answer(self, request: Request, sample: int) -> Answer:
        skip = frozenset(request.stop_ids) | self.tokenizer.special_ids
        return Answer(
            request=request,
            sample=sample,
            decoder=StreamDecoder(self.tokenizer.token_bytes, skip),
            matcher=StopMatcher(request.config.stop),
        )

    def _enter(self, group: list[Answer]) -> None:
        for answer in group:
            request = answer.request
            seed = sub_seed(request.seed, answer.sample)
            self._rows.assign(answer.row, request.config, request.max_new, list(request.stop_ids), seed)
            self._cache.reset(answer.row)
        if not group[0].pending:
            self._prompt_read(group)

    # ---- reading prompts -------------------------------------------------------------------------------------------

    def _runs(self, reading: list[Answer]) -> list[tuple[list[Answer], int]]:
        """Neighboring rows that read alike, in batch buckets: the answers of each call and its number of rows."""
        runs: list[list[Answer]] = []
        for answer in reading:
            near = bool(runs) and runs[-1][-1].row + 1 == answer.row
            if near and runs[-1][-1].scores_prompt == answer.scores_prompt:
                runs[-1].append(answer)
            else:
                runs.append([answer])
        calls = []
        for run in runs:
            done = 0
            for bucket in cover(len(run), self._runner.batch_buckets, CALL_COST_ROWS):
                calls.append((run[done : done + bucket], bucket))
                done += bucket
        return calls

    def _prefill_calls(self, answers: list[Answer], num_rows: int) -> list[PrefillCall]:
        """The calls that read what is left of these answers' prompts, the next one first."""
        longest = max(len(a.pending) for a in answers)
        ranked = self._ranked(answers, prompt=True)
        slots = self._slots_for(max(a.filled + len(a.pending) for a in answers))
        widths = cover(longest, self._runner.prefill_buckets, CALL_COST_TOKENS)
        return [PrefillCall(num_rows, slots, width, ranked, answers[0].scores_prompt) for width in widths]

    def _prefill(self, answers: list[Answer], num_rows: int) -> None:
        """Read the next chunk of these answers' prompts."""
        call = self._prefill_calls(answers, num_rows)[0]
        # Padding rows sit behind the real ones, or before them at the end of the cache; they are idle either way.
        first = min(answers[0].row, self.max_rows - num_rows)
        ids = torch.zeros(num_rows, call.width, dtype=torch.int64)
        positions = torch.full((num_rows, call.width), IDLE)
        last = torch.zeros(num_rows, dtype=torch.int64)
        targets = torch.zeros(num_rows, call.width, dtype=torch.int64)
        chunks = []
        for answer in answers:
            row, chunk = answer.row - first, answer.pending[: call.width]
            following = (*answer.request.prompt_ids, 0)[answer.filled + 1 : answer.filled + 1 + len(chunk)]
            ids[row, : len(chunk)] = torch.tensor(chunk)
            positions[row, : len(chunk)] = torch.arange(answer.filled, answer.filled + len(chunk))
            targets[row, : len(chunk)] = torch.tensor(following)
            last[row] = len(chunk) - 1
            chunks.append(len(chunk))
        outputs = self._runner.prefill(call, first, (ids, positions, last, targets))
        self._figures.prompt_tokens += sum(chunks)
        for answer, length in zip(answers, chunks, strict=True):
            row = answer.row - first
            answer.pending, answer.filled = answer.pending[length:], answer.filled + length
            if call.score:
                self._note_prompt_logprobs(answer, [t[row] for t in outputs[-3:]], targets[row], length)
            if answer.filled == len(answer.request.prompt_ids):
                self._rows.token[answer.row] = outputs[0][row].clamp_min(0)  # BAD_LOGITS is no row of the embedding
                self._rows.step[answer.row] = 1
                self._accept(answer, int(outputs[0][row]), [t[row] for t in outputs[1:4]] if call.ranked else None)
                if not self._has_ended(answer):
                    self._rows.position[answer.row] = answer.filled
                    answer.decoding = True

    def _note_prompt_logprobs(self, answer: Answer, scores: list[Tensor], targets: Tensor, length: int) -> None:
        request = answer.request
        known, count = request.prompt_logprobs, request.config.prompt_logprobs or 0
        if not known:
            known.append(TokenLogprob(request.prompt_ids[0], None))
        for i in range(min(length, len(request.prompt_ids) - len(known))):
            known.append(_token_logprob(int(targets[i]), scores[0][i], scores[1][i], scores[2][i], count))

    def _prompt_read(self, group: list[Answer]) -> None:
        """The group's first row holds all of the prompt but its last token: share it, and let every row decode that."""
        leader, request = group[0], group[0].request
        if request.config.prompt_logprobs is not None and not request.prompt_logprobs:
            request.prompt_logprobs.append(TokenLogprob(request.prompt_ids[0], None))
        if request.max_new == 0:
            for index in range(request.config.n):
                request.finish(index, self._completion(leader, "length"), "")
            return
        others = [a.row for a in group[1:]]
        self._cache.copy_rows([leader.row] * len(others), others)
        for answer in group:
            self._rows.seen[answer.row] = self._rows.seen[leader.row]
            self._rows.token[answer.row] = request.prompt_ids[-1]
            self._rows.position[answer.row] = len(request.prompt_ids) - 1
            answer.decoding = True

    # ---- writing answers -------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        """One call of the decode program over all rows in use; rows that are still reading are idle in it."""
        rows = self._scheduler.rows
        decoding = [a for a in rows if a.decoding]
        call = self._decode_call()
        tokens, *scores = self._runner.decode(call)
        computed, before = tokens.shape[1] * len(decoding), self._figures.decoded_tokens
        table = tokens.tolist()
        for answer in decoding:
            if answer.request.beams is None:
                for i, token in enumerate(table[answer.row]):
                    if token == IDLE or self._has_ended(answer):
                        break
                    self._accept(answer, token, [t[answer.row, i] for t in scores] if call.ranked else None)
                    self._figures.decoded_tokens += 1
        for answer in decoding:
            if answer.request.beams is not None and answer.sample == 0:
                self._advance_beams(answer.request, tokens, scores)
        if not any(a.request.beams for a in decoding):
            self._figures.wasted_tokens += computed - (self._figures.decoded_tokens - before)
        self._leave()

    def _decode_call(self) -> DecodeCall:
        """How to write the next tokens of the rows in use."""
        rows, run = self._scheduler.rows, self.built.run
        chooses_beams = any(a.request.beams is not None for a in rows)  # which the host does, after every token
        unrolled = self._most_left(rows) if run.loop == "unrolled" and not chooses_beams else 1
        repeats = run.iterations if run.loop == "device" and not chooses_beams else 1
        ranked = self._ranked(rows, prompt=False)
        greedy = all(a.request.config.temperature == 0 for a in rows)
        held = max(len(a.request.prompt_ids) + a.written for a in rows) + unrolled * repeats - 1
        num_rows = fit(len(rows), self._runner.batch_buckets)
        return DecodeCall(num_rows, self._slots_for(held), greedy, ranked, unrolled, repeats)

    def _most_left(self, rows: list[Answer]) -> int:
        """Tokens that the row with most to write still has to write, at least 1."""
        return max(1, *(a.num_to_decode for a in rows))

    def _accept(self, answer: Answer, token: int, scores: list[Tensor] | None) -> None:
        """Take a token into an answer: text, stop strings, stop reason."""
        request = answer.request
        if request.first_token is None:
            request.first_token = self._clock()
        if token == BAD_LOGITS:
            self._fail(request, len(answer.ids) + 1)
            return
        answer.ids.append(token)
        answer.written += 1
        if scores is not None and request.config.logprobs is not None:
            logprob, values, tokens = scores
            answer.logprobs.append(_token_logprob(token, logprob, values, tokens, request.config.logprobs))
        reason: StopReason | None = None
        if token in request.stop_ids:
            reason, tail = self._stop_id_reason(token, request), answer.decoder.flush()
        else:
            tail = answer.decoder.push(token)
            if answer.written == request.max_new:
                reason, tail = "length", tail + answer.decoder.flush()
        text, stopped = answer.push(tail, final=reason is not None)
        if stopped and reason in (None, "length"):
            reason = "stop"
        if reason is not None:
            answer.decoding = False
            request.finish(answer.sample, self._completion(answer, reason), text)
        elif text:
            request.pieces.append(Piece(text, answer.sample))

    def _completion(self, answer: Answer, reason: StopReason) -> Completion:
        wanted = answer.request.config.logprobs is not None
        return Completion(
            text="".join(answer.text),
            ids=tuple(answer.ids),
            stop_reason=reason,
            logprobs=tuple(answer.logprobs) if wanted else None,
        )

    def _cut_off(self, request: Request, index: int, reason: StopReason) -> None:
        """End answer `index` with what is written of it."""
        answer = request.answers[min(index, len(request.answers) - 1)]
        if request.beams is not None:
            ids = request.beams.leading()
            text, _ = self._text_of(ids, request)
            request.finish(index, Completion(text, ids, reason), text)
        else:
            text, _ = answer.push(answer.decoder.flush(), final=True)
            request.finish(index, self._completion(answer, reason), text)

    def _fail(self, request: Request, token_number: int) -> None:
        """End a request whose logits are not numbers; the others go on."""
        request.error = NumericsError(
            asked=f"token {token_number} of an answer",
            found="logits that are NaN or infinite",
            rule="sampling needs finite logits",
            fix="load with dtype=bfloat16 or float32; if that does not help, the weights are damaged",
        )
        for index in range(request.expected):
            if index not in request.done:
                self._cut_off(request, index, "error")
        self._scheduler.withdraw(set(request.answers))

    def _stop_id_reason(self, token: int, request: Request) -> StopReason:
        return "stop_id" if token in request.config.stop_ids else "eos"

    def _has_ended(self, answer: Answer) -> bool:
        return answer.sample in answer.request.done

    def _advance_beams(self, request: Request, tokens: Tensor, scores: list[Tensor]) -> None:
        beams, group = request.beams, request.groups[0]
        assert beams is not None
        rows = [a.row for a in group]
        count = beams.num_candidates
        if bool((tokens[rows] == BAD_LOGITS).any()):
            self._fail(request, group[0].written + 1)
            return
        if request.first_token is None:
            request.first_token = self._clock()
        move = beams.advance(scores[1][rows, 0, :count], scores[2][rows, 0, :count])
        self._figures.decoded_tokens += 1
        if move.done:
            results = beams.results()
            request.expected = len(results)
            for rank, best in enumerate(results):
                text, _ = self._text_of(best.ids, request)
                reason = self._stop_id_reason(best.ids[-1], request) if best.reason == "eos" else best.reason
                request.finish(rank, Completion(text, best.ids, reason, score=best.score), text)
            return
        shared = len(request.prompt_ids)
        moved = [(rows[parent], row) for parent, row in zip(move.parents, rows, strict=True) if rows[parent] != row]
        sources, targets = [s for s, _ in moved], [t for _, t in moved]
        self._cache.copy_rows(sources, targets, first_slot=shared)
        self._rows.copy_rows(sources, targets)
        for answer in group:
            answer.written += 1
        position = shared + group[0].written - 1
        for row, token in zip(rows, move.tokens, strict=True):
            self._rows.token[row] = token
            self._rows.position[row] = position

    def _text_of(self, ids: Sequence[int], request: Request) -> tuple[str, bool]:
        """The text of an answer up to a stop string, and whether there was one."""
        answer = self._answer(request, 0)
        decoded = "".join(answer.decoder.push(i) for i in ids) + answer.decoder.flush()
        return answer.push(decoded, final=True)

    # ---- rows and programs -----------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Free the rows of answers that ended; beams leave together."""
        self._release([a for a in self._scheduler.rows if self._has_ended(a) or a.request.finished])

    def _release(self, answers: list[Answer]) -> None:
        for answer in answers:
            answer.decoding = False
            answer.pending = ()
        num_used = len(self._scheduler.rows)
        for source, target in self._scheduler.release(answers):
            self._cache.copy_rows([source], [target])
            self._rows.copy_rows([source], [target])
        self._rows.position[len(self._scheduler.rows) : num_used] = IDLE

    def _ranked(self, answers: list[Answer], *, prompt: bool) -> int:
        """How many ranked tokens the programs of these rows must return."""
        needs = [0]
        for answer in answers:
            config = answer.request.config
            if answer.request.beams is not None:
                needs.append(answer.request.beams.num_candidates)
            elif config.logprobs is not None:
                needs.append(max(config.logprobs, 1))
            if prompt and config.prompt_logprobs is not None:
                needs.append(max(config.prompt_logprobs, 1))
        return min(fit(max(needs), RANKED), self.model.config.vocab_size)

    def _slots_for(self, held: int) -> int:
        planned = max(len(a.request.prompt_ids) + a.request.max_new for a in self._scheduler.rows)
        return self._runner.slots_for(held, planned)

    def _clock(self) -> float:
        """Seconds, without those spent on making programs: compiling is reported apart from running."""
        return time.perf_counter() - self._runner.seconds.compile


def _token_logprob(token: int, logprob: Tensor, values: Tensor, tokens: Tensor, count: int) -> TokenLogprob:
    top = zip(tokens[:count].tolist(), values[:count].tolist(), strict=True)
    return TokenLogprob(token, float(logprob), tuple(top))


def _is_id(value: Any) -> bool:
    """Whether this is a token id rather than a prompt: an int, or what numpy and torch have for one."""
    return hasattr(value, "__index__") and getattr(value, "ndim", 0) == 0


def run_config(model: str, dtype: str | torch.dtype | None = None, **settings: Any) -> RunConfig:
    """The RunConfig of these settings; fields of `CompileSpec` are accepted beside its own.

    `backend` may also be "auto", the default: compiled programs, or eager with a warning where there is no compiler.
    `quantize` may be a short name such as "int4-g64".

    Raises:
        RequestError, ConfigError: an unknown or wrong setting.
    """
    backend = settings.get("backend", "auto")
    if backend == "auto":
        settings.pop("backend", None)
    settings.setdefault("fallback", backend == "auto")
    compiling = {f.name for f in fields(CompileSpec)}
    known = ({f.name for f in fields(RunConfig)} | compiling) - {"model", "dtype"}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise RequestError(
            asked=f"load with {', '.join(unknown)}",
            found="no such setting",
            rule=f"the settings are dtype, {', '.join(sorted(known))}",
            fix="correct the name",
        )
    chosen = {name: settings.pop(name) for name in compiling & set(settings)}
    spec = replace(settings.pop("compile", CompileSpec()), **chosen)
    if isinstance(settings.get("quantize"), str):
        settings["quantize"] = QuantSpec.parse(settings["quantize"]) if settings["quantize"] else None
    return RunConfig(model=str(model), dtype=str(dtype or "").removeprefix("torch."), compile=spec, **settings)


def compile_ahead(built: Built) -> list[str]:
    """Put every program that a run's requests need into the store; returns what they are for.

    The build may be without weights. Covers all batch, prefill and slot buckets, greedy and sampling. Requests with
    log-probabilities or beams have programs of their own, made when they are first asked for; so has the unrolled
    loop. Progress comes as events `compile.start` and `compile.done`.

    Raises:
        MachineError: no C++ compiler.
    """
    runner = Runner(built)
    calls = runner.all_calls()
    runner.require(calls)
    return [built.programs.label(call.label) for call in calls]


def load(
    model: str = "nano",
    *,
    dtype: str | torch.dtype | None = None,
    torch_dtype: str | torch.dtype | None = None,
    observe: Observer = ignore,
    mesh: DeviceMesh | None = None,
    **settings: Any,
) -> Engine:
    """An engine for `nano` (bundled), a checkpoint directory, or a Hugging Face hub id.

    Args:
        dtype: float32, bfloat16 or float16; None keeps the checkpoint's. `torch_dtype` is the older spelling.
        observe: called with progress events and warnings.
        mesh: the ranks over which `layout` spreads the model; each of them makes an engine and drives it alike.
        settings: further fields of `RunConfig` (device, context, max_rows, loop, ...) and of `CompileSpec` (backend,
            threads, ...).

    Raises:
        RequestError, ConfigError: an unknown or wrong setting.
        CheckpointError, TokenizerError, MachineError: see `bluejay.build.build`.
    """
    names = [None if d is None else str(d).removeprefix("torch.") for d in (dtype, torch_dtype)]
    if None not in names and names[0] != names[1]:
        raise RequestError(
            asked=f"dtype={names[0]} and torch_dtype={names[1]}",
            found="two different dtypes",
            rule="both spell the same setting",
            fix="give one of them",
        )
    run = run_config(model, names[0] or names[1], **settings)
    return Engine(build(run, observe, mesh=mesh))
