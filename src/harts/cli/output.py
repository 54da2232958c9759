"""What commands print: results on stdout, everything else on stderr."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Rows = Sequence[tuple[str, str]]


def print_result(result: Mapping[str, Any], rows: Rows, *, as_json: bool) -> None:
    """One JSON object on one line, or aligned rows of (name, value) for people.

    JSON has no NaN and no infinity: both become null.
    """
    if as_json:
        print(json.dumps(_finite(result), allow_nan=False))
    else:
        print(aligned(rows))


def aligned(rows: Rows) -> str:
    """Two columns; the first as wide as its longest name."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}   {value}".rstrip() for name, value in rows)


def print_error(message: str) -> None:
    """One line on stderr, whatever the message holds."""
    print("harts: error:", " ".join(message.split()), file=sys.stderr)


@contextlib.contextmanager
def stdout_kept_for_results() -> Iterator[None]:
    """Send what libraries print meanwhile to stderr."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def seconds(value: float) -> str:
    """A duration with three significant digits, in ms below one second."""
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:,.3g} s"


def percent(fraction: float) -> str:
    """A fraction as a percentage with one decimal."""
    return f"{100 * fraction:.1f} %"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
