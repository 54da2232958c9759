"""`harts train CONFIG.toml [section.key=value ...]`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import NamedTuple

from harts.cli.config import read_config
from harts.cli.output import print_result
from harts.errors import HartsError
from harts.report.train_report import write_train_report
from harts.train.options import RunOptions


def run(args: argparse.Namespace) -> int:
    """Train; with --json the last step's metrics are the one object on stdout.

    However the run ends, report.html beside its metrics shows the steps that are done.
    """
    options = read_config(args.config, args.overrides)
    from transformers.utils import logging  # torch and transformers, after the config is read

    from harts.train.trainer import train

    logging.disable_progress_bar()  # the console shows steps, not shards of a checkpoint
    metrics_file = Path(options.output.dir) / "metrics.jsonl"
    before = _stamp(metrics_file)
    try:
        metrics = train(options, resume=args.resume)
    finally:
        stamp = _stamp(metrics_file)
        # a refused run leaves the report of another alone, and one without a step has none
        if stamp != before and stamp is not None and stamp.size > 0:
            _report(metrics_file, options)
    if args.json:
        print_result(metrics, [], as_json=True)
    else:
        print(f"metrics, report.html and checkpoints are in {options.output.dir}")
    return 0


class _Stamp(NamedTuple):
    """What changes when a run writes its metrics."""

    inode: int
    size: int
    modified: int


def _stamp(path: Path) -> _Stamp | None:
    """None where there are no metrics."""
    try:
        status = path.stat()
    except OSError:
        return None
    return _Stamp(status.st_ino, status.st_size, status.st_mtime_ns)


def _report(metrics_file: Path, options: RunOptions) -> None:
    """Write the page; a run is never lost for its report, so a problem is only told."""
    try:
        write_train_report(
            metrics_file,
            metrics_file.with_name("report.html"),
            config=dataclasses.asdict(options),
        )
    except HartsError as error:
        print(f"harts: no report: {error}", file=sys.stderr)
