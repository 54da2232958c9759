"""The options of every command that reads rollouts, and the reading with a progress bar."""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harts.data.compression import Progress
from harts.data.read import FORMATS, detect, read, takes
from harts.data.trajectory import TrajectoryBatch

_SHOW_FROM_BYTES = 1 << 25
"""Files smaller than this (32 MiB) are read before a bar could be looked at."""


def add_reading_options(parser: argparse.ArgumentParser, *, tokenizer_use: str = "") -> None:
    """FILE and how it is read; tokenizer_use: what else the command does with --tokenizer."""
    parser.add_argument(
        "file",
        metavar="FILE",
        help="rollouts: token rows (JSON lines, Parquet), verifiers traces, ATIF, slime dumps or "
        "chat logs; JSON also .gz, .xz, .zst",
    )
    group = parser.add_argument_group("how FILE is read")
    group.add_argument(
        "--format", choices=FORMATS, help="what FILE is (default: its content tells)"
    )
    group.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="a Hugging Face folder or a .tiktoken file, for messages without token ids"
        + (f"; also {tokenizer_use}" if tokenizer_use else ""),
    )
    group.add_argument(
        "--chat-template",
        metavar="NAME",
        help="chatml, qwen3 or a file with a Hugging Face template (default: the tokenizer's own)",
    )
    group.add_argument(
        "--sampling",
        choices=("step", "tree-step"),
        help="step: one trajectory an assistant turn; tree-step: each distinct turn of a task "
        "once (default: step for logs, branches for token trees)",
    )
    group.add_argument(
        "--rewards",
        metavar="PATH",
        help="rewards by trajectory, rollout or group id, where FILE has none (JSON or CSV)",
    )
    group.add_argument(
        "--trust", action="store_true", help="open Python pickles (.pt dumps of slime and miles)"
    )


def read_rollouts(
    args: argparse.Namespace, *, tokenizer_also_decodes: bool = False
) -> TrajectoryBatch:
    """`harts.read` as the command line says; a bar on stderr where that is a terminal.

    tokenizer_also_decodes: the command has its own use for --tokenizer, so it is no mistake to give
    it for a file of token ids.
    """
    tokenizer = args.tokenizer
    if tokenizer_also_decodes and tokenizer is not None:
        chosen = args.format or detect(args.file)
        tokenizer = tokenizer if takes(chosen, "tokenizer") else None
    with _bar(args.file) as progress, warnings.catch_warnings():
        warnings.showwarning = _show_warning
        return read(
            args.file,
            format=args.format,
            trust=args.trust,
            tokenizer=tokenizer,
            chat_template=args.chat_template,
            sampling=args.sampling,
            rewards=args.rewards,
            progress=progress,
        )


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print("harts: warning:", " ".join(str(message).split()), file=sys.stderr)


@contextlib.contextmanager
def _bar(file: str) -> Iterator[Progress | None]:
    path = Path(file)
    if not sys.stderr.isatty() or not path.is_file() or path.stat().st_size < _SHOW_FROM_BYTES:
        yield None
        return
    try:
        from rich import console, progress
    except ImportError:  # a bar is a comfort, no reason to stop
        yield None
        return
    columns = (
        progress.TextColumn("reading {task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    stderr = console.Console(stderr=True)
    with progress.Progress(*columns, console=stderr, transient=True) as shown:
        task = shown.add_task(path.name, total=path.stat().st_size)
        yield lambda done, total: shown.update(task, completed=done, total=total)
