"""Tree attention on one GPU: FlashAttention-4, FlexAttention and the chain views.

    python benchmarks/ops_attention.py                 # 65,536 rows, 16 heads, bfloat16, table
    python benchmarks/ops_attention.py --write         # and the JSON in benchmarks/results
    python benchmarks/ops_attention.py --sides fa4 fa4-any-order --case prototype

"fa4" is deterministic, "fa4-any-order" is not, and neither is "kv-views": FlashAttention-4 over
copies of each chain's keys (`baselines.py`). The tree is the first rows, in DFS preorder, of a
generated agent tree or, with --case prototype, the tree of benchmarks/step.py. Samples of all sides
alternate in one process and are timed by CUDA events; a TFLOP/s counts visible (query, key) pairs
only: 2 (D + V) a pair and head forward, 3.5 times that forward and backward.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import harts
from harts.data.synthetic import SyntheticOptions, generate
from harts.ops.attention import tree_attention
from harts.views.attention import AttentionView, ChainRows, build_attention_view
from harts.views.chains import chains_of

sys.path.insert(0, str(Path(__file__).parent))
from baselines import baseline
from gpu_environment import gpu_environment
from gpu_timing import alternate
from results_file import add_result_options, keep_records, settings
from step_data import prototype_batch

AGENT_TREE = SyntheticOptions(
    shape="agent_tree",
    tasks=2,
    rollouts=24,
    turns=12,
    system_tokens=4000,
    task_tokens=4000,
    turn_tokens=150,
    observation_tokens=250,
    fork_probability=0.7,
)
WIDTHS = ((128, 128), (192, 128))
SIDES: dict[str, dict[str, Any]] = {
    "fa4": {"impl": "fa4"},
    "fa4-any-order": {"impl": "fa4", "deterministic": False},
    "flex": {"impl": "flex"},
    "kv-views": {"impl": "fa4", "deterministic": False},
    "views": {"impl": "views"},
}


def main() -> None:
    """Measure and print; write the JSON with --write."""
    args = _arguments()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/ops_attention.py measures on a GPU, and torch finds none")
    view = view_of(args.case, args.rows, args.seed)
    records = [_measure(view, args, *widths) for widths in WIDTHS]
    for record in records:
        print(record["case"])
        for name, value in record["metrics"].items():
            print(f"  {name:34} {value:.5g}")
    keep_records(args, "ops_attention", records)


def view_of(case: str, num_rows: int, seed: int) -> AttentionView:
    """The first rows of a tree in DFS preorder: their ancestors are among them."""
    prototype = case == "prototype"
    batch = (
        prototype_batch(num_rows, seed) if prototype else generate(replace(AGENT_TREE, seed=seed))
    )
    plan = harts.plan_step(batch, capacity=100 * num_rows, planner="next-fit")
    (microbatch,) = plan.microbatches()
    view = build_attention_view(microbatch, chains_of(microbatch), torch.device("cuda"))
    if view.end.numel() < num_rows:
        sys.exit(f"--rows is {num_rows}, but the generated tree has {view.end.numel()} rows")
    chains = tuple(
        ChainRows(chain.start, min(chain.stop, num_rows), chain.ancestors)
        for chain in view.chains
        if chain.start < num_rows
    )
    return AttentionView(view.end[:num_rows].clamp(max=num_rows), chains)


def _measure(
    view: AttentionView, args: argparse.Namespace, key_width: int, value_width: int
) -> dict[str, Any]:
    q, k, v, d_out = _inputs(view.end.numel(), args.heads, key_width, value_width)
    outputs = {}
    metrics: dict[str, float] = {}
    sides: dict[str, Callable[[], object]] = {}
    for side in args.sides:
        options = SIDES[side] | {"view": view}

        def forward(side: str = side, options: dict[str, Any] = options) -> torch.Tensor:
            with baseline("kv-views", []) if side == "kv-views" else nullcontext():
                return tree_attention(q, k, v, scale=key_width**-0.5, **options)

        def both(forward: Callable[[], torch.Tensor] = forward) -> object:
            return torch.autograd.grad(forward(), (q, k, v), d_out)

        sides |= {f"{side}_forward": forward, f"{side}_both": both}
        started = time.perf_counter()
        both()
        torch.cuda.synchronize()
        metrics[f"{side}_first_call_seconds"] = time.perf_counter() - started
        torch.cuda.reset_peak_memory_stats()
        both()
        metrics[f"{side}_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        outputs[side] = forward().detach().float()
    want = outputs.pop("views", None)
    for side, output in outputs.items() if want is not None else ():
        difference = (output - want).norm() / want.norm()
        metrics[f"{side}_relative_difference_to_views"] = difference.item()
    del outputs, want

    samples = alternate(sides, args.samples)
    row = torch.arange(view.end.numel(), device="cuda")
    pairs = (view.end - row).sum().item()
    flops = {"forward": 2 * pairs * args.heads * (key_width + value_width)}
    flops["both"] = 3.5 * flops["forward"]
    for name, milliseconds in samples.items():
        median = statistics.median(milliseconds)
        metrics[f"{name}_ms"] = median
        metrics[f"{name}_ms_spread"] = max(milliseconds) - min(milliseconds)
        metrics[f"{name}_tflops"] = flops[name.rpartition("_")[2]] / median / 1e9
    metrics |= {"visible_pairs": pairs, "chains": len(view.chains)}
    return {
        "bench": "ops_attention",
        "case": f"{args.case}-rows{args.rows}-heads{args.heads}-{key_width}-{value_width}",
        "config": settings(args)
        | {"key_width": key_width, "value_width": value_width, "dtype": "bf16"},
        "env": gpu_environment(),
        "metrics": metrics,
        "samples": samples,
    }


def _inputs(
    num_rows: int, heads: int, key_width: int, value_width: int
) -> tuple[torch.Tensor, ...]:
    """q, k, v that take gradients, and the gradient of the output."""
    torch.manual_seed(0)
    q, k, v, d_out = (
        torch.randn(num_rows, heads, width, device="cuda", dtype=torch.bfloat16)
        for width in (key_width, key_width, value_width, value_width)
    )
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), d_out


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=65536)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--sides", nargs="*", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--case", choices=("agent_tree", "prototype"), default="agent_tree")
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    add_result_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
