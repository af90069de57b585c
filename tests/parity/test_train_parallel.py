"""Laws 4 and 7 for the training loop: many ranks train what one process trains. One world of four gloo ranks."""

from __future__ import annotations

import pytest
import torch
from train_ranks import MODEL, everything, noisy_model
from world import Reports, assert_held, reports_of

from bluejay.parallel.step import _Forward


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


def test_stages_drop_by_seeds_of_their_own() -> None:
    """Catches stages that all draw the same masks from the seed of a micro-batch."""
    model = noisy_model(MODEL).train()
    model.transformer.drop.p = 0.5
    ids, seeds = torch.arange(12).view(2, 6), torch.tensor([3])
    first, again, other = (_Forward(model, n, False, 0.0, torch.float32)(ids, seeds=seeds) for n in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
