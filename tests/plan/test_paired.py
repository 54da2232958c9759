from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.plan.paired import place_evenly
from harts.plan.placement import place_greedily
from tests.plan.memberships import slot_maxima

anything = settings(deadline=None, max_examples=100)


@st.composite
def works(draw, *, most_slots=6, most_replicas=4):
    replicas = draw(st.integers(1, most_replicas))
    num = replicas * draw(st.integers(1, most_slots))
    return np.array(draw(st.lists(st.integers(1, 99), min_size=num, max_size=num))), replicas


def table(rows, placement, replicas):
    """Work of every slot (row) and replica (column); each place filled exactly once."""
    work = np.zeros((len(rows) // replicas, replicas), np.int64)
    count = np.zeros_like(work)
    np.add.at(work, (placement.slot_of_microbatch, placement.replica_of_microbatch), rows)
    np.add.at(count, (placement.slot_of_microbatch, placement.replica_of_microbatch), 1)
    assert (count == 1).all()
    return work


@anything
@given(works(most_slots=3, most_replicas=2))
def test_sorted_blocks_have_the_least_sum_of_slot_maxima(drawn):
    rows, replicas = drawn
    least = min(
        sum(max(order[a : a + replicas]) for a in range(0, len(order), replicas))
        for order in permutations(rows.tolist())
    )
    assert slot_maxima(rows, replicas) == least


@anything
@given(works())
def test_placement_keeps_slot_maxima_and_never_raises_the_largest_total(drawn):
    rows, replicas = drawn
    even = table(rows, place_evenly(rows, replicas=replicas), replicas)
    greedy = table(rows, place_greedily(rows, replicas=replicas), replicas)
    assert even.max(axis=1).sum() == greedy.max(axis=1).sum() == slot_maxima(rows, replicas)
    assert even.sum(axis=0).max() <= greedy.sum(axis=0).max()
    assert sorted(even.ravel().tolist()) == sorted(rows.tolist())


@anything
@given(works(most_slots=6, most_replicas=2))
def test_no_exchange_in_one_or_two_slots_lowers_the_largest_total(drawn):
    rows, replicas = drawn
    work = table(rows, place_evenly(rows, replicas=replicas), replicas)
    if replicas == 1:
        return
    for one, other in product(range(len(work)), repeat=2):
        changed = work.copy()
        for slot in {one, other}:
            changed[slot] = work[slot][::-1]
        assert changed.sum(axis=0).max() >= work.sum(axis=0).max()


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_totals_of_many_slots_come_out_nearly_even(replicas):
    rows = np.random.default_rng(replicas).integers(40_000, 65_537, 30 * replicas)
    totals = table(rows, place_evenly(rows, replicas=replicas), replicas).sum(axis=0)
    assert totals.max() / totals.mean() - 1 < 1e-4


def test_placing_twice_gives_the_same_placement():
    rows = np.random.default_rng(0).integers(1, 9, 64)
    one, other = (place_evenly(rows, replicas=4) for _ in range(2))
    assert one.replica_of_microbatch.tolist() == other.replica_of_microbatch.tolist()
