"""Flat token rows as JSON lines: one object a line, one trajectory an object.

An object whose token ids are a list of lists is a whole batch in columns (SkyRL's
GeneratorOutput, AReaL's trajectory dict): each of its lists has one entry a trajectory.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from harts.data.aliases import PROMPT_NAMES, TOKEN_NAMES
from harts.data.compression import Progress
from harts.data.formats.flat import adapted
from harts.data.formats.records import Parser, read_lines
from harts.data.values import fail


def read_jsonl(
    path: Path, *, parser: Parser = None, progress: Progress | None = None
) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield (row, "name:line") for every line that is not blank; a line of columns gives many rows.

    Raises DataError with file and line for anything that is not one JSON object in UTF-8.
    """
    for row, source in read_lines(path, parser=parser, progress=progress, arrays=True):
        if any(_is_list_of_lists(row.get(name)) for name in (*PROMPT_NAMES, *TOKEN_NAMES)):
            for entry, place in _rows_of_columns(row, source):
                yield adapted(entry, place), place
        else:
            yield adapted(row, source), source


def _is_list_of_lists(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], list)


def _rows_of_columns(
    columns: dict[str, Any], source: str
) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Lists are split, one entry a trajectory; anything else belongs to every trajectory."""
    first = next(n for n in (*PROMPT_NAMES, *TOKEN_NAMES) if _is_list_of_lists(columns.get(n)))
    num_rows = len(columns[first])
    for name, values in columns.items():
        if isinstance(values, list | np.ndarray) and len(values) != num_rows:
            problem = f"{name} has {len(values)} entries, {first} {num_rows}"
            fail(source, problem, "give one entry a trajectory in every list")
    for index in range(num_rows):
        row = {
            name: values[index] if isinstance(values, list | np.ndarray) else values
            for name, values in columns.items()
        }
        yield row, f"{source}[{index}]"
