"""`harts train CONFIG.toml [section.key=value ...]`."""

from __future__ import annotations

import argparse
import json

from harts.cli.config import read_config


def run(args: argparse.Namespace) -> int:
    """Train; with --json the last step's metrics are the one object on stdout."""
    options = read_config(args.config, args.overrides)
    from transformers.utils import logging  # torch and transformers, after the config is read

    from harts.train.trainer import train

    logging.disable_progress_bar()  # the console shows steps, not shards of a checkpoint
    metrics = train(options, resume=args.resume)
    if args.json:
        print(json.dumps(metrics))
    else:
        print(f"metrics and checkpoints are in {options.output.dir}")
    return 0
