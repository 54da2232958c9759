"""`harts plan`: how a step would be cut, checked independently; never loads torch."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import harts
from harts.cli.output import percent, print_result, seconds
from harts.cli.reading import read_rollouts
from harts.data.trajectory import TrajectoryBatch
from harts.errors import ConfigError
from harts.plan.over_capacity import dropped_text, within_capacity
from harts.plan.planner import plan_step
from harts.plan.step_plan import StepPlan
from harts.plan.verify import verify_plan
from harts.report.page import check_destination
from harts.report.plan_report import write_plan_report
from harts.report.text import counted

_BASELINES = {"ortools": ("ortools_ffd", "plan_ortools"), "dta": ("dta", "plan_dta")}


def run(args: argparse.Namespace) -> int:
    """Plan, verify the plan (outside `plan_seconds`), print its summary and write its report."""
    if args.report is not None:
        check_destination(args.report, made_from=args.file)  # before the work, not after it
    batch = read_rollouts(args)
    plan = _plan(batch, args)
    verify_plan(plan)
    summary = plan.summary()
    rows = _rows(summary, args)
    if len(plan.dropped):
        summary["dropped"] = [batch.name_of(i) for i in plan.dropped.tolist()]
        rows.append(("dropped", dropped_text(batch, plan.dropped)))
    if args.report is not None:
        write_plan_report(plan, args.report, source=Path(args.file).name)
        rows.append(("report", args.report))
    print_result(summary, rows, as_json=args.json)
    return 0


def _plan(batch: TrajectoryBatch, args: argparse.Namespace) -> StepPlan:
    if args.planner in _BASELINES and args.chunk_size == 64:
        kept, dropped = within_capacity(batch, args.capacity, args.over_capacity)
        plan = _baseline(args.planner)(kept, args.capacity, args.replicas)
        return dataclasses.replace(plan, dropped=dropped)
    if args.planner in _BASELINES:
        raise ConfigError(
            f"--chunk-size is {args.chunk_size}; the baseline {args.planner} plans for chunks of 64"
        )
    return plan_step(
        batch,
        capacity=args.capacity,
        replicas=args.replicas,
        chunk_size=args.chunk_size,
        planner=args.planner,
        over_capacity=args.over_capacity,
    )


def _baseline(planner: str) -> Callable[[TrajectoryBatch, int, int], StepPlan]:
    """A planner to compare with, from benchmarks/plan_baselines of a source checkout."""
    folder = Path(harts.__file__).parents[2] / "benchmarks"
    module, function = _BASELINES[planner]
    if not (folder / "plan_baselines").is_dir():
        raise ConfigError(
            f"--planner {planner} is a benchmark baseline and not part of the package; "
            "run from a source checkout (pip install -e .)"
        )
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    plan: Callable[[TrajectoryBatch, int, int], StepPlan] = getattr(
        import_module(f"plan_baselines.{module}"), function
    )
    return plan


def _rows(summary: dict[str, Any], args: argparse.Namespace) -> list[tuple[str, str]]:
    rounds, slot = summary["rounds"], summary["slot_imbalance"]
    compact, replay = summary["compact_tokens"], summary["replay_tokens"]
    return [
        ("trajectories", f"{summary['trajectories']:,}"),
        ("raw tokens", f"{summary['raw_tokens']:,}"),
        ("unique tokens", f"{summary['trie_tokens']:,} over the whole step"),
        ("compact rows", f"{compact:,} in microbatches of at most {args.capacity:,}"),
        ("compression", f"{summary['compression']:.2f}x (raw tokens / compact rows)"),
        (
            "microbatches",
            f"{summary['microbatches']:,} ({counted(summary['slots'], 'slot')} x "
            f"{counted(summary['replicas'], 'replica')})",
        ),
        (
            "imbalance",
            f"slots {percent(slot['p50'])} (median), {percent(slot['p95'])} (p95); "
            f"step {percent(summary['step_imbalance'])}",
        ),
        (
            "rounds",
            f"{rounds['max']} at most, {rounds['mean']:.2f} on average "
            f"(linear attention, chunks of {args.chunk_size})",
        ),
        ("replay", f"{replay:,} rows ({percent(replay / compact)} of the compact rows)"),
        ("planned in", seconds(summary["plan_seconds"])),
    ]
