"""Run the GPU tests on this machine and keep their result: `make test-gpu`.

    PYTHONPATH=src:. python benchmarks/gpu_tests.py --write
    PYTHONPATH=src:. python benchmarks/gpu_tests.py tests/ops --limit 300 --out results

Needs pytest beside torch, triton, transformers, fla-core and flash-attn-4; runs in parallel where
pytest-xdist is installed. Most of the time is compilation, so do not run anything beside it. Prints
each failure as it happens. A run that is stopped, or that --limit stops, keeps what it has: the
tests without an outcome are listed as unfinished, files that cannot be imported among the failures.
Exits with pytest's status.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from gpu_environment import gpu_environment
from results_file import add_result_options, keep_records

MARKED = "gpu or triton"
SLOW_SECONDS = 200
"""A test that runs longer says where it is."""
_OUTCOME = re.compile(r"(PASSED|FAILED|SKIPPED|ERROR)\s+(?:\[[^]]*\]\s+)?(tests/\S.*?::.*?)\s*$")
_OUTCOME_BEHIND = re.compile(r"^(tests/\S+::.*?) (PASSED|FAILED|SKIPPED|ERROR)\b")
_NOT_IMPORTED = re.compile(r"^(ERROR) (tests/\S+?\.py)(?: - |$)")


def main() -> None:
    """Test, print failures and totals, write the JSON."""
    args = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as an interrupt: keep what there is
    started = time.perf_counter()
    outcomes: dict[str, str] = {}
    names, status, tail = [], 1, ["stopped while the tests were collected"]
    try:
        names = _collected(args.tests, args.limit)
        status, tail = _run(args, outcomes)
    except (KeyboardInterrupt, subprocess.TimeoutExpired):
        pass
    seconds = round(time.perf_counter() - started, 1)
    record = {
        "bench": "gpu_tests",
        "case": f"pytest -m '{MARKED}'",
        "config": {"tests": args.tests, "workers": args.workers, "limit": args.limit},
        "env": gpu_environment(),
        "metrics": metrics_of(names, outcomes) | {"status": status, "seconds": seconds},
        "samples": {},
    }
    print("\n".join(tail))
    print(json.dumps(record["metrics"], indent=1))
    keep_records(args, "gpu_tests", [record])
    sys.exit(status)


def _collected(tests: list[str], limit: float) -> list[str]:
    """Names of all tests that should run; those of files that can be imported."""
    command = [sys.executable, "-m", "pytest", "-m", MARKED, "--collect-only", "-q", *tests]
    listing = subprocess.run(
        [*command, "-o", "addopts=--import-mode=importlib"],
        capture_output=True,
        text=True,
        check=False,
        timeout=limit,
    )
    return [line for line in listing.stdout.splitlines() if "::" in line]


def _run(args: argparse.Namespace, outcomes: dict[str, str]) -> tuple[int, list[str]]:
    """pytest's status and the end of its output; fills in the outcome of each test that had one."""
    command = [sys.executable, "-m", "pytest", "-m", MARKED, "-vv", "--color=no", "--tb=short"]
    command += ["--durations=20", "-o", f"faulthandler_timeout={SLOW_SECONDS}"]
    if importlib.util.find_spec("xdist"):
        command += ["-n", str(args.workers), "--dist", "worksteal"]
    process = subprocess.Popen(
        [*command, *args.tests],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ
        | {
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // args.workers)),
            "COLUMNS": "240",  # pytest names the error behind a failure where the line has room
        },
    )
    stop = threading.Timer(args.limit, os.killpg, (process.pid, signal.SIGKILL))
    stop.start()
    rest: list[str] = []
    assert process.stdout is not None
    try:
        for line in process.stdout:
            name, outcome = read_outcome(line)
            if not name:
                rest.append(line.rstrip())
                continue
            outcomes[name] = outcome
            if outcome in ("FAILED", "ERROR"):
                print(outcome, name, flush=True)
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGKILL)
    stop.cancel()
    return process.wait(), rest[-args.tail :]


def read_outcome(line: str) -> tuple[str, str]:
    """Test and outcome of one line of pytest -v, with and without xdist; empty for others.

    A file that cannot be imported is an error under the file's name.
    """
    not_imported = _NOT_IMPORTED.match(line)
    if not_imported:
        return not_imported[2], not_imported[1]
    behind = _OUTCOME_BEHIND.match(line)
    if behind:
        return behind[1], behind[2]
    before = _OUTCOME.search(line) if "[gw" in line else None  # behind what a test wrote, too
    return (before[2], before[1]) if before else ("", "")


def metrics_of(names: list[str], outcomes: dict[str, str]) -> dict[str, Any]:
    """Counts, passed tests by file, and the names of those that failed or had no outcome."""
    counts = Counter(outcomes.values())
    by_file = Counter(n.split("::")[0] for n, o in outcomes.items() if o == "PASSED")
    return {
        "passed": counts["PASSED"],
        "failed": counts["FAILED"] + counts["ERROR"],
        "skipped": counts["SKIPPED"],
        "by_file": dict(sorted(by_file.items())),
        "failures": sorted(n for n, o in outcomes.items() if o in ("FAILED", "ERROR")),
        "unfinished": sorted(set(names) - set(outcomes)),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tests", nargs="*", default=["tests"])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--limit", type=float, default=3600, help="seconds until it is stopped")
    parser.add_argument("--tail", type=int, default=120, help="lines of pytest's end to print")
    add_result_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
