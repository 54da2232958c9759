"""Invariant 1: a tree equals its trajectories, for every family and every shape."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import harts
from harts.models.presets import tiny_model
from harts.rl import moe_losses
from tests import oracles
from tests.families import FAMILIES, KDA_MOE, MOE_FAMILIES
from tests.shapes import LARGE_SHAPES, SHAPES, VOCABULARY
from tests.strategies import long_token_trees

TOLERANCE = 1e-9


@cache
def _models(model_type: str) -> tuple[Any, Any, harts.TreeModel]:
    """The unmodified model, and an attached copy, both float64."""
    reference = tiny_model(model_type, vocab_size=VOCABULARY).double().train()
    if model_type in MOE_FAMILIES:  # grouped GEMMs have no float64
        reference.set_experts_implementation("eager")
        _spread_expert_biases(reference)
    attached = copy.deepcopy(reference)
    return reference, attached, harts.attach(attached)


def _spread_expert_biases(model: Any) -> None:
    """Selection biases that matter, as after training."""
    torch.manual_seed(1)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn_like(buffer) * 0.1)


def _batch(trajectories: list[list[int]], **fields: Any) -> harts.TrajectoryBatch:
    rng = np.random.default_rng(11)
    masks = [[0, *rng.integers(0, 2, len(t) - 1).tolist()] for t in trajectories]
    return harts.TrajectoryBatch.from_rows(
        [
            {"input_ids": t, "loss_mask": m} | {k: v[i] for k, v in fields.items()}
            for i, (t, m) in enumerate(zip(trajectories, masks, strict=True))
        ]
    )


def _rows(batch: harts.TrajectoryBatch) -> tuple[list[list[int]], list[list[bool]]]:
    rows = batch.rows()
    return [list(r["input_ids"]) for r in rows], [list(r["loss_mask"]) for r in rows]


def _weights(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(2, count, dtype=torch.float64, generator=generator)


def _compare(
    model_type: str, batch: harts.TrajectoryBatch, capacity: int, rows_per_call: int = 1
) -> None:
    """Log-probs, entropy and every gradient of a loss that weighs each position differently,
    with and without recomputation, against one expanded run."""
    reference, hf_model, model = _models(model_type)
    weights, start_of = _weights(int(batch.loss_mask.sum())), _starts(batch)
    with oracles.float64_throughout():
        expanded = oracles.expanded_run(reference, *_rows(batch), rows_per_call=rows_per_call)
        want = oracles.gradients(
            reference,
            lambda: (weights[0] * expanded.log_probs + weights[1] * expanded.entropy).sum(),
        )
        plan = harts.plan_step(batch, capacity=capacity)
        harts.verify_plan(plan)
        for recompute in (False, True):
            _set_recompute(hf_model, recompute)
            hf_model.zero_grad(set_to_none=True)
            for microbatch in plan.microbatches():
                out = model.log_probs(microbatch)
                places = np.concatenate([start_of[i] for i in microbatch.trajectory_ids])
                _assert_close(out.log_probs, expanded.log_probs[places], "log_probs")
                _assert_close(out.entropy, expanded.entropy[places], "entropy")
                mine = weights[:, places]
                (mine[0] * out.log_probs + mine[1] * out.entropy).sum().backward()
            for name, parameter in hf_model.named_parameters():
                got = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                _assert_close(got, want[name], f"{name}, recompute {recompute}")


def _starts(batch: harts.TrajectoryBatch) -> list[np.ndarray]:
    counts = [int(sum(mask)) for mask in _rows(batch)[1]]
    ends = np.cumsum(counts)
    return [np.arange(e - c, e) for c, e in zip(counts, ends, strict=True)]


def _set_recompute(hf_model: Any, on: bool) -> None:
    if on:
        hf_model.gradient_checkpointing_enable()
    else:
        hf_model.gradient_checkpointing_disable()


def _assert_close(got: torch.Tensor, want: torch.Tensor, name: str) -> None:
    scale = max(float(want.detach().abs().max()) if want.numel() else 0.0, 1e-3)
    error = float((got - want).detach().abs().max()) if want.numel() else 0.0
    assert error <= TOLERANCE * scale, f"{name}: off by {error:.3e} at scale {scale:.3e}"


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_tree_equals_its_trajectories(model_type: str, shape: str) -> None:
    _compare(model_type, _batch(SHAPES[shape]), capacity=100_000)


@pytest.mark.parametrize("shape", sorted(LARGE_SHAPES))
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_large_tree_equals_its_trajectories(model_type: str, shape: str) -> None:
    _compare(model_type, _batch(LARGE_SHAPES[shape]), capacity=100_000, rows_per_call=32)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_tree_cut_into_microbatches_equals_its_trajectories(model_type: str) -> None:
    _compare(model_type, _batch(SHAPES["three-levels"]), capacity=250)


@settings(max_examples=6, deadline=None)
@given(trajectories=long_token_trees(chunk_size=64, vocabulary=VOCABULARY))
@pytest.mark.parametrize("model_type", [KDA_MOE, "olmo_hybrid", "qwen3_5_moe_text"])
def test_any_tree_equals_its_trajectories(model_type: str, trajectories: list[list[int]]) -> None:
    longest = max(map(len, trajectories))
    _compare(model_type, _batch(trajectories), capacity=max(400, longest))


def test_temperature_applies_to_each_position() -> None:
    reference, _, model = _models("qwen3")
    trajectories = SHAPES["forks-at-63-64-65"]
    rng = np.random.default_rng(0)
    temperature = [rng.choice([0.7, 1.0, 1.3], len(t)).tolist() for t in trajectories]
    batch = _batch(trajectories, temperature=temperature)
    with oracles.float64_throughout():
        expanded = oracles.expanded_run(reference, *_rows(batch), temperature=temperature)
        (microbatch,) = harts.plan_step(batch).microbatches()
        out = model.log_probs(microbatch)
    _assert_close(out.log_probs, expanded.log_probs, "log_probs")
    _assert_close(out.entropy, expanded.entropy, "entropy")


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("model_type", MOE_FAMILIES)
def test_moe_losses_and_loads_equal_those_of_the_expanded_run(
    model_type: str, recompute: bool
) -> None:
    reference, hf_model, model = _models(model_type)
    batch = _batch(SHAPES["three-levels"])
    decisions: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    handles = [
        reference.get_submodule(name).register_forward_hook(
            lambda m, _, out, name=name: decisions.setdefault(name, []).append((out[0], out[2]))
        )
        for name in model.routers
    ]
    with oracles.float64_throughout():
        oracles.expanded_run(reference, *_rows(batch))
        for handle in handles:
            handle.remove()
        sigmoid = model_type in ("bailing_hybrid", "kimi_linear")
        want_loss, want_loads = _expanded_moe(list(decisions.values()), sigmoid)
        want = oracles.gradients(reference, lambda: want_loss)

        _set_recompute(hf_model, recompute)
        (microbatch,) = harts.plan_step(batch).microbatches()
        out = model.log_probs(microbatch)
        loss = moe_losses.router_z_loss(out.routers) + moe_losses.load_balancing_loss(out.routers)
        loads = moe_losses.expert_loads(out.routers)
        got = oracles.gradients(hf_model, lambda: loss)
    assert float(loss.detach()) == pytest.approx(float(want_loss.detach()), rel=TOLERANCE)
    assert loads.tolist() == want_loads
    for name, gradient in want.items():
        _assert_close(got[name], gradient, name)


def _expanded_moe(
    layers: list[list[tuple[torch.Tensor, torch.Tensor]]], sigmoid: bool
) -> tuple[torch.Tensor, list[list[int]]]:
    """z-loss plus load-balancing loss summed over layers, token by token of the expanded run."""
    loss, loads = torch.zeros((), dtype=torch.float64), []
    for trajectories in layers:
        logits = torch.cat([logits for logits, _ in trajectories])
        chosen = torch.cat([indices for _, indices in trajectories])
        scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
        mean_probability = (scores / scores.sum(-1, keepdim=True)).mean(0)
        counts = [int((chosen == expert).sum()) for expert in range(logits.shape[1])]
        share = torch.tensor(counts, dtype=torch.float64) / chosen.numel()
        loss = loss + logits.shape[1] * (share * mean_probability).sum()
        loss = loss + torch.logsumexp(logits, -1).square().mean()
        loads.append(counts)
    return loss, loads


def test_recomputation_changes_no_bit() -> None:
    _, hf_model, model = _models(KDA_MOE)
    (microbatch,) = harts.plan_step(_batch(SHAPES["three-levels"])).microbatches()
    gradients = []
    for on in (False, True):
        _set_recompute(hf_model, on)
        gradients.append(
            oracles.gradients(hf_model, lambda: model.log_probs(microbatch).log_probs.sum())
        )
    assert all(torch.equal(gradients[0][name], g) for name, g in gradients[1].items())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_same_step_twice_gives_the_same_bits(model_type: str) -> None:
    _, hf_model, model = _models(model_type)
    _set_recompute(hf_model, False)
    (microbatch,) = harts.plan_step(_batch(SHAPES["three-levels"])).microbatches()
    first, second = (
        oracles.gradients(hf_model, lambda: model.log_probs(microbatch).log_probs.sum())
        for _ in range(2)
    )
    assert all(torch.equal(first[name], g) for name, g in second.items())


@pytest.mark.parametrize("model_type", ["olmo_hybrid", "qwen3_5_text", "qwen3"])
def test_a_changed_token_moves_no_bit_of_other_branches(model_type: str) -> None:
    """Dense families: experts batch by route, so a changed route may move other rows' rounding."""
    _, _, model = _models(model_type)
    trajectories = SHAPES["forks-at-63-64-65"]
    changed = [list(t) for t in trajectories]
    changed[0][-3] = (changed[0][-3] + 1) % VOCABULARY  # in the trunk, below every fork
    before, after = (_all_log_probs(model, t) for t in (trajectories, changed))
    for other in range(1, len(trajectories)):
        assert torch.equal(before[other], after[other])
    assert not torch.equal(before[0], after[0])


def _all_log_probs(model: harts.TreeModel, trajectories: list[list[int]]) -> list[torch.Tensor]:
    batch = harts.TrajectoryBatch.from_rows(
        [{"input_ids": t, "loss_mask": [0] + [1] * (len(t) - 1)} for t in trajectories]
    )
    (microbatch,) = harts.plan_step(batch).microbatches()
    with torch.no_grad():
        values: list[torch.Tensor] = microbatch.scatter(model.log_probs(microbatch).log_probs)
    return values
