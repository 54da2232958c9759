"""One training step on one GPU: a rollout tree against the same trajectories expanded.

    python benchmarks/step.py                          # the prototype's tree, five samples
    python benchmarks/step.py --case FILE.jsonl.xz FILE2.jsonl.xz --samples 5 2
    python benchmarks/step.py --variants rounds views  # baselines beside it

Both sides run the same model with the same kernels on microbatches of the same capacity; the
expanded side gives every trajectory an identity of its own, so nothing is shared. A step is
forward, backward and the gradients of all parameters, every layer recomputed in backward unless
--recompute says otherwise. Samples alternate in one process.

The ideal speed-up is T / (A / pair ratio + H / head ratio + R / row ratio): of the expanded time T
the attention core A shrinks by the visible (query, key) pairs, the LM head H by the head rows, the
rest R by the rows. A and H are measured alone, on the expanded microbatches' own shapes.
Conversion is the measured speed-up over the ideal one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import harts
from harts.models.kernels import fast_kernels
from harts.models.tree_model import TreeModel
from harts.ops.attention import tree_attention
from harts.ops.cross_entropy import mapped_log_probs
from harts.plan.microbatch import MicroBatch
from harts.train.sampling import unshared
from harts.views.tree import TreeView

sys.path.insert(0, str(Path(__file__).parent))
from gpu_environment import gpu_environment, limit_autotuning
from results_file import write_result
from step_data import CAPACITY, prototype_batch
from step_models import SHAPES, build_model

VARIANTS: dict[str, dict[str, Any]] = {
    "rounds": {"linear_attention": "rounds"},
    "views": {"attention": "views"},
    "deterministic": {"deterministic": True},
}


@dataclass
class Side:
    """One way to run the step: its plan, microbatches with their views, and samples."""

    plan: harts.StepPlan
    microbatches: list[tuple[MicroBatch, TreeView]]
    view_seconds: float
    seconds: list[float]


def main() -> None:
    """Measure and print; write the JSON with --write or --out."""
    args = _arguments()
    limit_autotuning(args.configs)
    model = _attached(args)
    num_parameters = sum(p.numel() for p in model.model.parameters())
    print(f"{args.model}: {num_parameters / 1e9:.2f} B parameters", flush=True)
    records = []
    for index, case in enumerate(args.case):
        samples = args.samples[min(index, len(args.samples) - 1)]
        records.append(_case(model, case, samples, args))
        if args.out:  # after each, since a run may be cut short
            path = Path(args.out) / f"step-{args.model}-{args.recompute}.json"
            path.write_text(json.dumps(records, indent=1) + "\n")
    if args.write:
        print(write_result("step", "h200", records))


def _case(model: TreeModel, case: str, samples: int, args: argparse.Namespace) -> dict[str, Any]:
    """Both sides on one batch, the variants, the profile."""
    batch = prototype_batch() if case == "prototype" else harts.read(case)
    sides = {
        "tree": _side(model, batch, args.capacity),
        "expanded": _side(model, unshared(batch), args.capacity),
    }
    weights = _weights(sides)
    log_probs: dict[str, torch.Tensor] = {}
    gradients: dict[str, dict[str, torch.Tensor]] = {}
    for name, side in sides.items():
        started = time.perf_counter()
        log_probs[name] = _step(model, side, weights)
        torch.cuda.synchronize()
        gradients[name] = _some_gradients(model)
        print(f"{name}: first step {time.perf_counter() - started:.1f} s", flush=True)
    peak = _measure(model, sides, weights, samples)
    metrics = _metrics(model, sides, peak)
    metrics |= _agreement(sides, log_probs, gradients)
    for variant in args.variants:
        metrics |= _variant(model, sides["tree"], weights, variant)
    _print(metrics)
    if args.profile:
        _profile(partial(_step, model, sides["tree"], weights))
    return {
        "bench": "step",
        "case": f"{args.model} {Path(case).name.split('.')[0]} recompute {args.recompute}",
        "config": vars(args) | {"kernels": str(model.kernels)},
        "env": gpu_environment(),
        "metrics": metrics,
        "samples": {name: side.seconds for name, side in sides.items()},
    }


def _attached(args: argparse.Namespace) -> TreeModel:
    hf_model = build_model(args.model)
    if args.recompute == "full":
        hf_model.gradient_checkpointing_enable({"use_reentrant": False})
    kernels = fast_kernels(torch.device("cuda"))
    chosen = dict(pair.split("=") for pair in args.kernels)
    return harts.attach(hf_model, kernels=replace(kernels, **chosen))


def _side(model: TreeModel, batch: harts.TrajectoryBatch, capacity: int) -> Side:
    plan = harts.plan_step(batch, capacity)
    started = time.perf_counter()
    microbatches = [(mb, model.view(mb)) for mb in plan.microbatches()]
    torch.cuda.synchronize()
    view_seconds = time.perf_counter() - started
    print(
        f"{plan.raw_tokens:,} tokens in {plan.compact_tokens:,} rows, {len(microbatches)} "
        f"microbatches; planned in {plan.plan_seconds:.3f} s, views {view_seconds:.3f} s",
        flush=True,
    )
    return Side(plan, microbatches, view_seconds, [])


def _weights(sides: dict[str, Side]) -> torch.Tensor:
    """A random weight for every position of the batch, the same on both sides."""
    generator = torch.Generator("cuda").manual_seed(0)
    num_positions = len(sides["tree"].plan.batch.tokens)
    return torch.randn(num_positions, device="cuda", generator=generator) * 1e-3


def _scored(microbatch: MicroBatch) -> torch.Tensor:
    """Positions of the batch that the outputs belong to."""
    return torch.from_numpy(microbatch.batch_position[microbatch.scored]).cuda()


def _step(model: TreeModel, side: Side, weights: torch.Tensor) -> torch.Tensor:
    """Gradients of all parameters; returns the log-probs by position of the batch."""
    model.model.zero_grad(set_to_none=True)
    by_position = torch.zeros_like(weights)
    for microbatch, view in side.microbatches:
        at = _scored(microbatch)
        out = model.log_probs(microbatch, view=view)
        (-(out.log_probs * weights[at]).sum()).backward()
        by_position[at] = out.log_probs.detach()
    return by_position


def _some_gradients(model: TreeModel) -> dict[str, torch.Tensor]:
    """Copies of a few parameters' gradients, of all depths."""
    names = [name for name, p in model.model.named_parameters() if p.grad is not None]
    small = [n for n in names if model.model.get_parameter(n).numel() < 2**25]
    chosen = small[:: max(1, len(small) // 24)]
    return {name: model.model.get_parameter(name).grad.float().clone() for name in chosen}


def _measure(
    model: TreeModel, sides: dict[str, Side], weights: torch.Tensor, samples: int
) -> dict[str, float]:
    """Samples of both sides in turn; peak memory of each in GiB."""
    peak: dict[str, float] = {}
    for sample in range(samples):
        for name, side in sides.items():
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
            started = time.perf_counter()
            _step(model, side, weights)
            torch.cuda.synchronize()
            side.seconds.append(time.perf_counter() - started)
            peak[name] = torch.cuda.max_memory_allocated() / 2**30
            print(f"sample {sample} {name:8} {side.seconds[-1]:.3f} s", flush=True)
    return peak


def _metrics(model: TreeModel, sides: dict[str, Side], peak: dict[str, float]) -> dict[str, float]:
    tree, expanded = sides["tree"], sides["expanded"]
    tree_seconds, total = (statistics.median(side.seconds) for side in (tree, expanded))
    raw, compact = tree.plan.raw_tokens, tree.plan.compact_tokens
    pair_ratio = _pairs(expanded) / _pairs(tree)
    head_ratio = _head_rows(expanded) / _head_rows(tree)
    attention = _attention_seconds(model, expanded)
    head = _head_seconds(model, expanded)
    rest = total - attention - head
    ideal = total / (attention / pair_ratio + head / head_ratio + rest * compact / raw)
    speedup = total / tree_seconds
    planning = tree.plan.plan_seconds + tree.view_seconds
    return {
        "speedup": speedup,
        "ideal": ideal,
        "conversion": speedup / ideal,
        "core_speedup": total / (tree_seconds + planning),
        "compression": raw / compact,
        "pair_ratio": pair_ratio,
        "head_ratio": head_ratio,
        "raw_tokens_per_second": raw / tree_seconds,
        "compact_tokens_per_second": compact / tree_seconds,
        "expanded_raw_tokens_per_second": raw / total,
        "tree_seconds": tree_seconds,
        "tree_seconds_spread": max(tree.seconds) - min(tree.seconds),
        "expanded_seconds": total,
        "expanded_seconds_spread": max(expanded.seconds) - min(expanded.seconds),
        "attention_share_of_expanded": attention / total,
        "head_share_of_expanded": head / total,
        "plan_seconds": tree.plan.plan_seconds,
        "view_seconds": tree.view_seconds,
        "peak_gib": peak["tree"],
        "peak_gib_expanded": peak["expanded"],
        "raw_tokens": raw,
        "compact_tokens": compact,
        "replay_tokens": sum(mb.calls.replay_tokens for mb, _ in tree.microbatches),
        "rounds": max(mb.calls.num_rounds for mb, _ in tree.microbatches),
    }


def _pairs(side: Side) -> int:
    return sum(
        int((view.attention.end.long() - torch.arange(view.num_rows, device="cuda")).sum())
        for _, view in side.microbatches
    )


def _head_rows(side: Side) -> int:
    return sum(view.logprobs.compact_row.numel() for _, view in side.microbatches)


def _attention_seconds(model: TreeModel, side: Side) -> float:
    """The attention core of a step on this side: all layers, with the recomputed forward."""
    config = model._causal_lm.config
    layers = sum(model.family.kind_of(m) in model.family.attention for m in model.model.modules())
    key_width = getattr(config, "qk_head_dim", None) or (
        config.qk_nope_head_dim + config.qk_rope_head_dim
        if hasattr(config, "qk_nope_head_dim")
        else config.head_dim
    )
    value_width = getattr(config, "v_head_dim", None) or key_width
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    forwards = 2 if model.model.is_gradient_checkpointing else 1
    total = 0.0
    for _, view in side.microbatches:
        q, k, v, d_out = (
            torch.randn(view.num_rows, n, width, device="cuda", dtype=torch.bfloat16)
            for n, width in (
                (heads, key_width),
                (key_heads, key_width),
                (key_heads, value_width),
                (heads, value_width),
            )
        )
        leaves = [x.requires_grad_() for x in (q, k, v)]

        def run(
            leaves: list[torch.Tensor] = leaves,
            d_out: torch.Tensor = d_out,
            view: TreeView = view,
        ) -> None:
            for _ in range(forwards):
                out = tree_attention(
                    *leaves,
                    view=view.attention,
                    scale=key_width**-0.5,
                    impl=model.kernels.attention,
                    deterministic=model.kernels.deterministic,
                )
            torch.autograd.grad(out, leaves, d_out)

        total += layers * _timed(run)
    return total


def _head_seconds(model: TreeModel, side: Side) -> float:
    """LM head, log-probs and their backward on this side."""
    weight = model._causal_lm.get_output_embeddings().weight
    total = 0.0
    for _, view in side.microbatches:
        hidden = torch.randn(
            view.num_rows, weight.shape[1], device="cuda", dtype=weight.dtype
        ).requires_grad_()

        def run(hidden: torch.Tensor = hidden, view: TreeView = view) -> None:
            log_probs, _ = mapped_log_probs(
                hidden, weight, view=view.logprobs, impl=model.kernels.log_probs
            )
            torch.autograd.grad(log_probs.sum(), (hidden, weight))

        total += _timed(run)
    return total


def _timed(run: Callable[[], object], samples: int = 3) -> float:
    """Median seconds after one call to warm up."""
    seconds = []
    for _ in range(samples + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def _agreement(
    sides: dict[str, Side],
    log_probs: dict[str, torch.Tensor],
    gradients: dict[str, dict[str, torch.Tensor]],
) -> dict[str, float]:
    """How near the two sides are; random weights flip MoE routes on rounding noise."""
    scored = torch.from_numpy(sides["tree"].plan.batch.loss_mask.copy()).cuda()
    difference = (log_probs["tree"] - log_probs["expanded"])[scored].abs()
    relative = [
        ((g - gradients["expanded"][name]).norm() / gradients["expanded"][name].norm()).item()
        for name, g in gradients["tree"].items()
    ]
    return {
        "mean_abs_logprob_diff": difference.mean().item(),
        "max_abs_logprob_diff": difference.max().item(),
        "median_rel_grad_diff": statistics.median(relative),
        "max_rel_grad_diff": max(relative),
    }


def _variant(model: TreeModel, side: Side, weights: torch.Tensor, name: str) -> dict[str, float]:
    """Seconds of the tree step with one operator replaced, at least three samples."""
    kernels = model.kernels
    model.kernels = replace(kernels, **VARIANTS[name])
    try:
        seconds = _timed(partial(_step, model, side, weights))
    finally:
        model.kernels = kernels
    return {f"{name}_tree_seconds": seconds}


def _print(metrics: dict[str, float]) -> None:
    for name, value in metrics.items():
        print(f"{name:32} {value:,.5g}", flush=True)


def _profile(run: Callable[[], object], rows: int = 60) -> None:
    """GPU time of one step by kernel, and of PyTorch's own operators by input shape."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        run()
        torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    kernels = [e for e in profile.key_averages() if e.device_type == on_gpu]
    busy = sum(e.self_device_time_total for e in kernels)
    print(f"GPU busy {busy / 1e3:.1f} ms", flush=True)
    for event in sorted(kernels, key=lambda e: -e.self_device_time_total)[:rows]:
        _print_share(event, busy, event.key[:90])
    operators = [
        e
        for e in profile.key_averages(group_by_input_shape=True)
        if e.device_type != on_gpu and e.key.startswith("aten::")
    ]
    for event in sorted(operators, key=lambda e: -e.self_device_time_total)[:rows]:
        shapes = [shape for shape in event.input_shapes if shape]
        _print_share(event, busy, f"{event.key} {shapes}"[:90])


def _print_share(event: Any, busy: float, name: str) -> None:
    milliseconds = event.self_device_time_total / 1e3
    print(f"{milliseconds:9.2f} ms {1e3 * milliseconds / busy:6.1%} x{event.count:<5} {name}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--case", nargs="+", default=["prototype"], help="'prototype' or rollout files"
    )
    parser.add_argument("--model", default="ling-3-tiny", choices=SHAPES)
    parser.add_argument("--capacity", type=int, default=CAPACITY)
    parser.add_argument(
        "--samples", type=int, nargs="+", default=[5], help="for each case, the last one repeated"
    )
    parser.add_argument("--recompute", default="full", choices=("full", "none"))
    parser.add_argument("--variants", nargs="*", default=[], choices=VARIANTS)
    parser.add_argument("--kernels", nargs="*", default=[], help="such as attention=flex")
    parser.add_argument("--configs", type=int, default=6, help="autotune choices of a fla kernel")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--out", help="folder for the JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
