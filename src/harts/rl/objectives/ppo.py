"""Proximal Policy Optimization's clipped policy loss (arXiv 1707.06347, Equation 7).

The value function lives elsewhere: advantages (for example GAE, one value a token) come as a field.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harts.plan.denominators import Denominators
from harts.rl.objectives.inputs import Fields, PolicyOutput
from harts.rl.objectives.policy import PolicyOptions, policy_loss


@dataclass(frozen=True, kw_only=True)
class PpoOptions(PolicyOptions):
    """The paper's clip of 0.2 and mean over all samples; no dual clip unless asked for."""


DEFAULTS = PpoOptions()


def ppo(
    out: PolicyOutput,
    fields: Fields,
    denominators: Denominators,
    *,
    options: PpoOptions = DEFAULTS,
) -> torch.Tensor:
    """This microbatch's share of the step's PPO loss; see harts.rl.objectives.policy_loss."""
    return policy_loss(out, fields, denominators, options)
