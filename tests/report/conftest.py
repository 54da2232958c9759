"""Batches and plans to report on."""

from __future__ import annotations

from pathlib import Path

import pytest

from harts.data.synthetic import agent_batch
from harts.data.trajectory import TrajectoryBatch
from harts.plan.planner import plan_step
from harts.plan.step_plan import StepPlan
from tests.cli.conftest import rollouts, run_harts

__all__ = ["rollouts", "run_harts"]  # fixtures

TOKEN_FILES = Path(__file__).parents[3] / "shared" / "rollouts" / "tokens"
HOSTILE = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;<!--\ud800\x00"


@pytest.fixture(scope="session")
def batch() -> TrajectoryBatch:
    return agent_batch(seed=3, shape="agent_tree", raw_tokens=20_000)


@pytest.fixture(scope="session")
def plan(batch: TrajectoryBatch) -> StepPlan:
    return plan_step(batch, capacity=2048, replicas=2)


@pytest.fixture(scope="session")
def hostile_batch() -> TrajectoryBatch:
    rows = [
        {
            "input_ids": [1, 2, 3, *range(i + 4, i + 40)],
            "loss_mask": [0] + [1] * 38,
            "group_id": HOSTILE if i % 2 else "plain",
            "rollout_id": HOSTILE,
        }
        for i in range(6)
    ]
    return TrajectoryBatch.from_rows(rows, [f"{HOSTILE}:{i}" for i in range(6)])


@pytest.fixture(scope="session")
def tau_file() -> Path:
    path = TOKEN_FILES / "tau_airline_step_qwen3.jsonl.xz"
    if not path.exists():
        pytest.skip("the rollout files are not beside this checkout (../shared/rollouts)")
    return path
