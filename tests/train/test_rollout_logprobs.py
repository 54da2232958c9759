"""Recorded against recomputed log-probabilities: statistics, worst places, and what they betray."""

import json

import numpy as np
import pytest

from harts.data.trajectory import TrajectoryBatch
from harts.errors import DataError
from harts.train.rollout_logprobs import compare_recorded, recorded_field

VOCABULARY = 40


class Policy:
    """Random logits at every position of a few trajectories; values at any temperature."""

    def __init__(self, lengths: tuple[int, ...] = (90, 30, 200), prompt: int = 10) -> None:
        draw = np.random.default_rng(0)
        self.logits = draw.normal(0, 2, (sum(lengths), VOCABULARY))
        self.tokens = np.array(
            [draw.choice(VOCABULARY, p=np.exp(row) / np.exp(row).sum()) for row in self.logits]
        )
        self.lengths, self.prompt = lengths, prompt

    def values(self, temperature: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
        """log-probability of each token, and entropy."""
        log_p = self.logits / temperature
        log_p = log_p - np.log(np.exp(log_p).sum(1, keepdims=True))
        chosen = log_p[np.arange(len(log_p)), self.tokens]
        return chosen, -(np.exp(log_p) * log_p).sum(1)

    def batch(self, name: str, recorded: np.ndarray, **fields: float) -> TrajectoryBatch:
        rows, begin = [], 0
        for length in self.lengths:
            span = slice(begin, begin + length)
            mask = [0] * self.prompt + [1] * (length - self.prompt)
            rows.append({"input_ids": self.tokens[span], "loss_mask": mask, **fields})
            rows[-1][name] = recorded[span]
            begin += length
        return TrajectoryBatch.from_rows(rows)


def noise(scale: float) -> np.ndarray:
    return np.random.default_rng(1).normal(0, scale, 320)


def test_small_differences_pass_without_suspicion() -> None:
    policy = Policy()
    log_probs, entropy = policy.values()
    recorded = np.minimum(log_probs + noise(0.01), 0)
    found = compare_recorded(policy.batch("rollout_logprobs", recorded), log_probs, entropy)
    assert found.passed
    assert found.suspicion is None
    assert found.field == "rollout_logprobs"
    assert found.temperature_field is None


def test_statistics_are_those_of_the_scored_differences() -> None:
    policy = Policy()
    log_probs, entropy = policy.values()
    recorded = np.minimum(log_probs + noise(0.3), 0)
    batch = policy.batch("logprobs", recorded)
    unscored = np.where(batch.loss_mask, log_probs, np.nan)
    found = compare_recorded(batch, unscored, entropy, tolerance=0.5)
    difference = (recorded - log_probs)[batch.loss_mask]
    assert found.count == 320 - 30
    assert found.mean == pytest.approx(difference.mean())
    assert found.mean_abs == pytest.approx(np.abs(difference).mean())
    assert found.p95 == pytest.approx(np.quantile(np.abs(difference), 0.95))
    assert found.max_abs == np.abs(difference).max()
    assert [(r.first, r.last, r.count) for r in found.by_position] == [
        (0, 63, 54 + 20 + 54),
        (64, 127, 26 + 64),
        (128, 255, 72),
    ]
    total = sum(r.mean_abs * r.count for r in found.by_position)
    assert total == pytest.approx(np.abs(difference).sum())
    assert max(r.max_abs for r in found.by_position) == found.max_abs
    json.dumps(found.summary(), allow_nan=False)


def test_the_worst_places_are_named() -> None:
    policy = Policy()
    log_probs, entropy = policy.values()
    recorded = log_probs.copy()
    recorded[90 + 17] -= 3.0
    recorded[90 + 30 + 150] -= 5.0
    found = compare_recorded(policy.batch("old_log_probs", recorded), log_probs, entropy)
    first, second = found.worst[:2]
    assert (first.trajectory, first.position) == (2, 150)
    assert (second.trajectory, second.position, second.name) == (1, 17, "trajectory 1")
    assert second.token == policy.tokens[107]
    assert second.recorded == pytest.approx(second.recomputed - 3.0)


@pytest.mark.parametrize(("by", "where"), [(1, "after"), (-1, "before")])
def test_values_one_position_off_are_recognised(by: int, where: str) -> None:
    policy = Policy()
    log_probs, entropy = policy.values()
    recorded = np.roll(log_probs, by)
    found = compare_recorded(policy.batch("logprobs", recorded), log_probs, entropy)
    assert not found.passed
    assert f"one position {where} its token" in found.suspicion


@pytest.mark.parametrize("temperature", [0.6, 0.8, 0.95, 1.05, 1.3, 1.6])
def test_another_temperature_is_recognised_and_estimated(temperature: float) -> None:
    policy = Policy()
    log_probs, entropy = policy.values()
    recorded = np.minimum(policy.values(temperature)[0] + noise(0.01), 0)
    found = compare_recorded(policy.batch("logprobs", recorded), log_probs, entropy)
    assert found.suspicion.startswith("they look recorded at about ")
    estimate = float(found.suspicion.split()[5])
    assert estimate == pytest.approx(temperature, rel=0.15)


def test_the_same_temperature_on_both_sides_is_no_difference() -> None:
    policy = Policy()
    log_probs, entropy = policy.values(0.7)
    batch = policy.batch("logprobs", log_probs, temperature=0.7)
    found = compare_recorded(batch, log_probs, entropy)
    assert (found.mean_abs, found.temperature_field) == (0, "temperature")


def test_base_two_logarithms_are_recognised() -> None:
    policy = Policy()
    log_probs, entropy = policy.values()
    found = compare_recorded(policy.batch("logprobs", log_probs / np.log(2)), log_probs, entropy)
    assert "1.44 times" in found.suspicion
    assert "base-2" in found.suspicion


@pytest.mark.parametrize("seed", range(5))
def test_another_model_raises_no_suspicion(seed: int) -> None:
    policy = Policy()
    log_probs, entropy = policy.values()
    recorded = -np.random.default_rng(seed).exponential(2, 320)
    found = compare_recorded(policy.batch("logprobs", recorded), log_probs, entropy)
    assert not found.passed
    assert found.suspicion is None


def test_what_the_engine_recorded_wins_over_what_a_trainer_recomputed() -> None:
    row = {"input_ids": [1, 2], "loss_mask": [0, 1], "old_log_probs": [0.0, -1.0]}
    assert recorded_field(TrajectoryBatch.from_rows([row])) == "old_log_probs"
    row["rollout_log_probs"] = [0.0, -2.0]
    assert recorded_field(TrajectoryBatch.from_rows([row])) == "rollout_log_probs"


@pytest.mark.parametrize(
    ("recorded", "part"),
    [
        ({}, "no recorded log-probabilities"),
        ({"logprobs": -1.0}, "one value a trajectory"),
        ({"logprobs": [-1.0, 0.0, 0.0]}, "0 at every scored position"),
        ({"logprobs": [0.0, -1.0, 0.5]}, r"trajectory 0: logprobs\[2\] is 0.5"),
    ],
)
def test_values_that_cannot_be_compared_are_refused(recorded: dict, part: str) -> None:
    row = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], **recorded}
    with pytest.raises(DataError, match=part) as caught:
        compare_recorded(TrajectoryBatch.from_rows([row]), np.full(3, -1.0), np.ones(3))
    assert "\n" not in str(caught.value)
