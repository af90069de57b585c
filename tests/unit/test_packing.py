"""Samples to rows and blocks: labels, lengths, order. B-32, B-34, B-35, and every sample once an epoch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bluejay.errors import ConfigError
from bluejay.train import IGNORED, Blocks, Reader, Rows, Samples

EOS = 50256
documents = st.lists(st.lists(st.integers(1, 90), min_size=1, max_size=12), min_size=1, max_size=9).filter(
    lambda docs: sum(map(len, docs)) > 1
)


def samples_of(*ids: list[int], learn_from: int = 0) -> Samples:
    return Samples.of([(one, learn_from) for one in ids], vocab_size=60_000)


def test_an_end_of_text_is_a_target_though_padding_might_look_like_it() -> None:
    """B-32: labels made by masking the padding id lose the end of text, and the model never learns to stop."""
    rows = Rows(samples_of([5, 6, EOS], [5, 6, 7, 8, EOS]), length=4)
    batch = rows.batch(np.array([0, 1]), rows=2)
    assert batch.targets.tolist() == [[6, EOS, IGNORED, IGNORED], [6, 7, 8, EOS]]
    assert batch.inputs[0, :2].tolist() == [5, 6]
    assert (batch.num_tokens, batch.num_targets) == (6, 6)


def test_the_first_token_is_never_counted() -> None:
    """B-34: a row of five labelled tokens has four predictions; whether the first is labelled makes no difference."""
    for learn_from in (0, 1):
        batch = Rows(samples_of([5, 6, 7, 8, 9], learn_from=learn_from), length=8).batch(np.array([0]), rows=1)
        assert batch.num_targets == 4
        assert batch.targets[0, :4].tolist() == [6, 7, 8, 9]
    rows = Rows(samples_of([5, 6, 7, 8, 9], [EOS], learn_from=0), length=8)
    assert (rows.num_targets, rows.num_without_target, len(rows)) == (4, 1, 1)


def test_only_the_answer_is_learned() -> None:
    """Catches a prompt that is learned, and an answer shifted by one."""
    rows = Rows(samples_of([1, 2, 3, 4, EOS], learn_from=3), length=8)
    assert rows.batch(np.array([0]), rows=1).targets[0, :4].tolist() == [IGNORED, IGNORED, 4, EOS]
    assert rows.num_targets == 2


def test_samples_without_a_target_are_counted_and_left_out() -> None:
    """B-35: a truncated answer leaves nothing to learn; the sample must not come back as a loss of 0 or nan."""
    rows = Rows(samples_of([1, 2, 3, 4, EOS], [1, 2, EOS], [1, 2, 3, 4, 5, 6], learn_from=2), length=3)
    assert (rows.num_without_target, rows.num_cut, len(rows)) == (0, 2, 3)
    rows = Rows(samples_of([1, 2, 3, 4, EOS], [1], [7, 8, 9, 1, 2, 3], learn_from=4), length=4)
    assert (rows.num_without_target, rows.num_cut, len(rows)) == (1, 1, 2)
    assert sorted(rows.order(0, 0)) == [0, 2]


def test_nothing_to_learn_at_all_is_an_error_with_the_numbers() -> None:
    """B-35: a run over data without a target must not report a loss of 0.0."""
    with pytest.raises(ConfigError) as caught:
        Rows(samples_of([1, 2, 3, 4, EOS], [1, 2, 3, 4, 5, EOS], learn_from=4), length=3)
    assert "2 of 2 samples have no target after truncation" in caught.value.found
    assert "6" in caught.value.fix
    with pytest.raises(ConfigError):
        Blocks(samples_of([1, 2, 3], learn_from=3), length=3)


@given(docs=documents, length=st.integers(1, 7), seed=st.integers(0, 3), epoch=st.integers(0, 2))
def test_blocks_use_every_token_once(docs: list[list[int]], length: int, seed: int, epoch: int) -> None:
    """Catches a dropped tail, a token that two blocks share, and a target that is not the token after its input."""
    docs = [[100 * i + token for token in doc] for i, doc in enumerate(docs)]  # every document's ids are its own
    blocks = Blocks(samples_of(*docs), length)
    order = blocks.order(seed, epoch)
    assert sorted(order) == list(range(len(blocks)))
    batch = blocks.batch(np.arange(len(blocks)), len(blocks), seed, epoch)
    real = batch.targets != IGNORED
    inputs, targets = batch.inputs[real].tolist(), batch.targets[real].tolist()
    assert inputs[1:] == targets[:-1]
    stream = [inputs[0], *targets]
    assert sorted(stream) == sorted(token for doc in docs for token in doc)
    assert batch.num_tokens == batch.num_targets == len(stream) - 1
    for doc in docs:
        at = stream.index(doc[0])
        assert stream[at : at + len(doc)] == doc


@given(docs=documents, length=st.integers(1, 7), seed=st.integers(0, 3))
def test_blocks_within_documents(docs: list[list[int]], length: int, seed: int) -> None:
    """Catches a segment that spans two documents, and a first token that is predicted from another document."""
    docs = [[100 * (i + 1) + token for token in doc] for i, doc in enumerate(docs)]
    if all(len(doc) == 1 for doc in docs):
        return
    blocks = Blocks(samples_of(*docs), length, within_documents=True)
    batch = blocks.batch(np.arange(len(blocks)), len(blocks), seed, 0)
    assert batch.segments is not None
    assert batch.num_targets == sum(len(doc) - 1 for doc in docs) == blocks.num_targets
    real = batch.targets != IGNORED
    assert (batch.inputs[real] // 100 == batch.targets[real] // 100).all()
    for row in range(len(blocks)):
        pairs = set(zip((batch.inputs[row] // 100).tolist(), batch.segments[row].tolist(), strict=True))
        assert len({document for document, _ in pairs}) == len({segment for _, segment in pairs}) == len(pairs)


@given(
    num=st.integers(1, 40),
    micro=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    replicas=st.integers(1, 3),
    seed=st.integers(0, 5),
)
def test_every_sample_is_read_once_an_epoch(num: int, micro: int, accumulation: int, replicas: int, seed: int) -> None:
    """Catches a dropped last batch, a sample read twice, and replicas that share rows; order changes with the epoch."""
    rows = Rows(samples_of(*[[i + 1, 1] for i in range(num)]), length=2)
    readers = [Reader(rows, micro, accumulation, seed, replicas=replicas, replica=index) for index in range(replicas)]
    for epoch in range(2):
        seen = []
        for update in range(readers[0].updates_per_epoch):
            for reader in readers:
                batches = reader.batches(epoch * reader.updates_per_epoch + update)
                assert [batch.inputs.shape[0] for batch in batches] == [micro] * accumulation
                seen += [int(i) for b in batches for i, t in zip(b.inputs[:, 0], b.targets[:, 0], strict=True) if t > 0]
        assert sorted(seen) == list(range(1, num + 1))


def test_order_is_a_function_of_seed_and_epoch() -> None:
    """B-37: an order drawn from a global random state is another one after a resume."""
    rows = Rows(samples_of(*[[i + 1, 1] for i in range(50)]), length=2)
    reader = Reader(rows, 4, 1, seed=3)
    straight = [reader.chosen(update)[1].tolist() for update in range(26)]
    np.random.seed(11)
    again = Reader(rows, 4, 1, seed=3)
    assert [again.chosen(update)[1].tolist() for update in (25, 7, 13)] == [straight[25], straight[7], straight[13]]
    assert straight[:13] != straight[13:]
    assert Reader(rows, 4, 1, seed=4).chosen(0)[1].tolist() != straight[0]


def test_the_digest_sees_every_part() -> None:
    """Catches a resume on other data: ids, bounds and what is learned all count."""
    digests = {
        samples_of([1, 2], [3]).digest(),
        samples_of([1], [2, 3]).digest(),
        samples_of([1, 2], [4]).digest(),
        samples_of([1, 2], [3], learn_from=1).digest(),
    }
    assert len(digests) == 4
