import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from harts.data.trajectory import TrajectoryBatch
from harts.errors import PlanError
from harts.plan.placement import place_greedily
from harts.plan.planner import plan_step
from harts.plan.verify import verify_plan
from tests.planner_oracles import feasible_counts, prefix_counts
from tests.strategies import token_trees, trajectory_batches
from tests.tree.shapes import batch_of, caterpillar, named_shapes
from tests.tree.test_segments import paths_of

anything = settings(deadline=None, max_examples=100)
few = settings(deadline=None, max_examples=40)


@st.composite
def plannable(draw, *, max_trajectories=10, batches=None):
    """A batch, a capacity from its longest trajectory up, and replicas it can be split over."""
    if batches is None:
        batches = token_trees(max_trajectories=max_trajectories, vocabulary=3).map(batch_of)
    batch = draw(batches)
    longest = int(batch.lengths.max())
    capacity = longest + draw(st.integers(0, 3) | st.integers(0, len(batch.tokens)))
    replicas = draw(st.integers(1, min(4, len(batch))))
    return batch, capacity, replicas


def plan_or_reject(batch, capacity, replicas, chunk_size=4):
    try:
        return plan_step(batch, capacity=capacity, replicas=replicas, chunk_size=chunk_size)
    except PlanError as error:
        assert "do not form a multiple of" in str(error)
        assume(False)


@anything
@given(plannable())
def test_every_plan_is_legal(drawn):
    verify_plan(plan_or_reject(*drawn))


@few
@given(plannable(batches=trajectory_batches(with_identity=True)))
def test_every_plan_of_rows_with_identity_is_legal(drawn):
    verify_plan(plan_or_reject(*drawn))


@anything
@given(plannable())
def test_every_trajectory_is_in_exactly_one_microbatch_and_slots_are_complete(drawn):
    batch, _, replicas = drawn
    plan = plan_or_reject(*drawn)
    members = [mb.trajectory_ids.tolist() for d in range(replicas) for mb in plan.microbatches(d)]
    assert sorted(i for ids in members for i in ids) == list(range(len(batch)))
    assert all(ids == sorted(ids) and ids for ids in members)
    assert plan.num_microbatches == len(members) == plan.num_slots * replicas
    assert {len(plan.microbatches(d)) for d in range(replicas)} == {plan.num_slots}
    assert sorted(set(plan.microbatch_of_trajectory.tolist())) == list(range(len(members)))
    places = Counter(
        zip(plan.slot_of_microbatch.tolist(), plan.replica_of_microbatch.tolist(), strict=True)
    )
    assert places == Counter((s, d) for s in range(plan.num_slots) for d in range(replicas))
    for d in range(replicas):
        for slot, mb in enumerate(plan.microbatches(d)):
            assert plan.slot_of_microbatch[mb.index] == slot
            assert plan.replica_of_microbatch[mb.index] == d
            assert set(plan.microbatch_of_trajectory[mb.trajectory_ids]) == {mb.index}


@anything
@given(plannable())
def test_compact_work_is_the_node_count_of_the_token_trie(drawn):
    batch, capacity, _ = drawn
    plan = plan_or_reject(*drawn)
    paths = paths_of(batch)
    for mb in plan._all:
        rows = len(prefix_counts([paths[i] for i in mb.trajectory_ids]))
        assert mb.num_rows == mb.layout.num_rows == rows <= capacity
        assert plan.compact_tokens_of_microbatch[mb.index] == rows
    assert plan.trie_tokens == len(prefix_counts(paths))
    assert plan.compact_tokens == sum(plan.compact_tokens_of_microbatch)
    assert plan.raw_tokens == len(batch.tokens)
    assert plan.compression == plan.raw_tokens / plan.compact_tokens
    assert plan.trie_tokens <= plan.compact_tokens <= plan.raw_tokens


@few
@given(plannable())
def test_planning_twice_gives_the_same_plan(drawn):
    first, second = plan_or_reject(*drawn), plan_or_reject(*drawn)
    for name in ("microbatch_of_trajectory", "replica_of_microbatch", "slot_of_microbatch"):
        assert getattr(first, name).tolist() == getattr(second, name).tolist()
    assert first.microbatch_of_trajectory.dtype == np.int64


@anything
@given(plannable(), st.randoms(use_true_random=False))
def test_the_order_of_the_batch_does_not_change_the_work(drawn, random):
    batch, capacity, replicas = drawn
    shuffled = list(range(len(batch)))
    random.shuffle(shuffled)
    plan = plan_or_reject(*drawn)
    other = plan_or_reject(batch.select(shuffled), capacity, replicas)
    assert other.compact_tokens == plan.compact_tokens
    assert sorted(other.compact_tokens_of_microbatch) == sorted(plan.compact_tokens_of_microbatch)
    assert (other.slot_imbalance, other.step_imbalance) == (
        plan.slot_imbalance,
        plan.step_imbalance,
    )


