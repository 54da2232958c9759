"""The sections of a run: data, plan, model, objective, train, output. Frozen, all documented."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from harts.errors import ConfigError
from harts.plan.over_capacity import OverCapacity
from harts.plan.planner import Planner
from harts.rl.objectives import (
    DapoOptions,
    GrpoOptions,
    GspoOptions,
    PpoOptions,
    ReductionOptions,
    SftOptions,
)

OBJECTIVES: dict[str, type[ReductionOptions]] = {
    "grpo": GrpoOptions,
    "dapo": DapoOptions,
    "gspo": GspoOptions,
    "ppo": PpoOptions,
    "sft": SftOptions,
}


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """path: rollouts, any format that harts reads. format: override the detection.
    tokenizer, chat_template, sampling, rewards, trust: as in `harts.read`.
    groups_per_step: groups (tasks) of each step; None takes all of them every step.
    Groups are shuffled anew every epoch by train.seed.
    """

    path: str
    format: str | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    sampling: Literal["step", "tree-step"] | None = None
    rewards: str | None = None
    trust: bool = False
    groups_per_step: int | None = None


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """capacity: most compact rows of a microbatch. chunk_size: rows of a linear-attention chunk.
    planner, over_capacity: as in `plan_step`.
    sharing: "tree" computes every shared row once; "expanded" computes each trajectory alone
    through the same code, the baseline to compare with.
    """

    capacity: int = 65536
    chunk_size: int = 64
    planner: Planner = "harts"
    over_capacity: OverCapacity = "error"
    sharing: Literal["tree", "expanded"] = "tree"

    def __post_init__(self) -> None:
        _require_at_least_one("plan.capacity", self.capacity)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """path: a local Hugging Face folder, or tiny:<model_type> for a small random one.
    dtype: of parameters and compute; with bfloat16 the optimiser keeps float32 weights, moments
    and gradient sums, and the parameters that the family keeps in float32 stay so.
    seed: of a random model.
    """

    path: str
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class ObjectiveOptions:
    """name: the policy objective; options: its own, as in harts.rl.objectives.
    advantages: "field" reads them from the data, "group" makes them from the rewards of each
    group, "leave_one_out" likewise against the mean of the others.
    load_balancing, router_z: weights of the MoE losses (0 is off).
    expert_bias_rate: step of the expert-bias update of sigmoid routers (0 is off).
    """

    name: Literal["grpo", "dapo", "gspo", "ppo", "sft"] = "grpo"
    options: ReductionOptions = field(default_factory=GrpoOptions)
    advantages: Literal["field", "group", "leave_one_out"] = "field"
    load_balancing: float = 0.0
    router_z: float = 0.0
    expert_bias_rate: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """steps: optimiser steps. learning_rate, betas, epsilon, weight_decay: AdamW's.
    warmup_steps: linear warm-up, then constant. max_grad_norm: clip of the global norm; inf
    leaves gradients alone. recompute: "full" recomputes each layer in backward, "none" keeps its
    activations, "selective" recomputes all of a layer but its attention ("fa4" and "views" can
    keep it), in the first recompute_layers layers (None: in all), and keeps the others.
    device: "auto" is cuda where there is one. deterministic: torch's deterministic algorithms.
    seed: of the order of groups.
    """

    steps: int = 20
    learning_rate: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 0
    max_grad_norm: float = 1.0
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_layers: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    deterministic: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        _require_at_least_one("train.steps", self.steps)
        for name in ("learning_rate", "weight_decay", "warmup_steps"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"train.{name} is {value}; give 0 or more")
        if not self.max_grad_norm > 0:
            raise ConfigError(
                f"train.max_grad_norm is {self.max_grad_norm}; give more than 0, or inf to leave "
                "gradients alone"
            )
        if not 0 < self.epsilon < math.inf:
            raise ConfigError(f"train.epsilon is {self.epsilon}; give more than 0")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"train.betas is {list(self.betas)}; give two from 0 to below 1")
        if self.recompute != "selective" and self.recompute_layers is not None:
            raise ConfigError(
                f"train.recompute_layers is {self.recompute_layers} with "
                f"train.recompute={self.recompute!r}; give it with 'selective' only"
            )
        if self.recompute_layers is not None and self.recompute_layers < 1:
            raise ConfigError(
                f"train.recompute_layers is {self.recompute_layers}; give at least 1, or "
                "train.recompute='none'"
            )


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """dir: where metrics.jsonl and checkpoints go. checkpoint_every: steps between checkpoints;
    the last step always makes one. keep: newest checkpoints kept.
    """

    dir: str = "runs/harts"
    checkpoint_every: int = 10
    keep: int = 2

    def __post_init__(self) -> None:
        _require_at_least_one("output.checkpoint_every", self.checkpoint_every)
        _require_at_least_one("output.keep", self.keep)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """One training run."""

    data: DataOptions
    model: ModelOptions
    plan: PlanOptions = field(default_factory=PlanOptions)
    objective: ObjectiveOptions = field(default_factory=ObjectiveOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    output: OutputOptions = field(default_factory=OutputOptions)


def _require_at_least_one(key: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{key} is {value}; give at least 1")
