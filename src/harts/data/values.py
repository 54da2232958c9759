"""One value of a row becomes a checked array; a value that would change on the way is refused."""

import math
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from harts.errors import DataError

Array = npt.NDArray[Any]

EXACT_IN_FLOAT64 = 2**53
"""Whole numbers up to this size, and not all beyond it, are float64 values."""


def fail(where: str, problem: str, advice: str) -> NoReturn:
    """Raise a DataError of one line: where, what is wrong, what to do."""
    raise DataError(" ".join(f"{where}: {problem}; {advice}".split()))


def describe(value: object) -> str:
    """A short name of a value for an error message."""
    if value is None:
        return "null"
    if isinstance(value, bool | np.bool_):
        return str(bool(value)).lower()
    if isinstance(value, int | float | np.number):
        return str(value)
    if isinstance(value, str):
        return f"the string {value!r}" if len(value) <= 40 else f"a string of {len(value)} letters"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}"
    return f"a {type(value).__name__}"


def some_of(names: Sequence[str], most: int) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most:,} more"


def is_sequence(value: object) -> bool:
    """Lists, tuples, ranges and whatever numpy sees as an array of at least one dimension."""
    if isinstance(value, list | tuple | range):
        return True
    if isinstance(value, np.generic | type) or not hasattr(value, "__array__"):
        return False
    return getattr(value, "ndim", 1) != 0


def to_array(value: Any, name: str, where: str) -> Array:
    """A one-dimensional bool, integer or floating array that equals `value`; O(length).

    Python whole numbers become int64, fractions float64, truth values bool; arrays keep their
    dtype. NaN, infinity, nested lists, strings, nulls and mixtures of truth values and numbers are
    errors.
    """
    array = _from_list(value, name, where) if isinstance(value, list | tuple | range) else None
    if array is None:
        try:
            array = np.asarray(value)
        except (TypeError, ValueError, RuntimeError) as error:
            fail(where, f"{name} cannot be read as an array ({error})", "give a numpy array")
        if isinstance(value, np.ma.MaskedArray):
            fail(where, f"{name} is a masked array", "fill the masked entries")
        if array.dtype.kind == "O" and array.ndim == 1:
            array = _from_list(array.tolist(), name, where)
    if array.ndim != 1:
        fail(where, f"{name} has shape {array.shape}", "give one number per token")
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        fail(where, f"{name} has dtype {array.dtype}", "give one number per token")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        index = int(np.argmin(np.isfinite(array)))
        fail(where, f"{name}[{index}] is {array[index]}", "give a finite number")
    return array


def to_tokens(value: Any, name: str, where: str) -> npt.NDArray[np.int32]:
    """Token ids as int32 (T,): whole, 0 <= id < 2**31; fractions equal to whole numbers pass."""
    if not is_sequence(value):
        fail(where, f"{name} is {describe(value)}", "give a list of token ids")
    array = to_array(value, name, where)
    if array.dtype.kind == "b":
        fail(where, f"{name} holds truth values", "give token ids")
    if array.size == 0:
        return np.zeros(0, np.int32)
    wrong = None
    if array.min() < 0:
        wrong = int(np.argmax(array < 0)), "negative"
    elif array.max() >= 2**31:
        wrong = int(np.argmax(array >= 2**31)), "not below 2**31"
    elif array.dtype.kind == "f" and (array != np.floor(array)).any():
        wrong = int(np.argmax(array != np.floor(array))), "not whole"
    if wrong is not None:
        index, what = wrong
        advice = "token ids are whole numbers from 0 to 2**31 - 1, drop or map it"
        fail(where, f"{name}[{index}] is {array[index]}, {what}", advice)
    return array.astype(np.int32, copy=False)


def to_mask(value: Any, name: str, where: str) -> npt.NDArray[np.bool_]:
    """A loss mask as bool (T,) from 0, 1, false and true (also mixed, also as 0.0 and 1.0)."""
    if not is_sequence(value):
        fail(where, f"{name} is {describe(value)}", "give a list with one 0 or 1 per token")
    if isinstance(value, list | tuple) and {bool, int} <= set(map(type, value)):
        value = [int(entry) if isinstance(entry, bool) else entry for entry in value]
    array = to_array(value, name, where)
    if array.dtype.kind == "b":
        return array
    legal = (array == 0) | (array == 1)
    if not legal.all():
        index = int(np.argmin(legal))
        fail(where, f"{name}[{index}] is {array[index]}", "use 0 or 1 (or false and true)")
    return array.astype(np.bool_)


