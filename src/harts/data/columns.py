"""Many checked rows become columns: one flat array a position field, one entry a trajectory field.

Which of the two a field is follows from its values. A field that is a list in one row and a number
in another is spread over the tokens of the latter.
"""

from collections.abc import Iterable
from typing import Any, TypedDict

import numpy as np

from harts.data.aliases import NUMERIC_FIELDS
from harts.data.rows import Row, canonical_row, trajectory_name
from harts.data.values import Array, describe, fail, join
from harts.errors import DataError


class Columns(TypedDict):
    """What a TrajectoryBatch is made of (shapes and dtypes there)."""

    tokens: Array
    offsets: Array
    loss_mask: Array
    position_fields: dict[str, Array]
    trajectory_fields: dict[str, Array]
    sources: tuple[str, ...] | None


def collect(pairs: Iterable[tuple[Row, str | None]]) -> Columns:
    """Check rows one by one and join them; a row may be freed as soon as the next one is asked for.

    pairs: (row, source), source such as "bad.jsonl:3" or None. Raises DataError that names the
    first bad trajectory. O(all values).
    """
    values: dict[str, list[Any]] = {}
    names: list[str] = []
    sources: list[str | None] = []
    for index, (row, source) in enumerate(pairs):
        where = trajectory_name(index, source)
        canonical = canonical_row(row, where)
        if index == 0:
            values = {name: [] for name in canonical}
        _require_same_fields(values, canonical, names, where)
        for name, value in canonical.items():
            values[name].append(value)
        names.append(where)
        sources.append(source)
    if not names:
        raise DataError("the batch has no trajectories; give at least one row")
    lengths = np.array([part.size for part in values["input_ids"]], np.int64)
    # each column is freed once it is joined: the peak is the rows and one column
    tokens = np.concatenate(values.pop("input_ids"))
    loss_mask = np.concatenate(values.pop("loss_mask"))
    position_fields: dict[str, Array] = {}
    trajectory_fields: dict[str, Array] = {}
    for name in list(values):
        column = values.pop(name)
        if name == "identity" or any(isinstance(value, np.ndarray) for value in column):
            position_fields[name] = _position_column(name, column, lengths, names)
        else:
            trajectory_fields[name] = trajectory_column(name, column, names)
    return Columns(
        tokens=tokens,
        offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
        loss_mask=loss_mask,
        position_fields=position_fields,
        trajectory_fields=trajectory_fields,
        sources=None if None in sources else tuple(source for source in sources if source),
    )


def _require_same_fields(
    expected: dict[str, Any], present: dict[str, Any], names: list[str], where: str
) -> None:
    if expected.keys() == present.keys():
        return
    advice = "give it in every row (null where it is unknown) or in none"
    for name in expected:
        if name not in present:
            fail(where, f"there is no {name}, but {names[0]} has it", advice)
    extra = next(name for name in present if name not in expected)
    fail(names[0], f"there is no {extra}, but {where} has it", advice)


def _position_column(name: str, column: list[Any], lengths: Array, names: list[str]) -> Array:
    parts: list[Array] = []
    for value, length, where in zip(column, lengths, names, strict=True):
        if isinstance(value, np.ndarray):
            parts.append(value)
            continue
        dtype = _scalar_dtype(value, name, where)
        if dtype is None or dtype.kind == "O":
            advice = "give one number per token (or one for all of them) in every row"
            fail(where, f"{name} is {describe(value)}", advice)
        parts.append(np.full(length, value, dtype))
    joined = join(parts, names, name)
    if name == "identity":
        return _identity(joined, lengths, names)
    _require_numeric(name, joined, column, names)
    return joined


def trajectory_column(name: str, column: list[Any], names: list[str]) -> Array:
    """One entry a trajectory as an array (N,); names: the trajectories, for messages.

    None turns numbers into floats with NaN; strings, dicts and mixtures are kept as objects.
    Raises DataError for numbers that would be rounded and for fields that must be numbers.
    """
    dtypes = [_scalar_dtype(value, name, where) for value, where in zip(column, names, strict=True)]
    known = {dtype for dtype in dtypes if dtype is not None}
    has_null = None in dtypes
    is_bool = {dtype.kind == "b" for dtype in known}
    if (
        any(dtype.kind == "O" for dtype in known)
        or len(is_bool) > 1
        or (has_null and True in is_bool)
    ):
        joined = _objects(column)
    elif not known:
        joined = np.full(len(column), np.nan) if name in NUMERIC_FIELDS else _objects(column)
    else:
        fractional = {dtype for dtype in known if dtype.kind == "f"}
        null_dtype = np.result_type(*fractional) if fractional else np.dtype(np.float64)
        filled = [
            np.full(1, np.nan if dtype is None else value, dtype or null_dtype)
            for value, dtype in zip(column, dtypes, strict=True)
        ]
        joined = join(filled, names, name)
    _require_numeric(name, joined, column, names)
    return joined


def _scalar_dtype(value: Any, name: str, where: str) -> np.dtype[Any] | None:
    """The dtype that holds a scalar as it is; object for anything but numbers, None for None."""
    if value is None:
        return None
    if isinstance(value, np.bool_ | np.integer | np.floating):
        return np.dtype(value.dtype.newbyteorder("="))
    if isinstance(value, bool):
        return np.dtype(np.bool_)
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            problem = f"{name} is {value}, which needs more than 64 bits"
            fail(where, problem, "give it as a string")
        return np.dtype(np.int64)
    return np.dtype(np.float64) if isinstance(value, float) else np.dtype(object)


def _objects(column: list[Any]) -> Array:
    array = np.empty(len(column), dtype=object)
    array[:] = column
    return array


def _identity(joined: Array, lengths: Array, names: list[str]) -> Array:
    """Identities are compared, never computed with: int64 or nothing."""
    beyond = joined.dtype.kind == "u" and joined.size and int(joined.max()) >= 2**63
    if joined.dtype.kind not in "iu" or beyond:
        problem = f"identity has dtype {joined.dtype}"
        fail(names[0], problem, "give whole numbers below 2**63 in every row")
    return joined.astype(np.int64, copy=False)


def _require_numeric(name: str, joined: Array, column: list[Any], names: list[str]) -> None:
    if name not in NUMERIC_FIELDS or joined.dtype.kind in "iuf":
        return
    for value, where in zip(column, names, strict=True):
        is_array = isinstance(value, np.ndarray)
        dtype = value.dtype if is_array else _scalar_dtype(value, name, where)
        if dtype is not None and dtype.kind not in "iuf":
            got = "truth values" if is_array else describe(value)
            fail(where, f"{name} is {got}", "give a number, or rename the field")
