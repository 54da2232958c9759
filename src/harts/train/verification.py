"""Does the tree equal its trajectories? One model, run both ways on the same data (invariant 1).

The expanded run is the unmodified model on one trajectory at a time. Both runs see the same loss,
whose fixed pseudo-random weights make every scored position matter to every gradient.

In bfloat16 no constant says how much two right runs differ: a router that flips moves a
log-probability by tenths of a nat. There both runs are compared with a third, the unmodified
model in float32, and the tree run may be at most so much worse than the expanded run. (The same
kernels in another packing would measure nothing: they mostly give the same bits for a row.)

Legend: S tokens of the batch, P scored positions.
"""

from __future__ import annotations

import copy
import dataclasses
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


HALF_PRECISION_FACTOR = 2.0
"""How much larger the tree run's error may be than the expanded run's, both in bfloat16, as a mean
over positions and over all gradients; twice that for the largest error of a single position."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """capacity, chunk_size: of the plan, in rows. seed: of the loss weights.

    tolerance: largest absolute difference of a log-probability or entropy, in nats; None is 1e-4,
    or in bfloat16 measured on the expanded run.
    gradient_tolerance: largest relative L2 difference of a parameter's gradient; None is 1e-3, or
    in bfloat16 measured, over all gradients together.
    """

    capacity: int = 65536
    chunk_size: int = 64
    tolerance: float | None = None
    gradient_tolerance: float | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Differences:
    """Between two runs, over the scored positions and all trained parameters.

    max_log_prob, mean_log_prob, max_entropy: absolute, in nats. parameter_gradient: largest over
    parameters of ||a - b|| / max(||b||, GRADIENT_NORM_FLOOR * norm of all of b's gradients).
    all_gradients: ||a - b|| / ||b|| of all gradients as one vector. Also used for the tolerances
    of these, where inf allows anything.
    """

    max_log_prob: float
    mean_log_prob: float
    max_entropy: float
    parameter_gradient: float
    all_gradients: float

    def within(self, allowed: Differences) -> bool:
        """Whether none is larger than allowed; NaN never is within."""
        own, most = dataclasses.astuple(self), dataclasses.astuple(allowed)
        return all(difference <= limit for difference, limit in zip(own, most, strict=True))


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What `verify_model` found.

    differences: of the tree run from the expanded run, in bfloat16 from the expanded float32 run.
    allowed: their tolerances. worst_parameter: where parameter_gradient is largest.
    worst_trajectory, worst_position: where a log-probability differs most.
    log_probs, entropy: float64 (S,), of the tree run at the scored positions, else NaN.
    tree_seconds includes planning and index tensors; both times are forward and backward of the
    whole batch, after a first pass over its shortest scored trajectory.
    """

    plan: StepPlan
    options: VerifyOptions
    differences: Differences
    allowed: Differences
    worst_trajectory: int
    worst_position: int
    worst_parameter: str
    log_probs: Floats = dataclasses.field(repr=False, compare=False)
    entropy: Floats = dataclasses.field(repr=False, compare=False)
    tree_seconds: float
    expanded_seconds: float

    @property
    def max_abs_logprob_diff(self) -> float:
        """Largest absolute difference of a log-probability, in nats."""
        return self.differences.max_log_prob

    @property
    def max_rel_grad_diff(self) -> float:
        """Largest relative difference of a parameter's gradient."""
        return self.differences.parameter_gradient

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
        return self.differences.within(self.allowed)

    def summary(self) -> dict[str, Any]:
        """The keys of `harts verify --json`."""
        batch = self.plan.batch
        return {
            "compression": self.compression,
            "max_abs_logprob_diff": self.max_abs_logprob_diff,
            "mean_abs_logprob_diff": self.differences.mean_log_prob,
            "max_rel_grad_diff": self.max_rel_grad_diff,
            "tree_seconds": self.tree_seconds,
            "expanded_seconds": self.expanded_seconds,
            "speedup": self.speedup,
            "passed": self.passed,
            "max_abs_entropy_diff": self.differences.max_entropy,
            "rel_all_grads_diff": self.differences.all_gradients,
            "worst_trajectory": self.worst_trajectory,
            "worst_position": self.worst_position,
            "worst_parameter": self.worst_parameter,
            "trajectories": len(batch),
            "scored_tokens": int(batch.loss_mask.sum()),
            "raw_tokens": self.plan.raw_tokens,
            "compact_tokens": self.plan.compact_tokens,
            "microbatches": self.plan.num_microbatches,
            "tolerance": self.allowed.max_log_prob,
            "mean_tolerance": self.allowed.mean_log_prob,
            "gradient_tolerance": self.allowed.parameter_gradient,
            "all_grads_tolerance": self.allowed.all_gradients,
        }


def verify_model(
    model: nn.Module, batch: TrajectoryBatch, options: VerifyOptions | None = None
) -> Verification:
    """Compare a causal language model on the tree with itself on each trajectory alone.

    model: a transformers model (or PEFT wrapper) before `attach`; it is left as it is, apart from
    evaluation mode and cleared gradients. Its copy becomes the tree model, so the memory is twice
    that of the model and its gradients, plus one microbatch; in bfloat16 a float32 copy with its
    gradients comes on top. Logits exist for a block of scored rows only. Raises DataError when no
    position is scored or the model's own log-probabilities are not finite, UnsupportedModelError
    and PlanError as `attach` and `plan_step` do.
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
    allowed = _constant_tolerances(options)
    reference, reference_model = expanded, model
    if any(parameter.dtype == torch.bfloat16 for parameter in model.parameters()):
        reference_model = copy.deepcopy(model).float()
        with _fresh_gradients(reference_model, keep=True):
            reference = _run_expanded(reference_model, batch, weights)
        noise = _compare((expanded, model), (reference, reference_model), batch)
        allowed = _measured_tolerances(noise, options)
    differences = _compare((tree, tree_model.model), (reference, reference_model), batch)
    difference = np.abs(tree.log_probs - reference.log_probs)[batch.loss_mask]
    trajectory, position = _place_of(int(difference.argmax()), batch)
    _, worst_parameter = _largest_gradient_difference(tree_model.model, reference_model)
    model.zero_grad(set_to_none=True)
    return Verification(
        plan=plan,
        options=options,
        differences=differences,
        allowed=allowed,
        worst_trajectory=trajectory,
        worst_position=position,
        worst_parameter=worst_parameter,
        log_probs=tree.log_probs,
        entropy=tree.entropy,
        tree_seconds=tree.seconds,
        expanded_seconds=expanded.seconds,
    )


def _constant_tolerances(options: VerifyOptions) -> Differences:
    tolerance, gradient_tolerance = options.tolerance, options.gradient_tolerance
    tolerance = 1e-4 if tolerance is None else tolerance
    return Differences(
        max_log_prob=tolerance,
        mean_log_prob=math.inf,
        max_entropy=tolerance,
        parameter_gradient=1e-3 if gradient_tolerance is None else gradient_tolerance,
        all_gradients=math.inf,
    )


def _measured_tolerances(noise: Differences, options: VerifyOptions) -> Differences:
    """noise: of the expanded bfloat16 run from the float32 run; what the options give still holds.

    No bound of its own for a parameter: gradients that nearly cancel are noise in bfloat16.
    """
    allowed = _constant_tolerances(options)
    if options.tolerance is None:
        allowed = dataclasses.replace(
            allowed,
            max_log_prob=2 * HALF_PRECISION_FACTOR * noise.max_log_prob,
            mean_log_prob=HALF_PRECISION_FACTOR * noise.mean_log_prob,
            max_entropy=2 * HALF_PRECISION_FACTOR * noise.max_entropy,
        )
    if options.gradient_tolerance is None:
        allowed = dataclasses.replace(
            allowed,
            parameter_gradient=math.inf,
            all_gradients=HALF_PRECISION_FACTOR * noise.all_gradients,
        )
    return allowed


def _compare(
    left: tuple[_Run, nn.Module], right: tuple[_Run, nn.Module], batch: TrajectoryBatch
) -> Differences:
    """Two runs and the models that hold their gradients; relative to the right one."""
    (run, model), (reference, reference_model) = left, right
    log_prob, entropy = (
        np.abs(a - b)[batch.loss_mask]
        for a, b in ((run.log_probs, reference.log_probs), (run.entropy, reference.entropy))
    )
    return Differences(
        max_log_prob=float(log_prob.max()),
        mean_log_prob=float(log_prob.mean()),
        max_entropy=float(entropy.max()),
        parameter_gradient=_largest_gradient_difference(model, reference_model)[0],
        all_gradients=_difference_of_all_gradients(model, reference_model),
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


def _difference_of_all_gradients(model: nn.Module, reference: nn.Module) -> float:
    """||a - b|| / ||b|| over all trained parameters; a missing gradient is zero."""
    mine = dict(model.named_parameters())
    trained = [(name, p) for name, p in reference.named_parameters() if p.requires_grad]
    norm = math.hypot(*(_norm(p.grad) for _, p in trained))
    difference = math.hypot(*(_norm(_minus(mine[name].grad, p.grad)) for name, p in trained))
    return difference / norm if norm else math.inf * bool(difference)


def _minus(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    return left - right


def _norm(values: torch.Tensor | None) -> float:
    if values is None:
        return 0.0
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))
