from hypothesis import given, settings
from hypothesis import strategies as st

from harts.plan.repair import repair_memberships
from tests.plan.memberships import (
    assert_legal,
    cost_of,
    partition_by,
    partitioned_trees,
)
from tests.plan.ordered_trees import trie_rows

anything = settings(deadline=None, max_examples=150)


def brute_repair(paths, labels, capacity, neighbourhood):
    """One iteration: labels after the best move, else the best swap, else None."""
    num = len(paths)

    def rows(labels, k):
        return trie_rows([p for p, label in zip(paths, labels, strict=True) if label == k])

    def saved(changed):
        touched = {k for k, new in zip(labels, changed, strict=True) if k != new}
        touched |= {new for k, new in zip(labels, changed, strict=True) if k != new}
        if any(rows(changed, k) > capacity for k in touched):
            return 0
        return sum(rows(labels, k) - rows(changed, k) for k in touched)

    def near(x):
        return range(max(0, x - neighbourhood), min(num, x + neighbourhood + 1))

    moves = [
        (x, k, [k if p == x else labels[p] for p in range(num)])
        for x in range(num)
        if labels.count(labels[x]) > 1
        for k in sorted({labels[y] for y in near(x)} - {labels[x]})
    ]
    swaps = [
        (x, y, [labels[{x: y, y: x}.get(p, p)] for p in range(num)])
        for x in range(num)
        for y in near(x)
        if x < y and labels[x] != labels[y]
    ]
    for choices in (moves, swaps):
        best = max(
            choices, key=lambda choice: (saved(choice[2]), -choice[0], -choice[1]), default=None
        )
        if best is not None and saved(best[2]) > 0:
            return best[2]
    return None


@anything
@given(partitioned_trees(max_trajectories=9), st.integers(1, 4), st.integers(0, 3))
def test_repair_applies_the_best_moves_and_swaps_of_counted_prefixes(drawn, nearby, iterations):
    paths, cost, capacity, partition = drawn
    options = dict(capacity=capacity, neighbourhood=nearby, iterations=iterations)
    repaired = repair_memberships(cost, partition, **options)
    assert_legal(repaired, paths, capacity)
    assert len(repaired.rows) == len(partition.rows)
    assert repaired.rows.sum() <= partition.rows.sum()
    labels = partition.microbatch_of_place.tolist()
    for _ in range(iterations):
        labels = brute_repair(paths, labels, capacity, nearby) or labels
    assert repaired.microbatch_of_place.tolist() == labels


def test_a_swap_repairs_what_no_move_can():
    paths = [(0, 0, 0, 0), (0, 0, 0, 1), (1, 0, 0, 0), (1, 0, 0, 1)]
    partition = partition_by(paths, [0, 1, 1, 0])
    repaired = repair_memberships(cost_of(paths), partition, capacity=8)
    assert repaired.microbatch_of_place.tolist() == [1, 1, 0, 0]
    assert repaired.rows.tolist() == [5, 5]
