"""Tree against expanded run on CPU, through the same reference operators and the same LM head.

    python benchmarks/step_cpu.py                       # generated agent trees, S/C near 5.6
    python benchmarks/step_cpu.py --file rollouts.jsonl.xz --samples 1

Both sides run the same code on microbatches of the same capacity; the expanded side gives every
trajectory an identity of its own, so nothing is shared. Samples alternate in one process.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import harts
from harts.data.synthetic import agent_batch
from harts.models.tree_model import TreeModel
from harts.train.options import ObjectiveOptions
from harts.train.sampling import unshared
from harts.train.step import StepResult, accumulate_gradients

sys.path.insert(0, str(Path(__file__).parent))
from results_file import add_result_options, environment, keep_records


def main() -> None:
    """Measure and print; write the JSON with --write."""
    args = _arguments()
    batch = harts.read(args.file) if args.file else agent_batch(seed=0, shape="agent_tree")
    model = harts.attach(
        harts.tiny_model(args.model, vocab_size=int(batch.tokens.max()) + 1).train()
    )
    sides = {"tree": batch, "expanded": unshared(batch)}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    losses: dict[str, float] = {}
    plans = {}
    if not args.cold:
        for side in sides:
            _step(model, sides[side], args.capacity)
    for _ in range(args.samples):
        for side, data in sides.items():
            started = time.perf_counter()
            plan, result = _step(model, data, args.capacity)
            seconds[side].append(time.perf_counter() - started)
            losses[side], plans[side] = result.loss, plan
            print(f"{side:8} {seconds[side][-1]:.3f} s  loss {result.loss:+.9f}", flush=True)
    metrics = _metrics(seconds, losses, plans)
    for name, value in metrics.items():
        print(f"{name:28} {value:.6g}" if isinstance(value, float) else f"{name:28} {value}")
    if args.profile:
        _profile(model, sides["tree"], args.capacity)
    record = {
        "bench": "step_cpu",
        "case": Path(args.file).name if args.file else "agent_tree seed 0",
        "config": {"model": f"tiny:{args.model}", "capacity": args.capacity},
        "env": environment(),
        "metrics": metrics,
        "samples": seconds,
    }
    keep_records(args, f"step_cpu_{args.model}_{args.name}", [record], hardware="cpu2")


def _step(
    model: TreeModel, batch: harts.TrajectoryBatch, capacity: int
) -> tuple[harts.StepPlan, StepResult]:
    """Plan, log-probs, objective, backward: what the step costs without the optimiser."""
    model.model.zero_grad(set_to_none=True)
    plan = harts.plan_step(batch, capacity)
    return plan, accumulate_gradients(model, plan, ObjectiveOptions())


def _metrics(
    seconds: dict[str, list[float]], losses: dict[str, float], plans: dict[str, harts.StepPlan]
) -> dict[str, Any]:
    tree, expanded = (statistics.median(seconds[side]) for side in ("tree", "expanded"))
    raw, compact = plans["tree"].raw_tokens, plans["tree"].compact_tokens
    return {
        "speedup": expanded / tree,
        "compression": raw / compact,
        "tree_seconds": tree,
        "tree_seconds_spread": max(seconds["tree"]) - min(seconds["tree"]),
        "expanded_seconds": expanded,
        "expanded_seconds_spread": max(seconds["expanded"]) - min(seconds["expanded"]),
        "raw_tokens": raw,
        "compact_tokens": compact,
        "scored_tokens": plans["tree"].denominators.num_scored_tokens,
        "raw_tokens_per_second": raw / tree,
        "loss_difference": abs(losses["tree"] - losses["expanded"]),
        "microbatches_tree": plans["tree"].num_microbatches,
        "microbatches_expanded": plans["expanded"].num_microbatches,
    }


def _profile(model: TreeModel, batch: harts.TrajectoryBatch, capacity: int) -> None:
    """Where the tree step's time goes, by operator."""
    with torch.profiler.profile() as profile:
        _step(model, batch, capacity)
    print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=18))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", help="rollouts instead of generated ones")
    parser.add_argument("--model", default="bailing_hybrid")
    parser.add_argument("--capacity", type=int, default=65536)
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="no warm-up step on each side")
    parser.add_argument("--profile", action="store_true")
    add_result_options(parser)
    parser.add_argument("--name", default="agent_tree")
    return parser.parse_args()


if __name__ == "__main__":
    main()
