"""Measure planners on one saved batch, in a process of its own; one JSON object on stdout.

    python benchmarks/plan_measure.py harts FOLDER --samples 5 [--no-numba]
    python benchmarks/plan_measure.py baselines FOLDER --limits 0.2,1,3
    python benchmarks/plan_measure.py small --count 300

benchmarks/plan.py starts it. harts is called only through `harts.plan_step`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

CAPACITY = 65_536
REPLICAS = (4, 2)


def main() -> None:
    """Print what one of the three modes measures."""
    args = _arguments()
    if args.no_numba:
        sys.modules["numba"] = None  # type: ignore[assignment]  # as on a machine without it
    measure = {"harts": _measure_harts, "baselines": _measure_baselines, "small": _measure_small}
    json.dump(measure[args.mode](args), sys.stdout)


def quality(plan: Any) -> dict[str, Any]:
    """Work and balance of a StepPlan, the imbalances as Equation 23 in per cent."""
    work = np.zeros((plan.num_slots, plan.replicas))
    work[plan.slot_of_microbatch, plan.replica_of_microbatch] = plan.compact_tokens_of_microbatch
    total = work.sum(axis=0)
    return {
        "compact_tokens": int(work.sum()),
        "microbatches": plan.num_microbatches,
        "slots": plan.num_slots,
        "slot_critical_tokens": int(work.max(axis=1).sum()),
        "largest_replica_tokens": int(total.max()),
        "step_imbalance_percent": float(100 * (total.max() / total.mean() - 1)),
        "slot_imbalance_percent": (100 * (work.max(axis=1) / work.mean(axis=1) - 1)).tolist(),
    }


def _measure_harts(args: argparse.Namespace) -> dict[str, Any]:
    from plan_data import load_batch

    import harts

    batch = load_batch(args.folder)
    before = _restart_peak()
    first, plan = _timed(lambda: harts.plan_step(batch, capacity=CAPACITY, replicas=4))
    peak = _peak_bytes() - before
    seconds = []
    for _ in range(args.samples):
        elapsed, plan = _timed(lambda: harts.plan_step(batch, capacity=CAPACITY, replicas=4))
        seconds.append(elapsed)
        print(f"  harts {elapsed:.3f} s", file=sys.stderr, flush=True)
    other, plan_2 = _timed(lambda: harts.plan_step(batch, capacity=CAPACITY, replicas=2))
    found = {
        "batch": _describe(batch, plan),
        "first_call_seconds": first,
        "seconds": seconds,
        "seconds_at_2_replicas": other,
        "peak_bytes_beyond_tokens": peak,
        "quality": {"4": quality(plan), "2": quality(plan_2)},
    }
    return found | _measure_paper_options(batch)


def _measure_paper_options(batch: Any) -> dict[str, Any]:
    """The planner with what goes beyond the paper switched off, where it has such options."""
    import harts
    from harts.plan import options as module

    options = getattr(module, "PlannerOptions", None)
    if options is None or not hasattr(options, "paper"):
        return {}
    found: dict[str, Any] = {"paper_quality": {}}
    for replicas in REPLICAS:
        seconds, plan = _timed(
            lambda d=replicas: harts.plan_step(
                batch, capacity=CAPACITY, replicas=d, options=options.paper()
            )
        )
        found["paper_quality"][str(replicas)] = quality(plan)
        found["paper_seconds"] = seconds
    return found


def _measure_baselines(args: argparse.Namespace) -> dict[str, Any]:
    from plan_baselines.dta import plan_dta
    from plan_baselines.next_fit import plan_next_fit
    from plan_data import load_batch

    batch = load_batch(args.folder)
    found: dict[str, Any] = {}
    for name, planner in (("next_fit", plan_next_fit), ("dta", plan_dta)):
        planner(batch, CAPACITY, 4)
        seconds = [_timed(lambda p=planner: p(batch, CAPACITY, 4))[0] for _ in range(3)]
        plans = {d: planner(batch, CAPACITY, d) for d in REPLICAS}
        found[name] = {
            "seconds": seconds,
            "quality": {str(d): quality(plan) for d, plan in plans.items()},
        }
    for limit in args.limits:
        found[f"ortools_{limit:g}"] = _measure_ortools(batch, limit, args.workers)
    return found


def _measure_ortools(batch: Any, limit: float, workers: int) -> dict[str, Any]:
    from plan_baselines.ortools_ffd import arrange, partition_trees

    def progress(text: str) -> None:
        print(f"  OR-Tools {limit:g} s: {text}", file=sys.stderr, flush=True)

    trees = partition_trees(
        batch, CAPACITY, seconds_per_tree=limit, workers=workers, progress=progress
    )
    plans = {d: arrange(batch, trees, CAPACITY, d) for d in REPLICAS}
    others = {
        "by_raw": {"size": "raw"},
        "by_partitions": {"size": "partitions"},
        "merged": {"merge": True},
    }
    return {
        "seconds": [plans[4].plan_seconds],
        "workers": workers,
        "trees": len(trees.raw_of_tree),
        "proven_optimal_trees": trees.num_optimal,
        "partitions_before_splits": len(trees.members),
        "quality": {str(d): quality(plan) for d, plan in plans.items()},
        "variants": {
            name: {str(d): quality(arrange(batch, trees, CAPACITY, d, **how)) for d in REPLICAS}
            for name, how in others.items()
        },
    }


def _measure_small(args: argparse.Namespace) -> dict[str, Any]:
    """Total work over the least of all capacity-feasible partitions, per instance."""
    from plan_baselines.exhaustive import plan_exhaustively
    from plan_baselines.next_fit import plan_next_fit
    from plan_data import small_batches

    import harts
    from harts.errors import PlanError

    found: dict[str, Any] = {"agent": [], "random": [], "next_fit": [], "without_plan": 0}
    for kind, batch, capacity, replicas in small_batches(args.count):
        try:
            least = plan_exhaustively(batch, capacity, replicas).compact_tokens
        except PlanError:  # no multiple of the replicas is reachable
            found["without_plan"] += 1
            continue
        for name, planner in ((kind, harts.plan_step), ("next_fit", plan_next_fit)):
            try:
                plan = planner(batch, capacity=capacity, replicas=replicas)
                found[name].append(plan.compact_tokens / least)
            except PlanError:  # counts as a miss: a plan exists
                found[name].append(None)
    return found


def _describe(batch: Any, plan: Any) -> dict[str, int]:
    return {
        "trajectories": len(batch),
        "raw_tokens": len(batch.tokens),
        "trie_tokens": plan.trie_tokens,
        "tasks": len(np.unique(batch.trajectory_fields["group_id"])),
    }


def _timed(call: Any) -> tuple[float, Any]:
    started = time.perf_counter()
    result = call()
    return time.perf_counter() - started, result


def _restart_peak() -> int:
    """Forget the peak so far (Linux); resident bytes now.

    ru_maxrss would not do: a process starts with that of the one that forked it.
    """
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _peak_bytes() -> int:
    return _status_bytes("VmHWM")


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", choices=["harts", "baselines", "small"])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--no-numba", action="store_true")
    parser.add_argument(
        "--limits", type=lambda text: [float(s) for s in text.split(",")], default=[0.2, 1.0, 3.0]
    )
    parser.add_argument("--workers", type=int, default=2, help="threads of CP-SAT")
    parser.add_argument("--count", type=int, default=300)
    return parser.parse_args()


if __name__ == "__main__":
    main()
