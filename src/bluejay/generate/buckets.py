"""Which padded sizes to use for a given amount of work: pure functions from numbers to numbers."""

from __future__ import annotations

import math
from functools import lru_cache


@lru_cache(maxsize=4096)
def cover(count: int, buckets: tuple[int, ...], call_cost: int) -> tuple[int, ...]:
    """The buckets, largest first, that process `count` items with the least padded work.

    A call costs its bucket's size plus `call_cost` (in items: what reading the weights once is worth), so a small rest
    is padded rather than given a call of its own. Only the last call may be padded. Ties prefer fewer calls.

    Raises:
        ValueError: no bucket, or a negative count.
    """
    if not buckets or min(buckets) < 1 or count < 0:
        raise ValueError(f"cover({count}, {buckets}): buckets must be whole numbers from 1 and count at least 0")
    # Cost, calls and last bucket of the best way to process each number of units. No shortcut by "the largest bucket as
    # often as it fits": 21 items in buckets of 3 and 4 are seven calls of 3.
    unit = math.gcd(*buckets)
    units = -(-count // unit)
    best = [(0, 0, 0)]
    for number in range(1, units + 1):
        ways = ((best[max(0, number - bucket // unit)], bucket) for bucket in buckets)
        best.append(min((cost + bucket + call_cost, calls + 1, bucket) for (cost, calls, _), bucket in ways))
    used = []
    while units > 0:
        used.append(best[units][2])
        units -= used[-1] // unit
    return tuple(sorted(used, reverse=True))


def useful(largest: int, buckets: tuple[int, ...]) -> tuple[int, ...]:
    """The buckets that `cover` may choose for at most `largest` items: none beyond the first that holds them all."""
    return tuple(bucket for bucket in buckets if all(b < largest or b >= bucket for b in buckets))


def fit(count: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds `count` items.

    Raises:
        ValueError: every bucket is smaller.
    """
    fitting = [bucket for bucket in buckets if bucket >= count]
    if not fitting:
        raise ValueError(f"{count} items do not fit the largest of {buckets}")
    return min(fitting)
