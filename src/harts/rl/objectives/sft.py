"""Supervised fine-tuning: the weighted negative log-likelihood of the scored tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harts.plan.denominators import Denominators
from harts.rl.objectives.inputs import Fields, PolicyOutput, current_log_probs, optional_field
from harts.rl.objectives.normalisation import ReductionOptions, reduce_over_step


@dataclass(frozen=True, kw_only=True)
class SftOptions(ReductionOptions):
    """Defaults to "token_mean", the cross-entropy that every framework trains with."""


DEFAULTS = SftOptions()


def sft(
    out: PolicyOutput,
    fields: Fields,
    denominators: Denominators,
    *,
    options: SftOptions = DEFAULTS,
) -> torch.Tensor:
    """This microbatch's share of the step's loss: a scalar, attached even where it is 0.

    The optional field "weights" multiplies each token's loss. It does not enter the denominators,
    which count tokens: weights of 2 double the loss. DataError for a non-finite weight. O(P).
    """
    log_probs = current_log_probs(out)
    weights = optional_field(fields, "weights", log_probs)
    token_losses = -log_probs if weights is None else -log_probs * weights
    return reduce_over_step(token_losses, fields, denominators, options)
