"""Advantages relative to the other rollouts of a group (arXiv 2402.03300, section 4.1.2).

A trajectory may be one call of a rollout. A rollout counts once in its group's statistics, however
many trajectories it has, and gives all of them its advantage.

Legend: N trajectories, U units (rated rollouts or trajectories), G groups.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from harts.data import aliases
from harts.data.trajectory import TrajectoryBatch
from harts.errors import ConfigError, DataError

Unit = Literal["rollout", "trajectory"]
Normalise = Literal["std", "none"]
Float64s = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class _RatedUnits:
    """unit_of_trajectory (N,): -1 without reward. reward, group (U,). num_units (G,)."""

    unit_of_trajectory: Int64s
    reward: Float64s
    group: Int64s
    num_units: Int64s

    def group_mean(self, values: Float64s) -> Float64s:
        """At each unit the mean of values (U,) over the units of its group."""
        sums = np.bincount(self.group, weights=values, minlength=len(self.num_units))
        return (sums / np.maximum(self.num_units, 1))[self.group]

    def to_trajectories(self, values: Float64s) -> Float64s:
        """values (U,) at each trajectory (N,), 0 where it has no reward."""
        return np.append(values, 0.0)[self.unit_of_trajectory]


def group_advantages(
    batch: TrajectoryBatch,
    *,
    unit: Unit = "rollout",
    normalise: Normalise = "std",
    epsilon: float = 1e-6,
) -> Float64s:
    """(reward - mean) / (std + epsilon) over the rated units of a group, float64 (N,).

    Reads the trajectory fields reward, group_id and rollout_id (or their aliases). The standard
    deviation is the population's; normalise="none" leaves the division out (Dr. GRPO). With unit
    "rollout", trajectories of equal group_id and rollout_id count once and must agree in reward;
    without a rollout_id field every trajectory is its own rollout. A trajectory without reward
    (NaN or None) gets 0 and is left out of the statistics. O(N).

    DataError: no reward or group_id, a reward that is not a number, rewards that differ within
    a rollout. ConfigError: an unknown unit or normalise, a negative epsilon.
    """
    if normalise not in get_args(Normalise):
        raise ConfigError(f"normalise is {normalise!r}; choose 'std' or 'none'")
    if not epsilon >= 0.0:
        raise ConfigError(f"epsilon is {epsilon}; give a value from 0")
    units = _rated_units(batch, unit)
    centred = units.reward - units.group_mean(units.reward)
    if normalise == "none":
        return units.to_trajectories(centred)
    scale = np.sqrt(units.group_mean(centred**2)) + epsilon
    return units.to_trajectories(np.divide(centred, scale, where=scale > 0, out=centred * 0.0))


def leave_one_out_advantages(batch: TrajectoryBatch, *, unit: Unit = "rollout") -> Float64s:
    """RLOO: reward minus the mean reward of the group's other units, float64 (N,).

    Source: arXiv 2402.14740. A unit alone in its group has no baseline and gets 0. Fields,
    units, missing rewards and errors as in group_advantages. O(N).
    """
    units = _rated_units(batch, unit)
    size = units.num_units[units.group]
    centred = units.reward - units.group_mean(units.reward)
    return units.to_trajectories(centred * size / np.maximum(size - 1, 1))


def _rated_units(batch: TrajectoryBatch, unit: Unit) -> _RatedUnits:
    if unit not in get_args(Unit):
        raise ConfigError(f"unit is {unit!r}; choose 'rollout' or 'trajectory'")
    reward = _rewards(batch)
    group_of_trajectory = _codes(_ids(batch, "group_id"))
    unit_name = np.arange(len(batch))
    has_rollouts = aliases.find(batch.trajectory_fields, "rollout_id") is not None
    if unit == "rollout" and has_rollouts:
        unit_name = _codes(zip(group_of_trajectory, _ids(batch, "rollout_id"), strict=True))
        _refuse_unequal_rewards(batch, reward, unit_name)

    rated = np.flatnonzero(~np.isnan(reward))
    _, first, unit_of_rated = np.unique(unit_name[rated], return_index=True, return_inverse=True)
    unit_of_trajectory = np.full(len(batch), -1, dtype=np.int64)
    unit_of_trajectory[rated] = unit_of_rated
    group = group_of_trajectory[rated[first]]
    num_groups = int(group_of_trajectory.max(initial=-1)) + 1
    return _RatedUnits(
        unit_of_trajectory=unit_of_trajectory,
        reward=reward[rated[first]],
        group=group,
        num_units=np.bincount(group, minlength=num_groups),
    )


def _rewards(batch: TrajectoryBatch) -> Float64s:
    rewards = np.empty(len(batch), dtype=np.float64)
    for trajectory, value in enumerate(_trajectory_field(batch, "reward")):
        try:
            rewards[trajectory] = np.nan if value is None else value
        except (TypeError, ValueError):
            rewards[trajectory] = np.inf
        if np.isinf(rewards[trajectory]):
            raise DataError(
                f"{batch.name_of(trajectory)}: reward is {value!r}; give a finite number, or null "
                "for a trajectory without reward"
            )
    return rewards


def _ids(batch: TrajectoryBatch, canonical: str) -> npt.NDArray[Any]:
    ids = _trajectory_field(batch, canonical)
    for trajectory, value in enumerate(ids):
        if value is None or value != value:  # a numeric field has NaN where a row has none
            raise DataError(
                f"{batch.name_of(trajectory)}: {canonical} is missing; advantages need one for "
                "each trajectory"
            )
    return ids


def _trajectory_field(batch: TrajectoryBatch, canonical: str) -> npt.NDArray[Any]:
    name = aliases.find(batch.trajectory_fields, canonical)
    if name is None:
        present = ", ".join(sorted(batch.trajectory_fields)) or "none"
        raise DataError(
            f"advantages need the trajectory field '{canonical}'; trajectory fields present: "
            f"{present}"
        )
    return batch.trajectory_fields[name]


def _codes(values: Iterable[Hashable]) -> Int64s:
    """Number values by first appearance; equal values of any hashable type share a number."""
    code_of_value: dict[Hashable, int] = {}
    return np.array([code_of_value.setdefault(v, len(code_of_value)) for v in values], np.int64)


def _refuse_unequal_rewards(batch: TrajectoryBatch, reward: Float64s, unit_name: Int64s) -> None:
    _, first, rank = np.unique(unit_name, return_index=True, return_inverse=True)
    expected = reward[first][rank]
    unequal = (reward != expected) & ~(np.isnan(reward) & np.isnan(expected))
    if unequal.any():
        trajectory = int(np.argmax(unequal))
        other = int(first[rank[trajectory]])
        raise DataError(
            f"{batch.name_of(trajectory)}: reward is {reward[trajectory]}, but "
            f"{batch.name_of(other)} of the same rollout has {reward[other]}; give a rollout one "
            "reward, or use unit='trajectory'"
        )
