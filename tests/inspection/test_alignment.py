"""Edits between two token runs: they rebuild the new run, and are small where little changed."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harts.inspection.alignment import ANCHOR, MAX_EDITS, Edit, align


def tokens(values: object) -> np.ndarray:
    return np.array(values, np.int32)


def common_prefix(a: list[int], b: list[int]) -> int:
    shared = 0
    while shared < min(len(a), len(b)) and a[shared] == b[shared]:
        shared += 1
    return shared


def applied(old: list[int], new: list[int], edits: list[Edit]) -> list[int]:
    """The old tokens with every edit made: new tokens in place of old ones."""
    out, place = [], 0
    for edit in edits:
        out += old[place : edit.old_begin] + new[edit.new_begin : edit.new_end]
        place = edit.old_end
    return out + old[place:]


@given(st.data())
def test_edits_turn_the_old_run_into_a_prefix_of_the_new_one(data: st.DataObject) -> None:
    letters = st.integers(0, data.draw(st.sampled_from([1, 3, 500])))
    old = data.draw(st.lists(letters, min_size=1, max_size=80))
    new = list(old)
    for _ in range(data.draw(st.integers(0, 3))):
        a, b = sorted(data.draw(st.tuples(*[st.integers(0, len(new))] * 2)))
        new[a:b] = data.draw(st.lists(letters, max_size=12))
    edits = align(tokens(old), tokens(new), common_prefix(old, new))
    rebuilt = applied(old, new, edits)
    assert rebuilt == new[: len(rebuilt)]
    for edit in edits:
        assert edit.removed or edit.inserted
        assert 0 <= edit.old_begin <= edit.old_end <= len(old)
        assert 0 <= edit.new_begin <= edit.new_end <= len(new)
    for before, after in pairwise(edits):
        assert before.old_end < after.old_begin


@pytest.mark.parametrize(
    ("removed", "inserted"), [(4, 0), (0, 5), (3, 2), (700, 3), (20_000, 0), (5, 3000)]
)
def test_one_edit_far_from_the_end_is_found_whole(removed: int, inserted: int) -> None:
    draw = np.random.default_rng(0)
    old = draw.integers(0, 50_000, 30_000).astype(np.int32)
    middle = draw.integers(50_000, 60_000, inserted).astype(np.int32)
    new = np.concatenate([old[:100], middle, old[100 + removed :], middle])
    edits = align(old, new, 100)
    assert edits == [Edit(100, 100 + removed, 100, 100 + inserted, closed=True)]


@pytest.mark.parametrize("left", range(1, ANCHOR + 2))
def test_a_few_last_tokens_are_found_again_after_a_removal(left: int) -> None:
    old = tokens([1, 2, *range(100, 140), *range(10, 10 + left)])
    new = tokens([1, 2, *range(10, 10 + left), 7, 7, 7])
    assert align(old, new, 2) == [Edit(2, 42, 2, 2, closed=True)]


def test_a_close_agreement_wins_over_the_last_token_of_the_old_run() -> None:
    old = tokens([1, *range(1000, 1100), *range(2000, 2300), 9])
    new = tokens([1, 5, 9, *range(2000, 2300), 9])
    assert align(old, new, 1) == [Edit(1, 101, 1, 3, closed=True)]


def test_unrelated_runs_are_one_open_edit() -> None:
    old, new = tokens(range(100)), tokens(range(200, 290))
    assert align(old, new, 0) == [Edit(0, 100, 0, 90, closed=False)]


def test_an_old_run_that_goes_on_is_a_removal() -> None:
    old, new = tokens(range(20)), tokens(range(12))
    assert align(old, new, 12) == [Edit(12, 20, 12, 12, closed=True)]


def test_edits_beyond_the_limit_become_one() -> None:
    old = np.arange(20 * (MAX_EDITS + 50), dtype=np.int32)
    new = old.copy()
    new[10::20] += 1_000_000
    edits = align(old, new, 10)
    assert len(edits) == MAX_EDITS
    assert edits[-1].old_end == len(old)
    assert not edits[-1].closed
