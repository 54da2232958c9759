"""One training step on one GPU: a rollout tree against the same trajectories expanded.

    python benchmarks/step.py                          # the prototype's tree, five samples
    python benchmarks/step.py --case FILE.jsonl.xz FILE2.jsonl.xz --samples 5 2
    python benchmarks/step.py --variants rounds nodes kv-views  # baselines beside it
    python benchmarks/step.py --recompute full selective selective:12 none --sides tree

Both sides run the same model with the same kernels on microbatches of the same capacity; the
expanded side gives every trajectory an identity of its own, so nothing is shared. A step is
forward, backward and the gradients of all parameters, every layer recomputed in backward unless
--recompute says otherwise ("selective:12" recomputes the first 12). Samples alternate in one
process. What does not fit the memory is recorded as that.

Conversion is the measured speed-up over the ideal one, which `step_ideal.py` defines.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

import harts
from harts.models.kernels import fast_kernels
from harts.models.tree_model import TreeModel
from harts.plan.microbatch import MicroBatch
from harts.train.options import TrainOptions
from harts.train.recompute import set_recomputation
from harts.train.sampling import unshared
from harts.views.tree import TreeView

sys.path.insert(0, str(Path(__file__).parent))
from baselines import Baseline, baseline
from gpu_environment import gpu_environment, limit_autotuning
from results_file import add_result_options, keep_records, settings
from step_data import CAPACITY, prototype_batch
from step_ideal import ideal_metrics, seconds_of
from step_models import SHAPES, build_model

KERNEL_VARIANTS: dict[str, dict[str, Any]] = {
    "rounds": {"linear_attention": "rounds"},
    "deterministic": {"deterministic": True},
}
VARIANTS = (*KERNEL_VARIANTS, *get_args(Baseline))


class Kept:
    """The record of one setting, printed and written as it grows: a run may be cut short."""

    def __init__(self, records: list[dict[str, Any]], args: argparse.Namespace) -> None:
        self._records, self._record, self._args = records, records[-1], args
        self.metrics: dict[str, float] = self._record["metrics"]

    def add(self, metrics: dict[str, float], samples: dict[str, list[float]] | None = None) -> None:
        """Metrics, and samples by name."""
        self.metrics |= metrics
        self._record["samples"] |= samples or {}
        for name, value in metrics.items():
            print(f"{name:32} {value:,.5g}", flush=True)
        name = f"step-{self._args.model}"
        keep_records(self._args, "step", self._records, name=name, whole=False)


@dataclass
class Side:
    """One way to run the step: its plan, and its microbatches with their views."""

    plan: harts.StepPlan
    microbatches: list[tuple[MicroBatch, TreeView]]
    view_seconds: float

    @property
    def views(self) -> list[TreeView]:
        return [view for _, view in self.microbatches]


def main() -> None:
    """Measure and print; write the JSON with --write or --out."""
    args = _arguments()
    limit_autotuning(args.configs)
    model = _attached(args)
    num_parameters = sum(p.numel() for p in model.model.parameters())
    print(f"{args.model}: {num_parameters / 1e9:.2f} B parameters", flush=True)
    records: list[dict[str, Any]] = []
    for index, case in enumerate(args.case):
        samples = args.samples[min(index, len(args.samples) - 1)]
        batch = prototype_batch() if case == "prototype" else harts.read(case)
        sides = _sides(model, batch, args)
        for recompute in args.recompute:
            _set_recomputation(model, recompute)
            records.append(_record(model, case, recompute, args))
            _measure(model, sides, recompute, samples, args, Kept(records, args))
    keep_records(args, "step", records, name=f"step-{args.model}")


def _sides(
    model: TreeModel, batch: harts.TrajectoryBatch, args: argparse.Namespace
) -> dict[str, Side]:
    batches = {"tree": batch, "expanded": unshared(batch)}
    return {name: _side(model, batches[name], args.capacity) for name in args.sides}


def _measure(
    model: TreeModel,
    sides: dict[str, Side],
    recompute: str,
    samples: int,
    args: argparse.Namespace,
    kept: Kept,
) -> None:
    """Both sides, or the tree alone where they do not fit; then ideal, variants and profile."""
    tree, weights = sides["tree"], _weights(sides["tree"])
    attempt = partial(_attempt, model, kept)
    both = "expanded" in sides and attempt(
        "both", partial(_compare, model, sides, weights, samples, kept)
    )
    if both:
        attempt("ideal", partial(_keep_ideal, model, sides, recompute, kept))
    elif not attempt("tree", partial(_compare, model, {"tree": tree}, weights, samples, kept)):
        return
    for variant in args.variants:
        attempt(variant, partial(_keep_variant, model, tree, weights, variant, samples, kept))
    if args.profile:
        _profile(partial(_step, model, tree, weights))


def _attempt(model: TreeModel, kept: Kept, stage: str, run: Callable[[], None]) -> bool:
    """Whether it fits the memory; kept where not."""
    try:
        run()
        return True
    except torch.OutOfMemoryError as error:
        message = str(error).splitlines()[0][:120]
    # only now are the frames gone that hold the step's tensors
    print(f"{stage}: {message}", flush=True)
    kept.add({f"{stage}_out_of_memory": 1.0})
    model.model.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    return False


def _compare(
    model: TreeModel,
    sides: dict[str, Side],
    weights: torch.Tensor,
    samples: int,
    kept: Kept,
) -> None:
    """A first step of each side, whose results are compared; then samples in turn."""
    log_probs: dict[str, torch.Tensor] = {}
    gradients: dict[str, dict[str, torch.Tensor]] = {}
    for name, side in sides.items():
        started = time.perf_counter()
        log_probs[name] = _step(model, side, weights)
        torch.cuda.synchronize()
        gradients[name] = _some_gradients(model)
        print(f"{name}: first step {time.perf_counter() - started:.1f} s", flush=True)
    seconds, peak = _samples(model, sides, weights, samples)
    tree, expanded = sides["tree"], sides.get("expanded")
    kept.add(_tree_metrics(tree, seconds["tree"], peak["tree"]), seconds)
    if expanded is not None:
        kept.add(_expanded_metrics(expanded, seconds["expanded"], peak["expanded"]))
        kept.add(_agreement(tree, log_probs, gradients))
        kept.add(_speedups(tree, kept.metrics))


def _record(
    model: TreeModel, case: str, recompute: str, args: argparse.Namespace
) -> dict[str, Any]:
    return {
        "bench": "step",
        "case": f"{args.model} {Path(case).name.split('.')[0]} recompute {recompute}",
        "config": settings(args) | {"kernels": str(model.kernels)},
        "env": gpu_environment(),
        "metrics": {},
        "samples": {},
    }


def _attached(args: argparse.Namespace) -> TreeModel:
    hf_model = build_model(args.model)
    kernels = fast_kernels(torch.device("cuda"))
    chosen = dict(pair.split("=") for pair in args.kernels)
    return harts.attach(hf_model, kernels=replace(kernels, **chosen))


def _set_recomputation(model: TreeModel, setting: str) -> None:
    """Of all layers anew: full, none, selective, or selective:N for the first N layers."""
    name, _, num_layers = setting.partition(":")
    options = TrainOptions(
        recompute=name,  # type: ignore[arg-type]
        recompute_layers=int(num_layers) if num_layers else None,
    )
    model.model.gradient_checkpointing_disable()
    set_recomputation(model.model, options)


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
    return Side(plan, microbatches, view_seconds)


def _weights(tree: Side) -> torch.Tensor:
    """A random weight for every position of the batch, the same on both sides."""
    generator = torch.Generator("cuda").manual_seed(0)
    num_positions = len(tree.plan.batch.tokens)
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


def _samples(
    model: TreeModel, sides: dict[str, Side], weights: torch.Tensor, samples: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of both sides in turn; peak memory of each in GiB."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    peak: dict[str, float] = {}
    for sample in range(samples):
        for name, side in sides.items():
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
            started = time.perf_counter()
            _step(model, side, weights)
            torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - started)
            peak[name] = torch.cuda.max_memory_allocated() / 2**30
            print(f"sample {sample} {name:8} {seconds[name][-1]:.3f} s", flush=True)
    return seconds, peak


def _tree_metrics(tree: Side, seconds: list[float], peak: float) -> dict[str, float]:
    raw, compact = tree.plan.raw_tokens, tree.plan.compact_tokens
    median = statistics.median(seconds)
    return {
        "tree_seconds": median,
        "tree_seconds_spread": max(seconds) - min(seconds),
        "raw_tokens_per_second": raw / median,
        "compact_tokens_per_second": compact / median,
        "peak_gib": peak,
        "compression": raw / compact,
        "raw_tokens": raw,
        "compact_tokens": compact,
        "plan_seconds": tree.plan.plan_seconds,
        "view_seconds": tree.view_seconds,
        "replay_tokens": sum(mb.calls.replay_tokens for mb, _ in tree.microbatches),
        "rounds": max(mb.calls.num_rounds for mb, _ in tree.microbatches),
    }


def _expanded_metrics(expanded: Side, seconds: list[float], peak: float) -> dict[str, float]:
    median = statistics.median(seconds)
    return {
        "expanded_seconds": median,
        "expanded_seconds_spread": max(seconds) - min(seconds),
        "expanded_raw_tokens_per_second": expanded.plan.raw_tokens / median,
        "peak_gib_expanded": peak,
    }


def _speedups(tree: Side, metrics: dict[str, float]) -> dict[str, float]:
    seconds, total = metrics["tree_seconds"], metrics["expanded_seconds"]
    planning = tree.plan.plan_seconds + tree.view_seconds
    return {"speedup": total / seconds, "core_speedup": total / (seconds + planning)}


def _keep_ideal(model: TreeModel, sides: dict[str, Side], recompute: str, kept: Kept) -> None:
    metrics = kept.metrics
    ideal = ideal_metrics(
        model,
        sides["tree"].views,
        sides["expanded"].views,
        expanded_seconds=metrics["expanded_seconds"],
        row_ratio=metrics["compression"],
        attention_forwards=2 if recompute == "full" else 1,
    )
    kept.add(ideal | {"conversion": metrics["speedup"] / ideal["ideal"]})


def _agreement(
    tree: Side,
    log_probs: dict[str, torch.Tensor],
    gradients: dict[str, dict[str, torch.Tensor]],
) -> dict[str, float]:
    """How near the two sides are; random weights flip MoE routes on rounding noise."""
    scored = torch.from_numpy(tree.plan.batch.loss_mask.copy()).cuda()
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


def _keep_variant(
    model: TreeModel,
    side: Side,
    weights: torch.Tensor,
    name: str,
    samples: int,
    kept: Kept,
) -> None:
    """Seconds of the tree step with one operator replaced, after one step to warm up."""
    kernels = model.kernels
    run = partial(_step, model, side, weights)
    timed = partial(seconds_of, run, samples)
    metrics = {}
    try:
        if name in KERNEL_VARIANTS:
            model.kernels = replace(kernels, **KERNEL_VARIANTS[name])
            seconds = timed()
            if name == "deterministic":
                metrics["deterministic_same_bits"] = float(_repeats_its_bits(model, run))
        else:
            with baseline(name, side.microbatches):  # type: ignore[arg-type]
                seconds = timed()
    finally:
        model.kernels = kernels
    metrics[f"{name}_tree_seconds"] = statistics.median(seconds)
    kept.add(metrics, {f"{name} tree": seconds})


def _repeats_its_bits(model: TreeModel, run: Callable[[], torch.Tensor]) -> bool:
    """Whether two steps give the same log-probs and the same gradients of all parameters."""
    log_probs = run()
    first = {name: p.grad.cpu() for name, p in model.model.named_parameters() if p.grad is not None}
    same = torch.equal(run(), log_probs)
    parameters = dict(model.model.named_parameters())
    return same and all(torch.equal(parameters[n].grad.cpu(), g) for n, g in first.items())


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
    parser.add_argument(
        "--recompute", nargs="+", default=["full"], help="full, none, selective, selective:LAYERS"
    )
    parser.add_argument(
        "--sides", nargs="+", default=["tree", "expanded"], choices=("tree", "expanded")
    )
    parser.add_argument("--variants", nargs="*", default=[], choices=VARIANTS)
    parser.add_argument("--kernels", nargs="*", default=[], help="such as attention=flex")
    parser.add_argument("--configs", type=int, default=6, help="autotune choices of a fla kernel")
    parser.add_argument("--profile", action="store_true")
    add_result_options(parser)
    args = parser.parse_args()
    if "tree" not in args.sides:
        parser.error("--sides: the tree is measured always; give tree, or tree expanded")
    if args.variants and any(setting.startswith("selective") for setting in args.recompute):
        parser.error("--variants: the baselines keep nothing; give --recompute full or none")
    return args


if __name__ == "__main__":
    main()
