"""Policy objectives as pure functions: (out, fields, denominators, *, options) -> scalar loss.

The sum of the losses of all microbatches and replicas is the loss of the step.
"""

from __future__ import annotations

from harts.rl.objectives.dapo import DapoOptions, dapo
from harts.rl.objectives.grpo import GrpoOptions, grpo
from harts.rl.objectives.gspo import GspoOptions, gspo
from harts.rl.objectives.inputs import Fields, PolicyOutput
from harts.rl.objectives.metrics import MetricSum, add_metrics, policy_metrics
from harts.rl.objectives.normalisation import ReductionOptions
from harts.rl.objectives.policy import PolicyOptions, policy_loss
from harts.rl.objectives.ppo import PpoOptions, ppo
from harts.rl.objectives.sft import SftOptions, sft

__all__ = [
    "DapoOptions",
    "Fields",
    "GrpoOptions",
    "GspoOptions",
    "MetricSum",
    "PolicyOptions",
    "PolicyOutput",
    "PpoOptions",
    "ReductionOptions",
    "SftOptions",
    "add_metrics",
    "dapo",
    "grpo",
    "gspo",
    "policy_loss",
    "policy_metrics",
    "ppo",
    "sft",
]
