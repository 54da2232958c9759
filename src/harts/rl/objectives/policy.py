"""The clipped policy-gradient loss that GRPO, DAPO, GSPO and PPO are settings of (Equation 18).

Legend: P scored positions of one microbatch, in batch order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch

from harts.errors import ConfigError
from harts.plan.denominators import Denominators
from harts.rl.objectives.clip import clipped_surrogate, importance_ratio
from harts.rl.objectives.inputs import (
    Fields,
    PolicyOutput,
    at_least_float32,
    current_log_probs,
    optional_field,
    required_field,
)
from harts.rl.objectives.kl import KLEstimator, kl_estimate
from harts.rl.objectives.normalisation import (
    ReductionOptions,
    check_choice,
    reduce_over_step,
    trajectory_mean,
)


@dataclass(frozen=True, kw_only=True)
class PolicyOptions(ReductionOptions):
    """Options of every policy objective, beside normalisation and max_length.

    clip_low, clip_high: the ratio counts only within [1 - clip_low, 1 + clip_high].
    clip_ratio_c: dual clip, bound of the ratio where the advantage is negative; above 1, or None.
    kl_coefficient: weight of the penalty for leaving the reference policy; above 0 it needs the
    field ref_log_probs. kl_estimator: "k1", "k2" or "k3", see harts.rl.objectives.kl.
    entropy_coefficient: weight of the entropy bonus.
    ratio_level: whether a token has its own ratio or its trajectory's; fixed by the objective.
    """

    ratio_level: ClassVar[Literal["token", "sequence"]] = "token"

    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_ratio_c: float | None = None
    kl_coefficient: float = 0.0
    kl_estimator: KLEstimator = "k3"
    entropy_coefficient: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("kl_estimator", self.kl_estimator, get_args(KLEstimator))
        if not 0.0 <= self.clip_low <= 1.0:
            raise ConfigError(f"clip_low is {self.clip_low}; give a value from 0 to 1")
        if not self.clip_high >= 0.0:
            raise ConfigError(f"clip_high is {self.clip_high}; give a value from 0")
        if self.clip_ratio_c is not None and not self.clip_ratio_c > 1.0:
            raise ConfigError(f"clip_ratio_c is {self.clip_ratio_c}; give a value above 1")
        if not self.kl_coefficient >= 0.0:
            raise ConfigError(f"kl_coefficient is {self.kl_coefficient}; give a value from 0")


def policy_loss(
    out: PolicyOutput, fields: Fields, denominators: Denominators, options: PolicyOptions
) -> torch.Tensor:
    """Scalar loss, attached to out: surrogate + kl_coefficient KL - entropy_coefficient entropy.

    All three terms are normalised alike. fields: "advantages" always, "old_log_probs" where the
    policy has moved since sampling (absent: on-policy, the ratio is 1 with the gradient of the
    log-probability), "ref_log_probs" with a KL penalty; their aliases are known. Zero, but still
    attached, where P is 0. DataError for a missing or non-finite field. O(P).
    """
    log_probs = current_log_probs(out)
    advantages = required_field(fields, "advantages", log_probs, "a policy objective")
    ratio = importance_ratio(log_importance_ratio(log_probs, fields, denominators, options))
    token_losses = clipped_surrogate(
        ratio,
        advantages,
        clip_low=options.clip_low,
        clip_high=options.clip_high,
        clip_ratio_c=options.clip_ratio_c,
    )
    if options.kl_coefficient > 0.0:
        reference = required_field(fields, "ref_log_probs", log_probs, "kl_coefficient > 0")
        penalty = kl_estimate(log_probs, reference, options.kl_estimator)
        token_losses = token_losses + options.kl_coefficient * penalty
    if options.entropy_coefficient != 0.0:
        entropy = at_least_float32(out.entropy)
        token_losses = token_losses - options.entropy_coefficient * entropy
    return reduce_over_step(token_losses, fields, denominators, options)


def log_importance_ratio(
    log_probs: torch.Tensor, fields: Fields, denominators: Denominators, options: PolicyOptions
) -> torch.Tensor:
    """log(policy / old policy) of each scored position (P,), at options.ratio_level.

    "sequence" is GSPO's token form (arXiv 2507.18071, Equation 14): the value is the trajectory's
    mean log-ratio, the gradient that of the token's own log-probability.
    """
    old_log_probs = optional_field(fields, "old_log_probs", log_probs)
    if old_log_probs is None:
        return log_probs - log_probs.detach()
    if options.ratio_level == "token":
        return log_probs - old_log_probs
    sequence_log_ratio = trajectory_mean(log_probs.detach() - old_log_probs, fields, denominators)
    return log_probs - log_probs.detach() + sequence_log_ratio
