"""Estimates of KL(policy || reference) from one sampled token (Schulman, "Approximating KL").

With d = log reference - log policy: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d. As a loss on
on-policy samples, k2 has the gradient of KL(policy || reference), k3 (GRPO's paper, Equation 4)
that of KL(reference || policy), and k1's gradient is zero in expectation: k1 is for logging.
"""

from __future__ import annotations

from typing import Literal, assert_never

import torch

from harts.rl.objectives.clip import MAX_LOG_RATIO

KLEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(
    log_probs: torch.Tensor, reference_log_probs: torch.Tensor, estimator: KLEstimator
) -> torch.Tensor:
    """One estimate in nats for each token; differentiable in both arguments."""
    log_ratio = reference_log_probs - log_probs
    match estimator:
        case "k1":
            return -log_ratio
        case "k2":
            return 0.5 * log_ratio**2
        case "k3":
            bounded = log_ratio.clamp(max=MAX_LOG_RATIO)
            return torch.expm1(bounded) - bounded
        case _:
            assert_never(estimator)
