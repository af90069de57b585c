"""What a caller asks of generation: one frozen dataclass, checked as a whole before a device is touched."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal

from bluejay.errors import RequestError

MAX_STOP_IDS = 16
MAX_LOGPROBS = 64
MAX_BEAMS = 32
MAX_ANSWERS = 1024
MAX_TEMPERATURE = 1e3  # from here on every token is equally likely
LARGEST = 2**63 - 1  # what a row's parameters hold


@dataclass(frozen=True)
class GenerationConfig:
    """How to continue a prompt. The defaults are greedy decoding of up to 64 tokens.

    Attributes:
        max_new_tokens, min_new_tokens: tokens to write at most, and before any stop id may be chosen.
        temperature: 0 is greedy (whatever the filters say); 1 is the model's own distribution.
        top_k, top_p, min_p: filters in this order, after temperature; 0, 1 and 0 switch them off. At least one token
            always survives, so top_p = 0 is greedy.
        repetition_penalty: above 1 makes tokens of the prompt and the output so far less likely.
        num_beams: above 1 is beam search, with transformers' meaning of `length_penalty` and `early_stopping`.
        n: answers per prompt: samples, or the best n beams.
        stop: strings that end the answer; the text ends before the earliest one.
        stop_ids: token ids that end the answer, besides the checkpoint's end of text.
        ignore_eos: do not end at the checkpoint's end of text.
        seed: makes a sampled answer repeatable, whatever else is in the batch; None draws one.
        logprobs: None for none, k for the log-probability of each token and of the k likeliest (before temperature).
        prompt_logprobs: the same for the prompt's tokens.
        over_window: "refuse" a prompt plus max_new_tokens above the window, or "cut" the answer there.
    """

    max_new_tokens: int = 64
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    over_window: Literal["refuse", "cut"] = "refuse"

    @classmethod
    def of(cls, base: GenerationConfig | None = None, **settings: Any) -> GenerationConfig:
        """`base` with settings changed; a single string or id is accepted where a tuple is meant.

        Raises:
            RequestError: an unknown setting, or one that contradicts another.
        """
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(settings) - set(known))
        if unknown:
            raise RequestError(
                asked=f"generation with {', '.join(unknown)}",
                found="no such setting",
                rule=f"the settings are {', '.join(known)}",
                fix="correct the name",
            )
        for name in ("stop", "stop_ids"):
            if name in settings:
                value = () if settings[name] is None else settings[name]
                single = isinstance(value, str) or not isinstance(value, Iterable)
                settings[name] = (value,) if single else tuple(value)
        current = {} if base is None else {name: getattr(base, name) for name in known}
        return cls(**{**current, **settings})

    def __post_init__(self) -> None:
        whole = {
            "max_new_tokens": (0, LARGEST),
            "min_new_tokens": (0, LARGEST),
            "top_k": (0, LARGEST),
            "num_beams": (1, MAX_BEAMS),
            "n": (1, MAX_ANSWERS),
            "seed": (0, LARGEST),
            "logprobs": (0, MAX_LOGPROBS),
            "prompt_logprobs": (0, MAX_LOGPROBS),
        }
        for name, (low, high) in whole.items():
            value = getattr(self, name)
            if value is None and name in ("seed", "logprobs", "prompt_logprobs"):
                continue
            if type(value) is not int or not low <= value <= high:
                raise _refuse(name, value, f"a whole number from {low} to {high}")
        real = {
            "temperature": (0.0, MAX_TEMPERATURE),
            "top_p": (0.0, 1.0),
            "min_p": (0.0, 1.0),
            "repetition_penalty": (1e-3, 1e3),
            "length_penalty": (-50.0, 50.0),  # a window to this power is still a float
        }
        for name, (least, most) in real.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
                raise _refuse(name, value, f"a number between {least:g} and {most:g}")
        if type(self.ignore_eos) is not bool:
            raise _refuse("ignore_eos", self.ignore_eos, "true or false")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise _refuse("early_stopping", self.early_stopping, 'true, false or "never"')
        if self.over_window not in ("refuse", "cut"):
            raise _refuse("over_window", self.over_window, '"refuse" or "cut"')
        if not isinstance(self.stop, tuple) or not all(isinstance(s, str) and s for s in self.stop):
            raise _refuse("stop", self.stop, "one or more strings that are not empty")
        if any("\ud800" <= letter <= "\udfff" for text in self.stop for letter in text):
            raise _refuse("stop", self.stop, "valid Unicode: half a surrogate pair can never be written")
        if not isinstance(self.stop_ids, tuple) or not all(type(i) is int and i >= 0 for i in self.stop_ids):
            raise _refuse("stop_ids", self.stop_ids, "whole numbers from 0")
        if len(self.stop_ids) >= MAX_STOP_IDS:
            raise _refuse("stop_ids", self.stop_ids, f"at most {MAX_STOP_IDS - 1} ids")
        self._check_together()

    def _check_together(self) -> None:
        beams, greedy = self.num_beams > 1, self.temperature == 0
        contradictions = [
            (
                self.min_new_tokens > self.max_new_tokens,
                f"min_new_tokens={self.min_new_tokens} with max_new_tokens={self.max_new_tokens}",
                "the least cannot exceed the most",
                "lower min_new_tokens",
            ),
            (
                beams and not greedy,
                f"num_beams={self.num_beams} with temperature={self.temperature:g}",
                "beam search is deterministic, a temperature above 0 samples",
                "set temperature=0 or num_beams=1",
            ),
            (
                beams and self.n > self.num_beams,
                f"n={self.n} with num_beams={self.num_beams}",
                "beam search has num_beams answers to give",
                f"set num_beams to at least {self.n}",
            ),
            (
                not beams and greedy and self.n > 1,
                f"n={self.n} with temperature=0",
                "greedy decoding gives the same answer n times",
                "set a temperature above 0, or num_beams",
            ),
            (
                not beams and (self.length_penalty != 1 or self.early_stopping is not False),
                f"length_penalty={self.length_penalty:g}, early_stopping={self.early_stopping} with num_beams=1",
                "both only mean something in beam search",
                "set num_beams above 1 or leave them out",
            ),
            (
                beams and self.logprobs is not None,
                f"logprobs={self.logprobs} with num_beams={self.num_beams}",
                "a beam's score is the sum of its log-probabilities and is returned with it",
                "leave logprobs out",
            ),
        ]
        for wrong, found, rule, fix in contradictions:
            if wrong:
                raise RequestError(asked="generation with these settings together", found=found, rule=rule, fix=fix)


def _refuse(name: str, value: object, rule: str) -> RequestError:
    return RequestError(
        asked=f"generation with {name}={value!r}",
        found=f"{name}={value!r}",
        rule=f"{name} must be {rule}",
        fix=f"correct {name}",
    )
