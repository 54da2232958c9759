"""Compile scalar loops with numba where it is installed (the extra `harts[plan]`).

A kernel is written once and decorated with `jit`; callers take `use_numba` and run
`kernel(loop, use_numba=...)`. Without numba the same loop runs as Python, so a loop that is too
slow for that has a numpy twin.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, TypeVar, cast

from harts.errors import PlanError

HAVE_NUMBA = importlib.util.find_spec("numba") is not None

Loop = TypeVar("Loop", bound=Callable[..., Any])


def jit(loop: Loop) -> Loop:
    """`numba.njit(cache=True)` of a loop over arrays, or the loop itself without numba.

    Compiled at the first call for each signature, cached beside the source file.
    """
    if not HAVE_NUMBA:
        return loop
    return cast(Loop, importlib.import_module("numba").njit(cache=True)(loop))


def kernel(loop: Loop, *, use_numba: bool) -> Loop:
    """The compiled loop, or its Python body. PlanError when numba is asked for and absent."""
    if use_numba and not HAVE_NUMBA:
        raise PlanError("use_numba is True but numba is not installed; pip install 'harts[plan]'")
    return loop if use_numba else cast(Loop, getattr(loop, "py_func", loop))
