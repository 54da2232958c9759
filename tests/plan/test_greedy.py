import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.plan.greedy import greedy_candidate, greedy_plans
from tests.plan.memberships import assert_legal, assert_same
from tests.plan.ordered_trees import groups_of, needs_numba, priced_trees, random_cost, trie_rows
from tests.planner_oracles import common_prefix

anything = settings(deadline=None, max_examples=100)


def brute_plans(paths, capacity):
    """Eight greedy plans before alignment, as lists of places, by counting prefixes."""
    num = len(paths)

    def rows(places):
        return trie_rows([paths[p] for p in places])

    def suffix(x):
        near = [y for y in (x - 1, x + 1) if 0 <= y < num]
        return len(paths[x]) - max((common_prefix(paths[x], paths[y]) for y in near), default=0)

    def shared(x, group):
        return len(paths[x]) - (rows([*group, x]) - rows(group))

    ascending = list(range(num))
    for processing in (
        ascending,
        ascending[::-1],
        sorted(ascending, key=lambda x: -len(paths[x])),
        sorted(ascending, key=lambda x: -suffix(x)),
    ):
        for best_fit in (True, False):
            groups = []
            for x in processing:
                score = [
                    (rows([*group, x]) if best_fit else shared(x, group), -k)
                    for k, group in enumerate(groups)
                    if rows([*group, x]) <= capacity
                ]
                if score:
                    groups[-max(score)[1]].append(x)
                else:
                    groups.append([x])
            yield without_small(groups, rows, shared, capacity)


def without_small(groups, rows, shared, capacity):
    for k in sorted(range(len(groups)), key=lambda k: rows(groups[k])):
        trial = [list(group) for group in groups]
        members, trial[k] = sorted(trial[k]), []
        for x in members:
            score = [
                (shared(x, group), -j)
                for j, group in enumerate(trial)
                if group and j != k and rows([*group, x]) <= capacity
            ]
            if not score:
                break
            trial[-max(score)[1]].append(x)
        else:
            groups = trial
    return [sorted(group) for group in groups if group]


@anything
@given(priced_trees())
def test_the_eight_plans_are_those_of_counting_prefixes(drawn):
    paths, cost, capacity = drawn
    expected = [sorted(groups) for groups in brute_plans(paths, capacity)]
    plans = greedy_plans(cost, capacity=capacity, replicas=1, use_numba=False)
    assert [sorted(groups_of(plan)) for plan in plans] == expected


@anything
@given(priced_trees(), st.integers(1, 4))
def test_every_plan_is_legal_and_the_candidate_has_fewest_microbatches(drawn, replicas):
    paths, cost, capacity = drawn
    plans = greedy_plans(cost, capacity=capacity, replicas=replicas, use_numba=False)
    best = greedy_candidate(cost, capacity=capacity, replicas=replicas, use_numba=False)
    for plan in plans:
        assert_legal(plan, paths, capacity, replicas=replicas)
    if not plans:
        assert best is None
        return
    key = min((len(plan.rows), plan.rows.sum()) for plan in plans)
    assert (len(best.rows), best.rows.sum()) == key


def test_there_is_no_plan_where_trajectories_are_too_few_to_align():
    cost = random_cost(3, 3)
    assert greedy_candidate(cost, capacity=100, replicas=4, use_numba=False) is None


@needs_numba
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num", [1, 2, 90, 300])
def test_numba_and_numpy_agree(seed, num):
    cost = random_cost(seed, num)
    for capacity in (9, 14, 30):
        arguments = dict(capacity=capacity, replicas=1 + seed)
        fast = greedy_plans(cost, **arguments, use_numba=True)
        slow = greedy_plans(cost, **arguments, use_numba=False)
        assert len(fast) == len(slow)
        for one, other in zip(fast, slow, strict=True):
            assert_same(one, other)
