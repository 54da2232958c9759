"""`harts plan`: how a step would be cut, checked independently; never loads torch."""

from __future__ import annotations

import argparse
from typing import Any

from harts.cli.output import Rows, counted, percent, print_result, seconds
from harts.data.read import read
from harts.plan.planner import plan_step
from harts.plan.verify import verify_plan


def run(args: argparse.Namespace) -> int:
    """Plan, verify the plan (outside `plan_seconds`) and print its summary."""
    batch = read(args.file)
    plan = plan_step(
        batch, capacity=args.capacity, replicas=args.replicas, chunk_size=args.chunk_size
    )
    verify_plan(plan)
    summary = plan.summary()
    print_result(summary, _rows(summary, args), as_json=args.json)
    return 0


def _rows(summary: dict[str, Any], args: argparse.Namespace) -> Rows:
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
