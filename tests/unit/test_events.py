"""The event leaf."""

from __future__ import annotations

import dataclasses

import pytest

from bluejay.events import Event, Observer, ignore


def test_events_cannot_be_changed_by_a_listener() -> None:
    """Catches an event that the first listener alters for the second."""
    event = Event("checkpoint.shard", {"num_bytes": 3})
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.name = "other"  # type: ignore[misc]
    assert Event("a").fields == {}


def test_functions_tell_whoever_listens() -> None:
    """Catches an Observer that is more than a function of one event."""
    heard: list[Event] = []

    def work(observe: Observer = ignore) -> None:
        observe(Event("done"))

    work()
    work(heard.append)
    assert heard == [Event("done")]
