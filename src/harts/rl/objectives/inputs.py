"""What an objective reads: model outputs, and numpy fields as tensors beside them.

Legend: P scored positions of one microbatch, in batch order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from harts.data import aliases
from harts.errors import DataError
from harts.views.gather import on_device

Fields = Mapping[str, npt.NDArray[Any]]


class PolicyOutput(Protocol):
    """The part of a model output that objectives use; both tensors are (P,) and attached."""

    @property
    def log_probs(self) -> torch.Tensor:
        """Log-probability of each scored token."""

    @property
    def entropy(self) -> torch.Tensor:
        """Entropy in nats of the distribution that each scored token was drawn from."""


def current_log_probs(out: PolicyOutput) -> torch.Tensor:
    """out.log_probs (P,) in at least float32; DataError unless one-dimensional."""
    if out.log_probs.dim() != 1:
        raise DataError(
            f"log_probs have the shape {tuple(out.log_probs.shape)}; objectives take one value "
            "per scored position, shape (P,)"
        )
    return at_least_float32(out.log_probs)


def at_least_float32(values: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or in float32 where it is half precision."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def required_field(fields: Fields, canonical: str, like: torch.Tensor, use: str) -> torch.Tensor:
    """As optional_field, but a missing field is a DataError that lists the fields present."""
    values = optional_field(fields, canonical, like)
    if values is None:
        present = ", ".join(sorted(fields)) or "none"
        raise DataError(f"{use} needs the field '{canonical}'; fields present: {present}")
    return values


def optional_field(fields: Fields, canonical: str, like: torch.Tensor) -> torch.Tensor | None:
    """A field under any of its known names, as a tensor of like's shape, dtype and device.

    None where the batch has no such field. DataError where a value is missing, not a number or
    not finite, or where the length is not P: a NaN would otherwise reach every parameter.
    """
    known = canonical in aliases.FIELD_ALIASES
    name = aliases.find(fields, canonical) if known else canonical
    if name is None or name not in fields:
        return None
    try:
        values = np.asarray(fields[name]).astype(np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"field '{name}' holds values that are not numbers ({error})") from None
    if values.shape != tuple(like.shape):
        raise DataError(
            f"field '{name}' has the shape {values.shape}, log_probs {tuple(like.shape)}; "
            "give the fields of the same microbatch"
        )
    finite = np.isfinite(values)
    if not finite.all():
        raise DataError(_first_bad_value(name, values, int(np.argmin(finite)), fields))
    return on_device(values, like.device).to(like.dtype)


def trajectory_of_position(fields: Fields) -> npt.NDArray[np.int64]:
    """Index of each scored position's trajectory in the whole batch, int64 (P,)."""
    if "trajectory_index" not in fields:
        present = ", ".join(sorted(fields)) or "none"
        raise DataError(
            f"field 'trajectory_index' is missing, got {present}; pass the microbatch's own fields"
        )
    return np.asarray(fields["trajectory_index"], dtype=np.int64)


def _first_bad_value(
    name: str, values: npt.NDArray[np.float64], scored_position: int, fields: Fields
) -> str:
    where = f"scored position {scored_position}"
    if "trajectory_index" in fields and "position" in fields:
        trajectory = fields["trajectory_index"][scored_position]
        where = f"trajectory {trajectory}, position {fields['position'][scored_position]}"
    return f"field '{name}' is {values[scored_position]} at {where}; scored positions need a number"
