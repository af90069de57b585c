"""Laws 4 and 7 for the training loop: many ranks train what one process trains. One world of four gloo ranks."""

from __future__ import annotations

import pytest
from train_ranks import everything
from world import Reports, assert_held, reports_of


@pytest.fixture(scope="module")
def training_reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """What every rank says of every check."""
    return reports_of("train_ranks.py", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", [name for name, _ in everything()])
def test_ranks_train_what_one_process_trains(name: str, training_reports: Reports) -> None:
    """Catches what makes a run over a plan another run than one process's, each with its own signature.

    B-52 a bias that every rank adds; B-56 gradients scaled by passes or micro-batches; B-33 means of means over
    replicas with unequal targets; B-58 evaluation rows that are counted twice or not at all; clipping by the norm of a
    part, or with what ranks share counted by each; moments cut another way than their weight; an average evaluated
    with gathered weights that are out of date; an overflow, a number that is none, Ctrl-C or a full disk of which only
    one rank learns; dropout that a resume draws anew (law 7, B-37); adapters and rounding over parts of matrices.
    """
    assert_held(name, training_reports)
