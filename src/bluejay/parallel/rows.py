"""Samples over replicas and back: every one once, in order, whatever the layout and the static batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

PADDING = -1  # a row of a batch that stands for no sample


def deal(num_samples: int, replicas: int, rows: int) -> list[list[list[int]]]:
    """For each replica its batches of sample numbers, all of `rows` rows; PADDING fills the last ones.

    All replicas get equally many batches, so that none waits for another in a collective that never comes.
    """
    per_round = rows * replicas
    num_rounds = -(-num_samples // per_round)

    def batch(replica: int, number: int) -> list[int]:
        first = number * per_round + replica * rows
        return [i if i < num_samples else PADDING for i in range(first, first + rows)]

    return [[batch(replica, number) for number in range(num_rounds)] for replica in range(replicas)]


def collect(dealt: Sequence[Sequence[Sequence[int]]], results: Sequence[Sequence[Sequence[T]]]) -> list[T]:
    """One result per sample, in the order of the samples, from what each replica made of the batches dealt to it."""
    by_sample = {
        sample: result
        for batches, made in zip(dealt, results, strict=True)
        for batch, row_results in zip(batches, made, strict=True)
        for sample, result in zip(batch, row_results, strict=True)
        if sample != PADDING
    }
    return [by_sample[sample] for sample in range(len(by_sample))]
