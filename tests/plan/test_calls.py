import json
import re
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.errors import PlanError
from harts.plan.calls import plan_calls
from harts.plan.verify import verify_calls
from tests.planner_oracles import (
    brute_minimum_rounds,
    direct_choices,
    mandatory_replay,
    rounds_of_choice,
    starts_and_ends,
)

B = 8
PAPER_B = 64


@st.composite
def segment_forests(draw, *, max_segments=8, chunk_size=B, trees=1):
    """parent and length; lengths favour one row and ends around chunk boundaries."""
    count = draw(st.integers(1, max_segments))
    parent = [-1] + [draw(st.integers(-1 if trees > 1 else 0, s - 1)) for s in range(1, count)]
    length = []
    for above in parent:
        start = starts_and_ends(parent[: len(length)], length)[1][above] if above >= 0 else 0
        to_boundary = chunk_size - start % chunk_size
        edges = [to_boundary + d for d in (-1, 0, 1, chunk_size) if to_boundary + d > 0]
        length.append(draw(st.sampled_from([1, *edges]) | st.integers(1, 2 * chunk_size)))
    return parent, length


def by_round(plan, names):
    """{round: {(names along the chain, replay), ...}}"""
    rounds = {}
    for s in plan.sequences:
        chain = " ".join(names[segment] for segment in s.segments)
        rounds.setdefault(s.round, set()).add((chain, s.replay))
    return rounds


def children_at_root(*lengths):
    """A root of the first length with children of the others."""
    return [-1] + [0] * (len(lengths) - 1), list(lengths)


@settings(deadline=None, max_examples=300)
@given(segment_forests(max_segments=8))
def test_num_rounds_is_the_minimum_over_every_choice_of_direct_children(tree):
    parent, length = tree
    plan = plan_calls(parent, length, chunk_size=B)
    assert plan.num_rounds == brute_minimum_rounds(parent, length, B)


def random_tree(rng, count):
    """A segment tree whose forks often fall around chunk boundaries."""
    parent = [-1, *(int(rng.integers(max(0, s - 5), s)) for s in range(1, count))]
    return parent, rng.choice([1, 1, 2, B - 1, B, B + 1], count).tolist()


@pytest.mark.parametrize("count", [6, 7, 8, 9])
def test_num_rounds_is_the_minimum_on_hundreds_of_random_trees(count):
    rng = np.random.default_rng(count)
    for _ in range(600):
        parent, length = random_tree(rng, count)
        plan = plan_calls(parent, length, chunk_size=B)
        assert plan.num_rounds == brute_minimum_rounds(parent, length, B), (parent, length)


def test_a_side_branch_that_forks_before_its_next_boundary_is_not_worth_continuing():
    # 1 forks again without another round, 2 only with one: 2 must continue the root, not 1
    parent, length = [-1, 0, 0, 1, 1, 2, 2], [B, 1, B, 1, 1, 1, 1]
    plan = plan_calls(parent, length, chunk_size=B)
    assert plan.num_rounds == 2
    assert plan.direct_child[0] == 2


