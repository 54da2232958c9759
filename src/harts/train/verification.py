"""Does the tree equal its trajectories? One model, run both ways on the same data (invariant 1).

The expanded run is the unmodified model on one trajectory at a time. Both runs see the same loss,
whose fixed pseudo-random weights make every scored position matter to every gradient.

Legend: S tokens of the batch, P scored positions.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from harts.data.aliases import find
from harts.data.trajectory import TrajectoryBatch
from harts.errors import DataError
from harts.models.tree_model import TreeModel, attach
from harts.plan.planner import plan_step
from harts.plan.step_plan import StepPlan

Floats = npt.NDArray[np.float64]

GRADIENT_NORM_FLOOR = 1e-3
"""Part of the norm of all gradients below which a parameter's own norm is not the scale.

Some gradients vanish in exact arithmetic (a key bias under softmax); what is left of them is
rounding noise, about 1e-7 of the whole in float32, and no two orders of summation agree on it.
"""

_HEAD_BLOCK_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """capacity, chunk_size: of the plan, in rows. seed: of the loss weights.

    tolerance: largest absolute difference of a log-probability or entropy, in nats.
    gradient_tolerance: largest relative L2 difference of a parameter's gradient.
    """

    capacity: int = 65536
    chunk_size: int = 64
    tolerance: float = 1e-4
    gradient_tolerance: float = 1e-3
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What `verify_model` found. Differences are absolute, in nats, over the scored positions.

    max_rel_grad_diff: largest over parameters of ||tree - expanded|| / max(||expanded||,
      GRADIENT_NORM_FLOOR * norm of all expanded gradients), at worst_parameter.
    worst_trajectory, worst_position: where a log-probability differs most.
    tree_seconds includes planning and index tensors; both times are forward and backward of the
    whole batch, after a first pass over its shortest scored trajectory.
    """

    plan: StepPlan
    options: VerifyOptions
    max_abs_logprob_diff: float
    mean_abs_logprob_diff: float
    worst_trajectory: int
    worst_position: int
    max_abs_entropy_diff: float
    max_rel_grad_diff: float
    worst_parameter: str
    tree_seconds: float
    expanded_seconds: float

    @property
    def compression(self) -> float:
        """Raw tokens over compact rows."""
        return self.plan.compression

    @property
    def speedup(self) -> float:
        """Expanded time over tree time."""
        return self.expanded_seconds / self.tree_seconds

    @property
    def passed(self) -> bool:
        """Whether everything is within the tolerances; NaN never is."""
        return (
            self.max_abs_logprob_diff <= self.options.tolerance
            and self.max_abs_entropy_diff <= self.options.tolerance
            and self.max_rel_grad_diff <= self.options.gradient_tolerance
        )

    def summary(self) -> dict[str, Any]:
        """The keys of `harts verify --json`."""
        batch = self.plan.batch
        return {
            "compression": self.compression,
            "max_abs_logprob_diff": self.max_abs_logprob_diff,
            "mean_abs_logprob_diff": self.mean_abs_logprob_diff,
            "max_rel_grad_diff": self.max_rel_grad_diff,
            "tree_seconds": self.tree_seconds,
            "expanded_seconds": self.expanded_seconds,
            "speedup": self.speedup,
            "passed": self.passed,
            "max_abs_entropy_diff": self.max_abs_entropy_diff,
            "worst_trajectory": self.worst_trajectory,
            "worst_position": self.worst_position,
            "worst_parameter": self.worst_parameter,
            "trajectories": len(batch),
            "scored_tokens": int(batch.loss_mask.sum()),
            "raw_tokens": self.plan.raw_tokens,
            "compact_tokens": self.plan.compact_tokens,
            "microbatches": self.plan.num_microbatches,
            "tolerance": self.options.tolerance,
            "gradient_tolerance": self.options.gradient_tolerance,
        }


