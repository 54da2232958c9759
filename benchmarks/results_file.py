"""Write benchmark results: benchmarks/results/<bench>-<hardware>-<date>-<commit>.json."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

RESULTS = Path(__file__).parent / "results"


def environment() -> dict[str, Any]:
    """What a number depends on: machine, versions, threads, commit."""
    return {
        "device": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": None,
        "transformers": transformers.__version__,
        "commit": _commit(),
    }


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments that a number depends on: all but where it goes."""
    return {k: v for k, v in vars(args).items() if k not in ("out", "write", "sweep")}


def add_result_options(parser: argparse.ArgumentParser) -> None:
    """--write and --out, as `keep_records` takes them."""
    parser.add_argument(
        "--write", action="store_true", help="the JSON into benchmarks/results, named by its commit"
    )
    parser.add_argument("--out", help="the JSON into this folder, also of what is not yet whole")


def keep_records(
    args: argparse.Namespace,
    bench: str,
    records: list[dict[str, Any]],
    *,
    name: str | None = None,
    hardware: str | None = None,
    whole: bool = True,
) -> None:
    """Write them where the arguments say; call it with whole=False for each part that is there.

    name: of the file in --out, the bench without. hardware: in the name in benchmarks/results, the
    GPU's without.
    """
    if args.out:
        write_records(Path(args.out) / f"{name or bench}.json", records)
    if args.write and whole:
        print(write_result(bench, hardware or gpu_name(), records))


def gpu_name() -> str:
    """The GPU's model as results are named: "h200"."""
    return torch.cuda.get_device_name().split()[-1].lower()


def write_result(bench: str, hardware: str, records: list[dict[str, Any]]) -> Path:
    """Write benchmarks/results/<bench>-<hardware>-<date>-<commit>.json; returns the file."""
    path = RESULTS / f"{bench}-{hardware}-{date.today():%Y%m%d}-{_commit()}.json"
    return write_records(path, records)


def write_records(path: Path, records: list[dict[str, Any]]) -> Path:
    """Write beside and rename, and make the folder: a run that is stopped leaves a whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".partial")
    beside.write_text(json.dumps(records, indent=1) + "\n")
    os.replace(beside, path)
    return path


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