def join(parts: Sequence[Array], names: Sequence[str], field: str) -> Array:
    """Concatenate arrays into the smallest dtype that holds all of them exactly.

    names: who gave each part, for messages. Truth values and numbers do not mix, nor do fractions
    and whole numbers beyond 2**53.
    """
    dtypes = {part.dtype for part in parts}
    target = np.result_type(*dtypes).newbyteorder("=")
    if len({dtype.kind == "b" for dtype in dtypes}) > 1:
        odd = next(i for i, p in enumerate(parts) if (p.dtype.kind == "b") != _is_bool(parts[0]))
        problem = f"{field} mixes truth values and numbers, see {names[0]}"
        fail(names[odd], problem, "use one kind of value")
    for part, name in zip(parts, names, strict=True):
        if target.kind == "f" and part.dtype.kind in "iu" and not fits_float64(part):
            problem = f"{field} has whole numbers beyond 2**53, other rows fractions or nulls"
            fail(name, problem, "use whole numbers or strings in every row")
    return np.concatenate(parts, dtype=target)


def fits_float64(array: Array) -> bool:
    """Whether every entry of an integer array is a float64 without rounding, by size."""
    if array.dtype.itemsize < 8 or array.size == 0:
        return True
    return int(array.max()) <= EXACT_IN_FLOAT64 and int(array.min()) >= -EXACT_IN_FLOAT64


def refuse_nan(value: object, name: str, where: str) -> None:
    """Raise for a NaN or infinity inside a value that is carried untouched (dicts, lists)."""
    pending = [value]
    while pending:
        entry = pending.pop()
        if isinstance(entry, dict):
            pending.extend(entry.values())
        elif isinstance(entry, list | tuple):
            pending.extend(entry)
        elif isinstance(entry, float | np.floating) and not math.isfinite(entry):
            verb = "is" if entry is value else "holds"
            fail(where, f"{name} {verb} {entry}", "give a finite number or null")


def _is_bool(array: Array) -> bool:
    return array.dtype.kind == "b"


def _from_list(value: Sequence[Any], name: str, where: str) -> Array:
    """np.array would turn [1, True] into two ones and [1, "a"] into strings: look first."""
    if len(value) == 0:
        return np.zeros(0, np.int64)
    types = {int} if isinstance(value, range) else set(map(type, value))
    kinds = {_kind_of(kind) for kind in types}
    if None in kinds:
        index = next(i for i, entry in enumerate(value) if _kind_of(type(entry)) is None)
        fail(where, f"{name}[{index}] is {describe(value[index])}", "give one number per token")
    if "b" in kinds and len(kinds) > 1:
        index = next(i for i, entry in enumerate(value) if _kind_of(type(entry)) == "b")
        problem = f"{name}[{index}] is {describe(value[index])} among numbers"
        fail(where, problem, "use one kind of value")
    if types == {int}:
        try:
            return np.array(value, np.int64)
        except OverflowError:
            index = next(i for i, entry in enumerate(value) if not -(2**63) <= entry < 2**63)
            problem = f"{name}[{index}] is {describe(value[index])}, which needs more than 64 bits"
            fail(where, problem, "give a smaller number")
    if kinds == {"i", "f"}:
        for index, entry in enumerate(value):
            if _kind_of(type(entry)) == "i" and abs(int(entry)) > EXACT_IN_FLOAT64:
                problem = f"{name}[{index}] is {entry}, beyond 2**53 among fractions"
                fail(where, problem, "give whole numbers only or smaller ones")
    return np.array(value)


def _kind_of(kind: type) -> str | None:
    if issubclass(kind, bool | np.bool_):
        return "b"
    if issubclass(kind, int | np.integer):
        return "i"
    return "f" if issubclass(kind, float | np.floating) else None
