"""Run the GPU tests on this machine and keep their result: `make test-gpu`.

    PYTHONPATH=src:. python benchmarks/gpu_tests.py --write

Needs pytest beside torch, triton, transformers, fla-core and flash-attn-4; runs in parallel where
pytest-xdist is installed. Exits with pytest's status.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from gpu_environment import gpu_environment
from results_file import write_result

SLOW_SECONDS = 200
"""A test that runs longer says where it is; most of the time is compilation."""


def main() -> None:
    """Test, print the tail, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tests", nargs="*", default=["tests"])
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 6)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--out", help="folder for the JSON instead of benchmarks/results")
    args = parser.parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        status = subprocess.run(_command(args, report), check=False).returncode
        metrics, files, failures = _read(report)
    metrics["seconds"] = round(time.perf_counter() - started, 1)
    print(json.dumps(metrics | {"files": files, "failures": failures}, indent=1))
    record = {
        "bench": "gpu_tests",
        "case": "pytest -m 'gpu or triton'",
        "config": {"tests": args.tests, "workers": args.workers},
        "env": gpu_environment(),
        "metrics": metrics | {"by_file": files, "failures": failures},
        "samples": {},
    }
    if args.out:
        (Path(args.out) / "gpu_tests.json").write_text(json.dumps([record], indent=1) + "\n")
    if args.write:
        print(write_result("gpu_tests", "h200", [record]))
    sys.exit(status)


def _command(args: argparse.Namespace, report: Path) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-m", "gpu or triton", f"--junitxml={report}"]
    command += ["--durations=20", "-o", f"faulthandler_timeout={SLOW_SECONDS}"]
    if importlib.util.find_spec("xdist"):
        command += ["-n", str(args.workers), "--dist", "worksteal"]
    return [*command, *args.tests]


def _read(report: Path) -> tuple[dict[str, Any], dict[str, int], list[str]]:
    """Totals, tests passed by file, and the names of those that failed."""
    if not report.exists():
        return {"passed": 0, "failed": 0, "skipped": 0}, {}, ["pytest wrote no report"]
    totals = {"passed": 0, "failed": 0, "skipped": 0}
    files: dict[str, int] = {}
    failures = []
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            totals["failed"] += 1
            failures.append(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" in kinds:
            totals["skipped"] += 1
        else:
            totals["passed"] += 1
            file = str(case.get("classname"))
            files[file] = files.get(file, 0) + 1
    return totals, files, failures


if __name__ == "__main__":
    main()
