"""Law 9: the planner's bytes are the run's bytes. One world of four gloo ranks weighs them all."""

from __future__ import annotations

import pytest
from plan_bytes_ranks import everything
from world import Reports, assert_held, reports_of


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """What every rank says of every check."""
    return reports_of("plan_bytes_ranks.py", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", [name for name, _ in everything()])
def test_the_planned_bytes_are_the_runs(name: str, reports: Reports) -> None:
    """Catches a plan that fits where the run does not: bf16 without its fp32 sums and masters, the second gradient of
    an embedding that is added to the first, a head's probabilities counted once too often or forgotten, rows of a
    pipeline's generation counted all at once, what replicas gather.
    """
    assert_held(name, reports)
