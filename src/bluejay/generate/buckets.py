"""Which padded sizes to use for a given amount of work: pure functions from numbers to numbers."""

from __future__ import annotations

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
    largest = max(buckets)
    # Far from the end the largest bucket is always right; near it, try every way to finish.
    full = max(0, count // largest - 1)
    rest = count - full * largest
    best: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())]
    for items in range(1, rest + 1):
        options = []
        for bucket in buckets:
            cost, calls, used = best[max(0, items - bucket)]
            options.append((cost + bucket + call_cost, calls + 1, (*used, bucket)))
        best.append(min(options))
    return (largest,) * full + tuple(sorted(best[rest][2], reverse=True))


def fit(count: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds `count` items.

    Raises:
        ValueError: every bucket is smaller.
    """
    fitting = [bucket for bucket in buckets if bucket >= count]
    if not fitting:
        raise ValueError(f"{count} items do not fit the largest of {buckets}")
    return min(fitting)
