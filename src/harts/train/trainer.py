"""The training loop: plan, log-probs, objective, backward, clip, AdamW."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import torch

import harts
from harts.data.read import read
from harts.errors import CheckpointError, ConfigError
from harts.models.load import load_model
from harts.models.tree_model import TreeModel, attach
from harts.plan.planner import plan_step
from harts.plan.step_plan import StepPlan
from harts.rl.moe_losses import update_expert_bias
from harts.train.checkpoint import Checkpoint, latest_checkpoint, load_optimizer, save_checkpoint
from harts.train.log import RunLog
from harts.train.options import RunOptions
from harts.train.sampling import GroupSampler, with_advantages
from harts.train.step import StepResult, accumulate_gradients


def train(options: RunOptions, *, resume: bool = False) -> dict[str, Any]:
    """Run to options.train.steps; returns the last step's metrics.

    Writes metrics.jsonl and checkpoints under options.output.dir. With `resume` it goes on from
    the last complete checkpoint there, bit for bit on CPU; without, the folder must be new.
    """
    run_dir, config = Path(options.output.dir), _as_json(options)
    checkpoint = _starting_point(run_dir, config, resume)
    batch = with_advantages(
        read(options.data.path, format=options.data.format), options.objective.advantages
    )
    sampler = GroupSampler(
        batch,
        groups_per_step=options.data.groups_per_step,
        seed=options.train.seed,
        expanded=options.plan.sharing == "expanded",
    )
    source = options.model.path if checkpoint is None else str(checkpoint.path)
    hf_model = load_model(
        source,
        vocab_size=int(batch.tokens.max()) + 1,
        seed=options.model.seed,
        dtype=getattr(torch, options.model.dtype),
    )
    model = attach(hf_model.train())
    _check_objective(model, options)
    if options.train.recompute == "full":
        hf_model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = _adamw(hf_model, options)
    first = 0
    if checkpoint is not None:
        first = checkpoint.step
        load_optimizer(checkpoint, optimizer)
    run_dir.mkdir(parents=True, exist_ok=True)
    log = RunLog(run_dir, total_steps=options.train.steps, first_step=first)
    log.note(f"harts {harts.__version__}: {_describe(options, model, batch, first)}")

    metrics: dict[str, Any] = {"step": first}
    for number in range(first, options.train.steps):
        started = time.perf_counter()
        plan = plan_step(
            sampler.step(number),
            options.plan.capacity,
            chunk_size=options.plan.chunk_size,
            planner=options.plan.planner,
            over_capacity=options.plan.over_capacity,
        )
        optimizer.zero_grad(set_to_none=True)
        result = accumulate_gradients(model, plan, options.objective, log.progress)
        grad_norm = float(
            torch.nn.utils.clip_grad_norm_(hf_model.parameters(), options.train.max_grad_norm)
        )
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(options, number)
        optimizer.step()
        if options.objective.expert_bias_rate and result.loads is not None:
            _update_biases(model, result.loads, options.objective.expert_bias_rate)
        seconds = time.perf_counter() - started
        metrics = _metrics(number + 1, plan, result, grad_norm, seconds)
        metrics["learning_rate"] = _learning_rate(options, number)
        log.step(metrics)
        last = number + 1 == options.train.steps
        if last or (number + 1) % options.output.checkpoint_every == 0:
            save_checkpoint(
                run_dir, number + 1, hf_model, optimizer, config, keep=options.output.keep
            )
    return metrics


def _starting_point(run_dir: Path, config: dict[str, Any], resume: bool) -> Checkpoint | None:
    """The checkpoint to go on from; None to start anew. Refuses to mix two runs in a folder."""
    checkpoint = latest_checkpoint(run_dir)
    if not resume:
        if checkpoint is not None:
            raise ConfigError(
                f"output.dir {run_dir} holds a run of {checkpoint.step} steps; "
                "go on with --resume, or choose another folder"
            )
        return None
    if checkpoint is None:
        return None
    for section in ("data", "plan", "model", "objective", "train"):
        for key, value in config[section].items():
            before = checkpoint.config[section].get(key)
            if before != value and (section, key) != ("train", "steps"):
                raise CheckpointError(
                    f"{section}.{key} is {value!r}, the run in {run_dir} has {before!r}; "
                    "resume with the same configuration (only train.steps may change)"
                )
    return checkpoint


def _check_objective(model: TreeModel, options: RunOptions) -> None:
    asked = [
        name
        for name in ("load_balancing", "router_z", "expert_bias_rate")
        if getattr(options.objective, name)
    ]
    if asked and not model.routers:
        raise ConfigError(
            f"objective.{asked[0]} is set, but {options.model.path} has no MoE layer; leave it out"
        )
    if options.objective.expert_bias_rate and not _expert_biases(model):
        raise ConfigError(
            f"objective.expert_bias_rate is set, but the routers of {options.model.path} have no "
            "expert bias; leave it out"
        )


def _adamw(model: Any, options: RunOptions) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(
        trained,
        lr=options.train.learning_rate,
        betas=options.train.betas,
        eps=options.train.epsilon,
        weight_decay=options.train.weight_decay,
    )


def _learning_rate(options: RunOptions, number: int) -> float:
    warm = min(1.0, (number + 1) / max(1, options.train.warmup_steps))
    return options.train.learning_rate * warm


def _expert_biases(model: TreeModel) -> list[torch.Tensor]:
    biases = [getattr(r, "e_score_correction_bias", None) for r in model.routers.values()]
    return [bias for bias in biases if bias is not None]


def _update_biases(model: TreeModel, loads: torch.Tensor, rate: float) -> None:
    update_expert_bias(_expert_biases(model), loads, rate=rate)


def _metrics(
    step: int, plan: StepPlan, result: StepResult, grad_norm: float, seconds: float
) -> dict[str, Any]:
    metrics = {
        "step": step,
        "loss": result.loss,
        "policy_loss": result.policy_loss,
        "grad_norm": grad_norm,
        "trajectories": len(plan.batch),
        "scored_tokens": plan.denominators.num_scored_tokens,
        "raw_tokens": plan.raw_tokens,
        "compact_tokens": plan.compact_tokens,
        "rows_saved": plan.raw_tokens - plan.compact_tokens,
        "compression": plan.compression,
        "microbatches": plan.num_microbatches,
        "plan_seconds": plan.plan_seconds,
        "gradient_seconds": result.seconds,
        "seconds": seconds,
        "raw_tokens_per_second": plan.raw_tokens / seconds,
    }
    metrics |= {name: value.mean for name, value in result.metrics.items() if value.count}
    if result.loads is not None:
        load = result.loads.double()
        metrics["expert_load_max_over_mean"] = float((load.amax(1) / load.mean(1)).max())
    return metrics


def _describe(options: RunOptions, model: TreeModel, batch: Any, first: int) -> str:
    num_parameters = sum(p.numel() for p in model.model.parameters())
    start = f", resuming after step {first}" if first else ""
    return (
        f"{options.objective.name} on {len(batch):,} trajectories of {options.data.path}, "
        f"{options.model.path} ({num_parameters / 1e6:.1f} M parameters), "
        f"{options.plan.sharing} rows, capacity {options.plan.capacity:,}{start}"
    )


def _as_json(options: RunOptions) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(options)))
    return config
