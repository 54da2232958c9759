"""Read the metrics of a training run: JSON lines, one a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harts.errors import DataError


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Numbers of every complete line by name, steps ascending; others are left out.

    A last line that was cut short is ignored: the run may be writing it. Raises DataError for a
    missing or empty file and for lines that are no metrics.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})"
        raise DataError(f"{problem}; give the metrics.jsonl of a run") from None
    steps = [
        _step(line, f"{path}:{number}")
        for number, line in enumerate(text.splitlines(keepends=True), 1)
        if line.endswith("\n") and line.strip()
    ]
    if not steps:
        raise DataError(f"{path}: holds no complete step; train for one first")
    for before, after, number in zip(steps, steps[1:], range(2, len(steps) + 1), strict=False):
        if after["step"] <= before["step"]:
            problem = f"{path}:{number}: step {after['step']:g} follows step {before['step']:g}"
            raise DataError(f"{problem}; steps must ascend, keep one run in a file")
    return steps


def _step(line: str, where: str) -> dict[str, float]:
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: broken JSON ({error.msg}); mend or remove the line") from None
    if not isinstance(entry, dict) or type(entry.get("step")) is not int:
        raise DataError(f"{where}: no whole number named step; give the metrics.jsonl of a run")
    return {
        name: value
        for name, value in entry.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