def test_a_side_branch_has_one_round_less_to_spend_than_the_chain_it_leaves():
    # 1 is a complete tree of three levels; 2 is the tree of the last test, a round later
    parent = [-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    length = [B, B, B, B, B, 1, B, *[1] * 8]
    assert plan_calls(parent, length, chunk_size=B).num_rounds == 3


@settings(deadline=None, max_examples=100)
@given(segment_forests(max_segments=8, trees=3))
def test_num_rounds_of_a_forest_is_the_maximum_over_its_trees(forest):
    parent, length = forest
    assert plan_calls(parent, length, chunk_size=B).num_rounds == brute_minimum_rounds(
        parent, length, B
    )


@settings(deadline=None, max_examples=200)
@given(segment_forests(max_segments=30, trees=2), st.sampled_from([1, 2, 3, B, PAPER_B]))
def test_every_chain_runs_in_the_earliest_round_its_start_state_allows(forest, chunk_size):
    parent, length = forest
    plan = plan_calls(parent, length, chunk_size=chunk_size)
    earliest = rounds_of_choice(parent, length, plan.direct_child.tolist(), chunk_size)
    for sequence in plan.sequences:
        assert {earliest[segment] for segment in sequence.segments} == {sequence.round}


@settings(deadline=None, max_examples=200)
@given(segment_forests(max_segments=30, trees=2), st.sampled_from([1, 2, 3, B, PAPER_B]))
def test_plans_of_any_forest_are_legal_and_replay_what_equation_15_says(forest, chunk_size):
    parent, length = forest
    plan = plan_calls(np.array(parent), np.array(length), chunk_size=chunk_size)
    verify_calls(plan, np.array(parent), np.array(length), chunk_size)
    assert plan.replay_tokens == mandatory_replay(parent, length, chunk_size)
    assert {s.round for s in plan.sequences} == set(range(1, plan.num_rounds + 1))
    starts, _ = starts_and_ends(parent, length)
    for sequence in plan.sequences:
        assert sequence.start == starts[sequence.segments[0]]
        assert sequence.replay == sequence.start - sequence.anchor == sequence.start % chunk_size
    assert all(plan.direct_child[s] >= 0 for s in set(parent) - {-1})


@settings(deadline=None, max_examples=50)
@given(segment_forests(max_segments=6))
def test_replay_does_not_depend_on_the_choice_of_direct_children(tree):
    parent, length = tree
    starts, _ = starts_and_ends(parent, length)
    complete = [c for c in direct_choices(parent) if all(c[s] >= 0 for s in set(parent) - {-1})]
    replays = {
        sum(starts[s] % B for s, above in enumerate(parent) if above >= 0 and choice[above] != s)
        for choice in complete
    }
    assert replays == {plan_calls(parent, length, chunk_size=B).replay_tokens}


@settings(deadline=None, max_examples=100)
@given(segment_forests(max_segments=12, trees=2))
def test_planning_twice_gives_the_same_plan(forest):
    first, second = (plan_calls(*forest, chunk_size=B) for _ in range(2))
    assert first.sequences == second.sequences
    assert first.direct_child.tolist() == second.direct_child.tolist()


@pytest.mark.parametrize(
    ("fork", "rounds", "replay"),
    [
        (1, 1, 1),
        (PAPER_B - 1, 1, 63),
        (PAPER_B, 2, 0),
        (PAPER_B + 1, 2, 1),
        (2 * PAPER_B - 1, 2, 63),
        (2 * PAPER_B, 2, 0),
        (2 * PAPER_B + 1, 2, 1),
    ],
)
def test_a_fork_at_or_beyond_the_chunk_boundary_costs_a_second_round(fork, rounds, replay):
    plan = plan_calls(*children_at_root(fork, 5, 5))
    assert (plan.num_rounds, plan.replay_tokens) == (rounds, replay)
    side = plan.sequences[1]
    assert (side.round, side.start, side.replay) == (rounds, fork, replay)
    assert side.anchor == fork - replay
    assert side.source == (0 if fork >= PAPER_B else -1)


@pytest.mark.parametrize(("rows", "rounds"), [(61, 2), (62, 2), (63, 3), (64, 3), (65, 3)])
def test_a_side_branch_forks_in_its_own_round_until_it_reaches_the_next_boundary(rows, rounds):
    # both children of a fork at 65 fork again; the boundary at 128 is 63 rows away
    parent, length = [-1, 0, 0, 1, 1, 2, 2], [PAPER_B + 1, rows, rows, 1, 1, 1, 1]
    assert plan_calls(parent, length).num_rounds == rounds
    assert brute_minimum_rounds(parent, length, PAPER_B) == rounds


def test_figure_2_needs_two_rounds():
    parent, length = [-1, 0, 0, 1, 1], [63, 2, 7, 70, 9]  # v0..v4: forks at B - 1 and B + 1
    plan = plan_calls(parent, length)
    assert plan.num_rounds == 2
    assert by_round(plan, ["v0", "v1", "v2", "v3", "v4"]) == {
        1: {("v0 v1 v3", 0), ("v2", 63)},
        2: {("v4", 1)},
    }


def tree_of(text):
    """`name length child child ...` a line, children in the figure's order -> names, arrays."""
    rows = [line.split() for line in text.strip().splitlines()]
    below = {name: children for name, _, *children in rows}
    length_of = {name: int(length) for name, length, *_ in rows}
    names, parent = [rows[0][0]], [-1]
    for place, name in enumerate(names):  # grows while it runs: parents first
        for child in below.get(name, []):
            names.append(child)
            parent.append(place)
    return names, parent, [length_of.get(name, 5) for name in names]


CASE_I = """
R1 3 A1 B1 C1
A1 2 A2 A3
A3 10 A4 A5
A4 73 A6 A7
A7 2 A8 A9
A8 1 A10 A11
B1 120 B2 B3
B2 1 B4 B5
B4 10 B6 B7
B7 6 B8 B9
C1 63 C2 C3
C2 1 C4 C5
C4 10 C6 C7
C6 110 C8 C9
C7 6 C10 C11
C10 52 C12 C13
C5 27 C14 C15
"""
CASE_I_ROUNDS = {
    1: {
        ("R1 A1 A2", 0),
        ("A3 A4 A6", 5),
        ("A5", 15),
        ("B1 B2 B4 B6", 3),
        ("C1 C2 C4 C6 C8", 3),
    },
    2: {
        ("A7 A8 A10", 24),
        ("A11", 27),
        ("A9", 26),
        ("B7 B8", 6),
        ("B9", 12),
        ("B5", 60),
        ("B3", 59),
        ("C9", 59),
        ("C7 C10 C12", 13),
        ("C11", 19),
        ("C5 C14", 3),
        ("C15", 30),
        ("C3", 2),
    },
    3: {("C13", 7)},
}
CASE_II = """
R2 3 D1 E1 F1
D1 2 D2 D3
D3 116 D5 D4
D5 42 D7 D6
D7 27 D8 D9
E1 121 E2 E3 E4 E5
E2 1 E6 E7
E3 1 E10 E11 E12 E13 E14 E15
E6 2 E8 E9
F1 64 F5 F2 F3 F4
F5 61 F16 F17
F2 2 F6
F6 1 F7 F8
F3 1 F9 F10 F11 F12 F13 F14 F15
"""
CASE_II_ROUNDS = {
    1: {("R2 D1 D2", 0), ("D3 D5 D7 D8", 5), ("E1 E2 E6 E8", 3), ("F1 F5 F16", 3)},
    2: {
        *(("D4", 57), ("D6", 35), ("D9", 62)),
        *(("E9", 63), ("E7", 61), ("E3 E10", 60), ("E4", 60), ("E5", 60)),
        *((f"E{k}", 61) for k in range(11, 16)),
        *(("F2 F6 F7", 3), ("F8", 6), ("F3 F9", 3), ("F4", 3), ("F17", 0)),
        *((f"F{k}", 4) for k in range(10, 16)),
    },
}


# The figures' token counts are not in the text; these lengths follow from its chains, rounds and
# replay lengths (a fork's replay is its depth modulo 64).
def test_appendix_case_1_needs_three_rounds_and_373_replayed_tokens():
    names, parent, length = tree_of(CASE_I)
    plan = plan_calls(parent, length)
    assert len(names) == 36
    assert (plan.num_rounds, plan.replay_tokens) == (3, 373)
    assert by_round(plan, names) == CASE_I_ROUNDS


def test_appendix_case_2_needs_two_rounds_and_813_replayed_tokens():
    names, parent, length = tree_of(CASE_II)
    plan = plan_calls(parent, length)
    assert len(names) == 42
    assert (plan.num_rounds, plan.replay_tokens) == (2, 813)
    assert by_round(plan, names) == CASE_II_ROUNDS


def test_a_chain_of_single_children_is_one_sequence_in_one_round():
    count = 400
    plan = plan_calls(list(range(-1, count - 1)), [B + 1] * count, chunk_size=B)
    assert plan.num_rounds == 1
    assert plan.sequences[0].segments == tuple(range(count))
    assert plan.replay_tokens == 0


def test_sequences_of_independent_trees_merge_by_round():
    one = ([-1, 0, 0], [B, 1, 1])
    plan = plan_calls([-1, 0, 0, -1, 3, 3, -1], [B, 1, 1, B - 1, 1, 1, 3], chunk_size=B)
    assert plan_calls(*one, chunk_size=B).num_rounds == plan.num_rounds == 2
    assert sorted(s.round for s in plan.sequences) == [1, 1, 1, 1, 2]


@pytest.mark.parametrize(("step", "rounds"), [(1, 2), (B, 2), (B + 1, 2)])
def test_a_caterpillar_126_levels_deep_needs_two_rounds(step, rounds):
    parent, length, spine = [-1], [step], 0
    for _ in range(126):
        parent += [spine, spine]
        length += [1, step]
        spine = len(parent) - 1
    plan = plan_calls(parent, length, chunk_size=B)
    assert plan.num_rounds == rounds
    verify_calls(plan, np.array(parent), np.array(length), B)


def test_a_complete_binary_tree_of_whole_chunks_needs_one_round_a_level():
    parent = [-1] + [(s - 1) // 2 for s in range(1, 2**7 - 1)]
    plan = plan_calls(parent, [B] * len(parent), chunk_size=B)
    assert plan.num_rounds == 7


def test_a_fan_out_of_hundreds_inside_the_first_chunk_is_one_round():
    plan = plan_calls([-1] + [0] * 500, [B - 1] + [3 * B] * 500, chunk_size=B)
    assert plan.num_rounds == 1
    assert plan.replay_tokens == 499 * (B - 1)


def test_chunks_of_one_row_replay_nothing():
    plan = plan_calls([-1, 0, 0, 1, 1], [1, 1, 1, 1, 1], chunk_size=1)
    assert plan.replay_tokens == 0
    assert plan.num_rounds == brute_minimum_rounds([-1, 0, 0, 1, 1], [1] * 5, 1)


def test_five_thousand_segments_are_planned_in_well_under_a_second():
    rng = np.random.default_rng(0)
    parent = np.concatenate([[-1], [rng.integers(0, s) for s in range(1, 5000)]])
    length = rng.integers(1, 200, 5000)
    started = time.process_time()
    plan = plan_calls(parent, length)
    assert time.process_time() - started < 0.5
    verify_calls(plan, parent, length, 64)
    assert plan.replay_tokens == sum(s.start % 64 for s in plan.sequences)


@pytest.mark.parametrize("count", [5000, 20_000])
def test_deep_segment_trees_are_planned_without_recursion(count):
    parent = [-1]
    while len(parent) < count:
        parent += [max(0, len(parent) - 2)] * 2
    plan = plan_calls(parent, [1] * len(parent))
    assert sum(len(s.segments) for s in plan.sequences) == len(parent)


@pytest.mark.parametrize(
    ("parent", "length", "chunk_size", "says"),
    [
        ([], [], 8, "the segment tree has 0 parents and 0 lengths"),
        ([-1, 0], [1], 8, "the segment tree has 2 parents and 1 lengths"),
        ([0], [1], 8, "segment 0 has parent 0"),
        ([-1, 2, 0], [1, 1, 1], 8, "segment 1 has parent 2"),
        ([-1, 1], [1, 1], 8, "segment 1 has parent 1"),
        ([-1, -2], [1, 1], 8, "segment 1 has parent -2"),
        ([-1, 5], [1, 1], 8, "segment 1 has parent 5"),
        ([-1, 0], [1, 0], 8, "segment 1 has 0 rows"),
        ([-1, 0], [-3, 1], 8, "segment 0 has -3 rows"),
        ([-1], [1], 0, "chunk_size is 0"),
        ([-1], [1], -64, "chunk_size is -64"),
        ([-1], [1], 6.4, "chunk_size is 6.4"),
    ],
)
def test_malformed_trees_are_refused_in_one_line(parent, length, chunk_size, says):
    with pytest.raises(PlanError, match=re.escape(says)) as caught:
        plan_calls(parent, length, chunk_size=chunk_size)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("parent", "length", "says"),
    [
        ([-1, 0.5], [1, 1], "parent[1] is 0.5"),
        ([-1, 0], [1, 2.5], "length[1] is 2.5"),
    ],
)
def test_fractions_are_refused_rather_than_rounded(parent, length, says):
    with pytest.raises(PlanError, match=re.escape(says)):
        plan_calls(parent, length)


# root of 2 chunks with two children, the second with two children a chunk later: three rounds
LEGAL = ([-1, 0, 0, 2, 2], [2 * B, 3, B + 2, 1, 1])


def mutated(plan, index, **changes):
    sequences = list(plan.sequences)
    sequences[index] = replace(sequences[index], **changes)
    return replace(plan, sequences=tuple(sequences))


def swapped(plan, i, j):
    """Exchange two sequences and rename sources so that only the order is wrong."""
    sequences = list(plan.sequences)
    sequences[i], sequences[j] = sequences[j], sequences[i]
    rename = {i: j, j: i}
    sequences = [replace(s, source=rename.get(s.source, s.source)) for s in sequences]
    return replace(plan, sequences=tuple(sequences))


MUTATIONS = {
    "a segment twice": (lambda p: mutated(p, 2, segments=(0,)), "every segment exactly once"),
    "a chain left out": (lambda p: replace(p, sequences=p.sequences[:-1]), "exactly once"),
    "an empty chain": (
        lambda p: replace(p, sequences=(*p.sequences, replace(p.sequences[2], segments=()))),
        "at least one segment",
    ),
    "a gap in the rounds": (lambda p: mutated(p, 2, round=4), "without gaps"),
    "a round 0": (lambda p: mutated(p, 2, round=0), "without gaps"),
    "too many rounds": (lambda p: replace(p, num_rounds=3), "without gaps"),
    "too few rounds": (lambda p: replace(p, num_rounds=1), "without gaps"),
    "segments out of order": (
        lambda p: mutated(p, 0, segments=p.sequences[0].segments[::-1]),
        "the child of the one before",
    ),
    "a wrong start": (lambda p: mutated(p, 1, start=B), "depth of its first own row"),
    "an earlier anchor": (lambda p: mutated(p, 1, anchor=B), "nearest chunk boundary"),
    "a source for the zero state": (lambda p: mutated(p, 0, source=1), "a zero start state"),
    "no source": (lambda p: mutated(p, 1, source=-1), "its parent's chain"),
    "itself as source": (lambda p: mutated(p, 1, source=1), "its parent's chain"),
    "a source that does not exist": (lambda p: mutated(p, 1, source=9), "its parent's chain"),
    "a source after its consumer": (lambda p: swapped(p, 0, 1), "its source before it"),
    "the round of its source": (lambda p: mutated(p, 1, round=1), "round 2 or later"),
    "another direct child": (
        lambda p: replace(p, direct_child=p.direct_child[::-1].copy()),
        "the segments that chains join",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_verify_calls_refuses(name):
    parent, length = LEGAL
    plan = plan_calls(parent, length, chunk_size=B)
    verify_calls(plan, np.array(parent), np.array(length), B)
    change, says = MUTATIONS[name]
    with pytest.raises(PlanError, match=re.escape(says)) as caught:
        verify_calls(change(plan), np.array(parent), np.array(length), B)
    assert "\n" not in str(caught.value)


@settings(deadline=None, max_examples=200)
@given(segment_forests(max_segments=12, trees=2), st.data())
def test_verify_calls_refuses_every_single_change_of_a_plan(forest, data):
    parent, length = (np.array(x) for x in forest)
    plan = plan_calls(parent, length, chunk_size=B)
    index = data.draw(st.integers(0, len(plan.sequences) - 1))
    sequence = plan.sequences[index]
    field = data.draw(st.sampled_from(["start", "anchor", "source", "segments", "direct"]))
    other = data.draw(st.integers(-1, 40))
    if field == "direct":
        direct = plan.direct_child.copy()
        direct[data.draw(st.integers(0, len(direct) - 1))] += 1 + other if other != -1 else -1
        changed = replace(plan, direct_child=direct)
        if direct.tolist() == plan.direct_child.tolist():
            return
    elif field == "segments":
        changed = mutated(plan, index, segments=sequence.segments[:-1])
    elif other == getattr(sequence, field):
        return
    else:
        changed = mutated(plan, index, **{field: other})
    with pytest.raises(PlanError):
        verify_calls(changed, parent, length, B)


def test_narrow_numpy_chunk_sizes_do_not_overflow():
    plan = plan_calls([-1, 0, 0], [3000, 1, 1], chunk_size=np.int8(64))
    assert plan.replay_tokens == 3000 % 64


def test_a_plan_holds_plain_python_numbers_only():
    plan = plan_calls(np.array([-1, 0, 0]), np.array([9, 1, 1], dtype=np.int32), chunk_size=8)
    json.dumps([vars(sequence) for sequence in plan.sequences])
    assert isinstance(plan.num_rounds, int) and isinstance(plan.replay_tokens, int)
