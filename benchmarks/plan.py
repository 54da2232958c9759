"""The planner against OR-Tools + FFD, AReaL-DTA and next-fit, on the paper's ten steps.

    python benchmarks/plan.py                                  # everything, about an hour
    python benchmarks/plan.py --quick                          # row 1, OR-Tools at 0.2 s, to stdout
    python benchmarks/plan.py --baselines-from benchmarks/results/plan-cpu2-....json
    python benchmarks/plan.py --table                          # docs/results/planning.md again

Every case is measured in processes of its own with one thread (CP-SAT has two, --workers) and
written to --work as it is done, so that a killed run continues where it was: baselines by case,
harts by case and by a hash of its sources. `--only baselines` measures nothing of harts.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import plan_data
from plan_table import render
from results_file import RESULTS, environment, write_result

from harts.errors import HartsError

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "results" / "planning.md"
CAPACITY = 65_536


def main() -> None:
    """Measure what is missing, write the JSON and the page."""
    args = _arguments()
    try:
        if not args.table:
            _measure(args)
        if args.only == "all" and not args.quick:
            _write_page()
    except HartsError as error:
        sys.exit(str(error))


def _measure(args: argparse.Namespace) -> None:
    taken = _baselines_of(args.baselines_from)
    env = environment() | {name: _version(name) for name in ("numpy", "numba", "ortools")}
    env["load_at_start"] = os.getloadavg()[0]
    env["baselines_from"] = args.baselines_from.name if args.baselines_from else None
    env["threads"] = {"planners": 1, "cp_sat": args.workers}
    records = []
    for case in _cases(args):
        baselines = taken.get(case) or _kept(
            _baselines_file(args, case), lambda c=case: _baselines(c, args)
        )
        if args.only == "baselines":
            continue
        harts = _kept(_harts_file(args, case), lambda c=case: _harts(c, args))
        config = {"capacity": CAPACITY, "replicas": [4, 2], "limits": args.limits}
        records.append(_record(case, config, env, harts, baselines))
    if args.only == "baselines":
        return
    small = _kept(
        _harts_file(args, f"small-{args.small}"),
        lambda: _worker("small", "--count", str(args.small)),
    )
    record = _record(f"{args.small} small instances", {"seed": 0}, env, {}, {})
    records.append(record | {"samples": small, "metrics": {}})
    if args.quick:
        print(render(records, "(a quick run, not kept)"))
    else:
        print(write_result("plan", "cpu2", records), file=sys.stderr)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _record(
    case: str, config: dict[str, Any], env: dict[str, Any], harts: Any, baselines: Any
) -> dict[str, Any]:
    return {
        "bench": "plan",
        "case": case,
        "config": config,
        "env": env,
        "metrics": {"harts": harts, **baselines},
        "samples": {"harts_seconds": harts.get("seconds", [])},
    }


def _cases(args: argparse.Namespace) -> list[str]:
    shapes = [] if args.quick or args.no_shapes else plan_data.shape_names()
    return [f"row {row}" for row in args.rows] + [f"shape {name}" for name in shapes]


def _batch(case: str, args: argparse.Namespace) -> Any:
    kind, name = case.split(" ", 1)
    if kind == "row":
        return plan_data.table2_batch(int(name), CAPACITY)
    return plan_data.shape_batch(name, args.shape_tasks, CAPACITY)


def _baselines(case: str, args: argparse.Namespace) -> dict[str, Any]:
    limits = ",".join(f"{limit:g}" for limit in args.limits)
    with tempfile.TemporaryDirectory() as folder:
        plan_data.save_batch(_batch(case, args), Path(folder))
        load = os.getloadavg()[0]
        found = _worker("baselines", folder, "--limits", limits, "--workers", str(args.workers))
    return found | {"measured": {"date": f"{date.today()}", "load_at_start": load}}


def _harts(case: str, args: argparse.Namespace) -> dict[str, Any]:
    samples = ("--samples", str(args.samples))
    with tempfile.TemporaryDirectory() as folder:
        plan_data.save_batch(_batch(case, args), Path(folder))
        found = _worker("harts", folder, *samples)
        plain = _worker("harts", folder, *samples, "--no-numba")
    found["seconds_without_numba"] = plain["seconds"]
    found["first_call_seconds_without_numba"] = plain["first_call_seconds"]
    found["same_without_numba"] = plain["quality"] == found["quality"]
    return found


def _worker(*arguments: str) -> dict[str, Any]:
    """One run of plan_measure.py; its progress goes on to stderr."""
    environ = os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "plan_measure.py"), *arguments]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"plan_measure.py {' '.join(arguments)} ended with {done.returncode}; see above")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _kept(path: Path, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the file holds, or what is measured now and written to it, beside and renamed."""
    if not path.exists():
        started = time.perf_counter()
        print(f"{path.parent.name}: {path.stem} ...", file=sys.stderr, flush=True)
        found = measure()
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".partial")
        beside.write_text(json.dumps(found))
        os.replace(beside, path)
        seconds = time.perf_counter() - started
        print(f"{path.parent.name}: {path.stem} {seconds:.0f} s", file=sys.stderr, flush=True)
    kept: dict[str, Any] = json.loads(path.read_text())
    return kept


