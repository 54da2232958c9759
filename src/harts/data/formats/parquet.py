"""Parquet: one trajectory a row, lists of numbers for what has one entry a token.

Columns that harts wrote as JSON text (dicts, mixtures of types) carry `JSON_MARK` in their
metadata and come back as they were.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from harts.data.compression import Progress
from harts.data.formats.flat import adapted
from harts.data.values import fail
from harts.errors import DataError

JSON_MARK = {b"harts.encoding": b"json"}

_ROWS_PER_STEP = 256


def read_parquet(
    path: Path, *, progress: Progress | None = None
) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield (row, "name:row n"), rows from 1; list columns as arrays of the column's own type.

    Reads 256 rows at a time. Raises DataError for a file that is not whole Parquet.
    """
    pyarrow, parquet = import_pyarrow(path)
    broken = (pyarrow.ArrowException, OSError)
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            doubled = next((name for name in names if names.count(name) > 1), None)
            if doubled is not None:
                fail(path.name, f"two columns are named {doubled}", "rename or drop one")
            for batch in file.iter_batches(batch_size=_ROWS_PER_STEP):
                columns = {
                    field.name: _column_values(column, field, pyarrow, path)
                    for field, column in zip(batch.schema, batch.columns, strict=True)
                }
                for index in range(batch.num_rows):
                    number += 1
                    row = {name: values[index] for name, values in columns.items()}
                    source = f"{path.name}:row {number}"
                    yield adapted(row, source), source
                if progress is not None:  # by rows: pyarrow does not say how far it has read
                    size = path.stat().st_size
                    progress(size * number // max(file.metadata.num_rows, 1), size)
    except broken as error:
        problem = f"not a whole Parquet file ({' '.join(str(error).split())[:120]})"
        fail(str(path), problem, "copy or write it again, or say what it is with format")


def import_pyarrow(path: Path) -> tuple[ModuleType, ModuleType]:
    """(pyarrow, pyarrow.parquet), or a DataError that names the extra to install."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        problem = f"{path}: Parquet needs the package pyarrow"
        raise DataError(f"{problem}; pip install 'harts[data]'") from None
    return pyarrow, pyarrow.parquet


def _column_values(column: Any, field: Any, pyarrow: ModuleType, path: Path) -> list[Any]:
    """One Python list of the column's entries, numbers and lists of numbers with their dtype."""
    kind = column.type
    is_list = pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)
    if is_list and _is_number(kind.value_type, pyarrow) and column.null_count == 0:
        flat, offsets = column.flatten(), column.offsets.to_numpy()
        if flat.null_count == 0:
            values = flat.to_numpy(zero_copy_only=False)
            bounds = (offsets - offsets[0]).tolist()
            return [values[a:b] for a, b in pairwise(bounds)]
    if _is_number(kind, pyarrow):
        dtype = np.dtype(kind.to_pandas_dtype())
        return [None if v is None else dtype.type(v) for v in column.to_pylist()]
    values = column.to_pylist()
    if field.metadata and JSON_MARK.items() <= field.metadata.items():
        return [_decode(text, field.name, path) for text in values]
    return list(values)


def _is_number(kind: Any, pyarrow: ModuleType) -> bool:
    types = pyarrow.types
    return bool(types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind))


def _decode(text: str, name: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        fail(path.name, f"column {name} is marked as JSON and is not", "write the file again")
