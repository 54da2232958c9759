"""harts: exact reinforcement learning on rollout trees.

    batch = harts.read("rollouts.jsonl")
    plan = harts.plan_step(batch, capacity=65536)
    model = harts.attach(hf_model)
    for mb in plan.microbatches():
        out = model.log_probs(mb)
        harts.objectives.grpo(out, mb.fields, plan.denominators).backward()

Names are imported on first use, so that reading and planning never load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "TrajectoryBatch": "harts.data.trajectory",
    "read": "harts.data.read",
    "write": "harts.data.write",
    "plan_step": "harts.plan.planner",
    "plan_calls": "harts.plan.calls",
    "verify_plan": "harts.plan.verify",
    "StepPlan": "harts.plan.step_plan",
    "MicroBatch": "harts.plan.microbatch",
    "CallPlan": "harts.plan.calls",
    "attach": "harts.models.tree_model",
    "Kernels": "harts.models.kernels",
    "keep_attention": "harts.ops.kept_results",
    "TreeModel": "harts.models.tree_model",
    "tiny_model": "harts.models.presets",
    "HartsError": "harts.errors",
    "UnsupportedModelError": "harts.errors",
}
_MODULES = {"objectives": "harts.rl.objectives"}

__all__ = ["__version__", *_HOME, *_MODULES]

if TYPE_CHECKING:
    from harts.data.read import read as read
    from harts.data.trajectory import TrajectoryBatch as TrajectoryBatch
    from harts.data.write import write as write
    from harts.errors import HartsError as HartsError
    from harts.errors import UnsupportedModelError as UnsupportedModelError
    from harts.models.kernels import Kernels as Kernels
    from harts.models.presets import tiny_model as tiny_model
    from harts.models.tree_model import TreeModel as TreeModel
    from harts.models.tree_model import attach as attach
    from harts.ops.kept_results import keep_attention as keep_attention
    from harts.plan.calls import CallPlan as CallPlan
    from harts.plan.calls import plan_calls as plan_calls
    from harts.plan.microbatch import MicroBatch as MicroBatch
    from harts.plan.planner import plan_step as plan_step
    from harts.plan.step_plan import StepPlan as StepPlan
    from harts.plan.verify import verify_plan as verify_plan
    from harts.rl import objectives as objectives


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name in _MODULES:
        return import_module(_MODULES[name])
    raise AttributeError(f"module 'harts' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
