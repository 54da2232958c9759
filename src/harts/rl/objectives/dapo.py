"""DAPO's loss (arXiv 2503.14476, Equation 8): clip-higher and a mean over all tokens.

Its dynamic sampling and overlong reward shaping act on the batch before it reaches an objective.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harts.plan.denominators import Denominators
from harts.rl.objectives.inputs import Fields, PolicyOutput
from harts.rl.objectives.normalisation import Normalisation
from harts.rl.objectives.policy import PolicyOptions, policy_loss


@dataclass(frozen=True, kw_only=True)
class DapoOptions(PolicyOptions):
    """clip_high 0.28 leaves unlikely tokens room to grow (section 3.1 of the paper)."""

    normalisation: Normalisation = "token_mean"
    clip_high: float = 0.28


DEFAULTS = DapoOptions()


def dapo(
    out: PolicyOutput,
    fields: Fields,
    denominators: Denominators,
    *,
    options: DapoOptions = DEFAULTS,
) -> torch.Tensor:
    """This microbatch's share of the step's DAPO loss; see harts.rl.objectives.policy_loss."""
    return policy_loss(out, fields, denominators, options)
