import itertools
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.errors import ConfigError, DataError
from harts.plan.denominators import Denominators
from harts.rl import objectives
from tests.rl import oracles
from tests.rl.steps import Output, random_step

COUNTS = [3, 0, 5, 1, 4]

# objective, its options, and the same for the oracle
CASES = {
    "grpo": (objectives.grpo, objectives.GrpoOptions(), {}),
    "grpo-sequence": (
        objectives.grpo,
        objectives.GrpoOptions(normalisation="sequence_mean"),
        {"normalisation": "sequence_mean"},
    ),
    "grpo-constant": (
        objectives.grpo,
        objectives.GrpoOptions(normalisation="constant_length", max_length=7),
        {"normalisation": "constant_length", "max_length": 7},
    ),
    "grpo-dual-clip": (
        objectives.grpo,
        objectives.GrpoOptions(clip_ratio_c=1.3),
        {"dual": 1.3},
    ),
    "grpo-k1": (
        objectives.grpo,
        objectives.GrpoOptions(kl_coefficient=0.3, kl_estimator="k1"),
        {"kl": 0.3, "estimator": "k1"},
    ),
    "grpo-k2": (
        objectives.grpo,
        objectives.GrpoOptions(kl_coefficient=0.3, kl_estimator="k2"),
        {"kl": 0.3, "estimator": "k2"},
    ),
    "grpo-k3-entropy-sequence": (
        objectives.grpo,
        objectives.GrpoOptions(
            kl_coefficient=0.3, entropy_coefficient=0.1, normalisation="sequence_mean"
        ),
        {"kl": 0.3, "bonus": 0.1, "normalisation": "sequence_mean"},
    ),
    "dapo": (objectives.dapo, objectives.DapoOptions(), {"low": 0.2, "high": 0.28}),
    "ppo": (
        objectives.ppo,
        objectives.PpoOptions(clip_low=0.1, clip_high=0.15),
        {"low": 0.1, "high": 0.15},
    ),
    "gspo": (
        objectives.gspo,
        objectives.GspoOptions(),
        {"level": "sequence", "normalisation": "sequence_mean", "low": 3e-4, "high": 4e-4},
    ),
    "gspo-wide-clip": (
        objectives.gspo,
        objectives.GspoOptions(clip_low=0.3, clip_high=0.3),
        {"level": "sequence", "normalisation": "sequence_mean", "low": 0.3, "high": 0.3},
    ),
    "gspo-token-mean": (
        objectives.gspo,
        objectives.GspoOptions(clip_low=0.3, clip_high=0.3, normalisation="token_mean"),
        {"level": "sequence", "low": 0.3, "high": 0.3},
    ),
}
case = pytest.mark.parametrize(("objective", "options", "expected"), CASES.values(), ids=CASES)


def oracle_loss(step, expected, old=True):
    values = step.position_values
    return oracles.policy_loss_of_step(
        step.log_probs,
        step.entropies,
        [[a] * n for a, n in zip(step.advantage, step.counts, strict=True)],
        values["old_log_probs"] if old else None,
        values["ref_log_probs"],
        **expected,
    )


def assert_same(step, loss, expected_loss):
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=1e-12)
    actual, wanted = step.gradients(loss), step.gradients(expected_loss)
    for trajectory, (a, b) in enumerate(zip(actual, wanted, strict=True)):
        torch.testing.assert_close(
            a, b, rtol=1e-12, atol=1e-12, msg=lambda m, i=trajectory: f"leaf {i}: {m}"
        )


@case
def test_an_objective_and_its_gradient_equal_a_loop_over_trajectories(objective, options, expected):
    for seed in range(4):
        step = random_step(COUNTS, seed)
        out, fields = step.microbatch(range(len(COUNTS)))
        loss = objective(out, fields, step.denominators, options=options)
        assert_same(step, loss, oracle_loss(step, expected))


@case
def test_without_old_log_probs_the_policy_is_its_own_old_policy(objective, options, expected):
    step = random_step(COUNTS, 5)
    step.position_values["old_log_probs"] = [p.detach().tolist() for p in step.log_probs]
    out, fields = step.microbatch(range(len(COUNTS)), without=["old_log_probs"])
    loss = objective(out, fields, step.denominators, options=options)
    assert_same(step, loss, oracle_loss(step, expected))


@st.composite
def split_steps(draw):
    counts = draw(st.lists(st.integers(0, 6), min_size=1, max_size=8))
    order = draw(st.permutations(range(len(counts))))
    cuts = draw(st.sets(st.integers(0, len(counts)), max_size=4))
    bounds = [0, *sorted(cuts), len(counts)]
    pieces = [list(order[a:b]) for a, b in itertools.pairwise(bounds)]
    return random_step(counts, draw(st.integers(0, 1000))), pieces


