"""Group Sequence Policy Optimization (arXiv 2507.18071): one ratio for each trajectory.

The ratio is exp(mean over the trajectory's scored tokens of the log-ratio), Equation 7. The token
form is used (Equation 14): equal value and gradient where the advantage is constant over the
trajectory, and defined where it is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from harts.plan.denominators import Denominators
from harts.rl.objectives.inputs import Fields, PolicyOutput
from harts.rl.objectives.normalisation import Normalisation
from harts.rl.objectives.policy import PolicyOptions, policy_loss


@dataclass(frozen=True, kw_only=True)
class GspoOptions(PolicyOptions):
    """Clip range and normalisation of the paper (section 5.1, Equation 5).

    The range is narrow because a mean of many log-ratios is close to 0.
    """

    ratio_level: ClassVar[Literal["token", "sequence"]] = "sequence"

    normalisation: Normalisation = "sequence_mean"
    clip_low: float = 3e-4
    clip_high: float = 4e-4


DEFAULTS = GspoOptions()


def gspo(
    out: PolicyOutput,
    fields: Fields,
    denominators: Denominators,
    *,
    options: GspoOptions = DEFAULTS,
) -> torch.Tensor:
    """This microbatch's share of the step's GSPO loss; see harts.rl.objectives.policy_loss.

    DataError where only some of a trajectory's scored positions are given.
    """
    return policy_loss(out, fields, denominators, options)
