"""Read a rollout file into a TrajectoryBatch: pick the format, stream its rows."""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from harts.data.compression import COMPRESSED_SUFFIXES, open_for_reading
from harts.data.formats.jsonl import read_jsonl
from harts.data.formats.parquet import read_parquet
from harts.data.trajectory import TrajectoryBatch
from harts.errors import DataError

Format = Literal["jsonl", "parquet"]

READERS: Mapping[str, Callable[[Path], Iterator[tuple[Mapping[str, Any], str]]]] = {
    "jsonl": read_jsonl,
    "parquet": read_parquet,
}
"""Format name -> its reader, which yields (row, source)."""

SUFFIXES: Mapping[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
}

_PARQUET_MAGIC = b"PAR1"


def read(path: str | os.PathLike[str], *, format: Format | None = None) -> TrajectoryBatch:
    """Read flat token rows (see `TrajectoryBatch.from_rows`) from one file.

    JSON lines, plain or .gz, .xz, .zst, and Parquet. format: None goes by the suffix, then by the
    first bytes. Rows become arrays as they are read, so a file needs little more memory than its
    batch. Raises DataError, one line, for whatever is wrong with the file or a row.
    """
    file = Path(path)
    chosen = format or _detect(file)
    if chosen not in READERS:
        raise DataError(f"format is {chosen!r}; use one of {', '.join(READERS)}")
    with open_for_reading(file) as stream:
        if not stream.read(1):
            raise DataError(f"{file}: the file is empty; write one trajectory a line or row")
    return TrajectoryBatch.from_named_rows(_require_rows(READERS[chosen](file), file))


def format_of_suffix(path: Path) -> Format | None:
    """The format that the name promises, compression aside, or None."""
    name = path.with_suffix("") if path.suffix in COMPRESSED_SUFFIXES else path
    return SUFFIXES.get(name.suffix.lower())


def _detect(path: Path) -> Format:
    promised = format_of_suffix(path)
    if promised == "parquet":
        if path.suffix in COMPRESSED_SUFFIXES:
            raise DataError(f"{path}: Parquet inside an archive is not read; decompress it first")
        return promised
    with open_for_reading(path) as stream:
        head = stream.read(64)
    if head.startswith(_PARQUET_MAGIC):
        if promised is not None or path.suffix in COMPRESSED_SUFFIXES:
            raise DataError(f"{path}: the content is Parquet, the name is not; rename it")
        return "parquet"
    if promised is not None or head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        return promised or "jsonl"
    raise DataError(f"{path}: the format is not known; use one of {', '.join(READERS)} (format=)")


def _require_rows(
    pairs: Iterator[tuple[Mapping[str, Any], str]], path: Path
) -> Iterator[tuple[Mapping[str, Any], str]]:
    is_empty = True
    for pair in pairs:
        is_empty = False
        yield pair
    if is_empty:
        raise DataError(f"{path}: the file holds no rows; write one trajectory a line or row")