@settings(max_examples=60, deadline=None)
@given(split_steps(), st.sampled_from(sorted(CASES)))
def test_any_split_into_microbatches_leaves_loss_and_gradient_unchanged(split, name):
    step, pieces = split
    objective, options, _ = CASES[name]
    whole = objective(*step.microbatch(range(len(step.counts))), step.denominators, options=options)
    summed = sum(
        objective(*step.microbatch(piece), step.denominators, options=options) for piece in pieces
    )
    assert_same(step, summed, whole)


@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "plain"])
@pytest.mark.parametrize(
    "reduction",
    [
        {"normalisation": "token_mean"},
        {"normalisation": "sequence_mean"},
        {"normalisation": "constant_length", "max_length": 9},
    ],
    ids=lambda r: r["normalisation"],
)
def test_sft_is_the_weighted_negative_log_likelihood(reduction, weighted):
    step = random_step(COUNTS, 7)
    weights = step.position_values["weights"]
    if not weighted:
        weights = [[1.0] * n for n in COUNTS]
    options = objectives.SftOptions(**reduction)
    loss = sum(
        objectives.sft(
            *step.microbatch(piece, without=[] if weighted else ["weights"]),
            step.denominators,
            options=options,
        )
        for piece in ([0, 3], [1, 2, 4])
    )
    assert_same(step, loss, oracles.nll_of_step(step.log_probs, weights, **reduction))


@case
@pytest.mark.parametrize("counts", [[0, 0], [2, 0]], ids=["empty-step", "empty-microbatch"])
def test_an_empty_mask_gives_a_zero_loss_with_a_graph(objective, options, expected, counts):
    step = random_step(counts, 1)
    out, fields = step.microbatch([1])
    loss = objective(out, fields, step.denominators, options=options)
    assert loss.shape == () and loss.item() == 0.0
    loss.backward()
    assert all((leaf.grad is None or not leaf.grad.any()) for leaf in step.leaves())
    metrics = objectives.policy_metrics(out, fields, step.denominators, options=options)
    assert np.isnan(metrics["entropy"].mean)


def test_per_token_advantages_weigh_each_token_by_its_own():
    step = random_step([2, 3], 3)
    out, fields = step.microbatch([0, 1], without=["old_log_probs"])
    fields["advantages"] = np.arange(5.0)
    objectives.gspo(out, fields, step.denominators).backward()
    torch.testing.assert_close(step.log_probs[0].grad, -torch.tensor([0.0, 1.0]).double() / 4)
    torch.testing.assert_close(step.log_probs[1].grad, -torch.tensor([2.0, 3.0, 4.0]).double() / 6)


def test_positions_in_any_order_give_the_same_sequence_ratio():
    step = random_step([3, 4, 2], 11)
    out, fields = step.microbatch([0, 1, 2])
    options = objectives.GspoOptions(clip_low=0.5, clip_high=0.5)
    expected = objectives.gspo(out, fields, step.denominators, options=options)
    shuffle = np.random.default_rng(0).permutation(9)
    shuffled = Output(out.log_probs[shuffle], out.entropy[shuffle])
    fields = {name: values[shuffle] for name, values in fields.items()}
    loss = objectives.gspo(shuffled, fields, step.denominators, options=options)
    assert_same(step, loss, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_losses_are_at_least_float32_and_keep_float64(dtype):
    log_probs = torch.tensor([-1.0, -2.0], dtype=dtype, requires_grad=True)
    fields = {
        "advantage": np.array([1, 2]),
        "logprobs": np.array([-1.0, -2.0], dtype=np.float32),
        "trajectory_index": np.zeros(2, np.int64),
    }
    denominators = Denominators.of(np.array([False, True, True]), np.array([0, 3]))
    options = objectives.GrpoOptions(entropy_coefficient=0.1)
    loss = objectives.grpo(Output(log_probs, -log_probs), fields, denominators, options=options)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    loss.backward()
    assert log_probs.grad.dtype == dtype


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0], ids=str)
@pytest.mark.parametrize("gap", [1e3, -1e3], ids=["far-likelier", "far-unlikelier"])
def test_extreme_ratios_never_give_nan(gap, advantage):
    log_probs = torch.tensor([-1.0], requires_grad=True)
    fields = {
        "advantages": np.array([advantage]),
        "old_log_probs": np.array([-1.0 - gap]),
        "ref_log_probs": np.array([-1.0 - gap]),
        "trajectory_index": np.zeros(1, np.int64),
    }
    denominators = Denominators.of(np.array([False, True]), np.array([0, 2]))
    options = objectives.GrpoOptions(kl_coefficient=0.1)
    loss = objectives.grpo(Output(log_probs, -log_probs), fields, denominators, options=options)
    loss.backward()
    assert loss.isfinite() and log_probs.grad.isfinite().all()


