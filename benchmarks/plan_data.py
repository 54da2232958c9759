"""Batches for the planner benchmark: rows of the paper's Table 2, real tree shapes, small forests.

The generator and the shapes lie beside the repository, in ../shared/rollouts; nothing is copied
from there and nothing is written here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from harts.data.synthetic import SyntheticOptions, generate
from harts.data.trajectory import TrajectoryBatch
from harts.errors import DataError

ROLLOUTS = Path(__file__).resolve().parents[2] / "shared" / "rollouts"
SYSTEM_TOKENS = 17_000
"""System prompt that all tasks of a shapes file share: the logs leave it out."""


def table2_batch(row: int, capacity: int = 65_536) -> TrajectoryBatch:
    """A generated step of the size of one row (1 to 10) of Table 2, calibrated to its tokens."""
    if not 1 <= row <= 10:
        raise DataError(f"row {row} of Table 2; give one from 1 to 10")
    return _batch_of(_generator().make_step(row, match="planned", cap=capacity))


def shape_names() -> list[str]:
    """Names of the real tree shapes, such as `tau_airline_gpt4o.qwen3`."""
    _generator()
    return [path.name.removesuffix(".jsonl.gz") for path in sorted(_shape_files())]


def shape_batch(name: str, tasks: int | None, capacity: int = 65_536) -> TrajectoryBatch:
    """A step with the shape of real logs and random tokens; `tasks` drawn by seed 0, or all.

    Trajectories over the capacity are left out.
    """
    path = ROLLOUTS / "shapes" / f"{name}.jsonl.gz"
    if not path.exists():
        raise DataError(f"no shapes at {path}; names are {', '.join(shape_names())}")
    step = _generator().Step
    return _batch_of(step.from_shapes(path, system=SYSTEM_TOKENS, tasks=tasks, cap=capacity))


def small_batches(count: int, seed: int = 0) -> Iterator[tuple[str, TrajectoryBatch, int, int]]:
    """(kind, batch, capacity, replicas) of `count` instances with at most 9 trajectories.

    In turn agent-like (up to 9 trajectories of a generated batch) and random trees of three
    tokens. Capacities lie between the longest trajectory and the whole trie's rows.
    """
    rng = np.random.default_rng(seed)
    for index in range(count):
        kind = ("agent", "random")[index % 2]
        num = int(rng.integers(4, 10))
        batch = _small_agent(rng, num) if kind == "agent" else _small_random(rng, num)
        longest, trie = int(batch.lengths.max()), _trie_tokens(batch)
        capacity = longest + int(rng.random() * max(0, trie - longest) * 0.7)
        yield kind, batch, capacity, int(rng.integers(1, 4))


def _small_agent(rng: np.random.Generator, num: int) -> TrajectoryBatch:
    """`num` trajectories of two tasks with a shared system prompt of any weight."""
    whole = generate(
        SyntheticOptions(
            shape=("agent_steps", "agent_tree")[int(rng.integers(2))],
            seed=int(rng.integers(2**31)),
            tasks=2,
            rollouts=6,
            turns=5,
            system_tokens=int(rng.integers(1, 600)),
            task_tokens=100,
            turn_tokens=60,
            observation_tokens=90,
        )
    )
    return whole.select(np.sort(rng.permutation(len(whole))[:num]))


def _small_random(rng: np.random.Generator, num: int) -> TrajectoryBatch:
    rows: list[list[int]] = []
    for _ in range(num):
        prefix: list[int] = []
        if rows and rng.random() < 0.9:
            earlier = rows[int(rng.integers(len(rows)))]
            prefix = earlier[: int(rng.integers(0, len(earlier) + 1))]
        rows.append(prefix + rng.integers(0, 3, int(rng.integers(1, 40))).tolist())
    group = np.array([row[0] for row in rows], dtype=np.int64)
    return flat_batch([np.array(row, dtype=np.int32) for row in rows], group)


def save_batch(batch: TrajectoryBatch, folder: Path) -> None:
    """Write the arrays as .npy, so that a measuring process loads them and nothing more."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokens", "offsets", "loss_mask"):
        np.save(folder / f"{name}.npy", getattr(batch, name))
    np.save(folder / "group_id.npy", batch.trajectory_fields["group_id"])


def load_batch(folder: Path) -> TrajectoryBatch:
    """The batch of `save_batch`."""
    return TrajectoryBatch(
        tokens=np.load(folder / "tokens.npy"),
        offsets=np.load(folder / "offsets.npy"),
        loss_mask=np.load(folder / "loss_mask.npy"),
        trajectory_fields={"group_id": np.load(folder / "group_id.npy")},
    )


def _trie_tokens(batch: TrajectoryBatch) -> int:
    rows = (batch.tokens[a:b].tobytes() for a, b in _spans(batch))
    return len({row[:end] for row in rows for end in range(4, len(row) + 1, 4)})


def _spans(batch: TrajectoryBatch) -> list[tuple[int, int]]:
    return list(pairwise(batch.offsets.tolist()))


def flat_batch(rows: list[npt.NDArray[np.int32]], group: npt.NDArray[np.int64]) -> TrajectoryBatch:
    """Token rows as one batch; every token but the first is scored, `group_id` is the task."""
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    mask = np.ones(int(offsets[-1]), np.bool_)
    mask[offsets[:-1]] = False
    return TrajectoryBatch(
        tokens=np.concatenate(rows),
        offsets=offsets,
        loss_mask=mask,
        trajectory_fields={"group_id": group},
    )


def _batch_of(step: Any) -> TrajectoryBatch:
    """Flat tokens of a generated step, its paths in a shuffled order (seed 0)."""
    paths = np.random.default_rng(0).permutation(len(step.leaf))
    rows = [step.tokens(int(path)) for path in paths]
    return flat_batch(rows, np.asarray(step.task, dtype=np.int64)[paths])


def _shape_files() -> list[Path]:
    return list((ROLLOUTS / "shapes").glob("*.jsonl.gz"))


def _generator() -> ModuleType:
    path = ROLLOUTS / "synthetic_swe.py"
    if not path.exists():
        raise DataError(f"no generator at {path}; this benchmark needs the shared rollouts there")
    spec = importlib.util.spec_from_file_location("synthetic_swe", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
