"""One step's gradients: every microbatch of a plan through the model and the objective."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from harts.models.tree_model import TreeModel, TreeOutput
from harts.plan.microbatch import MicroBatch
from harts.plan.step_plan import StepPlan
from harts.rl import moe_losses, objectives
from harts.rl.objectives import MetricSum, PolicyOptions, add_metrics, policy_metrics
from harts.train.options import ObjectiveOptions

Progress = Callable[[Iterable[MicroBatch], int], Iterable[MicroBatch]]


@dataclass(frozen=True)
class StepResult:
    """loss: of the whole step, policy and MoE terms. metrics: sums over the scored positions.
    loads: int64 (L, E) tokens of each expert, None without MoE. seconds: wall time.
    """

    loss: float
    policy_loss: float
    metrics: dict[str, MetricSum]
    loads: torch.Tensor | None
    seconds: float


def accumulate_gradients(
    model: TreeModel,
    plan: StepPlan,
    options: ObjectiveOptions,
    progress: Progress = lambda microbatches, total: microbatches,
) -> StepResult:
    """Add the gradients of the whole step to the parameters' `.grad`.

    Log-probs in the original order, the objective over the step's denominators, backward: one
    microbatch at a time, so memory is that of one microbatch.
    """
    started = time.perf_counter()
    objective = getattr(objectives, options.name)
    loss = policy_loss = 0.0
    metrics: dict[str, MetricSum] = {}
    loads: torch.Tensor | None = None
    microbatches = [mb for r in range(plan.replicas) for mb in plan.microbatches(r)]
    for microbatch in progress(microbatches, len(microbatches)):
        out = model.log_probs(microbatch)
        fields = microbatch.fields
        policy = objective(out, fields, plan.denominators, options=options.options)
        total = policy + _moe_loss(out, plan, options)
        if total.requires_grad:
            total.backward()
        loss += float(total.detach())
        policy_loss += float(policy.detach())
        if isinstance(options.options, PolicyOptions):
            added = policy_metrics(out, fields, plan.denominators, options=options.options)
            metrics = add_metrics(metrics, added)
        metrics = add_metrics(metrics, {"log_prob": _mean_of(out.log_probs)})
        if out.routers:
            mine = moe_losses.expert_loads(out.routers)
            loads = mine if loads is None else loads + mine
    return StepResult(loss, policy_loss, metrics, loads, time.perf_counter() - started)


def _mean_of(values: torch.Tensor) -> MetricSum:
    return MetricSum(values.detach().double().sum(), values.numel())


def _moe_loss(out: TreeOutput, plan: StepPlan, options: ObjectiveOptions) -> torch.Tensor | float:
    """Router losses of a microbatch, weighted so that they add up over the step."""
    loss: torch.Tensor | float = 0.0
    if options.load_balancing:
        loss = loss + options.load_balancing * moe_losses.load_balancing_loss(
            out.routers, total=plan.raw_tokens
        )
    if options.router_z:
        loss = loss + options.router_z * moe_losses.router_z_loss(
            out.routers, total=plan.raw_tokens
        )
    return loss