@settings(deadline=None, max_examples=40)
@given(plannable(max_trajectories=6), st.integers(1, 6))
def test_a_plan_is_only_found_where_a_partition_exists(drawn, replicas):
    batch, capacity, _ = drawn
    assume(replicas <= len(batch))
    feasible = feasible_counts(paths_of(batch), capacity)
    try:
        plan = plan_step(batch, capacity=capacity, replicas=replicas)
    except PlanError:
        return
    assert plan.num_microbatches in feasible


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("name", named_shapes(4))
def test_named_shapes_are_planned_at_every_capacity_around_their_size(name, replicas):
    batch = batch_of(named_shapes(4)[name])
    replicas = min(replicas, len(batch))
    longest, trie = int(batch.lengths.max()), len(prefix_counts(paths_of(batch)))
    for capacity in sorted({longest, longest + 1, max(longest, trie - 1), trie, 10 * trie}):
        try:
            plan = plan_step(batch, capacity=capacity, replicas=replicas, chunk_size=4)
        except PlanError:
            assert len(batch) < 6
            assert all(k % replicas for k in feasible_counts(paths_of(batch), capacity))
        else:
            verify_plan(plan)


def test_one_replica_with_room_for_everything_has_one_microbatch():
    plan = plan_step(batch_of(caterpillar(126)), capacity=126 + 126)
    assert plan.num_microbatches == 1
    assert plan.compact_tokens == plan.trie_tokens == 252
    assert plan_step(batch_of(caterpillar(126)), capacity=251).num_microbatches == 2


def test_exact_duplicates_cost_nothing():
    plan = plan_step(batch_of([[4, 4, 4]] * 5), capacity=3)
    assert (plan.num_microbatches, plan.compact_tokens, plan.compression) == (1, 3, 5.0)


def test_capacity_one_takes_one_token_trajectories():
    batch = TrajectoryBatch.from_rows([{"input_ids": [k % 3], "loss_mask": [0]} for k in range(6)])
    plan = plan_step(batch, capacity=1)
    verify_plan(plan)
    assert plan.compact_tokens_of_microbatch.tolist() == [1, 1, 1]


def test_equal_prefixes_merge_across_groups():
    batch = batch_of([[1, 2, 3], [1, 2, 4]], group_id=["a", "b"])
    assert plan_step(batch).compact_tokens == 4


def test_splitting_happens_where_neighbours_share_least():
    groups = [[[g] * 6 + [k] for k in range(3)] for g in range(4)]
    batch = batch_of([t for group in groups for t in group])
    plan = plan_step(batch, capacity=100, replicas=4)
    assert plan.compact_tokens == plan.trie_tokens
    assert plan.compact_tokens_of_microbatch.tolist() == [9, 9, 9, 9]


def test_more_microbatches_than_trajectories_merge_down_to_a_multiple_of_the_replicas():
    # next-fit gives 3 microbatches, 2 replicas need 4, 3 trajectories cannot fill them: 2 do
    batch = batch_of([[1, 1, 1], [2, 2, 2, 2], [1, 1, 2]])
    plan = plan_step(batch, capacity=4, replicas=2)
    verify_plan(plan)
    assert sorted(plan.compact_tokens_of_microbatch) == [4, 4]
    batch = batch_of([[1, 1, 1], [1, 2, 2, 2], [1, 1, 2]])
    plan = plan_step(batch, capacity=5, replicas=2)
    verify_plan(plan)


# errors


