"""The tree of the fidelity benchmark, the depth of its rows, and other ways to run its rows.

Legend: C compact rows, S tokens of all trajectories.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import harts
from harts.plan.calls import CallPlan, Sequence
from harts.plan.microbatch import MicroBatch
from harts.tree.order import Ints, TrajectoryOrder, sort_trajectories
from harts.views.chains import chains_of
from harts.views.conv import build_conv_view
from harts.views.linear import build_linear_view
from harts.views.packing import pack_chains
from harts.views.tree import TreeView

CHUNK = 64
DEPTH = 5
_CHILDREN = (3, 3, 2, 2, 2)  # of a segment at each depth: at most two of them continue its chain
_ROOT_ROWS = (130, 180)
_INNER_ROWS = (CHUNK, 120)  # from a whole chunk up, so that each makes a boundary state of its own
_SHORT_ROWS = (1, 60)


def forked_batch(
    rows: int, vocabulary: int, *, depth: int = DEPTH, seed: int = 0
) -> harts.TrajectoryBatch:
    """Trajectories of one tree of exactly `rows` unique tokens, up to `depth` forks deep.

    Every inner segment has two or three children that go on, and every second one a short tooth
    beside them. Half of the leaves at the bottom are short, the others share the rows that are
    left. No fork lies on a chunk boundary. Tokens are random, all but the first are scored.
    Raises ValueError where the rows do not suffice.
    """
    rng = np.random.default_rng(seed)
    tree = _Tree(rng)
    tree.grow(tree.add(-1, _ROOT_ROWS, forks=True), 0, depth)
    spare = rows - sum(tree.length)
    if spare < 0:
        raise ValueError(f"rows is {rows}, the tree has {sum(tree.length)} at depth {depth}; more")
    share = np.cumsum(rng.dirichlet(np.full(len(tree.long), 4.0)))
    more = np.diff(np.round(share * spare), prepend=0).astype(int)
    for leaf, extra in zip(tree.long, more.tolist(), strict=True):
        tree.length[leaf] += extra
    tokens = [rng.integers(0, vocabulary, length) for length in tree.length]
    for segment, above in enumerate(tree.parent):  # siblings differ in their first token
        tokens[segment][0] = tree.parent[:segment].count(above)
    leaves = sorted(set(range(len(tree.parent))) - set(tree.parent))
    paths = [np.concatenate([tokens[s] for s in tree.path(leaf)]) for leaf in leaves]
    return harts.TrajectoryBatch.from_rows(
        [{"input_ids": ids, "loss_mask": np.arange(len(ids)) > 0} for ids in paths]
    )


@dataclass
class _Tree:
    rng: np.random.Generator
    parent: list[int] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    long: list[int] = field(default_factory=list)

    def add(self, parent: int, rows: tuple[int, int], *, forks: bool) -> int:
        begin = self.end[parent] if parent >= 0 else 0
        length = int(self.rng.integers(*rows))
        if forks and (begin + length) % CHUNK == 0:
            length += 1
        self.parent.append(parent)
        self.length.append(length)
        self.end.append(begin + length)
        return len(self.parent) - 1

    def grow(self, segment: int, at: int, depth: int) -> None:
        below_is_leaf = at + 1 == depth
        rows = _SHORT_ROWS if below_is_leaf else _INNER_ROWS
        for rank in range(_CHILDREN[at]):
            child = self.add(segment, rows, forks=not below_is_leaf)
            if not below_is_leaf:
                self.grow(child, at + 1, depth)
            elif rank % 2 == 0:
                self.long.append(child)
        if segment % 2 == 0:
            self.add(segment, _SHORT_ROWS, forks=False)

    def path(self, segment: int) -> list[int]:
        return [*self.path(self.parent[segment]), segment] if segment >= 0 else []


def whole_tree(batch: harts.TrajectoryBatch) -> MicroBatch:
    """All trajectories in one microbatch, shared rows once."""
    return MicroBatch(0, batch, sort_trajectories(batch), CHUNK)


def expanded(batch: harts.TrajectoryBatch, order: Ints, capacity: int) -> list[MicroBatch]:
    """Nothing shared: trajectories in the given order (N,), next-fit into the capacity in rows."""
    groups: list[list[int]] = [[]]
    for trajectory in order.tolist():
        rows = int(batch.lengths[[*groups[-1], trajectory]].sum())
        if groups[-1] and rows > capacity:
            groups.append([])
        groups[-1].append(trajectory)
    microbatches = []
    for index, group in enumerate(groups):
        ids = np.array(group, np.int64)
        alone = TrajectoryOrder(ids, np.zeros(len(ids), np.int64), batch.lengths[ids])
        microbatches.append(MicroBatch(index, batch, alone, CHUNK))
    return microbatches


def depth_of_rows(tree: MicroBatch) -> dict[str, Ints]:
    """Depth of every compact row, (C,), counted in two ways.

    fork: segments above the row's own, the handoff depth of the paper's section 5.4.
    chain: states that were handed from one chain of the plan to the next on the way to the row;
    fewer, as one child of a fork continues its parent's chain.
    """
    forest, calls, layout = tree.forest, tree.calls, tree.layout
    rows = {name: np.empty(tree.num_rows, np.int64) for name in ("fork", "chain")}
    of_segment = _forks_above(forest.parent)
    for first, length, forks in zip(layout.first_row, forest.length, of_segment, strict=True):
        rows["fork"][first : first + length] = forks
    of_chain: list[int] = []
    for sequence, chain in zip(calls.sequences, chains_of(tree), strict=True):
        handed = 0
        if sequence.source >= 0:  # a source that started there itself handed nothing over
            new_state = sequence.anchor > calls.sequences[sequence.source].anchor
            handed = of_chain[sequence.source] + new_state
        of_chain.append(handed)
        rows["chain"][chain.start : chain.stop] = handed
    return rows


def without_replay(tree: MicroBatch, view: TreeView, device: torch.device) -> TreeView:
    """The view where every segment is a chain that starts from its parent's end state.

    The chunk grid begins anew at every fork, and nothing is replayed: the same function of exact
    numbers, other chunks. Attention and everything else stay as they are.
    """
    calls = _segments_as_chains(tree)
    as_planned: Any = SimpleNamespace(
        chunk_size=tree.chunk_size, layout=tree.layout, forest=tree.forest, calls=calls
    )
    start = tree.forest.start
    chains = [
        replace(chain, depth=depth)
        for chain, depth in zip(chains_of(as_planned), start.tolist(), strict=True)
    ]
    packing = pack_chains(as_planned, chains)
    packing = replace(packing, anchor=start[packing.by_round])
    return replace(
        view,
        linear=build_linear_view(as_planned, packing, device),
        conv={w: build_conv_view(packing, chains, w, device) for w in view.conv},
    )


def _segments_as_chains(tree: MicroBatch) -> CallPlan:
    """One sequence a segment, at depths where every segment above is filled up to whole chunks.

    There the end of a segment, ragged or not, is the chunk boundary that its children start from.
    """
    parents, chunk = tree.forest.parent.tolist(), tree.chunk_size
    chunks = (-(-tree.forest.length // chunk)).tolist()
    rounds = (1 + _forks_above(tree.forest.parent)).tolist()
    begin: list[int] = []
    for above in parents:
        begin.append(begin[above] + chunks[above] * chunk if above >= 0 else 0)
    sequences = tuple(
        Sequence(rounds[s], (s,), begin[s], begin[s], parents[s]) for s in range(len(parents))
    )
    return CallPlan(sequences, max(rounds), np.full(len(parents), -1))


def _forks_above(parent: Ints) -> Ints:
    depth = np.zeros(len(parent), np.int64)
    for segment, above in enumerate(parent.tolist()):
        if above >= 0:
            depth[segment] = depth[above] + 1
    return depth


@dataclass(frozen=True)
class Rows:
    """The compact rows of the tree, which all runs are compared on.

    of_position: (S,), row of every token of the batch. first_position: (C,), token of the first
    trajectory that holds each row. depth: way of counting -> (C,). sampled: (n,) rows, ascending,
    whose logits are compared. chosen: way -> one (n_d,) index into `sampled` for each depth.
    """

    of_position: np.ndarray
    first_position: np.ndarray
    depth: dict[str, np.ndarray]
    sampled: np.ndarray
    chosen: dict[str, list[np.ndarray]]


@dataclass(frozen=True)
class Piece:
    """The view of a microbatch, and where its rows belong; all index tensors int64.

    tree_row: (own rows,), the tree's row. scored: (P,), position in the batch of each log-prob.
    first_row, first_tree_row: own rows that are the first to hold a tree row, and that row.
    sample_row, sample: own rows whose logits are compared, and their places in `Rows.sampled`.
    """

    view: TreeView
    tree_row: torch.Tensor
    scored: torch.Tensor
    first_row: torch.Tensor
    first_tree_row: torch.Tensor
    sample_row: torch.Tensor
    sample: torch.Tensor


def rows_of(tree: MicroBatch, samples: int, seed: int) -> Rows:
    """Sample up to `samples` rows of every depth, for both ways of counting."""
    of_position = tree.layout.semantic_to_compact
    _, first_position = np.unique(of_position, return_index=True)
    depth = depth_of_rows(tree)
    rng = np.random.default_rng(seed)
    picked = {
        way: [
            np.sort(rng.permutation(np.flatnonzero(of_row == d))[:samples])
            for d in range(int(of_row.max()) + 1)
        ]
        for way, of_row in depth.items()
    }
    sampled = np.unique(np.concatenate([rows for by_depth in picked.values() for rows in by_depth]))
    chosen = {way: [np.searchsorted(sampled, r) for r in rows] for way, rows in picked.items()}
    return Rows(of_position, first_position, depth, sampled, chosen)


def piece_of(microbatch: MicroBatch, view: TreeView, rows: Rows) -> Piece:
    """Where the rows of any microbatch of the batch belong in the tree."""
    position, own_row = microbatch.batch_position, microbatch.layout.semantic_to_compact
    tree_row = np.empty(microbatch.num_rows, np.int64)
    tree_row[own_row] = rows.of_position[position]
    is_first = rows.first_position[rows.of_position[position]] == position
    first_row, first_tree_row = own_row[is_first], rows.of_position[position[is_first]]
    sample = np.minimum(np.searchsorted(rows.sampled, first_tree_row), len(rows.sampled) - 1)
    is_sampled = rows.sampled[sample] == first_tree_row
    arrays = (
        tree_row,
        position[microbatch.scored],
        first_row,
        first_tree_row,
        first_row[is_sampled],
        sample[is_sampled],
    )
    device = view.tokens.device
    return Piece(view, *(torch.from_numpy(x).to(device) for x in arrays))
