"""Padded sizes: against every other way to cut the same work."""

from __future__ import annotations

from functools import cache
from itertools import combinations_with_replacement

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bluejay.generate import cover, fit
from bluejay.generate.buckets import useful

bucket_sets = st.builds(
    lambda sizes, unit: tuple(sorted(size * unit for size in sizes)),
    st.sets(st.integers(1, 14), min_size=1, max_size=4),
    st.sampled_from([1, 1, 2, 5]),
)


def least_cost(count: int, buckets: tuple[int, ...], call_cost: int) -> int:
    """By trying the last call in every way, with no shortcut."""

    @cache
    def best(items: int) -> int:
        return 0 if items <= 0 else min(bucket + call_cost + best(items - bucket) for bucket in buckets)

    return best(count)


@given(count=st.integers(0, 200), buckets=bucket_sets, call_cost=st.integers(0, 40))
def test_no_other_cut_is_cheaper(count: int, buckets: tuple[int, ...], call_cost: int) -> None:
    """A greedy cut (the largest bucket always, or the smallest that fits) that pads or calls more than it must."""
    used = cover(count, buckets, call_cost)
    assert set(used) <= set(buckets)
    assert list(used) == sorted(used, reverse=True)
    assert sum(used) >= count
    assert sum(used[:-1]) < count or not used  # only the last call is padded, and no call is empty
    assert sum(used) + call_cost * len(used) == least_cost(count, buckets, call_cost)


@given(count=st.integers(1, 12), buckets=bucket_sets, call_cost=st.integers(0, 5))
def test_ties_prefer_fewer_calls(count: int, buckets: tuple[int, ...], call_cost: int) -> None:
    """Equal work in more calls costs the host's time for nothing."""
    used = cover(count, buckets, call_cost)
    cost = sum(used) + call_cost * len(used)
    for calls in range(len(used)):
        for others in combinations_with_replacement(buckets, calls):
            assert sum(others) < count or sum(others) + call_cost * calls > cost


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, (16,)), (17, (64,)), (256, (256,)), (257, (256, 16)), (600, (256, 256, 64, 64)), (700, (256,) * 3)],
)
def test_prompt_chunks_of_the_default_buckets(count: int, expected: tuple[int, ...]) -> None:
    """A call is worth 32 tokens: 17 go into one bucket of 64, not two of 16; the last 188 of 700 into one of 256."""
    assert cover(count, (16, 64, 256), 32) == expected


@pytest.mark.parametrize(("count", "buckets"), [(3, ()), (3, (0, 4)), (3, (-2,)), (-1, (4,))])
def test_cover_refuses_what_it_cannot_cut(count: int, buckets: tuple[int, ...]) -> None:
    """A bucket of 0 would never end; a negative count would give an empty answer."""
    with pytest.raises(ValueError, match=str(count)):
        cover(count, buckets, 1)


@given(count=st.integers(0, 80), buckets=bucket_sets)
def test_fit_is_the_smallest_that_holds(count: int, buckets: tuple[int, ...]) -> None:
    """A bucket that is too large, or too small by one."""
    if count > max(buckets):
        with pytest.raises(ValueError, match=str(count)):
            fit(count, buckets)
    else:
        found = fit(count, tuple(reversed(buckets)))
        assert found >= count
        assert not any(count <= bucket < found for bucket in buckets)


@given(
    largest=st.integers(1, 300),
    buckets=st.lists(st.integers(1, 300), min_size=1, max_size=4, unique=True).map(sorted).map(tuple),
    call_cost=st.integers(0, 64),
)
def test_useful_buckets_are_those_that_cover_takes(largest: int, buckets: tuple[int, ...], call_cost: int) -> None:
    """A bucket that is used and was not compiled ahead; one as long as a prompt can never be, compiled for nobody."""
    taken = {bucket for count in range(1, largest + 1) for bucket in cover(count, buckets, call_cost)}
    assert taken <= set(useful(largest, buckets))
    assert sum(bucket >= largest for bucket in useful(largest, buckets)) <= 1
