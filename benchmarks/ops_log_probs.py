"""Mapped log-probabilities on one GPU: fused beside the reference and beside plain matmuls.

    python benchmarks/ops_log_probs.py                   # 65,536 head rows, V = 157,184, D = 1536
    python benchmarks/ops_log_probs.py --write           # and the JSON in benchmarks/results
    python benchmarks/ops_log_probs.py --sweep           # also other block budgets of fused

Sides, alternating in one process and timed by CUDA events:
    gemm_forward, gemm_both   the matrix products alone, 1 and 4, in the fused blocks: the bound
    fused_forward, fused_both, fused_both_entropy (entropy has a gradient too)
    fused_frozen              forward and backward, the weight takes no gradient: 3 products
    reference_forward, reference_both
A TFLOP/s counts 2 R V D a product, whatever else a side does.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harts.ops.cross_entropy import mapped_log_probs
from harts.ops.cross_entropy.fused import BLOCK_BYTES, rows_of_block
from harts.views.gather import on_device
from harts.views.logprobs import LogProbView

sys.path.insert(0, str(Path(__file__).parent))
from gpu_environment import gpu_environment
from gpu_timing import alternate
from results_file import add_result_options, keep_records, settings

DEVICE = torch.device("cuda")
PRODUCTS = {
    "gemm_forward": 1,
    "gemm_both": 4,
    "fused_forward": 1,
    "fused_both": 4,
    "fused_both_entropy": 4,
    "fused_frozen": 3,
    "reference_forward": 1,
    "reference_both": 4,
}
SWEPT_MIB = (256, 512, 1024, 1689, 2048, 2560, 3072, 3377, 4096, 5066, 6755, 8192)


def main() -> None:
    """Measure and print; write the JSON with --write."""
    args = _arguments()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/ops_log_probs.py measures on a GPU, and torch finds none")
    torch.manual_seed(args.seed)
    view = _view(args)
    hidden = torch.randn(args.rows, args.width, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.randn(args.vocabulary, args.width, device=DEVICE, dtype=torch.bfloat16)
    weight *= 2 * args.width**-0.5  # logits of a few nats
    hidden.requires_grad_(), weight.requires_grad_()
    sides = _sides(hidden, weight, view, BLOCK_BYTES)
    metrics = _first_calls(sides)
    metrics |= _difference(hidden, weight, view)
    samples = alternate(sides, args.samples)
    record: dict[str, Any] = {
        "bench": "ops_log_probs",
        "case": f"rows{args.rows}-vocabulary{args.vocabulary}-width{args.width}-bf16",
        "config": settings(args) | {"dtype": "bf16", "block_bytes": BLOCK_BYTES},
        "env": gpu_environment(),
        "metrics": metrics | _metrics(samples, args),
        "samples": samples,
    }
    if args.sweep:
        record["sweep"] = _sweep(hidden, weight, view, args.samples)
    for name, value in record["metrics"].items():
        print(f"  {name:40} {value:.5g}")
    for name, value in record.get("sweep", {}).items():
        print(f"  {name:40} {value:.5g}")
    keep_records(args, "ops_log_probs", [record])


def _view(args: argparse.Namespace) -> LogProbView:
    """Every row is scored: once, or --labels times for one row in eight."""
    draw = np.random.default_rng(args.seed)
    count = np.where(np.arange(args.rows) % 8 == 0, args.labels, 1)
    head_row = np.repeat(np.arange(args.rows), count)
    target = draw.integers(0, args.vocabulary, len(head_row))
    row_ptr = np.concatenate([[0], np.cumsum(count)])
    return LogProbView(
        compact_row=on_device(np.arange(args.rows), DEVICE),
        temperature=None,
        target=on_device(target, DEVICE),
        head_row=on_device(head_row, DEVICE),
        original=on_device(draw.permutation(len(head_row)), DEVICE),
        row_ptr=row_ptr,
        position_ptr=on_device(row_ptr, DEVICE),
        last_row=args.rows - 1,
        smallest_target=int(target.min()),
        largest_target=int(target.max()),
    )


def _sides(
    hidden: torch.Tensor, weight: torch.Tensor, view: LogProbView, budget: int
) -> dict[str, Callable[[], object]]:
    slopes = torch.randn(view.num_positions, device=DEVICE)
    frozen = weight.detach()

    def forward(impl: Any, used: torch.Tensor = weight) -> tuple[torch.Tensor, torch.Tensor]:
        budget_of_impl = budget if impl == "fused" else None
        return mapped_log_probs(hidden, used, view=view, impl=impl, max_block_bytes=budget_of_impl)

    def both(impl: Any) -> object:
        return torch.autograd.grad(forward(impl)[0], (hidden, weight), slopes)

    return {
        "gemm_forward": lambda: _products(hidden, weight, budget, backward=False),
        "gemm_both": lambda: _products(hidden, weight, budget, backward=True),
        "fused_forward": lambda: forward("fused"),
        "fused_both": lambda: both("fused"),
        "fused_both_entropy": lambda: torch.autograd.grad(
            forward("fused"), (hidden, weight), (slopes, slopes)
        ),
        "fused_frozen": lambda: torch.autograd.grad(forward("fused", frozen)[0], hidden, slopes),
        "reference_forward": lambda: forward("reference"),
        "reference_both": lambda: both("reference"),
    }


@torch.no_grad()
def _products(hidden: torch.Tensor, weight: torch.Tensor, budget: int, *, backward: bool) -> None:
    """The matrix products of forward, or of both, in the fused blocks, on what memory holds."""
    num_rows, vocabulary = len(hidden), len(weight)
    block_rows = rows_of_block(num_rows, budget // (vocabulary * 4))
    logits = hidden.new_empty(block_rows, vocabulary, dtype=torch.float32)
    gradients = hidden.new_zeros(block_rows, vocabulary) if backward else None
    d_weight = torch.zeros_like(weight, dtype=torch.float32) if backward else None
    d_hidden = torch.empty_like(hidden, dtype=torch.float32) if backward else None
    for start in range(0, num_rows, block_rows):
        rows = slice(start, min(num_rows, start + block_rows))
        block, count = hidden[rows], rows.stop - rows.start
        for _ in range(2 if backward else 1):
            torch.mm(block, weight.t(), out_dtype=torch.float32, out=logits[:count])
        if gradients is not None and d_weight is not None and d_hidden is not None:
            d_logits = gradients[:count]
            torch.addmm(d_weight, d_logits.t(), block, out_dtype=torch.float32, out=d_weight)
            torch.mm(d_logits, weight, out_dtype=torch.float32, out=d_hidden[rows])


def _first_calls(sides: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of the first call, compilation included, and peak memory of the second."""
    metrics: dict[str, float] = {}
    for name, call in sides.items():
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        metrics[f"{name}_first_call_seconds"] = time.perf_counter() - started
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        metrics[f"{name}_peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
        print(f"first call: {name}", flush=True)
    return metrics


def _difference(hidden: torch.Tensor, weight: torch.Tensor, view: LogProbView) -> dict[str, float]:
    with torch.no_grad():
        ours, theirs = (
            mapped_log_probs(hidden, weight, view=view, impl=impl)
            for impl in ("fused", "reference")
        )
    return {
        f"{name}_largest_difference": (one - two).abs().max().item()
        for name, one, two in zip(("log_probs", "entropy"), ours, theirs, strict=True)
    }


def _metrics(samples: dict[str, list[float]], args: argparse.Namespace) -> dict[str, float]:
    metrics: dict[str, float] = {}
    flops = 2 * args.rows * args.vocabulary * args.width
    for name, milliseconds in samples.items():
        median = statistics.median(milliseconds)
        metrics[f"{name}_ms"] = median
        metrics[f"{name}_ms_spread"] = max(milliseconds) - min(milliseconds)
        metrics[f"{name}_tflops"] = PRODUCTS[name] * flops / median / 1e9
    for phase in ("forward", "both"):
        fused = metrics[f"fused_{phase}_ms"]
        metrics[f"{phase}_over_gemm"] = fused / metrics[f"gemm_{phase}_ms"]
        metrics[f"{phase}_speedup"] = metrics[f"reference_{phase}_ms"] / fused
    return metrics


def _sweep(
    hidden: torch.Tensor, weight: torch.Tensor, view: LogProbView, num_samples: int
) -> dict[str, float]:
    """Median milliseconds of the products alone and of fused, by budget of a block."""
    sides = {
        f"{name}_{mib:05d}_mib_ms": call
        for mib in SWEPT_MIB
        for name, call in _sides(hidden, weight, view, mib << 20).items()
        if name in ("gemm_both", "fused_both")
    }
    return {
        name: statistics.median(milliseconds)
        for name, milliseconds in alternate(sides, num_samples).items()
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=65536, help="head rows")
    parser.add_argument("--vocabulary", type=int, default=157184)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--labels", type=int, default=9, help="scored positions of every 8th row")
    parser.add_argument("--samples", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sweep", action="store_true")
    add_result_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