def verify_model(
    model: nn.Module, batch: TrajectoryBatch, options: VerifyOptions | None = None
) -> Verification:
    """Compare a causal language model on the tree with itself on each trajectory alone.

    model: a transformers model (or PEFT wrapper) before `attach`; it is left as it is, apart from
    evaluation mode and cleared gradients. Its copy becomes the tree model, so the memory is twice
    that of the model and its gradients, plus one microbatch. Logits exist for a block of scored
    rows only. Raises DataError when no position is scored or the model's own log-probabilities
    are not finite, UnsupportedModelError and PlanError as `attach` and `plan_step` do.
    """
    options = options or VerifyOptions()
    if not batch.loss_mask.any():
        raise DataError(
            "no position is scored: loss_mask is 0 everywhere, so there is nothing to compare; "
            "set it to 1 where the policy generated the token"
        )
    plan_step(batch, options.capacity, 1, options.chunk_size)  # refuse before the model works
    model.eval()
    tree_model = attach(copy.deepcopy(model))
    for part in (_shortest_scored(batch), batch):  # the first pass warms up
        weights = _loss_weights(part, options.seed)
        with _fresh_gradients(tree_model.model, keep=part is batch):
            plan, tree = _run_tree(tree_model, part, weights, options)
        with _fresh_gradients(model, keep=part is batch):
            expanded = _run_expanded(model, part, weights)
    _require_finite(expanded, batch)
    difference = np.abs(tree.log_probs - expanded.log_probs)[batch.loss_mask]
    trajectory, position = _place_of(int(difference.argmax()), batch)
    max_rel_grad_diff, worst_parameter = _largest_gradient_difference(tree_model.model, model)
    model.zero_grad(set_to_none=True)
    return Verification(
        plan=plan,
        options=options,
        max_abs_logprob_diff=float(difference.max()),
        mean_abs_logprob_diff=float(difference.mean()),
        worst_trajectory=trajectory,
        worst_position=position,
        max_abs_entropy_diff=float(np.abs(tree.entropy - expanded.entropy)[batch.loss_mask].max()),
        max_rel_grad_diff=max_rel_grad_diff,
        worst_parameter=worst_parameter,
        tree_seconds=tree.seconds,
        expanded_seconds=expanded.seconds,
    )


@dataclass(frozen=True)
class _Run:
    """log_probs, entropy: (S,), NaN where nothing is scored. Gradients stay on the parameters."""

    log_probs: Floats
    entropy: Floats
    seconds: float


@dataclass(frozen=True)
class _LossWeights:
    """nll, entropy: (S,), what each scored position's terms count in the loss."""

    nll: Floats
    entropy: Floats

    def loss(
        self, log_probs: torch.Tensor, entropy: torch.Tensor, places: npt.NDArray[np.int64]
    ) -> torch.Tensor:
        """sum over positions of nll * -log p + entropy * H; places: (P,) into the (S,) arrays."""
        nll, bonus = (
            torch.as_tensor(w[places], dtype=log_probs.dtype, device=log_probs.device)
            for w in (self.nll, self.entropy)
        )
        return (bonus * entropy - nll * log_probs).sum()


def _loss_weights(batch: TrajectoryBatch, seed: int) -> _LossWeights:
    """Between 0.5 and 1.5 over P for the likelihood, a tenth of that for the entropy."""
    draw = np.random.default_rng(seed).uniform(0.5, 1.5, (2, len(batch.tokens)))
    nll, entropy = draw / batch.loss_mask.sum()
    return _LossWeights(nll, 0.1 * entropy)


def _run_tree(
    tree_model: TreeModel, batch: TrajectoryBatch, weights: _LossWeights, options: VerifyOptions
) -> tuple[StepPlan, _Run]:
    log_probs, entropy = (np.full(len(batch.tokens), np.nan) for _ in range(2))
    seconds = _stopwatch(tree_model.device)
    plan = plan_step(batch, options.capacity, 1, options.chunk_size)
    for microbatch in plan.microbatches():
        if not microbatch.num_scored:
            continue
        out = tree_model.log_probs(microbatch)
        fields = microbatch.fields
        places = batch.offsets[fields["trajectory_index"]] + fields["position"]
        weights.loss(out.log_probs, out.entropy, places).backward()
        log_probs[places] = _to_numpy(out.log_probs)
        entropy[places] = _to_numpy(out.entropy)
    return plan, _Run(log_probs, entropy, seconds())


