"""Group Relative Policy Optimization (arXiv 2402.03300): PPO's clip on group-relative advantages.

Advantages come as a field; harts.rl.advantages makes them from rewards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harts.plan.denominators import Denominators
from harts.rl.objectives.inputs import Fields, PolicyOutput
from harts.rl.objectives.policy import PolicyOptions, policy_loss


@dataclass(frozen=True, kw_only=True)
class GrpoOptions(PolicyOptions):
    """Defaults are those of today's frameworks (verl, TRL), not of the paper.

    normalisation "token_mean": the paper's "sequence_mean" prefers short wrong answers and, in
    step-wise data, lets a 20-token call weigh as much as a 5,000-token one.
    kl_coefficient 0: the paper's 0.04 needs a reference model that most runs now leave out.
    """


DEFAULTS = GrpoOptions()


def grpo(
    out: PolicyOutput,
    fields: Fields,
    denominators: Denominators,
    *,
    options: GrpoOptions = DEFAULTS,
) -> torch.Tensor:
    """This microbatch's share of the step's GRPO loss; see harts.rl.objectives.policy_loss."""
    return policy_loss(out, fields, denominators, options)
