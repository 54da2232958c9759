"""Checked access to fields of nested records; every complaint is one DataError with the place."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from harts.data.values import Array, describe, fail, to_array, to_mask, to_tokens

_KINDS = {dict: "an object", list: "a list", str: "a string", int: "a whole number"}


def get(record: Mapping[str, Any], name: str, kind: type, where: str) -> Any:
    """record[name], which must be there and a `kind`."""
    value = optional(record, name, kind, where)
    if value is None:
        fail(where, f"there is no {name}", f"give {_KINDS[kind]}")
    return value


def optional(record: Mapping[str, Any], name: str, kind: type, where: str) -> Any:
    """record[name], a `kind`, or None when it is absent or null."""
    value = record.get(name)
    is_wrong_bool = isinstance(value, bool) and kind is int
    if value is not None and (not isinstance(value, kind) or is_wrong_bool):
        fail(where, f"{name} is {describe(value)}", f"give {_KINDS[kind]}")
    return value


def as_object(value: Any, name: str, where: str) -> dict[str, Any]:
    """`value`, which must be an object; name: what it is, such as "steps[3]"."""
    if not isinstance(value, dict):
        fail(where, f"{name} is {describe(value)}", "give an object")
    return value


def tokens_of(record: Mapping[str, Any], name: str, where: str) -> npt.NDArray[np.int32] | None:
    """Token ids as int32, or None when they are absent, null or empty."""
    value = record.get(name)
    if value is None:
        return None
    tokens = to_tokens(value, name, where)
    return tokens if tokens.size else None


def mask_of(record: Mapping[str, Any], name: str, where: str) -> npt.NDArray[np.bool_]:
    """A mask as bool; absent and null are an empty one."""
    value = record.get(name)
    return np.zeros(0, np.bool_) if value is None else to_mask(value, name, where)


def numbers_of(record: Mapping[str, Any], name: str, size: int, what: str, where: str) -> Array:
    """`size` finite numbers as float64, one for each of `what`."""
    return checked_numbers(record[name], name, size, what, where)


def checked_numbers(value: Any, name: str, size: int, what: str, where: str) -> Array:
    """`size` finite numbers as float64, one for each of `what`."""
    if not isinstance(value, list | tuple | np.ndarray):
        fail(where, f"{name} is {describe(value)}", f"give a list, one number for each of {what}")
    numbers = to_array(value, name, where)
    if numbers.dtype.kind == "b":
        fail(where, f"{name} holds truth values", "give numbers")
    if numbers.size != size:
        fail(where, f"{name} has {numbers.size} entries, {what} {size}", "they must agree")
    return numbers.astype(np.float64)


def number_or_none(value: Any, name: str, where: str) -> float | None:
    """A finite number as float, or None for null."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        fail(where, f"{name} is {describe(value)}", "give a number or null")
    if not np.isfinite(value):
        fail(where, f"{name} is {value}", "give a finite number or null")
    return float(value)
