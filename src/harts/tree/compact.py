"""The compact layout: rows in DFS preorder, the direct child first.

One order serves every layer. Each chain is contiguous, and row k is an ancestor of row q (or q)
iff k <= q < end[k].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from harts.data.trajectory import TrajectoryBatch
from harts.tree.order import Ints, TrajectoryOrder
from harts.tree.segments import SegmentForest


@dataclass(frozen=True)
class CompactLayout:
    """Where every row of a segment forest lies, and which trajectories pass through it.

    first_row, end_row: int64 (V,), compact row of each segment's first row, and one past the
        last row of its subtree.
    tokens: int32 (C,). positions: int32 (C,), depth in the trajectory. end: int32 (C,).
    multiplicity: int64 (C,), semantic positions that map to each row (Equation 20).
    compact_row_of_trie_row: int64 (C,).
    order, forest: what was laid out.
    """

    order: TrajectoryOrder
    forest: SegmentForest
    first_row: Ints
    end_row: Ints
    tokens: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    end: npt.NDArray[np.int32]
    multiplicity: Ints
    compact_row_of_trie_row: Ints

    @property
    def num_rows(self) -> int:
        """Compact rows C."""
        return len(self.tokens)

    @cached_property
    def semantic_to_compact(self) -> Ints:
        """Compact row of every token of every trajectory, trajectories by ascending id, (S,).

        The map m of Equation 3. O(S).
        """
        order, by_place = self.order, []
        base = np.concatenate([[0], np.cumsum(order.new_rows)])
        rows = np.empty(0, np.int64)
        for place in range(len(order.ids)):
            new = np.arange(base[place], base[place + 1])
            rows = np.concatenate([rows[: order.lcp[place]], new])
            by_place.append(rows)
        by_id = [by_place[place] for place in np.argsort(order.ids, kind="stable")]
        compact: Ints = self.compact_row_of_trie_row[np.concatenate(by_id)]
        return compact


def lay_out(
    batch: TrajectoryBatch, order: TrajectoryOrder, forest: SegmentForest, direct_child: Ints
) -> CompactLayout:
    """Lay a forest out in DFS preorder.

    direct_child: int64 (V,), the child that continues each segment's chain, -1 for a leaf.
    O(C + V), no recursion.
    """
    first_row, end_row = _preorder(forest, direct_child)
    segment_of_trie_row = np.repeat(np.arange(len(forest.length)), forest.length)
    offset = first_row - forest.first_row
    compact_row = np.arange(forest.num_rows) + offset[segment_of_trie_row]
    tokens = np.empty(forest.num_rows, np.int32)
    positions = np.empty(forest.num_rows, np.int32)
    end = np.empty(forest.num_rows, np.int32)
    depth = forest.start - forest.first_row
    tokens[compact_row] = _trie_tokens(batch, order)
    positions[compact_row] = np.arange(forest.num_rows) + depth[segment_of_trie_row]
    end[compact_row] = end_row[segment_of_trie_row]
    ends_here = np.bincount(compact_row[forest.end_row], minlength=forest.num_rows)
    ends_before = np.concatenate([[0], np.cumsum(ends_here)])
    multiplicity = ends_before[end] - ends_before[:-1]
    return CompactLayout(
        order=order,
        forest=forest,
        first_row=first_row,
        end_row=end_row,
        tokens=tokens,
        positions=positions,
        end=end,
        multiplicity=multiplicity,
        compact_row_of_trie_row=compact_row,
    )


def _preorder(forest: SegmentForest, direct_child: Ints) -> tuple[Ints, Ints]:
    """First compact row and subtree end of every segment."""
    parent, length, direct = forest.parent.tolist(), forest.length.tolist(), direct_child.tolist()
    subtree = list(length)
    for segment in range(len(parent) - 1, -1, -1):
        if parent[segment] >= 0:
            subtree[parent[segment]] += subtree[segment]
    first = [0] * len(parent)
    next_row = [0] * len(parent)  # where the next side branch of each segment goes
    next_root = 0
    for segment, above in enumerate(parent):  # parents come first, side branches in order
        if above < 0:
            first[segment], next_root = next_root, next_root + subtree[segment]
        elif direct[above] == segment:
            first[segment] = first[above] + length[above]
        else:
            first[segment] = next_row[above]
            next_row[above] += subtree[segment]
        after_own = first[segment] + length[segment]
        chosen = direct[segment]
        next_row[segment] = after_own + (subtree[chosen] if chosen >= 0 else 0)
    first_row = np.array(first, dtype=np.int64)
    return first_row, first_row + np.array(subtree, dtype=np.int64)


def _trie_tokens(batch: TrajectoryBatch, order: TrajectoryOrder) -> npt.NDArray[np.int32]:
    """Tokens in trie-row order: the part of each sorted trajectory that is new."""
    pieces = [
        batch.tokens[batch.offsets[i] + shared : batch.offsets[i + 1]]
        for i, shared in zip(order.ids.tolist(), order.lcp.tolist(), strict=True)
    ]
    return np.concatenate(pieces)
