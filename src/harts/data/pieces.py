"""Trajectories given as references to shared pieces become a batch, each flat array filled once.

A tree format or a chat log holds every token once; its trajectories repeat most of them. Rows here
keep references to the pieces, so reading takes the unique tokens and the flat batch, never a third
copy.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harts.data.columns import trajectory_column
from harts.data.rows import trajectory_name
from harts.data.trajectory import TrajectoryBatch
from harts.data.values import Array, fail
from harts.errors import DataError

Placed = tuple[int, Array]
"""(position in the trajectory of the first value, values): everything between is zero."""


@dataclass(frozen=True, kw_only=True)
class PieceRow:
    """One trajectory. Arrays are shared with other rows and must not be written to.

    tokens: int32 arrays, one after the other. scored: bool arrays at their positions, False
    elsewhere. positions: name -> float64 arrays at their positions, 0 elsewhere. fields: one value
    a trajectory. source: such as "traces.jsonl:3 leaf 5".
    """

    tokens: Sequence[Array]
    scored: Sequence[Placed]
    source: str
    positions: Mapping[str, Sequence[Placed]] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens of the trajectory."""
        return sum(piece.size for piece in self.tokens)


def assemble(rows: Iterable[PieceRow]) -> TrajectoryBatch:
    """The batch of `rows`, in order; O(its tokens). Raises DataError that names a bad row."""
    kept = list(rows)
    if not kept:
        raise DataError("the batch has no trajectories; give at least one row")
    names = [trajectory_name(index, row.source) for index, row in enumerate(kept)]
    for row, name in zip(kept, names, strict=True):
        _require_same_fields(kept[0], row, names[0], name)
        if row.length == 0:
            fail(name, "there are no tokens", "drop it")
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum([row.length for row in kept])])
    tokens = np.empty(int(offsets[-1]), np.int32)
    for row, begin in zip(kept, offsets.tolist(), strict=False):
        for piece in row.tokens:
            tokens[begin : begin + piece.size] = piece
            begin += piece.size
    return TrajectoryBatch(
        tokens=tokens,
        offsets=offsets,
        loss_mask=_placed([row.scored for row in kept], offsets, np.bool_),
        position_fields={
            name: _placed([row.positions[name] for row in kept], offsets, np.float64)
            for name in kept[0].positions
        },
        trajectory_fields={
            name: trajectory_column(name, [row.fields[name] for row in kept], names)
            for name in kept[0].fields
        },
        sources=tuple(row.source for row in kept),
    )


def _placed(column: Sequence[Sequence[Placed]], offsets: Array, dtype: type) -> Array:
    values: Array = np.zeros(int(offsets[-1]), dtype)
    for placed, begin in zip(column, offsets.tolist(), strict=False):
        for position, part in placed:
            values[begin + position : begin + position + part.size] = part
    return values


def _require_same_fields(first: PieceRow, row: PieceRow, first_name: str, name: str) -> None:
    for present, expected in (
        (row.positions.keys(), first.positions.keys()),
        (row.fields.keys(), first.fields.keys()),
    ):
        missing = next((f for f in expected if f not in present), None)
        if missing is not None:
            fail(name, f"there is no {missing}, but {first_name} has it", "give it everywhere")
        extra = next((f for f in present if f not in expected), None)
        if extra is not None:
            fail(first_name, f"there is no {extra}, but {name} has it", "give it everywhere")
