"""Law 4: N ranks equal one, in logits, loss and every gradient. One world of four gloo ranks does all checks."""

from __future__ import annotations

import pytest
from parallel_ranks import everything
from world import Reports, assert_held, reports_of


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """What every rank says of every check."""
    return reports_of("parallel_ranks.py", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", [name for name, _ in everything()])
def test_ranks_equal_one_process(name: str, reports: Reports) -> None:
    """Catches what makes many ranks another model than one, each with its own signature (logits, loss, gradients).

    B-52 a row-parallel bias added by every rank, or its gradient divided; layer-norm gradients that lack the other
    ranks' part; B-56 pipeline gradients scaled by micro-batches or passes, and rows that do not divide; B-33 means of
    means over unequal token counts; a vocabulary of 65 whose padding is counted;
    law 5 a quantization group that two ranks share.
    """
    assert_held(name, reports)
