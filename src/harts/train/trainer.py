"""The training loop: plan, log-probs, objective, backward, clip, AdamW."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import harts
from harts.data.aliases import find
from harts.data.read import read
from harts.data.trajectory import TrajectoryBatch
from harts.errors import CheckpointError, ConfigError, DataError, TrainingError
from harts.models.load import load_model
from harts.models.tree_model import TreeModel, attach
from harts.ops.kept_results import KEEPING
from harts.plan.over_capacity import first_names, within_capacity
from harts.plan.planner import plan_step
from harts.plan.step_plan import StepPlan
from harts.rl.moe_losses import update_expert_bias
from harts.train.checkpoint import Checkpoint, latest_checkpoint, load_optimizer, save_checkpoint
from harts.train.determinism import deterministic
from harts.train.device import (
    choose_device,
    describe_device,
    peak_memory_gib,
    restart_peak_memory,
    wait_for,
)
from harts.train.log import RunLog, metrics_lines
from harts.train.mixed_precision import MixedPrecisionOptimizer
from harts.train.options import DataOptions, RunOptions, TrainOptions
from harts.train.recompute import set_recomputation
from harts.train.run_folder import StopSignal, alone_in
from harts.train.sampling import GroupSampler, with_advantages, without_unscored_groups
from harts.train.step import StepResult, accumulate_gradients

_MAY_CHANGE = {
    ("train", key) for key in ("steps", "device", "recompute", "recompute_layers")
}  # none of them changes what is computed


def train(options: RunOptions, *, resume: bool = False) -> dict[str, Any]:
    """Run to options.train.steps; returns the last step's metrics.

    Writes metrics.jsonl and checkpoints under options.output.dir. With `resume` it goes on from
    the last complete checkpoint there, bit for bit on CPU; without, the folder must be new.
    SIGINT and SIGTERM end it after the step that runs, with a checkpoint, by KeyboardInterrupt.
    Raises TrainingError, with nothing updated, for a step whose loss or gradients are not finite.
    """
    device = choose_device(options.train.device)
    with deterministic(options.train.deterministic, device), StopSignal() as stop:
        return _train(options, device, resume, stop)


@dataclass(frozen=True)
class _Run:
    """What the steps of a run need, made once."""

    options: RunOptions
    config: dict[str, Any]
    folder: Path
    sampler: GroupSampler
    model: TreeModel
    optimizer: MixedPrecisionOptimizer


def _train(
    options: RunOptions, device: torch.device, resume: bool, stop: StopSignal
) -> dict[str, Any]:
    folder, config = Path(options.output.dir), _as_json(options)
    checkpoint, notes = _starting_point(folder, config, resume)
    if checkpoint is not None and checkpoint.step >= options.train.steps:
        done = f"harts: {folder} already has {checkpoint.step} steps: nothing to do"
        print(done, file=sys.stderr)
        return metrics_lines(folder / "metrics.jsonl")[-1]
    batch = with_advantages(_read(options.data), options.objective.advantages)
    batch, left_out = _trainable(batch, options)
    sampler = GroupSampler(
        batch,
        groups_per_step=options.data.groups_per_step,
        seed=options.train.seed,
        expanded=options.plan.sharing == "expanded",
    )
    hf_model: Any = load_model(
        options.model.path if checkpoint is None else str(checkpoint.path),
        vocab_size=int(batch.tokens.max()) + 1,
        seed=options.model.seed,
        dtype=options.model.dtype,
    )
    model = attach(hf_model.to(device).train())
    _check_objective(model, options)
    set_recomputation(hf_model, options.train)
    attention = model.kernels.attention
    if options.train.recompute == "selective" and attention not in KEEPING:
        warnings.warn(
            f"train.recompute='selective' cannot keep attention {attention!r} and recomputes it; "
            f"it keeps {' and '.join(KEEPING)}",
            stacklevel=2,
        )
    optimizer = MixedPrecisionOptimizer(hf_model, partial(_adamw, options.train))
    first = 0
    if checkpoint is not None:
        first = checkpoint.step
        load_optimizer(checkpoint, optimizer)
    run = _Run(options, config, folder, sampler, model, optimizer)
    with alone_in(folder):
        log = RunLog(folder, total_steps=options.train.steps, first_step=first)
        log.note(f"harts {harts.__version__}: {_describe(options, model, batch, first)}")
        for note in (*notes, *left_out):
            log.note(note)
        return _all_steps(run, log, first, stop)


def _all_steps(run: _Run, log: RunLog, first: int, stop: StopSignal) -> dict[str, Any]:
    options = run.options
    metrics: dict[str, Any] = {}
    for number in range(first, options.train.steps):
        metrics = _one_step(run, log, number)
        log.step(metrics)
        done = number + 1
        due = done == options.train.steps or done % options.output.checkpoint_every == 0
        if due or stop.received:
            save_checkpoint(
                run.folder,
                done,
                run.model.model,
                run.optimizer,
                run.config,
                keep=options.output.keep,
            )
        if stop.received and done < options.train.steps:
            log.note(f"stopped after step {done}, with a checkpoint; go on with --resume")
            raise KeyboardInterrupt
    return metrics


def _one_step(run: _Run, log: RunLog, number: int) -> dict[str, Any]:
    """Metrics of a step, numbered from 0, once its update has run."""
    options, device = run.options, run.model.device
    started = time.perf_counter()
    restart_peak_memory(device)
    plan = plan_step(
        run.sampler.step(number),
        options.plan.capacity,
        chunk_size=options.plan.chunk_size,
        planner=options.plan.planner,
    )
    run.optimizer.zero_grad()
    result = accumulate_gradients(run.model, plan, options.objective, log.progress)
    grad_norm = run.optimizer.clip_gradients(options.train.max_grad_norm)
    measured = _measured(result, grad_norm)  # waits for the device
    _check_finite(measured, number + 1, options)
    run.optimizer.step(_learning_rate(options, number))
    if options.objective.expert_bias_rate and result.loads is not None:
        _update_biases(run.model, result.loads, options.objective.expert_bias_rate)
    wait_for(device)
    return {
        "step": number + 1,
        **measured,
        **_sizes(plan, seconds=time.perf_counter() - started),
        "peak_memory_gib": peak_memory_gib(device),
        "learning_rate": _learning_rate(options, number),
    }


def _check_finite(measured: dict[str, Any], step: int, options: RunOptions) -> None:
    """Before the update: a checkpoint never holds what such a step would make of the weights."""
    loss, norm = measured["loss"], measured["grad_norm"]
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise TrainingError(
            f"step {step}: loss is {loss}, the gradients' norm {norm}; nothing was updated and the "
            f"checkpoints in {options.output.dir} are those before; lower train.learning_rate or "
            "look at the rollouts of this step, then go on with --resume"
        )


def _read(options: DataOptions) -> TrajectoryBatch:
    return read(
        options.path,
        format=options.format,
        tokenizer=options.tokenizer,
        chat_template=options.chat_template,
        sampling=options.sampling,
        rewards=options.rewards,
        trust=options.trust,
    )


def _starting_point(
    folder: Path, config: dict[str, Any], resume: bool
) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint to go on from, None to start anew, and what to say of it.

    Refuses to mix two runs in a folder.
    """
    checkpoint = latest_checkpoint(folder)
    steps = len(metrics_lines(folder / "metrics.jsonl"))
    if not resume:
        if checkpoint is not None:
            raise ConfigError(
                f"output.dir {folder} holds a run of {checkpoint.step} steps; "
                "go on with --resume, or choose another folder"
            )
        if steps:
            raise ConfigError(
                f"output.dir {folder} holds the metrics of {steps} steps without a checkpoint; "
                "do them again with --resume, or choose another folder"
            )
        return None, []
    if checkpoint is None:
        again = f", and does {steps} steps again" if steps else ""
        return None, [f"no checkpoint in {folder}: the run starts from the beginning{again}"]
    for section in ("data", "plan", "model", "objective", "train"):
        for key, value in config[section].items():
            before = checkpoint.config[section].get(key, value)  # written before key was known
            if before != value and (section, key) not in _MAY_CHANGE:
                raise CheckpointError(
                    f"{section}.{key} is {value!r}, the run in {folder} has {before!r}; "
                    "resume with the same configuration (only steps, device and recomputation may "
                    "change)"
                )
    return checkpoint, []


