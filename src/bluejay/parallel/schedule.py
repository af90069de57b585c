"""Pipeline schedules as lists of (tick, stage, micro-batch, action): what is in flight, and how long stages wait.

A tick is one stage's forward or backward pass of one micro-batch; backward takes two (it computes two products for
every one of the forward pass).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BACKWARD_TICKS = 2


@dataclass(frozen=True, order=True)
class Action:
    """One pass of one micro-batch through one piece of the model; it begins at `tick`."""

    tick: int
    stage: int
    micro_batch: int
    kind: Literal["F", "B"]
    chunk: int = 0


def order(
    schedule: str, num_stages: int, num_micro: int, stage: int, chunks: int = 1
) -> list[tuple[Literal["F", "B"], int, int]]:
    """(kind, micro-batch, chunk) in the order in which a stage does them; a stage waits rather than change the order.

    Source: Huang et al. 2019 (GPipe); Narayanan et al. 2021 (1F1B, interleaved).
    """
    total = num_micro * chunks
    # The k-th pass of a stage: rounds of `num_stages` micro-batches through one chunk after the other.
    width = num_stages if chunks > 1 else num_micro

    def piece(k: int, backward: bool) -> tuple[int, int]:
        rounds, within = divmod(k, width * chunks)
        chunk, micro = divmod(within, width)
        return rounds * width + micro, chunks - 1 - chunk if backward else chunk

    if schedule == "gpipe":
        ahead = total
    elif chunks == 1:
        ahead = min(total, num_stages - stage)
    else:
        ahead = min(total, (chunks - 1) * num_stages + 2 * (num_stages - 1 - stage) + 1)
    kinds: list[Literal["F", "B"]] = ["F"] * ahead
    for _ in range(total - ahead):
        kinds += ["B", "F"]
    kinds += ["B"] * ahead
    counters = {"F": 0, "B": 0}
    steps: list[tuple[Literal["F", "B"], int, int]] = []
    for kind in kinds:
        steps.append((kind, *piece(counters[kind], kind == "B")))
        counters[kind] += 1
    return steps


def timeline(schedule: str, num_stages: int, num_micro: int, chunks: int = 1) -> list[Action]:
    """Every action with the tick at which it can begin, when all pieces take equally long and sending takes nothing."""
    last_piece = num_stages * chunks - 1
    waiting = [order(schedule, num_stages, num_micro, stage, chunks) for stage in range(num_stages)]
    free = [0] * num_stages
    ends: dict[tuple[str, int, int], int] = {}  # (kind, micro-batch, piece of the model) -> tick
    actions: list[Action] = []
    while any(waiting):
        moved = False
        for stage, steps in enumerate(waiting):
            while steps:
                kind, micro, chunk = steps[0]
                piece = chunk * num_stages + stage
                if kind == "F":
                    needed = None if piece == 0 else ("F", micro, piece - 1)
                else:
                    needed = ("F", micro, piece) if piece == last_piece else ("B", micro, piece + 1)
                if needed is not None and needed not in ends:
                    break
                tick = max(free[stage], 0 if needed is None else ends[needed])
                free[stage] = ends[kind, micro, piece] = tick + (1 if kind == "F" else BACKWARD_TICKS)
                actions.append(Action(tick, stage, micro, kind, chunk))
                steps.pop(0)
                moved = True
        assert moved, f"{schedule} over {num_stages} stages and {num_micro} micro-batches waits for itself"
    return sorted(actions)


def in_flight(schedule: str, num_stages: int, num_micro: int, stage: int, chunks: int = 1) -> int:
    """Largest number of forward passes whose activations a stage holds at once, counted in chunks."""
    held = peak = 0
    for kind, _, _ in order(schedule, num_stages, num_micro, stage, chunks):
        held += 1 if kind == "F" else -1
        peak = max(peak, held)
    return peak


def bubble(num_stages: int, num_micro: int, chunks: int = 1) -> float:
    """Fraction of a pass that a stage waits: (S - 1) / (chunks * M + S - 1), equal stages assumed.

    Source: Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters", section 2.2, with
    the whole pass as the denominator.
    """
    return (num_stages - 1) / (chunks * num_micro + num_stages - 1)
