"""A batch of trajectories as flat numpy arrays: what every later stage reads.

Legend: N trajectories, S tokens of all of them together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from harts.data.columns import collect
from harts.data.rows import RESERVED_NAMES, Row, trajectory_name
from harts.data.values import Array
from harts.errors import DataError

_NATIVE_DTYPES = (np.dtype(np.bool_), np.dtype(np.int64), np.dtype(np.float64))


@dataclass(frozen=True, kw_only=True, eq=False)
class TrajectoryBatch:
    """N trajectories; trajectory i is the slice [offsets[i], offsets[i+1]) of every (S,) array.

    tokens: int32 (S,), from 0. offsets: int64 (N+1,), strictly ascending from 0 to S.
    loss_mask: bool (S,): position t is scored when the model is trained to emit token t from the
      tokens before it. A scored first token is an error, a mask without scored tokens is not.
    position_fields: name -> (S,) bool or number. trajectory_fields: name -> (N,) bool, number
      (NaN where a row has None) or object. Their names and values are carried untouched; look for
      well-known ones with `harts.data.aliases.find`. `identity` is a position field (int64).
    sources: where each trajectory was read, such as "bad.jsonl:3", or None.

    Building one checks shapes, dtypes, the range of the tokens and the first positions, O(S);
    DataError otherwise. Arrays are not copied and must not be written to.
    """

    tokens: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.bool_]
    position_fields: dict[str, Array] = field(default_factory=dict)
    trajectory_fields: dict[str, Array] = field(default_factory=dict)
    sources: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _check_array("tokens", self.tokens, np.int32)
        _check_array("offsets", self.offsets, np.int64)
        _check_array("loss_mask", self.loss_mask, np.bool_, len(self.tokens))
        self._check_offsets()
        if len(self.tokens) and int(self.tokens.min()) < 0:
            raise DataError(f"tokens has {int(self.tokens.min())}; token ids start at 0")
        scored_first = np.flatnonzero(self.loss_mask[self.offsets[:-1]])
        if scored_first.size:
            name = self.name_of(int(scored_first[0]))
            problem = f"{name}: loss_mask[0] is 1"
            raise DataError(f"{problem}; set it to 0, nothing precedes the first token")
        for name, values in self.position_fields.items():
            _check_array(name, values, None, len(self.tokens))
        for name, values in self.trajectory_fields.items():
            _check_array(name, values, None, len(self), kinds="biufO")
        self._check_field_names()

    @classmethod
    def from_rows(
        cls, rows: Iterable[Row], sources: Iterable[str] | None = None
    ) -> TrajectoryBatch:
        """Check and join rows, each a dict with `input_ids`, `loss_mask` and any other field.

        Values are lists or arrays with one entry a token (position fields) or scalars, strings,
        dicts and None (trajectory fields). Also accepts `prompt_ids` with `response_ids` and the
        aliases of `harts.data.aliases`; `harts.data.rows` says how they are read. Whole numbers
        become int64, fractions float64, truth values bool; arrays and numpy scalars keep their
        dtype. sources: one a row, for messages. Raises DataError, one line that names the first
        bad trajectory. O(all values).
        """
        if isinstance(rows, dict):
            raise DataError("rows is one dict; give a list of dicts, one a trajectory")
        if sources is None:
            return cls.from_named_rows((row, None) for row in rows)
        rows, sources = list(rows), list(sources)
        if len(rows) != len(sources):
            problem = f"sources has {len(sources)} entries, rows {len(rows)}"
            raise DataError(f"{problem}; they must be equally long")
        return cls.from_named_rows(zip(rows, sources, strict=True))

    @classmethod
    def from_named_rows(cls, pairs: Iterable[tuple[Row, str | None]]) -> TrajectoryBatch:
        """`from_rows` over a stream of (row, source) pairs that need not fit in memory as rows."""
        return cls(**collect(pairs))

    def rows(self) -> list[dict[str, Any]]:
        """The inverse of `from_rows`: one dict a trajectory, arrays as views of this batch.

        NaN in a trajectory field becomes None. O(N x fields).
        """
        rows = []
        for index in range(len(self)):
            span = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
            row: dict[str, Any] = {
                "input_ids": self.tokens[span],
                "loss_mask": self.loss_mask[span],
            }
            row |= {name: values[span] for name, values in self.position_fields.items()}
            row |= {name: _entry(values, index) for name, values in self.trajectory_fields.items()}
            rows.append(row)
        return rows

    def select(self, ids: npt.ArrayLike) -> TrajectoryBatch:
        """The trajectories `ids` (n,), in the order given and as often as given; O(their tokens).

        Raises DataError when ids is empty, not integers or outside [0, N).
        """
        chosen = np.asarray(ids)
        if chosen.ndim != 1 or chosen.size == 0 or chosen.dtype.kind not in "iu":
            got = f"an array of shape {chosen.shape} and dtype {chosen.dtype}"
            raise DataError(f"ids is {got}; give a non-empty list of trajectory numbers")
        outside = (chosen < 0) | (chosen >= len(self))
        if outside.any():
            index = int(np.argmax(outside))
            problem = f"ids[{index}] is {chosen[index]}, the batch has {len(self)} trajectories"
            raise DataError(f"{problem}; give numbers from 0 to {len(self) - 1}")
        chosen = chosen.astype(np.int64)
        begin, end = self.offsets[chosen].tolist(), self.offsets[chosen + 1].tolist()
        spans = [slice(a, b) for a, b in zip(begin, end, strict=True)]

        def rows_of(values: Array) -> Array:
            return np.concatenate([values[span] for span in spans])

        return TrajectoryBatch(
            tokens=rows_of(self.tokens),
            offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths[chosen])]),
            loss_mask=rows_of(self.loss_mask),
            position_fields={name: rows_of(v) for name, v in self.position_fields.items()},
            trajectory_fields={name: v[chosen] for name, v in self.trajectory_fields.items()},
            sources=None if self.sources is None else tuple(self.sources[i] for i in chosen),
        )

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each trajectory, int64 (N,)."""
        return np.diff(self.offsets)

    def name_of(self, index: int) -> str:
        """How messages call a trajectory: `trajectory 2 (bad.jsonl:3)` or `trajectory 2`."""
        return trajectory_name(index, None if self.sources is None else self.sources[index])

    def __len__(self) -> int:
        """The number of trajectories N."""
        return len(self.offsets) - 1

    def _check_offsets(self) -> None:
        if len(self.offsets) < 2:
            raise DataError("the batch has no trajectories; give at least one")
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.tokens):
            got = f"offsets run from {self.offsets[0]} to {self.offsets[-1]}"
            raise DataError(f"{got}; they must run from 0 to {len(self.tokens)}, the tokens")
        if self.sources is not None and len(self.sources) != len(self):
            problem = f"sources has {len(self.sources)} entries, the batch {len(self)} trajectories"
            raise DataError(f"{problem}; they must be equally long")
        empty = np.flatnonzero(self.lengths <= 0)
        if empty.size:
            name = self.name_of(int(empty[0]))
            raise DataError(f"{name}: offsets leave it no tokens; drop it or mend offsets")

    def _check_field_names(self) -> None:
        taken = {"input_ids", "loss_mask", *RESERVED_NAMES}
        for name in [*self.position_fields, *self.trajectory_fields]:
            if name in taken:
                raise DataError(f"a field is named {name}, which is taken; rename it")
            taken.add(name)
        identity = self.position_fields.get("identity")
        if "identity" in self.trajectory_fields or (
            identity is not None and identity.dtype != np.int64
        ):
            raise DataError("identity must be an int64 position field; give one number per token")


def _check_array(
    name: str, values: Array, dtype: type | None, length: int | None = None, kinds: str = "biuf"
) -> None:
    """kinds: letters of numpy's dtype.kind that pass; every number has at most 64 bits."""
    if not isinstance(values, np.ndarray) or values.ndim != 1:
        raise DataError(f"{name} is a {type(values).__name__}; give a one-dimensional numpy array")
    if dtype is not None and values.dtype != dtype:
        raise DataError(f"{name} has dtype {values.dtype}; give {np.dtype(dtype)}")
    if values.dtype.kind not in kinds or values.dtype.itemsize > 8 or not values.dtype.isnative:
        advice = "give truth values or numbers of up to 64 bits in native byte order"
        raise DataError(f"{name} has dtype {values.dtype}; {advice}")
    if length is not None and len(values) != length:
        raise DataError(f"{name} has {len(values)} entries; it must have {length}")


def _entry(values: Array, index: int) -> Any:
    """A trajectory field's entry as a Python value where that keeps the dtype, else as it is."""
    entry = values[index]
    if values.dtype.kind == "f" and np.isnan(entry):
        return None
    return entry.item() if values.dtype in _NATIVE_DTYPES else entry