@settings(max_examples=25, deadline=None)
@given(split_steps(), st.sampled_from(sorted(CASES)))
def test_metrics_add_over_microbatches(split, name):
    step, pieces = split
    _, options, expected = CASES[name]
    merged = {}
    for piece in pieces:
        out, fields = step.microbatch(piece)
        part = objectives.policy_metrics(out, fields, step.denominators, options=options)
        merged = objectives.add_metrics(merged, part)
    total, ratios, clipped, old_kl, ref_kl, entropy = 0, 0.0, 0, 0.0, 0.0, 0.0
    low, high = expected.get("low", 0.2), expected.get("high", 0.2)
    for i, n in enumerate(step.counts):
        current = step.log_probs[i].detach().numpy()
        gaps = current - np.array(step.position_values["old_log_probs"][i])
        ref_gaps = np.array(step.position_values["ref_log_probs"][i]) - current
        for t in range(n):
            level = gaps.mean() if expected.get("level") == "sequence" else gaps[t]
            ratio, advantage = np.exp(level), step.advantage[i]
            total += 1
            ratios += ratio
            clipped += ratio > 1 + high if advantage > 0 else ratio < 1 - low
            clipped += advantage < 0 and ratio > expected.get("dual", np.inf)
            old_kl += np.exp(gaps[t]) - 1 - gaps[t]
            ref_kl += np.exp(ref_gaps[t]) - 1 - ref_gaps[t]
            entropy += step.entropies[i][t].item()
    sums = {
        "ratio": ratios,
        "clip_fraction": clipped,
        "old_kl": old_kl,
        "ref_kl": ref_kl,
        "entropy": entropy,
    }
    assert set(merged) == set(sums)
    for metric, value in sums.items():
        assert merged[metric].count == total
        assert float(merged[metric].total) == pytest.approx(value, rel=1e-11, abs=1e-12), metric
        assert not merged[metric].total.requires_grad


def error_of(step=None, *, change=None, without=(), objective=objectives.grpo, options=None):
    step = step or random_step([2, 3], 0)
    out, fields = step.microbatch(range(len(step.counts)), without=without)
    fields |= change or {}
    arguments = {} if options is None else {"options": options}
    with pytest.raises((DataError, ConfigError)) as caught:
        objective(out, fields, step.denominators, **arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_advantages_are_an_error_that_names_the_fields_present():
    message = error_of(without=["advantages"])
    assert "'advantages'" in message and "old_log_probs, position, ref_log_probs" in message


def test_a_kl_penalty_without_reference_is_refused():
    options = objectives.GrpoOptions(kl_coefficient=0.1)
    assert "'ref_log_probs'" in error_of(without=["ref_log_probs"], options=options)


def test_a_missing_value_is_refused_with_its_place():
    message = error_of(change={"advantages": np.array([0.0, 1.0, 2.0, np.nan, 1.0])})
    assert "'advantages' is nan at trajectory 1, position 2" in message
    assert "not numbers" in error_of(change={"advantages": np.array(["a"] * 5, dtype=object)})


def test_fields_of_another_microbatch_are_refused():
    assert "(4,)" in error_of(change={"advantages": np.zeros(4)})
    sequence_mean = objectives.GrpoOptions(normalisation="sequence_mean")
    elsewhere = {"trajectory_index": np.full(5, 2)}
    assert "trajectory 2" in error_of(change=elsewhere, options=sequence_mean)


def test_a_sequence_ratio_over_part_of_a_trajectory_is_refused():
    step = random_step([2, 3], 0)
    out, fields = step.microbatch([0, 1])
    out = Output(out.log_probs[:4], out.entropy[:4])
    fields = {name: values[:4] for name, values in fields.items()}
    with pytest.raises(DataError, match="trajectory 1 has 2 scored positions here and 3"):
        objectives.gspo(out, fields, step.denominators)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"normalisation": "mean"}, "normalisation is 'mean'; choose one of 'token_mean'"),
        ({"normalisation": "constant_length"}, "max_length is None"),
        ({"max_length": 5}, "max_length is 5 with normalisation 'token_mean'"),
        ({"normalisation": "constant_length", "max_length": 0}, "at least 1"),
        ({"kl_estimator": "k4"}, "kl_estimator is 'k4'"),
        ({"clip_low": 1.5}, "clip_low is 1.5"),
        ({"clip_high": float("nan")}, "clip_high is nan"),
        ({"clip_ratio_c": 1.0}, "clip_ratio_c is 1.0"),
        ({"kl_coefficient": -1.0}, "kl_coefficient is -1.0"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_options_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        objectives.GrpoOptions(**wrong)
