"""Why prefixes break: trajectories of a rollout that do not begin with all of an earlier one.

A trajectory of one more step should extend the one before. Where it does not, every row after the
break is computed again, although most of them repeat what came before.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harts.data.trajectory import TrajectoryBatch
from harts.inspection.alignment import Edit, Tokens, align
from harts.inspection.classify import Break, Decode, classify
from harts.inspection.paths import trie_paths
from harts.inspection.result import (
    BreakClass,
    BreakExample,
    BreakKind,
    Breaks,
    NamedTrajectory,
)
from harts.tree.order import Ints, RangeMinimum, TrajectoryOrder

MOST_PREDECESSORS = 32
"""Earlier trajectories of a rollout that are tried as the one that is continued."""

EXAMPLE_TOKENS = 24
"""Token ids on each side of a break that an example shows."""

EXAMPLE_TEXT_TOKENS = 160
"""Tokens that an example decodes, where a tokenizer is known."""


@dataclass(frozen=True)
class _Pairs:
    pairs: int
    extending: int
    broken: list[tuple[int, int, int]]  # previous, following, rows they share


def find_breaks(
    batch: TrajectoryBatch,
    order: TrajectoryOrder,
    rollouts: list[tuple[str, str]],
    rollout_field: str | None,
    decode: Decode | None,
) -> Breaks:
    """Find, explain and price the breaks of a batch.

    rollouts: (task, rollout) of each trajectory, (N,); their trajectories are steps in batch
    order. A trajectory is compared with the earlier one (of the last MOST_PREDECESSORS) with
    which it shares most. decode: token ids -> text, or None. O(N) comparisons and O(T log T) for
    a broken pair of T tokens after its break.
    """
    if rollout_field is None:
        return Breaks(rollout_field=None, pairs=0, extending=0, classes=())
    pairs = _pairs(order, rollouts)
    first_of_rollout = {key: i for i, key in reversed(list(enumerate(rollouts)))}
    breaks = []
    for previous, following, shared in pairs.broken:
        first = first_of_rollout[rollouts[following]]
        breaks.append(_explained(batch, previous, following, shared, first))
    kinds = classify(breaks, decode)
    costs = _unique_costs(order, breaks, kinds)
    return Breaks(
        rollout_field=rollout_field,
        pairs=pairs.pairs,
        extending=pairs.extending,
        classes=_by_kind(batch, breaks, kinds, costs, decode),
    )


def _pairs(order: TrajectoryOrder, rollouts: list[tuple[str, str]]) -> _Pairs:
    """Each trajectory with the earlier one of its rollout that it continues most of."""
    place = np.empty(len(order.ids), np.int64)
    place[order.ids] = np.arange(len(order.ids))
    places, shared_rows = place.tolist(), RangeMinimum(order.lcp)
    lengths = order.lengths[place].tolist()

    def shared(a: int, b: int) -> int:
        low, high = sorted((places[a], places[b]))
        return shared_rows(low + 1, high + 1)

    earlier: dict[tuple[str, str], list[int]] = {}
    pairs, extending, broken = 0, 0, []
    for following, rollout in enumerate(rollouts):
        candidates = earlier.setdefault(rollout, [])
        if candidates:
            pairs += 1
            most, previous = max((shared(c, following), c) for c in candidates)
            if most == min(lengths[previous], lengths[following]):
                extending += 1
            else:
                broken.append((previous, following, most))
        candidates.append(following)
        del candidates[:-MOST_PREDECESSORS]
    return _Pairs(pairs, extending, broken)


def _explained(
    batch: TrajectoryBatch, previous: int, following: int, shared: int, first: int
) -> Break:
    old, new = _tokens(batch, previous), _tokens(batch, following)
    is_same_token = shared < min(len(old), len(new)) and old[shared] == new[shared]
    return Break(
        previous=previous,
        following=following,
        position=shared,
        old=old,
        new=new,
        old_mask=batch.loss_mask[batch.offsets[previous] : batch.offsets[previous + 1]],
        prompt=_prompt_length(batch, first),
        # rows that differ by identity alone have no tokens to compare
        edits=() if is_same_token else tuple(align(old, new, shared)),
    )


def _prompt_length(batch: TrajectoryBatch, trajectory: int) -> int:
    """Tokens before the first scored one; all of them where none is scored."""
    begin, end = batch.offsets[trajectory : trajectory + 2].tolist()
    mask = batch.loss_mask[begin:end]
    return int(mask.argmax()) if mask.any() else end - begin


def _unique_costs(
    order: TrajectoryOrder, breaks: list[Break], kinds: list[BreakKind]
) -> Counter[BreakKind]:
    """Rows after each break that repeat the previous trajectory; each row counts once."""
    by_trajectory: dict[int, list[int]] = {}
    for index, found in enumerate(breaks):
        by_trajectory.setdefault(found.following, []).append(index)
    is_counted = np.zeros(int(order.new_rows.sum()), np.bool_)
    costs: Counter[BreakKind] = Counter()
    for trajectory, path in zip(order.ids.tolist(), trie_paths(order), strict=True):
        for index in by_trajectory.get(trajectory, ()):
            rows = path.rows(_repeated_positions(breaks[index]))
            costs[kinds[index]] += int((~is_counted[rows]).sum())
            is_counted[rows] = True
    return costs


def _repeated_positions(found: Break) -> Ints:
    """Positions of the following trajectory that repeat the previous one after the break."""
    if not found.edits:  # identity: token by token
        end = min(len(found.old), len(found.new))
        return found.position + np.flatnonzero(
            found.old[found.position : end] == found.new[found.position : end]
        )
    runs = found.repeated_runs()
    return np.concatenate([np.arange(a, b) for a, b in runs]) if runs else np.zeros(0, np.int64)


def _by_kind(
    batch: TrajectoryBatch,
    breaks: list[Break],
    kinds: list[BreakKind],
    costs: Counter[BreakKind],
    decode: Decode | None,
) -> tuple[BreakClass, ...]:
    classes = []
    for kind, count in Counter(kinds).items():
        members = [found for found, own in zip(breaks, kinds, strict=True) if own == kind]
        most_telling = max(members, key=lambda found: found.found_again)
        example = _example(batch, most_telling, decode)
        classes.append(BreakClass(kind=kind, count=count, cost_rows=costs[kind], example=example))
    return tuple(sorted(classes, key=lambda entry: (-entry.cost_rows, -entry.count, entry.kind)))


def _example(batch: TrajectoryBatch, found: Break, decode: Decode | None) -> BreakExample:
    position = found.position
    edit = found.edits[0] if found.edits else Edit(position, position, position, position, True)
    before = found.old[max(0, position - EXAMPLE_TEXT_TOKENS) : position]
    removed = found.old[edit.old_begin : edit.old_end][:EXAMPLE_TEXT_TOKENS]
    inserted = found.new[edit.new_begin : edit.new_end][:EXAMPLE_TEXT_TOKENS]
    texts = [
        None if decode is None else decode(part.tolist()) for part in (before, removed, inserted)
    ]
    return BreakExample(
        previous=named(batch, found.previous),
        following=named(batch, found.following),
        position=position,
        removed_tokens=edit.removed,
        inserted_tokens=edit.inserted,
        found_again=found.found_again,
        before=tuple(before[-EXAMPLE_TOKENS:].tolist()),
        removed=tuple(removed[:EXAMPLE_TOKENS].tolist()),
        inserted=tuple(inserted[:EXAMPLE_TOKENS].tolist()),
        before_text=texts[0],
        removed_text=texts[1],
        inserted_text=texts[2],
    )


def named(batch: TrajectoryBatch, index: int) -> NamedTrajectory:
    """A trajectory with its name and length."""
    return NamedTrajectory(index=index, name=batch.name_of(index), tokens=int(batch.lengths[index]))


def _tokens(batch: TrajectoryBatch, index: int) -> Tokens:
    tokens: npt.NDArray[np.int32] = batch.tokens[batch.offsets[index] : batch.offsets[index + 1]]
    return tokens