def refusal(batch, **options):
    with pytest.raises(PlanError) as caught:
        plan_step(batch, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_trajectory_longer_than_the_capacity_is_named_with_its_source_line():
    rows = [{"input_ids": [1] * n, "loss_mask": [0] * n} for n in (3, 9, 4, 5200)]
    batch = TrajectoryBatch.from_rows(rows, sources=[f"bad.jsonl:{k}" for k in (1, 2, 5, 7)])
    assert refusal(batch, capacity=5199) == (
        "trajectory 3 (bad.jsonl:7) has 5,200 tokens, more than the capacity 5,199; "
        "raise the capacity (--capacity; plan.capacity in a run) or split it, or drop it "
        "(over_capacity 'drop')"
    )
    assert refusal(batch, capacity=8).startswith(
        "trajectory 1 (bad.jsonl:2) has 9 tokens, more than the capacity 8 (and 1 more trajectory "
        "is too long);"
    )
    assert refusal(batch_of([[1, 2]]), capacity=1).startswith("trajectory 0 has 2 tokens,")


def test_fewer_trajectories_than_replicas_are_refused():
    message = refusal(batch_of([[1], [2]]), replicas=3)
    assert message.startswith("2 trajectories for 3 replicas; ")


def test_an_alignment_that_cannot_exist_is_refused():
    batch = batch_of([[k] * 3 for k in range(3)])
    assert not any(k % 2 == 0 for k in feasible_counts(paths_of(batch), 5))
    message = refusal(batch, capacity=5, replicas=2)
    assert message.startswith("3 trajectories do not form a multiple of 2 non-empty microbatches")


@pytest.mark.parametrize("name", ["capacity", "replicas", "chunk_size"])
@pytest.mark.parametrize("value", [0, -1])
def test_options_below_one_are_refused(name, value):
    assert refusal(batch_of([[1]]), **{name: value}) == f"{name} is {value}; it must be at least 1"


@pytest.mark.parametrize("name", ["capacity", "replicas", "chunk_size"])
@pytest.mark.parametrize("value", [2.5, "64", None])
def test_options_that_are_not_whole_numbers_are_refused(name, value):
    assert refusal(batch_of([[1]]), **{name: value}).startswith(f"{name} is {value!r}; ")


def test_a_replica_that_does_not_exist_is_an_index_error():
    plan = plan_step(batch_of([[1], [2]]), replicas=2)
    for replica in (-1, 2):
        with pytest.raises(IndexError, match="this plan has replicas 0 to 1"):
            plan.microbatches(replica)


# placement and what a plan reports


@anything
@given(st.lists(st.integers(1, 99), min_size=1, max_size=6), st.integers(1, 4))
def test_slots_hold_microbatches_of_neighbouring_work(work, replicas):
    rows = np.array((work * replicas)[: len(work) // replicas * replicas or replicas])
    rows = np.resize(rows, max(replicas, len(rows)))
    placement = place_greedily(rows, replicas=replicas)
    slots = [
        sorted(rows[placement.slot_of_microbatch == s].tolist())
        for s in range(len(rows) // replicas)
    ]
    assert all(len(slot) == replicas for slot in slots)
    assert all(a[0] >= b[-1] for a, b in pairwise(slots))
    load = [0] * replicas
    for s in range(len(slots)):  # the heavier member went to the replica with less so far
        here = {
            int(placement.replica_of_microbatch[k]): int(rows[k])
            for k in np.flatnonzero(placement.slot_of_microbatch == s)
        }
        assert sorted(here) == list(range(replicas))
        for a in range(replicas):
            for b in range(replicas):
                assert not (load[a] < load[b] and here[a] < here[b])
        load = [load[d] + here[d] for d in range(replicas)]


def plan_with_work(slots):
    """A plan whose microbatches have the given rows: slots[j][d] for slot j and replica d."""
    rows = [n for slot in slots for n in slot]
    batch = batch_of([[k] * n for k, n in enumerate(rows)])
    plan = plan_step(batch)
    replicas = len(slots[0])
    return replace(
        plan,
        replicas=replicas,
        microbatch_of_trajectory=np.arange(len(rows)),
        replica_of_microbatch=np.arange(len(rows)) % replicas,
        slot_of_microbatch=np.arange(len(rows)) // replicas,
        compact_tokens_of_microbatch=np.array(rows),
    )


def test_imbalance_is_the_excess_of_the_heaviest_replica_over_the_mean():
    plan = plan_with_work([[4, 2], [3, 3], [1, 3]])
    verify_plan(plan)
    # Equation 23 in the slots: 4/3 - 1, 0, 3/2 - 1; the totals are 8 and 8
    assert plan.slot_imbalance["p50"] == pytest.approx(1 / 3)
    assert plan.slot_imbalance["p95"] == pytest.approx(1 / 3 + 0.9 * (1 / 2 - 1 / 3))
    assert plan.step_imbalance == 0
    assert plan_with_work([[6, 1], [4, 1]]).step_imbalance == pytest.approx(10 / 6 - 1)


def test_one_replica_is_always_in_balance():
    plan = plan_step(batch_of([[k] * (k + 1) for k in range(5)]), capacity=5)
    assert plan.slot_imbalance == {"p50": 0.0, "p95": 0.0}
    assert plan.step_imbalance == 0.0


def test_denominators_count_the_whole_step():
    rows = [
        {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]},
        {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 0, 0]},
        {"input_ids": [1, 5], "loss_mask": [0, 1]},
    ]
    denominators = plan_step(TrajectoryBatch.from_rows(rows), capacity=4).denominators
    assert denominators.num_scored_tokens == 3
    assert denominators.num_trajectories == 3
    assert denominators.num_scored_trajectories == 2
    assert denominators.scored_tokens_of_trajectory.tolist() == [2, 0, 1]


SUMMARY_KEYS = [
    *("trajectories", "raw_tokens", "trie_tokens", "compact_tokens", "compression"),
    *("microbatches", "slots", "replicas", "slot_imbalance", "step_imbalance"),
    *("plan_seconds", "rounds", "replay_tokens"),
]


@few
@given(plannable())
def test_to_json_reads_back_with_the_documented_keys(drawn):
    _, capacity, replicas = drawn
    plan = plan_or_reject(*drawn)
    read = json.loads(plan.to_json())
    assert set(SUMMARY_KEYS) <= set(read)
    assert set(plan.summary()) == set(SUMMARY_KEYS)
    assert {k: read[k] for k in SUMMARY_KEYS} == json.loads(json.dumps(plan.summary()))
    assert set(read["slot_imbalance"]) == {"p50", "p95"}
    assert read["microbatches"] == read["slots"] * read["replicas"] == plan.num_microbatches
    assert read["microbatch_of_trajectory"] == plan.microbatch_of_trajectory.tolist()
    assert (read["capacity"], read["chunk_size"], read["replicas"]) == (capacity, 4, replicas)
    calls = [mb.calls for d in range(replicas) for mb in plan.microbatches(d)]
    assert read["rounds"]["max"] == max(c.num_rounds for c in calls)
    assert read["rounds"]["mean"] == pytest.approx(np.mean([c.num_rounds for c in calls]))
    assert read["replay_tokens"] == sum(c.replay_tokens for c in calls)
    assert plan.plan_seconds > 0


def test_numpy_numbers_as_options_still_give_json():
    plan = plan_step(
        batch_of([[1, 2], [1, 3]]),
        capacity=np.int64(9),
        replicas=np.int32(1),
        chunk_size=np.int8(4),
    )
    assert json.loads(plan.to_json())["capacity"] == 9


def test_planning_never_imports_torch():
    code = """
import sys, harts, numpy as np
batch = harts.TrajectoryBatch.from_rows([{"input_ids": [1, 2], "loss_mask": [0, 1]}] * 2)
plan = harts.plan_step(batch, capacity=4, replicas=2)
harts.verify_plan(plan)
harts.plan_calls([-1, 0], [3, 4])
mb = plan.microbatches(1)[0]
mb.scatter(np.ones(1)), mb.padded(np.ones(1)), mb.fields, plan.to_json()
bad = [name for name in ("torch", "transformers") if name in sys.modules]
sys.exit(f"imported {bad}" if bad else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# a plan that is not legal is refused, whatever is wrong with it


def legal_plan():
    groups = [[[g] * 6 + [k] * (k + 1) for k in range(3)] for g in range(4)]
    return plan_step(batch_of([t for g in groups for t in g]), capacity=15, replicas=2)


def with_entry(plan, name, index, value):
    array = getattr(plan, name).copy()
    array[index] = value
    return replace(plan, **{name: array})


def with_order(plan, **changes):
    return replace(plan, order=replace(plan.order, **changes))


def lcp_moved(plan):
    """The same number of rows in all, but shared by other neighbours."""
    lcp = plan.order.lcp.copy()
    place = int(np.flatnonzero(lcp == 6)[0])
    lcp[place] = 5
    other = int(np.flatnonzero((lcp == 0) & (plan.order.ids > 0))[0])
    lcp[other] = 1
    return with_order(replace(plan, capacity=99), lcp=lcp)


ILLEGAL = {
    "one membership too few": (
        lambda p: replace(p, microbatch_of_trajectory=p.microbatch_of_trajectory[:-1]),
        "one microbatch a trajectory",
    ),
    "a microbatch that does not exist": (
        lambda p: with_entry(p, "microbatch_of_trajectory", 0, p.num_microbatches),
        "ids 0..K-1",
    ),
    "a negative microbatch": (
        lambda p: with_entry(p, "microbatch_of_trajectory", 0, -1),
        "ids 0..K-1",
    ),
    "an empty microbatch": (
        lambda p: replace(
            p,
            microbatch_of_trajectory=np.where(
                p.microbatch_of_trajectory == 1, 0, p.microbatch_of_trajectory
            ),
        ),
        "no empty microbatch",
    ),
    "replicas that do not divide": (lambda p: replace(p, replicas=3), "multiple of 3"),
    "no replica": (lambda p: replace(p, replicas=0), "multiple of 0"),
    "two microbatches in one place": (
        lambda p: replace(
            p,
            slot_of_microbatch=np.zeros_like(p.slot_of_microbatch),
            replica_of_microbatch=np.zeros_like(p.replica_of_microbatch),
        ),
        "for every replica in every slot",
    ),
    "a replica beyond the last": (
        lambda p: replace(
            p,
            replica_of_microbatch=np.arange(p.num_microbatches),
            slot_of_microbatch=np.zeros(p.num_microbatches, np.int64),
        ),
        "for every replica in every slot",
    ),
    "a slot too few": (
        lambda p: replace(p, slot_of_microbatch=p.slot_of_microbatch[:-1]),
        "for every replica in every slot",
    ),
    "an entry of the slots too many": (
        lambda p: replace(p, slot_of_microbatch=np.append(p.slot_of_microbatch, 0)),
        "for every replica in every slot",
    ),
    "a trajectory in another microbatch": (
        lambda p: with_entry(
            p, "microbatch_of_trajectory", 0, (p.microbatch_of_trajectory[0] + 1) % 4
        ),
        "unique prefixes, not",
    ),
    "work counted too low": (
        lambda p: with_entry(
            p, "compact_tokens_of_microbatch", 2, p.compact_tokens_of_microbatch[2] - 1
        ),
        "unique prefixes, not",
    ),
    "a capacity that is too small": (
        lambda p: replace(p, capacity=int(p.compact_tokens_of_microbatch.max()) - 1),
        "rows within",
    ),
    "an order with a trajectory twice": (
        lambda p: with_order(p, ids=np.where(p.order.ids == 0, 1, p.order.ids)),
        "every trajectory once",
    ),
    "an order with wrong lengths": (
        lambda p: with_order(p, lengths=p.order.lengths[::-1].copy()),
        "the batch's lengths",
    ),
    "a common prefix before the first trajectory": (
        lambda p: with_order(p, lcp=p.order.lcp + 1),
        "no longer than either neighbour",
    ),
    "a common prefix too few": (
        lambda p: with_order(p, lcp=p.order.lcp[:-1]),
        "no longer than either neighbour",
    ),
    "a common prefix that is too short": (
        lambda p: with_order(p, lcp=np.maximum(p.order.lcp - 1, 0)),
        "a layout of exactly",
    ),
    "common prefixes between other neighbours": (
        lambda p: lcp_moved(plan_step(p.batch, capacity=1000)),
        "show the tokens of its trajectories",
    ),
    "denominators of a part of the step": (
        lambda p: replace(p, denominators=replace(p.denominators, num_scored_tokens=1)),
        "counts over the whole step",
    ),
    "denominators of other trajectories": (
        lambda p: replace(
            p,
            denominators=replace(
                p.denominators,
                scored_tokens_of_trajectory=p.denominators.scored_tokens_of_trajectory[::-1],
            ),
        ),
        "counts over the whole step",
    ),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_verify_plan_refuses(name):
    plan = legal_plan()
    assert plan.num_microbatches == 4
    verify_plan(plan)
    change, says = ILLEGAL[name]
    with pytest.raises(PlanError, match="illegal plan") as caught:
        verify_plan(change(plan))
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_verify_plan_refuses_microbatches_that_no_replica_runs(monkeypatch):
    plan = legal_plan()
    monkeypatch.setattr(type(plan), "microbatches", lambda self, replica=0: [])
    with pytest.raises(PlanError, match="every trajectory on exactly one replica, once"):
        verify_plan(plan)


def test_verify_plan_refuses_a_plan_made_without_the_identity_of_rows():
    rows = [[1, 2, 3]] * 2
    plan = plan_step(batch_of(rows))
    marked = batch_of(rows, identity=[[0, 0, 0], [1, 1, 1]])
    with pytest.raises(PlanError, match="6 unique prefixes, not 3"):
        verify_plan(replace(plan, batch=marked))


@anything
@given(plannable(), st.data())
def test_verify_plan_refuses_any_single_change_of_an_assignment(drawn, data):
    plan = plan_or_reject(*drawn)
    name = data.draw(
        st.sampled_from(
            ["replica_of_microbatch", "slot_of_microbatch", "compact_tokens_of_microbatch"]
        )
    )
    array = getattr(plan, name)
    index = data.draw(st.integers(0, len(array) - 1))
    value = data.draw(st.integers(-2, 6))
    assume(value != array[index])
    with pytest.raises(PlanError):
        verify_plan(with_entry(plan, name, index, value))
