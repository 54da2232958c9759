"""Read a rollout file into a TrajectoryBatch: pick the format, stream its rows."""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from harts.data.compression import COMPRESSED_SUFFIXES, Progress, open_for_reading
from harts.data.formats.agent_lightning import read_agent_lightning
from harts.data.formats.atif import read_atif
from harts.data.formats.chat import read_chat
from harts.data.formats.detect import HEAD_BYTES, PARQUET_MAGIC, is_torch, json_format
from harts.data.formats.jsonl import read_jsonl
from harts.data.formats.options import ReadOptions, Sampling
from harts.data.formats.parquet import read_parquet
from harts.data.formats.shapes import read_shapes
from harts.data.formats.slime import read_slime
from harts.data.formats.verifiers import read_verifiers
from harts.data.pieces import PieceRow, assemble
from harts.data.reward_files import RewardMapping
from harts.data.rewards import with_rewards
from harts.data.trajectory import TrajectoryBatch
from harts.errors import ConfigError, DataError

Format = Literal[
    "jsonl", "parquet", "verifiers", "atif", "slime", "chat", "agent-lightning", "shapes"
]

Pair = tuple[Mapping[str, Any], str]
Row = TypeVar("Row")

FLAT_READERS: Mapping[str, Callable[[Path, ReadOptions], Iterator[Pair]]] = {
    "jsonl": lambda path, options: read_jsonl(path, progress=options.progress),
    "parquet": lambda path, options: read_parquet(path, progress=options.progress),
    "slime": read_slime,
}
"""Format -> its reader of flat rows, which yields (row, source)."""

TREE_READERS: Mapping[str, Callable[[Path, ReadOptions], Iterator[PieceRow]]] = {
    "verifiers": read_verifiers,
    "atif": read_atif,
    "chat": read_chat,
    "agent-lightning": read_agent_lightning,
    "shapes": read_shapes,
}
"""Format -> its reader of rows that share their pieces."""

FORMATS: tuple[str, ...] = (*FLAT_READERS, *TREE_READERS)

SUFFIXES: Mapping[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
}

_TAKES: Mapping[str, tuple[str, ...]] = {
    "tokenizer": ("atif", "chat", "agent-lightning"),
    "chat_template": ("atif", "chat", "agent-lightning"),
    "sampling": ("verifiers", "atif", "chat", "agent-lightning"),
}
"""Option -> the formats it means something for."""


def read(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    trust: bool = False,
    tokenizer: Any = None,
    chat_template: str | None = None,
    sampling: Sampling | None = None,
    rewards: str | os.PathLike[str] | RewardMapping | None = None,
    progress: Progress | None = None,
) -> TrajectoryBatch:
    """Read rollouts from one file: flat token rows, token trees, framework dumps or chat logs.

    format: one of `FORMATS`; None goes by the content (JSON also .gz, .xz, .zst).
    trust: open pickles (slime's .pt); only containers, numbers and tensors in them are read.
    tokenizer: for messages without token ids: a Hugging Face folder, a .tiktoken file, or an object
      with encode(text) -> ids. Recorded token ids are never tokenised anew.
    chat_template: "chatml", "qwen3", jinja source or a file of it; None is the tokenizer's own.
    sampling: "step": one trajectory an assistant turn, which alone is scored; "tree-step": each
      distinct step of a group once. None: "step" for logs, branches for token trees.
    rewards: rewards by trajectory, rollout or group id, or by group and id, as a mapping or a file
      (JSON, CSV).
    progress: called with (bytes read, bytes in all) of the file.

    Needs little more memory than the batch (flat rows) or the batch and its unique tokens (trees,
    logs). Raises DataError, one line, for whatever is wrong with the file or a row, ConfigError for
    options that are missing or mean nothing for the format.
    """
    file = Path(path)
    chosen = format or _detect(file)
    if chosen not in FORMATS:
        raise DataError(f"format is {chosen!r}; use one of {', '.join(FORMATS)}")
    _require_meaning(chosen, tokenizer=tokenizer, chat_template=chat_template, sampling=sampling)
    options = ReadOptions(
        trust=trust,
        tokenizer=tokenizer,
        chat_template=chat_template,
        sampling=sampling,
        progress=progress,
    )
    with open_for_reading(file) as stream:
        if not stream.read(1):
            raise DataError(f"{file}: the file is empty; write one trajectory a line or row")
    if chosen in FLAT_READERS:
        pairs = _require_rows(FLAT_READERS[chosen](file, options), file)
        batch = TrajectoryBatch.from_named_rows(pairs)
    else:
        batch = assemble(_require_rows(TREE_READERS[chosen](file, options), file))
    if rewards is None:
        return batch
    return with_rewards(batch, rewards if isinstance(rewards, Mapping) else Path(rewards))


def format_of_suffix(path: Path) -> Format | None:
    """The format that the name promises, compression aside, or None."""
    name = path.with_suffix("") if path.suffix in COMPRESSED_SUFFIXES else path
    return SUFFIXES.get(name.suffix.lower())


def detect(path: str | os.PathLike[str]) -> str:
    """The format that `read` takes a file for; DataError when nothing tells."""
    return _detect(Path(path))


def takes(format: str, option: str) -> bool:
    """Whether an option of `read` (tokenizer, chat_template, sampling) is of use for a format."""
    return format in _TAKES[option]


def _detect(path: Path) -> str:
    promised = format_of_suffix(path)
    if promised == "parquet":
        if path.suffix in COMPRESSED_SUFFIXES:
            raise DataError(f"{path}: Parquet inside an archive is not read; decompress it first")
        return promised
    with open_for_reading(path) as stream:
        head = stream.read(HEAD_BYTES)
    if head.startswith(PARQUET_MAGIC):
        if promised is not None or path.suffix in COMPRESSED_SUFFIXES:
            raise DataError(f"{path}: the content is Parquet, the name is not; rename it")
        return "parquet"
    if is_torch(head):
        return "slime"
    found = json_format(head)
    if found is not None:
        return found
    if promised is not None or head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        return promised or "jsonl"
    raise DataError(f"{path}: the format is not known; use one of {', '.join(FORMATS)} (format=)")


def _require_meaning(chosen: str, **given: Any) -> None:
    for option, value in given.items():
        if value is not None and not takes(chosen, option):
            problem = f"{option} is given, but {chosen} files hold token ids as they are"
            advice = f"leave it out ({option} is for {', '.join(_TAKES[option])})"
            raise ConfigError(f"{problem}; {advice}")
    if given["sampling"] not in (None, "step", "tree-step"):
        raise ConfigError(f"sampling is {given['sampling']!r}; use step or tree-step")


def _require_rows(rows: Iterator[Row], path: Path) -> Iterator[Row]:
    is_empty = True
    for row in rows:
        is_empty = False
        yield row
    if is_empty:
        raise DataError(f"{path}: the file holds no rows; write one trajectory a line or row")
