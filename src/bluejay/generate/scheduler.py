"""Which request sits in which row. Knows no tensors and no model.

Rows in use are always 0 to n - 1: when one leaves, the last moves into its place, so that a decode step runs over a
range of rows no longer than it must be. Groups (the answers to one prompt) enter in order of arrival, all their rows at
once; nobody overtakes, so nobody starves.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar


@dataclass(eq=False)
class Slot:
    """One row's tenant."""

    row: int = -1


S = TypeVar("S", bound=Slot)


@dataclass
class Scheduler(Generic[S]):
    """Rows in use and groups in wait."""

    max_rows: int
    rows: list[S] = field(default_factory=list)
    waiting: deque[list[S]] = field(default_factory=deque)

    def submit(self, group: list[S]) -> None:
        """Queue a group of at most `max_rows` tenants."""
        assert 0 < len(group) <= self.max_rows, f"a group of {len(group)} cannot enter {self.max_rows} rows"
        self.waiting.append(group)

    def admit(self) -> list[list[S]]:
        """Give rows to as many waiting groups as fit, in order; returns the groups that entered."""
        entered = []
        while self.waiting and len(self.rows) + len(self.waiting[0]) <= self.max_rows:
            group = self.waiting.popleft()
            for tenant in group:
                tenant.row = len(self.rows)
                self.rows.append(tenant)
            entered.append(group)
        return entered

    def release(self, leaving: list[S]) -> list[tuple[int, int]]:
        """Free rows; returns the moves (from row, to row) that close the gaps, to be carried out in order."""
        moves = []
        for tenant in sorted(leaving, key=lambda t: t.row, reverse=True):
            hole, last = tenant.row, self.rows[-1]
            assert self.rows[hole] is tenant, f"row {hole} belongs to another tenant"
            self.rows.pop()
            tenant.row = -1
            if last is not tenant:
                self.rows[hole] = last
                moves.append((last.row, hole))
                last.row = hole
        return moves

    def withdraw(self, tenants: set[S]) -> None:
        """Forget tenants that still wait."""
        kept = [[t for t in group if t not in tenants] for group in self.waiting]
        self.waiting = deque(group for group in kept if group)