def _trainable(batch: TrajectoryBatch, options: RunOptions) -> tuple[TrajectoryBatch, list[str]]:
    """The batch without what no step can train on, and a note on what that was.

    Refuses, before anything is loaded or written, what the first step would refuse.
    """
    notes = []
    capacity, all_of_it = options.plan.capacity, len(batch)
    batch, too_long = within_capacity(batch, capacity, options.plan.over_capacity)
    _check_fields(batch, options)
    if len(too_long):
        notes.append(
            f"left out: {len(too_long)} of {all_of_it} trajectories, longer than the capacity "
            f"{capacity:,}"
        )
    batch, groups = without_unscored_groups(batch)
    if groups:
        notes.append(f"left out: {len(groups)} groups that score no token ({first_names(groups)})")
    return batch, notes


def _check_fields(batch: TrajectoryBatch, options: RunOptions) -> None:
    fields = {**batch.position_fields, **batch.trajectory_fields}
    if options.objective.name != "sft" and find(fields, "advantages") is None:
        present = ", ".join(sorted(fields)) or "none"
        raise DataError(
            f"{options.data.path}: objective {options.objective.name!r} needs the field "
            f"'advantages'; fields present: {present}; give it, or make it from rewards with "
            "objective.advantages='group'"
        )


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


def _adamw(options: TrainOptions, parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    on_cuda = any(parameter.is_cuda for parameter in parameters)
    return torch.optim.AdamW(
        parameters,
        lr=options.learning_rate,
        betas=options.betas,
        eps=options.epsilon,
        weight_decay=options.weight_decay,
        fused=True if on_cuda else None,  # CUDA's default holds temporaries as large as the weights
    )


def _learning_rate(options: RunOptions, number: int) -> float:
    warm = min(1.0, (number + 1) / max(1, options.train.warmup_steps))
    return options.train.learning_rate * warm


def _expert_biases(model: TreeModel) -> list[torch.Tensor]:
    biases = [getattr(r, "e_score_correction_bias", None) for r in model.routers.values()]
    return [bias for bias in biases if bias is not None]


def _update_biases(model: TreeModel, loads: torch.Tensor, rate: float) -> None:
    update_expert_bias(_expert_biases(model), loads, rate=rate)


def _measured(result: StepResult, grad_norm: torch.Tensor) -> dict[str, Any]:
    """Everything that was computed on the device; returns when the gradients are done there."""
    metrics = {
        "loss": result.loss,
        "policy_loss": result.policy_loss,
        "grad_norm": float(grad_norm),
        **result.means,
    }
    if result.loads is not None:
        load = result.loads.double()
        metrics["expert_load_max_over_mean"] = float((load.amax(1) / load.mean(1)).max())
    metrics["gradient_seconds"] = result.seconds
    return metrics


def _sizes(plan: StepPlan, seconds: float) -> dict[str, Any]:
    """What the step held, and how fast that was; seconds: of the whole step."""
    return {
        "trajectories": len(plan.batch),
        "scored_tokens": plan.denominators.num_scored_tokens,
        "raw_tokens": plan.raw_tokens,
        "compact_tokens": plan.compact_tokens,
        "rows_saved": plan.raw_tokens - plan.compact_tokens,
        "compression": plan.compression,
        "microbatches": plan.num_microbatches,
        "plan_seconds": plan.plan_seconds,
        "seconds": seconds,
        "raw_tokens_per_second": plan.raw_tokens / seconds,
        "compact_tokens_per_second": plan.compact_tokens / seconds,
    }


def _describe(options: RunOptions, model: TreeModel, batch: Any, first: int) -> str:
    num_parameters = sum(p.numel() for p in model.model.parameters())
    start = f", resuming after step {first}" if first else ""
    return (
        f"{options.objective.name} on {len(batch):,} trajectories of {options.data.path}, "
        f"{options.model.path} ({num_parameters / 1e6:.1f} M parameters, {options.model.dtype}) "
        f"on {describe_device(model.device)}, "
        f"{options.plan.sharing} rows, capacity {options.plan.capacity:,}{start}"
    )


def _as_json(options: RunOptions) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(options)))
    return config
