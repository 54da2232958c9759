"""Tree shapes without text, one task a line: real forks and lengths under made-up token ids.

    {"task": "t1", "seg": [[parent, length], ...], "traj": [[end, trained_start, length, trial]]}

`seg` is a radix tree (parent -1 is a root, parents may follow children); a trajectory is the chain
of segments from a root to `end`, of which [trained_start, length) is scored. Siblings begin with
different ids, so the trie of the rows is exactly this tree; tasks share nothing.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from harts.data.formats.options import ReadOptions
from harts.data.formats.records import read_documents
from harts.data.formats.values import get
from harts.data.pieces import PieceRow
from harts.data.values import Array, fail

_VOCABULARY = 4096


def read_shapes(path: Path, options: ReadOptions) -> Iterator[PieceRow]:
    """Yield a row a trajectory. O(tokens of the segments + trajectories x depth)."""
    num_roots = 0
    for record, source in read_documents(path, progress=options.progress):
        parent, length = _pairs(get(record, "seg", list, source), source)
        order = _parents_first(parent, source)
        rank = np.zeros(len(parent), np.int64)
        num_children = np.zeros(len(parent) + 1, np.int64)
        num_children[-1] = num_roots  # parent -1: roots go on counting over the tasks
        for segment in order:
            rank[segment] = num_children[parent[segment]]
            num_children[parent[segment]] += 1
        num_roots = int(num_children[-1])
        tokens = [_tokens(int(r), int(n)) for r, n in zip(rank, length, strict=True)]
        for index, entry in enumerate(get(record, "traj", list, source)):
            yield _row(record, entry, f"{source} traj {index}", parent, tokens)


def _pairs(segments: list[Any], where: str) -> tuple[Array, Array]:
    try:
        pairs = np.array(segments, np.int64).reshape(-1, 2)
    except (TypeError, ValueError, OverflowError):
        fail(where, "seg is not a list of pairs", "give [parent, length] for each segment")
    parent, length = pairs[:, 0], pairs[:, 1]
    wrong = np.flatnonzero((parent < -1) | (parent >= len(parent)) | (length < 1))
    if wrong.size:
        index = int(wrong[0])
        problem = f"seg[{index}] is {pairs[index].tolist()}"
        fail(where, problem, "parents are -1 or a segment, lengths at least 1")
    return parent, length


def _parents_first(parent: Array, where: str) -> list[int]:
    children: list[list[int]] = [[] for _ in range(len(parent) + 1)]
    for segment, above in enumerate(parent.tolist()):
        children[above].append(segment)
    order = list(children[-1])
    for segment in order:  # grows while it is read
        order.extend(children[segment])
    if len(order) != len(parent):
        fail(where, "seg has a cycle", "every segment must lead to a root, parent -1")
    return order


def _tokens(rank: int, length: int) -> Array:
    """The first id is the place among the siblings, the others scatter over the vocabulary."""
    tokens = (np.arange(length, dtype=np.int64) * 40503 + rank * 7919) % _VOCABULARY
    tokens[0] = rank
    return tokens.astype(np.int32)


def _row(
    record: dict[str, Any], entry: Any, where: str, parent: Array, tokens: list[Array]
) -> PieceRow:
    is_whole = isinstance(entry, list) and len(entry) >= 3
    if not is_whole or not all(type(value) is int for value in entry[:3]):
        fail(where, "is not a list of numbers", "give [end, trained_start, length, trial]")
    end, trained_start, length = entry[:3]
    if not 0 <= end < len(parent):
        fail(where, f"end is {end}, there are {len(parent)} segments", "name a segment from 0")
    chain, at = [], end
    while at >= 0:
        chain.append(tokens[at])
        at = int(parent[at])
    total = sum(piece.size for piece in chain)
    if total != length or not 0 < trained_start <= length:
        problem = f"its segments hold {total} tokens, length is {length}"
        fail(where, f"{problem}, trained_start {trained_start}", "they must agree")
    trial = entry[3] if len(entry) > 3 else None
    return PieceRow(
        tokens=chain[::-1],
        scored=[(trained_start, np.ones(length - trained_start, np.bool_))],
        fields={"group_id": record.get("task"), "rollout_id": trial},
        source=where,
    )
