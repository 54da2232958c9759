"""Write a TrajectoryBatch so that reading it gives the same batch; never leave half a file."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from harts.data.compression import COMPRESSED_SUFFIXES, compressor
from harts.data.formats.parquet import JSON_MARK, import_pyarrow
from harts.data.read import format_of_suffix
from harts.data.trajectory import TrajectoryBatch
from harts.data.values import Array, describe, fail
from harts.errors import DataError

_TOKENS_PER_ROW_GROUP = 1 << 24


def write(batch: TrajectoryBatch, path: str | os.PathLike[str]) -> None:
    """Write `.jsonl` or `.json` (also with .gz, .xz, .zst) or `.parquet`, by the suffix.

    The file is written beside `path` and renamed when whole. Reading it gives the same values in
    the same order. Parquet keeps every dtype; JSON lines keep int64, float64 and bool, narrower
    numbers come back as these with equal values. Sources are not written. Raises DataError for an
    unknown suffix, a place that cannot be written and object fields that JSON would change (tuples,
    keys that are not strings, ...).
    """
    file = Path(path)
    chosen = format_of_suffix(file)
    if chosen is None or (chosen == "parquet" and file.suffix in COMPRESSED_SUFFIXES):
        problem = f"{file}: the name does not say a format to write"
        raise DataError(f"{problem}; name it .jsonl (also .gz, .xz, .zst) or .parquet")
    _require_exact_objects(batch)
    if chosen == "parquet":
        _write_parquet(batch, file)
    else:
        _write_jsonl(batch, file)


def _write_jsonl(batch: TrajectoryBatch, path: Path) -> None:
    with _beside(path) as raw, compressor(path, raw) as stream:
        for row in batch.rows():
            text = json.dumps(
                {name: _plain(value) for name, value in row.items()},
                allow_nan=False,
                ensure_ascii=False,
                separators=(",", ":"),
            )
            stream.write(text.encode() + b"\n")


def _write_parquet(batch: TrajectoryBatch, path: Path) -> None:
    pyarrow, parquet = import_pyarrow(path)
    columns: dict[str, Array] = {"input_ids": batch.tokens, "loss_mask": batch.loss_mask}
    columns |= batch.position_fields | batch.trajectory_fields
    offsets = pyarrow.array(batch.offsets, pyarrow.int64())
    arrays, fields = [], []
    for name, values in columns.items():
        metadata = None
        if name not in batch.trajectory_fields:
            array = pyarrow.LargeListArray.from_arrays(offsets, pyarrow.array(values))
        elif values.dtype.kind != "O":
            array = pyarrow.array(values, mask=_is_nan(values))
        elif all(value is None or type(value) is str for value in values):
            array = pyarrow.array(values.tolist(), pyarrow.string())
        else:
            metadata = JSON_MARK
            array = pyarrow.array([_to_json(_plain(value)) for value in values], pyarrow.string())
        arrays.append(array)
        fields.append(pyarrow.field(name, array.type, metadata=metadata))
    table = pyarrow.Table.from_arrays(arrays, schema=pyarrow.schema(fields))
    mean_length = len(batch.tokens) // len(batch)
    with _beside(path) as raw:
        parquet.write_table(table, raw, row_group_size=max(1, _TOKENS_PER_ROW_GROUP // mean_length))


@contextmanager
def _beside(path: Path) -> Iterator[BinaryIO]:
    """A new file in the same folder that takes the name `path` only if the block ends well."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            with part.open("wb") as stream:
                yield stream
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        problem = f"{path}: cannot be written ({error.strerror or error})"
        raise DataError(f"{problem}; check the folder and its free space") from None


def _require_exact_objects(batch: TrajectoryBatch) -> None:
    for name, values in batch.trajectory_fields.items():
        if values.dtype.kind != "O":
            continue
        for index, value in enumerate(values):
            plain = _plain(value)
            try:
                text = _to_json(plain)
                text.encode()
                is_exact = _equal(json.loads(text), plain)
            except (TypeError, ValueError, RecursionError):
                is_exact = False
            if not is_exact:
                problem = f"{name} is {describe(value)}, which JSON cannot hold exactly"
                fail(batch.name_of(index), problem, "use strings, numbers, lists and plain dicts")


def _equal(left: Any, right: Any) -> bool:
    """Equality that tells lists from tuples and 1 from True and 1.0, any depth."""
    pending = [(left, right)]
    while pending:
        a, b = pending.pop()
        if type(a) is not type(b):
            return False
        if isinstance(a, dict):
            if list(a) != list(b):
                return False
            pending.extend((a[key], b[key]) for key in a)
        elif isinstance(a, list):
            if len(a) != len(b):
                return False
            pending.extend(zip(a, b, strict=True))
        elif a != b:
            return False
    return True


def _plain(value: Any) -> Any:
    """Arrays as lists, numpy scalars as Python's; equal values (float32 widens exactly)."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _to_json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def _is_nan(values: Array) -> Array | None:
    return np.isnan(values) if values.dtype.kind == "f" else None
