"""The planner: shares, balance, schedules, and errors with the nearest right answer."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bluejay.config import Layout, ModelConfig, Workload, preset
from bluejay.errors import ConfigError, MachineError
from bluejay.models import GPTJ, KVCache, costs, cut_dim, parameter_shapes, part_shape
from bluejay.parallel import balance, bubble, in_flight, packed_bytes, plan, propose, share_layers, timeline

SIX_B = preset("gptj-6b")
GIB = 2**30


def test_a_sum_that_is_wrong_names_the_nearest_split() -> None:
    """Catches layers that are dropped or held twice: 62 layers were given for 28."""
    with pytest.raises(ConfigError) as caught:
        plan(SIX_B, Layout(layers_per_device=(8, 8, 8, 8, 8, 8, 7, 7)), Workload())
    assert "62" in caught.value.found
    assert "[4, 4, 4, 4, 3, 3, 3, 3]" in caught.value.fix


def test_a_degree_that_does_not_divide_the_heads_lists_those_that_do() -> None:
    """Catches a cut through a head."""
    with pytest.raises(ConfigError) as caught:
        plan(SIX_B, Layout(tensor=3), Workload())
    assert caught.value.found == "16 heads"
    assert "1, 2, 4, 8, 16" in caught.value.fix


def test_a_cut_inside_a_quantization_group_is_refused_with_the_numbers() -> None:
    """Catches a group whose scale would belong to two devices (law 5)."""
    with pytest.raises(ConfigError) as caught:
        plan(replace(SIX_B, n_embd=4096, n_inner=4096 * 4 - 64 * 8), Layout(tensor=16), Workload(quantize="int4-g256"))
    error = str(caught.value)
    assert "mlp.fc_out.weight" in error
    assert "256" in error
    assert "16 devices" in error
    assert str(4096 * 4 - 64 * 8) in error


def test_an_overflow_names_the_device_its_largest_items_and_the_way_out() -> None:
    """Catches a plan that is found not to fit when the device is already rented."""
    with pytest.raises(MachineError) as caught:
        plan(SIX_B, Layout(stages=2), Workload(job="train", dtype="bfloat16"), 40 * GIB)
    assert "stage " in caught.value.found
    assert "optimizer" in caught.value.found
    assert "--optimizer muon" in caught.value.fix
    assert "more stages" in caught.value.fix


@given(st.integers(1, 40), st.lists(st.integers(-1, 12), min_size=1, max_size=8))
def test_every_layer_is_on_one_stage_in_order(num_layers: int, counts: list[int]) -> None:
    """Catches a layer that is lost when the shares do not divide, and an error without a split that works."""
    try:
        shares = share_layers(num_layers, counts)
    except ConfigError as error:
        proposal = [int(n) for n in error.fix.partition("[")[2].partition("]")[0].split(",")]
        assert sum(proposal) == num_layers
        assert len(proposal) == len(counts)
        return
    assert sum(shares) == num_layers
    wild = [share for share, n in zip(shares, counts, strict=True) if n < 0]
    assert all(share == n for share, n in zip(shares, counts, strict=True) if n >= 0)
    assert len(set(wild[:-1])) <= 1
    assert not wild or 0 <= wild[-1] - min(wild) < len(wild)


def test_the_last_wildcard_takes_the_remainder() -> None:
    """Catches a remainder that goes to the first stage, which also holds the embedding."""
    assert share_layers(28, [-1, 7, -1]) == (10, 7, 11)
    assert share_layers(28, [0, -1, -1, 0]) == (0, 14, 14, 0)


@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.floats(0, 5), st.integers(0, 9)), min_size=1, max_size=4),
)
def test_the_balance_is_that_of_brute_force(num_layers: int, stages: list[tuple[float, int]]) -> None:
    """Catches a split that another one beats: every split of up to 9 layers over up to 4 stages is tried."""
    extras, most = [extra for extra, _ in stages], [limit for _, limit in stages]
    options = itertools.product(*(range(min(limit, num_layers) + 1) for limit in most))
    slowest = [max(e + n for e, n in zip(extras, o, strict=True)) for o in options if sum(o) == num_layers]
    found = balance(num_layers, 1.0, extras, most)
    if found is None:
        assert not slowest
        return
    assert sum(found) == num_layers
    assert all(n <= limit for n, limit in zip(found, most, strict=True))
    assert math.isclose(max(e + n for e, n in zip(extras, found, strict=True)), min(slowest))


def test_the_head_counts_as_layers() -> None:
    """Catches an even split: with the head worth several layers, the last stage gets fewer."""
    wide = replace(preset("nano"), vocab_size=50400)
    made = plan(wide, Layout(stages=3), Workload(job="train"))
    assert made.layout.layers_per_device[-1] < made.layout.layers_per_device[1]
    even = plan(wide, Layout(layers_per_device=(2, 2, 2)), Workload(job="train"))
    assert max(s.cost for s in made.stages) < max(s.cost for s in even.stages)


def test_auto_moves_layers_away_from_the_stage_that_would_overflow() -> None:
    """Catches a balance that looks at time only: under 1f1b the first stage holds most activations."""
    work = Workload(job="train", dtype="bfloat16", gradient_accumulation=8, optimizer="muon")
    free = plan(SIX_B, Layout(stages=4), work)
    limit = free.fullest.memory.total - GIB
    tight = plan(SIX_B, Layout(stages=4), work, limit)
    assert tight.layout.layers_per_device != free.layout.layers_per_device
    assert tight.fullest.memory.total <= limit
    assert sum(tight.layout.layers_per_device) == 28


@given(
    st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"]),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(2, 3),
)
def test_schedules_do_every_pass_once_and_in_order(schedule: str, stages: int, rounds: int, chunks: int) -> None:
    """Catches a schedule that waits for itself, drops a micro-batch, or starts a pass before its input exists."""
    splits = schedule == "zero-bubble"
    chunks = chunks if schedule in ("interleaved", "zero-bubble") and stages > 1 else 1
    num_micro = rounds * stages
    actions = timeline(schedule, stages, num_micro, chunks)
    starts = {(a.kind, a.micro_batch, a.chunk * stages + a.stage): a.tick for a in actions}
    assert len(starts) == len(actions) == (3 if splits else 2) * num_micro * stages * chunks
    for (kind, micro, piece), tick in starts.items():
        if kind == "F" and piece > 0:
            assert starts["F", micro, piece - 1] + 1 <= tick
        if kind == "B":
            assert starts["F", micro, piece] < tick
            if piece < stages * chunks - 1:
                assert starts["B", micro, piece + 1] + (1 if splits else 2) <= tick
        if kind == "W":
            assert starts["B", micro, piece] < tick


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3))
def test_zero_bubble_waits_a_third(stages: int, rounds: int, chunks: int) -> None:
    """Catches gradients of weights that are put where another stage waits for this one."""
    chunks = chunks if stages > 1 else 1
    num_micro = rounds * stages
    length = max(a.tick + 1 for a in timeline("zero-bubble", stages, num_micro, chunks))
    waits = bubble(stages, num_micro, chunks, "zero-bubble")
    assert math.isclose(1 - 3 * num_micro * chunks / length, waits, abs_tol=1e-12)
    assert waits <= bubble(stages, num_micro, chunks)


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 6), st.integers(1, 12))
def test_the_bubble_is_what_the_timeline_waits(schedule: str, stages: int, num_micro: int) -> None:
    """Catches a bubble formula of another schedule, or one over the useful time instead of all of it."""
    actions = timeline(schedule, stages, num_micro)
    length = max(a.tick + (1 if a.kind == "F" else 2) for a in actions)
    assert math.isclose(1 - 3 * num_micro / length, bubble(stages, num_micro), abs_tol=1e-12)


def test_the_interleaved_bubble_is_shorter() -> None:
    """Catches chunks that are taken in the wrong order, which makes the pipeline wait as long as without them."""
    actions = timeline("interleaved", 4, 8, chunks=2)
    length = max(a.tick + (1 if a.kind == "F" else 2) for a in actions)
    assert math.isclose(1 - 3 * 16 / length, bubble(4, 8, chunks=2))
    assert bubble(4, 8, chunks=2) < bubble(4, 8)


def test_activations_in_flight_depend_on_the_schedule() -> None:
    """Catches a peak that is the same for all stages: 1f1b holds S - s micro-batches on stage s, gpipe all."""
    assert [in_flight("1f1b", 4, 8, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert [in_flight("gpipe", 4, 8, stage) for stage in range(4)] == [8, 8, 8, 8]
    assert in_flight("1f1b", 4, 2, 0) == 2
    assert [in_flight("zero-bubble", 4, 8, stage) for stage in range(4)] == [4, 4, 4, 4]


@pytest.mark.parametrize("tied", [False, True])
def test_the_split_table_is_the_model(tiny_config: ModelConfig, tied: bool) -> None:
    """Catches a parameter that the table does not know: its bytes would be planned nowhere, its gradient be wrong."""
    config = replace(tiny_config, tie_word_embeddings=tied)
    model = GPTJ(config)
    shapes = parameter_shapes(config)
    held = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    assert shapes == held
    if not tied:
        assert sum(map(math.prod, shapes.values())) == costs.num_parameters(config)
    assert {name for name in shapes if cut_dim(name) is None} == {
        name for name in shapes if "ln_" in name or name.endswith("fc_out.bias")
    }


def test_a_vocabulary_that_does_not_divide_is_padded() -> None:
    """Catches the last device with fewer rows than it is sent: 65 rows on 2 devices are 33 and 32 and a padded one."""
    config = replace(preset("tiny"), vocab_size=65)
    assert part_shape("lm_head.weight", (65, 32), 2) == (33, 32)
    assert plan(config, Layout(tensor=2), Workload()).padded_vocab_size == 66


@pytest.mark.parametrize(("tensor", "stages"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_planned_weights_and_cache_are_the_models(tiny_config: ModelConfig, tensor: int, stages: int) -> None:
    """Catches a tensor that is counted on two stages or on none: all devices together hold the model and its cache."""
    work = Workload(rows=3, dtype="float32")
    made = plan(tiny_config, Layout(stages=stages, tensor=tensor), work)
    model = GPTJ(tiny_config)
    whole = {n: p for n, p in model.named_parameters() if cut_dim(n) is None}
    copies = sum(p.nbytes for p in whole.values()) * (tensor - 1)
    held = sum(stage.memory.weights for stage in made.stages) * tensor
    assert held == sum(p.nbytes for p in model.parameters()) + copies
    cache = KVCache(tiny_config, 3, tiny_config.n_positions)
    assert sum(stage.memory.kv_cache for stage in made.stages) * tensor == cache.num_bytes


def test_four_bits_take_four_bits_and_their_scales() -> None:
    """Catches 4-bit weights counted without their scales: 4 + 32/g bits each."""
    assert packed_bytes(4096, 4096, 64) * 8 == 4096 * 4096 * 4.5
    assert packed_bytes(4096, 4096, 128) * 8 == 4096 * 4096 * 4.25
    assert packed_bytes(65, 20, 16) == 80 * (3 * 4 + 2 * 4)  # outputs to 16, inputs to 8, a short last group


def test_replicas_come_first_and_sharing_only_where_it_must() -> None:
    """Catches a proposal that cuts layers where whole copies fit, and one that keeps what cannot fit."""
    assert propose(SIX_B, 4, Workload(rows=4), 80 * GIB).layout.replicas == 4
    train = Workload(job="train", dtype="bfloat16", gradient_accumulation=4)
    made = propose(SIX_B, 8, train, 80 * GIB)
    assert made.layout.shard
    assert made.layout.num_devices == 8
    assert made.fullest.memory.total <= 80 * GIB


@settings(max_examples=25)
@given(st.integers(1, 16), st.sampled_from([None, 1, 2, 8, 30, 100]), st.sampled_from(["generate", "train"]))
def test_a_proposal_fits_or_says_why_not(devices: int, memory: int | None, job: str) -> None:
    """Catches a proposal over the limit, of another number of devices, or an error without a way out."""
    work = Workload(job=job, dtype="bfloat16", rows=2, gradient_accumulation=4)  # type: ignore[arg-type]
    try:
        made = propose(SIX_B, devices, work, (memory or 0) * GIB)
    except MachineError:
        return
    assert made.num_devices == devices
    assert memory is None or made.fullest.memory.total <= memory * GIB


@pytest.mark.parametrize(
    ("layout", "work", "word"),
    [
        (Layout(stages=29), Workload(), "28 layers"),
        (Layout(stages=2, micro_batches=3), Workload(job="train", gradient_accumulation=8), "1, 2, 4, 8"),
        (Layout(stages=2, schedule="interleaved", chunks=2), Workload(job="train"), "2 micro-batches"),
        (Layout(stages=2, schedule="zero-bubble"), Workload(job="train", gradient_accumulation=3), "2 micro-batches"),
        (Layout(layers_per_device=(14, 0, 14)), Workload(), "[10, 9, 9]"),
        (Layout(), Workload(context=4096), "2048"),
        (Layout(stages=2, replicas=2, shard=True, schedule="zero-bubble"), Workload(job="train"), "in one part"),
    ],
)
def test_wrong_requests_name_the_right_ones(layout: Layout, work: Workload, word: str) -> None:
    """Catches a wrong request that only a waiting rank finds out: each error holds the nearest right answer."""
    with pytest.raises(ConfigError) as caught:
        plan(SIX_B, layout, work)
    assert word in str(caught.value)


def test_a_tied_head_is_refused_where_it_would_be_wrong(tiny_config: ModelConfig) -> None:
    """Catches an embedding whose two gradients are never added up."""
    with pytest.raises(ConfigError, match="share one matrix"):
        plan(replace(tiny_config, tie_word_embeddings=True), Layout(stages=2), Workload(job="train"))


def test_half_precision_takes_eighteen_bytes_a_weight() -> None:
    """Catches bf16 training planned without its fp32 sums of gradients: 2 weight, 4 sum, 4 master, 8 Adam. The
    embedding, and all that replicas share out, are their own masters: 16.
    """
    work = Workload(job="train", dtype="bfloat16", gradient_accumulation=4)
    middle = plan(SIX_B, Layout(stages=4, micro_batches=4), work).stages[1]
    elements = middle.num_layers * (costs.num_parameters(SIX_B) - costs.num_parameters(replace(SIX_B, n_layer=27)))
    held = middle.memory.weights + middle.memory.gradients + middle.memory.optimizer
    assert held == 18 * elements
    shared = plan(SIX_B, Layout(replicas=4, shard=True), work).stages[0].memory
    assert shared.weights + shared.gradients + shared.optimizer == 16 * costs.num_parameters(SIX_B) / 4


def test_recomputing_moves_no_more_and_costs_layers_a_pass() -> None:
    """Catches a third pass of sums that recomputing ends before, and a balance in which recomputed layers cost what
    others do.
    """
    work = Workload(job="train", dtype="bfloat16", gradient_accumulation=8)
    again = replace(work, recompute=True)
    traffic = [plan(SIX_B, Layout(tensor=2), w).stages[0].traffic for w in (work, again)]
    assert traffic[0] == traffic[1]
    shares = [plan(SIX_B, Layout(layers_per_device=(7, 7, 7, 7)), w).stages[-1].cost for w in (work, again)]
    assert shares[1] < shares[0]


def test_a_packed_head_is_there_beside_a_shared_embedding() -> None:
    """Catches a tied head that quantizing packs and nobody counts."""
    tied = replace(SIX_B, tie_word_embeddings=True)
    work = Workload(quantize="int4-g64")
    held = [plan(config, Layout(), work).stages[0].memory.weights for config in (SIX_B, tied)]
    assert held[0] == held[1]


def test_groups_of_whole_rows_are_named_as_such() -> None:
    """Catches advice to use a group smaller than -1, and the wrong matrix of two."""
    with pytest.raises(ConfigError, match=r"attn.out_proj.weight in one group a row[\s\S]*--quantize int4-g256"):
        plan(SIX_B, Layout(tensor=2), Workload(quantize="int4-row"))


@pytest.mark.parametrize(
    ("layout", "work", "word"),
    [
        (Layout(stages=4, replicas=2), Workload(job="train", dtype="bfloat16", gradient_accumulation=4), "--shard"),
        (
            Layout(stages=4),
            Workload(job="train", rows=8, gradient_accumulation=2),
            "gradient accumulation of at least 4",
        ),
    ],
)
def test_advice_fits_the_layout(layout: Layout, work: Workload, word: str) -> None:
    """Catches "use 1f1b" where there are too few micro-batches to alternate, and missing advice."""
    with pytest.raises(MachineError) as caught:
        plan(SIX_B, layout, work, 4 * GIB)
    assert word in caught.value.fix
    assert "--schedule 1f1b" not in caught.value.fix


@pytest.mark.parametrize(
    ("layout", "work"),
    [
        (Layout(tensor=16), Workload()),
        (Layout(tensor=16), Workload(quantize="int4-g64")),
        (Layout(replicas=2), Workload(job="train")),
        (Layout(replicas=2), Workload(job="train", optimizer="muon")),
        (Layout(stages=2, replicas=2, schedule="gpipe"), Workload(job="train", gradient_accumulation=4)),
        (Layout(stages=2), Workload(job="train", gradient_accumulation=2, rows=4)),
    ],
)
def test_what_is_advised_is_accepted(layout: Layout, work: Workload) -> None:
    """Catches advice that the planner itself refuses: a degree above the heads, muon over shared-out state."""
    with pytest.raises(MachineError) as caught:
        plan(SIX_B, layout, work, GIB // 4)
    fix = caught.value.fix
    assert fix
    for words, change in {
        "--shard": {"shard": True},
        "--schedule 1f1b": {"schedule": "1f1b"},
    }.items():
        if words in fix:
            plan(SIX_B, replace(layout, **change), work)  # type: ignore[arg-type]
    for words, other in {
        "--optimizer muon": {"optimizer": "muon"},
        "--quantize int4-g64": {"quantize": "int4-g64"},
    }.items():
        if words in fix:
            plan(SIX_B, layout, replace(work, **other))  # type: ignore[arg-type]
    if "--tensor" in fix:
        degree = int(fix.partition("(--tensor ")[2].partition(")")[0])
        assert degree > layout.tensor
        plan(SIX_B, replace(layout, tensor=degree), work)


def test_what_is_given_is_kept_and_the_rest_proposed() -> None:
    """Catches a proposal that drops a setting, or one that is refused because some size was given."""
    assert propose(SIX_B, 4, Workload(rows=4), tensor=2).layout.replicas == 2
    train = Workload(job="train", gradient_accumulation=8, dtype="bfloat16")
    assert propose(SIX_B, 8, train, shard=True).layout.shard
    made = propose(SIX_B, 8, train, schedule="interleaved", chunks=2).layout
    assert (made.schedule, made.chunks) == ("interleaved", 2)
    assert made.num_stages > 1
    assert propose(SIX_B, 4, Workload(), layers_per_device=(14, -1)).num_devices == 4
    with pytest.raises(ConfigError, match="--devices 3"):
        propose(SIX_B, 4, Workload(), stages=3)
    with pytest.raises(ConfigError, match="16 heads"):
        propose(SIX_B, 6, Workload(), tensor=3)
