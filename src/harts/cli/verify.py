"""`harts verify`: the tree against the unmodified model, on the user's own data."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from harts.cli.output import Rows, print_result, seconds, stdout_kept_for_results
from harts.cli.reading import read_rollouts
from harts.data.trajectory import TrajectoryBatch
from harts.errors import ConfigError
from harts.report.text import counted

if TYPE_CHECKING:
    import torch
    from torch import nn

    from harts.train.rollout_logprobs import RecordedComparison
    from harts.train.verification import Verification


def run(args: argparse.Namespace) -> int:
    """Load, compare, print; 0 when passed, 1 when not."""
    batch = read_rollouts(args)
    if args.limit is not None:
        batch = batch.select(np.arange(min(args.limit, len(batch))))
    with stdout_kept_for_results():
        if args.rollout_logprobs:
            _require_recorded(batch)
        model = _load(args, batch)
        result = _verify(model, batch, args)
        recorded = _compare_recorded(result, args) if args.rollout_logprobs else None
    summary, rows = result.summary(), _rows(result, model, args)
    passed = result.passed
    if recorded is not None:
        passed = passed and recorded.passed
        summary["rollout_logprobs"] = recorded.summary()
        summary["passed"] = passed
        rows += _recorded_rows(recorded)
    rows.append(("passed", "yes" if passed else "NO"))
    if not result.passed and args.dtype == "float32" and _has_routers(model):
        rows.append(
            ("", "a router may have flipped where two experts tie within float32 rounding, which")
        )
        rows.append(("", "the expanded run does as well; --dtype float64 tells"))
    print_result(summary, rows, as_json=args.json)
    return 0 if passed else 1


def _has_routers(model: nn.Module) -> bool:
    from harts.models.families import family_of

    family = family_of(model.config.model_type)
    return any(family.kind_of(module) in family.routers for module in model.modules())


def _require_recorded(batch: TrajectoryBatch) -> None:
    """Refuse a file without recorded values before the model works."""
    from harts.train.rollout_logprobs import recorded_field

    recorded_field(batch)


def _compare_recorded(result: Verification, args: argparse.Namespace) -> RecordedComparison:
    from harts.train.rollout_logprobs import compare_recorded

    return compare_recorded(
        result.plan.batch, result.log_probs, result.entropy, tolerance=args.rollout_tolerance
    )


def _load(args: argparse.Namespace, batch: TrajectoryBatch) -> nn.Module:
    from harts.models.load import load_model, load_skeleton
    from harts.models.tree_model import attach

    device = _device(args.device)
    attach(load_skeleton(args.model))  # a refusal should not wait for the weights
    vocab_size = int(batch.tokens.max()) + 1
    model = load_model(args.model, vocab_size=vocab_size, seed=args.seed, dtype=args.dtype)
    return model.to(device)


def _device(name: str) -> torch.device:
    """The device of --device; "auto" is cuda where there is one."""
    import torch

    from harts.train.device import choose_device

    if name == "auto":
        return choose_device("auto")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device is {name!r}; use auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device is {name}, torch sees {torch.cuda.device_count()} CUDA devices; "
            "use --device cpu (harts doctor says more)"
        )
    return device


def _verify(model: nn.Module, batch: TrajectoryBatch, args: argparse.Namespace) -> Verification:
    from harts.train.verification import VerifyOptions, verify_model

    options = VerifyOptions(
        capacity=args.capacity,
        chunk_size=args.chunk_size,
        tolerance=args.tolerance,
        gradient_tolerance=args.gradient_tolerance,
        seed=args.seed,
    )
    return verify_model(model, batch, options)


def _rows(result: Verification, model: Any, args: argparse.Namespace) -> list[tuple[str, str]]:
    summary, batch = result.summary(), result.plan.batch
    parameters = sum(p.numel() for p in model.parameters())
    found, allowed = result.differences, result.allowed
    where = f"{batch.name_of(result.worst_trajectory)}, position {result.worst_position}"
    return [
        ("model", f"{type(model).__name__}, {parameters:,} parameters, {args.dtype}"),
        (
            "data",
            f"{counted(summary['trajectories'], 'trajectory', 'trajectories')}, "
            f"{counted(summary['scored_tokens'], 'scored token')}",
        ),
        (
            "compression",
            f"{result.compression:.2f}x ({summary['raw_tokens']:,} raw tokens, "
            f"{summary['compact_tokens']:,} compact rows, "
            f"{counted(summary['microbatches'], 'microbatch', 'microbatches')})",
        ),
        (
            "log-probs",
            f"max difference {result.max_abs_logprob_diff:.2e} at {where}; "
            f"mean {found.mean_log_prob:.2e}; "
            f"{_tolerances(allowed.max_log_prob, allowed.mean_log_prob)}",
        ),
        (
            "entropy",
            f"max difference {found.max_entropy:.2e}; {_tolerances(allowed.max_entropy)}",
        ),
        (
            "gradients",
            f"max relative difference {result.max_rel_grad_diff:.2e} in {result.worst_parameter}; "
            f"of all together {found.all_gradients:.2e}; "
            f"{_tolerances(allowed.parameter_gradient, allowed.all_gradients)}",
        ),
        (
            "time",
            f"tree {seconds(result.tree_seconds)}, expanded {seconds(result.expanded_seconds)} "
            "(not a speed-up of training: expanded is plain transformers, one trajectory at a "
            "time)",
        ),
    ]


def _recorded_rows(recorded: RecordedComparison) -> Rows:
    """The comparison with the rollout's own log-probabilities."""
    temperature = recorded.temperature_field or "none in the data, taken as 1"
    rows = [
        ("", ""),
        (
            "recorded",
            f"{recorded.field}, {counted(recorded.count, 'scored token')}; temperature: "
            f"{temperature}",
        ),
        (
            "difference",
            f"mean absolute {recorded.mean_abs:.3g} (tolerance {recorded.tolerance:.3g}), "
            f"median {recorded.p50:.3g}, 95 % {recorded.p95:.3g}, 99 % {recorded.p99:.3g}, "
            f"max {recorded.max_abs:.3g}; mean {recorded.mean:+.3g} nats (recorded - recomputed)",
        ),
    ]
    for place, part in enumerate(recorded.by_position):
        rows.append(
            (
                "by position" if place == 0 else "",
                f"{part.first:,} to {part.last:,}: mean {part.mean_abs:.3g}, max "
                f"{part.max_abs:.3g} ({counted(part.count, 'token')})",
            )
        )
    for place, worst in enumerate(recorded.worst):
        rows.append(
            (
                "worst" if place == 0 else "",
                f"{worst.name}, position {worst.position:,}, token {worst.token}: recorded "
                f"{worst.recorded:.4f}, recomputed {worst.recomputed:.4f}",
            )
        )
    if recorded.suspicion is not None:
        rows.append(("warning", recorded.suspicion))
    rows.append(("", ""))
    return rows


def _tolerances(*limits: float) -> str:
    """The limits in the order of the differences before them; inf is none."""
    named = ", ".join("any" if math.isinf(limit) else f"{limit:.3g}" for limit in limits)
    return f"{'tolerance' if len(limits) == 1 else 'tolerances'} {named}"
