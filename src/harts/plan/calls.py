"""Minimum-call planning for linear attention (paper section 3.3, Algorithm 1).

A chain is a run of segments joined by direct continuation; every other child starts a chain of
its own from the chunk-boundary state below the fork, replaying the rows from there. The plan
uses the least number of rounds (packed calls that depend on each other), in O(V + E).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from harts.errors import PlanError
from harts.plan.options import at_least_one
from harts.tree.order import Ints


@dataclass(frozen=True)
class Sequence:
    """One chain: the paper's input sequence.

    round: from 1. segments: in order. start: depth of the first own row. anchor: the chunk
    boundary it starts from. source: index of the sequence that passes that boundary inside its
    own rows or replay, -1 where the start state is zero (anchor 0).
    """

    round: int
    segments: tuple[int, ...]
    start: int
    anchor: int
    source: int

    @property
    def replay(self) -> int:
        """Ancestor rows fed again to the core, without outputs."""
        return self.start - self.anchor


@dataclass(frozen=True)
class CallPlan:
    """Chains of a segment forest by round; sequences are in discovery order, parents first."""

    sequences: tuple[Sequence, ...]
    num_rounds: int
    direct_child: Ints

    @cached_property
    def replay_tokens(self) -> int:
        """Total replay R (Equation 15); it does not depend on the choices made."""
        return sum(sequence.replay for sequence in self.sequences)


def plan_calls(
    parent: SequenceABC[int] | Ints, length: SequenceABC[int] | Ints, *, chunk_size: int = 64
) -> CallPlan:
    """Plan the chains and rounds of a segment tree, or of several trees at once.

    parent: (V,), -1 for a root, parents before children. length: (V,), rows of each segment.
    Rounds with the same number of independent trees merge. O(V + E) time, O(V) memory.
    Raises PlanError on malformed trees.
    """
    chunk_size = at_least_one("chunk_size", chunk_size)
    parents, lengths = _checked(parent, length)
    children: list[list[int]] = [[] for _ in parents]
    end = list(lengths)
    for segment, above in enumerate(parents):
        if above >= 0:
            children[above].append(segment)
            end[segment] += end[above]
    anchor = [(end[s] - lengths[s]) // chunk_size * chunk_size for s in range(len(parents))]
    # a segment that ends before its next chunk boundary leaves the state of its anchor usable
    crosses = [end[s] >= anchor[s] + chunk_size for s in range(len(parents))]
    pre, inside = _minimum_rounds(children, crosses)
    return _recover(parents, children, end, lengths, crosses, pre, inside, chunk_size)


def _checked(
    parent: SequenceABC[int] | Ints, length: SequenceABC[int] | Ints
) -> tuple[list[int], list[int]]:
    parents, lengths = _whole("parent", parent), _whole("length", length)
    if len(parents) != len(lengths) or not parents:
        raise PlanError(
            f"the segment tree has {len(parents)} parents and {len(lengths)} lengths; "
            "give one of each for every segment, at least one"
        )
    for segment, (above, rows) in enumerate(zip(parents, lengths, strict=True)):
        if not -1 <= above < segment:
            raise PlanError(
                f"segment {segment} has parent {above}; list parents before children, -1 for a root"
            )
        if rows < 1:
            raise PlanError(f"segment {segment} has {rows} rows; every segment needs at least 1")
    return parents, lengths


def _whole(name: str, values: SequenceABC[int] | Ints) -> list[int]:
    for place, value in enumerate(values):
        if not isinstance(value, int | np.integer):
            raise PlanError(f"{name}[{place}] is {value!r}; give whole numbers")
    return [int(value) for value in values]


def _minimum_rounds(children: list[list[int]], crosses: list[bool]) -> tuple[list[int], list[int]]:
    """T_pre and T_in of every segment (Equations 12 to 14), children before parents."""
    pre = [1] * len(children)
    inside = [1] * len(children)
    for segment in range(len(children) - 1, -1, -1):
        below = children[segment]
        if not below:
            continue
        largest = second = 0
        for child in below:
            if pre[child] > largest:
                largest, second = pre[child], largest
            elif pre[child] > second:
                second = pre[child]
        num_largest = sum(pre[child] == largest for child in below)
        best = 0
        for child in below:
            alone_largest = pre[child] == largest and num_largest == 1
            others = second if alone_largest else largest
            rounds = max(inside[child], 1 + others)
            best = rounds if best == 0 else min(best, rounds)
        inside[segment] = best
        pre[segment] = best if crosses[segment] else largest
    return pre, inside


def _recover(
    parents: list[int],
    children: list[list[int]],
    end: list[int],
    lengths: list[int],
    crosses: list[bool],
    pre: list[int],
    inside: list[int],
    chunk_size: int,
) -> CallPlan:
    """Hand the round budgets down from the roots (procedure Recover), without recursion."""
    members: list[list[int]] = []
    headers: list[tuple[int, int, int, int]] = []  # round, start, anchor, source
    direct = [-1] * len(parents)
    # a segment, whether its anchor state is ready, rounds left, round, and the sequence it
    # continues or branches off from
    todo = [(root, True, pre[root], 1, -1) for root, above in enumerate(parents) if above < 0]
    todo.reverse()
    while todo:
        segment, ready, budget, round_, sequence = todo.pop()
        above = parents[segment]
        if above < 0 or direct[above] != segment:  # a root or a side branch: a new sequence
            start = end[segment] - lengths[segment]
            start_anchor = start // chunk_size * chunk_size
            headers.append((round_, start, start_anchor, sequence if start_anchor else -1))
            members.append([])
            sequence = len(members) - 1
        members[sequence].append(segment)
        below = children[segment]
        if not below:
            continue
        same = ready and not crosses[segment]
        side_round = round_ if same else round_ + 1
        side_budget = budget if same else budget - 1
        over = sum(pre[child] > side_budget for child in below)
        chosen = next(
            child
            for child in below
            if (pre[child] if same else inside[child]) <= budget
            and over - (pre[child] > side_budget) == 0
        )
        direct[segment] = chosen
        todo.extend(
            (child, True, side_budget, side_round, sequence)
            for child in reversed(below)
            if child != chosen
        )
        todo.append((chosen, same, budget, round_, sequence))
    sequences = tuple(
        Sequence(round_, tuple(segments), start, anchor, source)
        for (round_, start, anchor, source), segments in zip(headers, members, strict=True)
    )
    return CallPlan(
        sequences=sequences,
        num_rounds=max(sequence.round for sequence in sequences),
        direct_child=np.array(direct, dtype=np.int64),
    )
