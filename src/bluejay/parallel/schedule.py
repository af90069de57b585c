"""Pipeline schedules as lists of (tick, stage, micro-batch, action): what is in flight, and how long stages wait.

A tick is one stage's forward pass of one micro-batch; its backward pass takes two (it computes two products for every
one of the forward pass). Zero bubble takes the backward pass apart: gradients of inputs, which other stages wait for,
and gradients of weights, which nobody waits for and which fill the gaps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BACKWARD_TICKS = 2

Kind = Literal["F", "B", "W"]  # forward; backward, or of inputs only where weights have a pass of their own; weights


@dataclass(frozen=True, order=True)
class Action:
    """One pass of one micro-batch through one piece of the model; it begins at `tick`."""

    tick: int
    stage: int
    micro_batch: int
    kind: Kind
    chunk: int = 0


def order(schedule: str, num_stages: int, num_micro: int, stage: int, chunks: int = 1) -> list[tuple[Kind, int, int]]:
    """(kind, micro-batch, chunk) in the order in which a stage does them; a stage waits rather than change the order.

    Source: Huang et al. 2019 (GPipe); Narayanan et al. 2021 (1F1B, interleaved); Qi et al. 2023 (zero bubble, ZB-H1).
    """
    total = num_micro * chunks
    # The k-th pass of a stage: rounds of `num_stages` micro-batches through one chunk after the other.
    width = num_stages if chunks > 1 else num_micro
    splits = schedule == "zero-bubble"

    def piece(k: int, backward: bool) -> tuple[int, int]:
        rounds, within = divmod(k, width * chunks)
        chunk, micro = divmod(within, width)
        return rounds * width + micro, chunks - 1 - chunk if backward else chunk

    if schedule == "gpipe":
        ahead = total
    elif chunks == 1:
        ahead = min(total, num_stages - stage)
    else:
        ahead = min(total, (chunks - 1) * num_stages + (1 if splits else 2) * (num_stages - 1 - stage) + 1)
    kinds: list[Kind] = ["F"] * ahead
    for k in range(total):
        kinds.append("B")
        if splits and k >= stage:
            kinds.append("W")
        if k < total - ahead:
            kinds.append("F")
    kinds += ["W"] * (min(stage, total) * splits)
    counters = {"F": 0, "B": 0, "W": 0}
    steps: list[tuple[Kind, int, int]] = []
    for kind in kinds:
        steps.append((kind, *piece(counters[kind], kind != "F")))
        counters[kind] += 1
    return steps


def timeline(schedule: str, num_stages: int, num_micro: int, chunks: int = 1) -> list[Action]:
    """Every action with the tick at which it can begin, when all pieces take equally long and sending takes nothing."""
    last_piece = num_stages * chunks - 1
    waiting = [order(schedule, num_stages, num_micro, stage, chunks) for stage in range(num_stages)]
    free = [0] * num_stages
    ends: dict[tuple[str, int, int], int] = {}  # (kind, micro-batch, piece of the model) -> tick
    splits = schedule == "zero-bubble"
    ticks = {"F": 1, "B": 1 if splits else BACKWARD_TICKS, "W": 1}
    actions: list[Action] = []
    while any(waiting):
        moved = False
        for stage, steps in enumerate(waiting):
            while steps:
                kind, micro, chunk = steps[0]
                piece = chunk * num_stages + stage
                if kind == "F":
                    needed = None if piece == 0 else ("F", micro, piece - 1)
                elif kind == "W":
                    needed = ("B", micro, piece)
                else:
                    needed = ("F", micro, piece) if piece == last_piece else ("B", micro, piece + 1)
                if needed is not None and needed not in ends:
                    break
                tick = max(free[stage], 0 if needed is None else ends[needed])
                free[stage] = ends[kind, micro, piece] = tick + ticks[kind]
                actions.append(Action(tick, stage, micro, kind, chunk))
                steps.pop(0)
                moved = True
        assert moved, f"{schedule} over {num_stages} stages and {num_micro} micro-batches waits for itself"
    return sorted(actions)


def in_flight(
    schedule: str, num_stages: int, num_micro: int, stage: int, chunks: int = 1, chunk: int | None = None
) -> int:
    """Largest number of forward passes whose activations a stage holds at once, of all its chunks or of one."""
    held = peak = 0
    splits = schedule == "zero-bubble"  # what gradients of weights need is kept until they are made
    for kind, _, of_chunk in order(schedule, num_stages, num_micro, stage, chunks):
        if chunk is None or chunk == of_chunk:
            held += {"F": 1, "B": 0 if splits else -1, "W": -1}[kind]
        peak = max(peak, held)
    return peak


def bubble(num_stages: int, num_micro: int, chunks: int = 1, schedule: str = "1f1b") -> float:
    """Fraction of a pass that a stage waits: (S - 1) / (chunks * M + S - 1), equal stages assumed.

    Under "zero-bubble" a stage waits S - 1 ticks instead of 3 (S - 1): the gradients of weights fill the others.

    Source: Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters", section 2.2, with
    the whole pass as the denominator; Qi et al. 2023, "Zero bubble pipeline parallelism", table 2 (ZB-H1).
    """
    waits = (num_stages - 1) / (1 + BACKWARD_TICKS if schedule == "zero-bubble" else 1)
    return waits / (chunks * num_micro + waits)
