"""What to log beside a policy loss, as sums with counts: they add over microbatches and ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from harts.plan.denominators import Denominators
from harts.rl.objectives.clip import importance_ratio, is_clipped
from harts.rl.objectives.inputs import (
    Fields,
    PolicyOutput,
    current_log_probs,
    optional_field,
    required_field,
)
from harts.rl.objectives.kl import kl_estimate
from harts.rl.objectives.policy import PolicyOptions, log_importance_ratio


@dataclass(frozen=True)
class MetricSum:
    """total: float64 scalar on the device of the log-probabilities; count: what it sums over."""

    total: torch.Tensor
    count: int

    def __add__(self, other: MetricSum) -> MetricSum:
        return MetricSum(self.total + other.total, self.count + other.count)

    @property
    def mean(self) -> float:
        """total / count, NaN where nothing was counted; waits for the device."""
        return float(self.total) / self.count if self.count else math.nan


def add_metrics(
    left: Mapping[str, MetricSum], right: Mapping[str, MetricSum]
) -> dict[str, MetricSum]:
    """Sum by name; a name that one side lacks keeps the other side's value."""
    merged = dict(left)
    for name, value in right.items():
        merged[name] = merged[name] + value if name in merged else value
    return merged


@torch.no_grad()
def policy_metrics(
    out: PolicyOutput, fields: Fields, denominators: Denominators, *, options: PolicyOptions
) -> dict[str, MetricSum]:
    """Sums over the scored positions of one microbatch, without gradient.

    "ratio": policy / old policy at the objective's level. "clip_fraction": positions whose
    gradient clipping removes. "old_kl": k3 estimate of KL(old || policy), by token. "entropy".
    "ref_kl": k3 estimate of KL(policy || reference), only where ref_log_probs are given.
    Pass the options of the objective; fields and errors are those of the objective.
    """
    log_probs = current_log_probs(out)
    advantages = required_field(fields, "advantages", log_probs, "policy_metrics")
    ratio = importance_ratio(log_importance_ratio(log_probs, fields, denominators, options))
    old = optional_field(fields, "old_log_probs", log_probs)
    reference = optional_field(fields, "ref_log_probs", log_probs)
    by_position = {
        "ratio": ratio,
        "clip_fraction": is_clipped(
            ratio,
            advantages,
            clip_low=options.clip_low,
            clip_high=options.clip_high,
            clip_ratio_c=options.clip_ratio_c,
        ),
        # Samples come from the old policy, so it takes the first place of KL(p || q).
        "old_kl": kl_estimate(log_probs if old is None else old, log_probs, "k3"),
        "entropy": out.entropy,
    }
    if reference is not None:
        by_position["ref_kl"] = kl_estimate(log_probs, reference, "k3")
    return {
        name: MetricSum(values.sum(dtype=torch.float64), values.numel())
        for name, values in by_position.items()
    }