def _baselines_file(args: argparse.Namespace, case: str) -> Path:
    limits = "-".join(f"{limit:g}" for limit in args.limits)
    folder = f"baselines-limits-{limits}-workers-{args.workers}-tasks-{args.shape_tasks}"
    return args.work / folder / f"{case}.json"


def _harts_file(args: argparse.Namespace, case: str) -> Path:
    """Keyed by the sources that decide plans and times, so that none is taken for another's."""
    source = HERE.parent / "src" / "harts"
    files = [*source.glob("plan/*.py"), *source.glob("tree/*.py"), *source.glob("data/*.py")]
    digest = hashlib.sha256()
    for path in [*sorted(files), HERE / "plan_measure.py", HERE / "plan_data.py"]:
        digest.update(path.read_bytes())
    digest.update(f"{args.samples} {args.shape_tasks}".encode())
    return args.work / f"harts-{digest.hexdigest()[:12]}" / f"{case}.json"


def _baselines_of(path: Path | None) -> dict[str, dict[str, Any]]:
    """Baselines by case from an earlier result file, or from the folder of a --work."""
    if path is None:
        return {}
    if path.is_dir():
        return {file.stem: json.loads(file.read_text()) for file in path.glob("*.json")}
    records = json.loads(path.read_text())
    return {
        record["case"]: {k: v for k, v in record["metrics"].items() if k != "harts"}
        for record in records
        if record["metrics"]
    }


def _write_page() -> None:
    files = sorted(RESULTS.glob("plan-cpu2-*.json"), key=lambda path: path.stat().st_mtime)
    if not files:
        sys.exit(f"no plan-cpu2-*.json in {RESULTS}; measure first")
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    page = render(json.loads(files[-1].read_text()), files[-1].name)
    beside = PAGE.with_suffix(".partial")
    beside.write_text(page)
    os.replace(beside, PAGE)
    print(PAGE, file=sys.stderr)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--rows", type=_rows, default="1-10", help="rows of Table 2: 1-10 or 3")
    parser.add_argument("--samples", type=int, default=5, help="timed calls a case, warm")
    parser.add_argument("--limits", type=_limits, default="0.2,1,3", help="CP-SAT seconds a tree")
    parser.add_argument("--workers", type=int, default=2, help="CP-SAT threads")
    parser.add_argument("--small", type=int, default=300, help="instances of at most 9")
    parser.add_argument("--shape-tasks", type=int, default=16, help="tasks drawn of each shape")
    parser.add_argument("--no-shapes", action="store_true", help="only the rows of Table 2")
    parser.add_argument("--only", choices=["all", "baselines"], default="all")
    parser.add_argument("--baselines-from", type=Path, help="a result file or a baselines folder")
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()) / "harts-plan-bench"
    )
    parser.add_argument("--quick", action="store_true", help="row 1, OR-Tools at 0.2 s, to stdout")
    parser.add_argument("--table", action="store_true", help="only write the page again")
    args = parser.parse_args()
    if args.quick:
        args.rows, args.limits, args.small = [1], [0.2], min(args.small, 50)
        args.work = args.work / "quick"
    return args


def _rows(text: str) -> list[int]:
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def _limits(text: str) -> list[float]:
    return [float(seconds) for seconds in text.split(",")]


if __name__ == "__main__":
    main()
