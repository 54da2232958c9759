"""One step's gradients: every microbatch of a plan through the model and the objective.

Nothing here reads a value back from the device between two microbatches: the host runs ahead, and
the index tensors of a microbatch are made while the device still works on the one before. What a
step measured stays on the device until `StepResult` is asked for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch

from harts.models.tree_model import TreeModel, TreeOutput
from harts.plan.microbatch import MicroBatch
from harts.plan.step_plan import StepPlan
from harts.rl import moe_losses, objectives
from harts.rl.objectives import MetricSum, PolicyOptions, add_metrics, policy_metrics
from harts.train.device import Stopwatch
from harts.train.options import ObjectiveOptions

Progress = Callable[[Iterable[MicroBatch], int], Iterable[MicroBatch]]


@dataclass(frozen=True)
class StepResult:
    """Sums over a step, on the device; reading a number waits for it.

    losses: float64 (2,), policy and MoE terms together, and the policy's alone. metrics: sums over
    the scored positions. loads: int64 (L, E) tokens of each expert, None without MoE.
    stopwatch: from the first microbatch to the end of the last backward.
    """

    losses: torch.Tensor
    metrics: dict[str, MetricSum]
    loads: torch.Tensor | None
    stopwatch: Stopwatch

    @property
    def loss(self) -> float:
        """Of the whole step, policy and MoE terms."""
        return self._numbers[0]

    @property
    def policy_loss(self) -> float:
        """Of the whole step, without the MoE terms."""
        return self._numbers[1]

    @property
    def means(self) -> dict[str, float]:
        """Mean of each metric; names for which nothing was counted are left out."""
        totals = zip(self.metrics.items(), self._numbers[2:], strict=True)
        return {name: total / sum_.count for (name, sum_), total in totals if sum_.count}

    @property
    def seconds(self) -> float:
        """Of all forward and backward passes, on the device's clock."""
        return self.stopwatch.seconds

    @cached_property
    def _numbers(self) -> list[float]:
        """losses and the totals of metrics, in one copy to the host."""
        totals = [sum_.total.reshape(1) for sum_ in self.metrics.values()]
        return torch.cat([self.losses, *totals]).tolist()


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
    stopwatch = Stopwatch(model.device)
    objective = getattr(objectives, options.name)
    losses = torch.zeros(2, dtype=torch.float64, device=model.device)
    metrics: dict[str, MetricSum] = {}
    loads: torch.Tensor | None = None
    microbatches = [mb for r in range(plan.replicas) for mb in plan.microbatches(r)]
    for microbatch in progress(microbatches, len(microbatches)):
        out = model.log_probs(microbatch)
        fields = microbatch.fields
        policy = objective(out, fields, plan.denominators, options=options.options)
        total = policy + _moe_loss(out, plan, options)
        losses += torch.stack([total.detach(), policy.detach()]).double()
        if isinstance(options.options, PolicyOptions):
            added = policy_metrics(out, fields, plan.denominators, options=options.options)
            metrics = add_metrics(metrics, added)
        metrics = add_metrics(metrics, {"log_prob": _mean_of(out.log_probs)})
        if out.routers:
            mine = moe_losses.expert_loads(out.routers)
            loads = mine if loads is None else loads + mine
        if total.requires_grad:
            total.backward()  # last: nothing that the host prepares stands behind it
    stopwatch.stop()
    return StepResult(losses, metrics, loads, stopwatch)


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
