"""Checkpoints: Hugging Face weights, with optimiser and position beside them.

A checkpoint is written in a folder beside its place and renamed when it is whole, so one that
has its name is complete, whenever the process was killed.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harts.errors import CheckpointError
from harts.train.mixed_precision import MixedPrecisionOptimizer

_POSITION = "position.json"
_OPTIMIZER = "optimizer.pt"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its folder (also a Hugging Face model folder) and steps done."""

    path: Path
    step: int
    config: dict[str, Any]


def save_checkpoint(
    run_dir: Path,
    step: int,
    model: Any,
    optimizer: MixedPrecisionOptimizer,
    config: dict[str, Any],
    *,
    keep: int,
) -> Checkpoint:
    """Write checkpoints/step-<n> after `step` steps, whole or not at all; keep the newest."""
    place = run_dir / "checkpoints" / f"step-{step:06d}"
    beside = place.with_name(f".{place.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    model.save_pretrained(beside)
    torch.save(optimizer.state_dict(), beside / _OPTIMIZER)
    (beside / _POSITION).write_text(json.dumps({"step": step, "config": config}))
    for file in beside.iterdir():
        _sync(file)
    shutil.rmtree(place, ignore_errors=True)
    os.replace(beside, place)
    _sync(place.parent)
    for old in _complete(run_dir)[:-keep]:
        shutil.rmtree(old)
    return Checkpoint(place, step, config)


def latest_checkpoint(run_dir: Path) -> Checkpoint | None:
    """The newest complete checkpoint of a run, or None; raises CheckpointError if unreadable."""
    complete = _complete(run_dir)
    if not complete:
        return None
    try:
        position = json.loads((complete[-1] / _POSITION).read_text())
        return Checkpoint(complete[-1], position["step"], position["config"])
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{complete[-1] / _POSITION} cannot be read ({error}); delete that folder to resume "
            "from the checkpoint before it"
        ) from None


def load_optimizer(checkpoint: Checkpoint, optimizer: MixedPrecisionOptimizer) -> None:
    """Restore the optimiser's state in place; raises CheckpointError if unreadable."""
    path = checkpoint.path / _OPTIMIZER
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        problem = str(error).splitlines()[0][:100]
        raise CheckpointError(
            f"{path} cannot be read ({problem}); delete {checkpoint.path} to resume from the "
            "checkpoint before it"
        ) from None
    optimizer.load_state_dict(state)


def _complete(run_dir: Path) -> list[Path]:
    """Folders that carry a final name, oldest first."""
    return sorted((run_dir / "checkpoints").glob("step-*"))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
