"""Small rollouts, a run of four steps on them, and what such a run leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import harts
from harts.cli.config import read_config
from harts.data.synthetic import SyntheticOptions, generate
from tests.families import KDA_MOE


@pytest.fixture(scope="session")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl"
    options = SyntheticOptions(
        tasks=3, rollouts=3, turns=3, system_tokens=40, turn_tokens=12, observation_tokens=12
    )
    harts.write(generate(options), path)
    return path


def write_config(tmp_path: Path, rollouts: Path, *overrides: str) -> Any:
    file = tmp_path / "run.toml"
    file.write_text(
        f"""
[data]
path = "{rollouts}"
groups_per_step = 2
[plan]
capacity = 600
[model]
path = "tiny:{KDA_MOE}"
[objective]
advantages = "group"
load_balancing = 1e-3
router_z = 1e-4
expert_bias_rate = 1e-2
[train]
steps = 4
learning_rate = 1e-3
[output]
dir = "{tmp_path / "run"}"
checkpoint_every = 2
"""
    )
    return read_config(str(file), list(overrides))


def read_metrics(tmp_path: Path) -> list[dict[str, Any]]:
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def saved_weights(
    run_dir: Path, step: int, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    from harts.models.load import load_model

    folder = run_dir / "checkpoints" / f"step-{step:06d}"
    model = load_model(str(folder), vocab_size=1, seed=0, dtype=dtype)
    return dict(model.state_dict())


def equal_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], v) for k, v in right.items())