def _run_expanded(model: nn.Module, batch: TrajectoryBatch, weights: _LossWeights) -> _Run:
    """Every trajectory alone through the model's own layers; the LM head on scored rows."""
    log_probs, entropy = (np.full(len(batch.tokens), np.nan) for _ in range(2))
    causal_lm: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = causal_lm.get_output_embeddings()
    device = causal_lm.get_input_embeddings().weight.device
    temperature = _temperature(batch)
    seconds = _stopwatch(device)
    for begin, end in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True):
        scored = begin + np.flatnonzero(batch.loss_mask[begin:end])
        if not len(scored):
            continue
        tokens = torch.as_tensor(batch.tokens[begin:end].astype(np.int64), device=device)
        hidden = causal_lm.get_decoder()(input_ids=tokens[None], use_cache=False).last_hidden_state
        rows = hidden[0, torch.as_tensor(scored - begin - 1, device=device)]
        leaf = rows.detach().requires_grad_()
        for block in _blocks(len(scored), head.weight):
            places = scored[block]
            logits = head(leaf[block])
            if temperature is not None:
                logits = (
                    logits / torch.as_tensor(temperature[places], device=device).to(logits)[:, None]
                )
            log_p = torch.log_softmax(logits, dim=-1)
            chosen = log_p.gather(1, tokens[torch.as_tensor(places - begin)][:, None])[:, 0]
            block_entropy = -(log_p.exp() * log_p).sum(-1)
            weights.loss(chosen, block_entropy, places).backward()
            log_probs[places] = _to_numpy(chosen)
            entropy[places] = _to_numpy(block_entropy)
        rows.backward(leaf.grad)
    return _Run(log_probs, entropy, seconds())


def _temperature(batch: TrajectoryBatch) -> Floats | None:
    """The temperature of each token (S,), where the data has one."""
    name = find([*batch.position_fields, *batch.trajectory_fields], "temperature")
    if name is None:
        return None
    if name in batch.position_fields:
        return batch.position_fields[name].astype(np.float64)
    return np.repeat(batch.trajectory_fields[name].astype(np.float64), batch.lengths)


def _blocks(num_rows: int, weight: torch.Tensor) -> Iterator[slice]:
    """Runs of rows whose logits take at most _HEAD_BLOCK_BYTES (at least one row)."""
    size = max(1, _HEAD_BLOCK_BYTES // (weight.shape[0] * weight.element_size()))
    return (slice(begin, begin + size) for begin in range(0, num_rows, size))


def _shortest_scored(batch: TrajectoryBatch) -> TrajectoryBatch:
    is_scored = np.logical_or.reduceat(batch.loss_mask, batch.offsets[:-1])
    candidates = np.flatnonzero(is_scored)
    return batch.select([candidates[batch.lengths[candidates].argmin()]])


@contextmanager
def _fresh_gradients(model: nn.Module, *, keep: bool) -> Iterator[None]:
    """No gradients before, and none after unless kept."""
    model.zero_grad(set_to_none=True)
    yield
    if not keep:
        model.zero_grad(set_to_none=True)


def _stopwatch(device: torch.device) -> Callable[[], float]:
    """A function that waits for the device and gives the seconds since now."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    started = now()
    return lambda: now() - started


def _to_numpy(values: torch.Tensor) -> Floats:
    array: Floats = values.detach().to("cpu", torch.float64).numpy()
    return array


def _require_finite(expanded: _Run, batch: TrajectoryBatch) -> None:
    bad = np.flatnonzero(~np.isfinite(expanded.log_probs[batch.loss_mask]))
    if len(bad):
        trajectory, position = _place_of(int(bad[0]), batch)
        value = expanded.log_probs[batch.offsets[trajectory] + position]
        raise DataError(
            f"{batch.name_of(trajectory)}: the unmodified model gives position {position} the "
            f"log-probability {value}; it must be finite, so check the weights and temperatures"
        )


def _place_of(scored_index: int, batch: TrajectoryBatch) -> tuple[int, int]:
    """(trajectory, position) of a scored position, counted over the batch."""
    place = int(np.flatnonzero(batch.loss_mask)[scored_index])
    trajectory = int(np.searchsorted(batch.offsets, place, side="right")) - 1
    return trajectory, place - int(batch.offsets[trajectory])


def _largest_gradient_difference(tree: nn.Module, expanded: nn.Module) -> tuple[float, str]:
    """The largest relative L2 difference and its parameter; a missing gradient is zero."""
    in_tree = dict(tree.named_parameters())
    trained = [(name, p) for name, p in expanded.named_parameters() if p.requires_grad]
    norms = {name: _norm(p.grad) for name, p in trained}
    floor = GRADIENT_NORM_FLOOR * math.hypot(*norms.values())
    worst, worst_name = -1.0, ""
    for name, parameter in trained:
        scale = max(norms[name], floor)
        difference = _norm(_minus(in_tree[name].grad, parameter.grad))
        relative = difference / scale if scale else math.inf * bool(difference)
        if math.isnan(relative):
            relative = math.inf
        if relative > worst:
            worst, worst_name = relative, name
    return worst, worst_name


def _minus(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left - right


def _norm(values: torch.Tensor | None) -> float:
    if values is None:
        return 0.0
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))
