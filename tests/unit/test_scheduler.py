"""The scheduler against a board of rows that follows its moves, through any sequence of arrivals and departures."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from bluejay.generate.scheduler import Scheduler, Slot


class Board(RuleBasedStateMachine):
    """Beside the scheduler: what each row really holds (as a cache would), and who waits, in order of arrival."""

    @initialize(max_rows=st.integers(1, 6))
    def start(self, max_rows: int) -> None:
        self.scheduler: Scheduler[Slot] = Scheduler(max_rows)
        self.rows: list[Slot | None] = [None] * max_rows
        self.inside: set[Slot] = set()
        self.waiting: list[list[Slot]] = []

    @rule(size=st.integers(1, 6))
    def submit(self, size: int) -> None:
        group = [Slot() for _ in range(min(size, len(self.rows)))]
        self.scheduler.submit(list(group))
        self.waiting.append(group)

    @rule()
    def admit(self) -> None:
        for group in self.scheduler.admit():
            assert group == self.waiting.pop(0)  # whole, and in order of arrival
            for tenant in group:
                assert self.rows[tenant.row] is None
                self.rows[tenant.row] = tenant
            self.inside.update(group)
        if self.waiting:
            assert len(self.inside) + len(self.waiting[0]) > len(self.rows)  # nobody waits who fits

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        present = sorted(self.inside, key=lambda t: t.row)
        leaving = data.draw(st.permutations(present).flatmap(lambda p: st.integers(0, len(p)).map(lambda n: p[:n])))
        for source, target in self.scheduler.release(leaving):
            assert self.rows[source] not in leaving  # a copy for nothing
            self.rows[target], self.rows[source] = self.rows[source], None
        for tenant in leaving:
            assert tenant.row == -1
        self.rows = [None if row in leaving else row for row in self.rows]
        self.inside.difference_update(leaving)

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        everyone = [tenant for group in self.waiting for tenant in group] + sorted(self.inside, key=lambda t: t.row)
        chosen = data.draw(st.sets(st.integers(0, len(everyone) - 1))) if everyone else set()
        leaving = {everyone[i] for i in chosen}
        self.scheduler.withdraw(leaving)  # those inside a row are not waiting and stay
        self.waiting = [kept for group in self.waiting if (kept := [t for t in group if t not in leaving])]

    @invariant()
    def rows_are_a_range_and_hold_their_tenants(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        used = self.scheduler.rows
        assert set(used) == self.inside
        assert [tenant.row for tenant in used] == list(range(len(used)))
        assert self.rows == [*used, *[None] * (len(self.rows) - len(used))]
        assert list(self.scheduler.waiting) == self.waiting


Board.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestBoard = Board.TestCase  # Rows with gaps, a tenant in two rows, a move that overwrites, overtaking, split groups.


def test_the_last_row_closes_the_gap() -> None:
    """One move for a tenant that leaves the middle, none for the last: each move copies a row of the cache."""
    scheduler: Scheduler[Slot] = Scheduler(4)
    first, second, third = group = [Slot(), Slot(), Slot()]
    scheduler.submit(group)
    scheduler.admit()
    assert scheduler.release([third]) == []
    assert scheduler.release([first]) == [(1, 0)]
    assert second.row == 0


def test_a_group_that_can_never_enter_is_refused() -> None:
    """A group larger than the board would block everybody behind it for ever."""
    with pytest.raises(AssertionError, match="5 cannot enter 4"):
        Scheduler[Slot](4).submit([Slot() for _ in range(5)])
