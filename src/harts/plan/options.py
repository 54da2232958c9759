"""One check for every whole-number option of the planners."""

from __future__ import annotations

import numpy as np

from harts.errors import PlanError


def at_least_one(name: str, value: object) -> int:
    """The option as a Python int; PlanError unless it is a whole number from 1 up."""
    if not isinstance(value, int | np.integer):
        raise PlanError(f"{name} is {value!r}; give a whole number from 1 up")
    if value < 1:
        raise PlanError(f"{name} is {value}; it must be at least 1")
    return int(value)
