"""Which trajectories a step trains on: whole groups, shuffled every epoch, from the seed alone.

A step's batch depends on nothing but the step number, so a resumed run goes on where it stopped.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from harts.data.aliases import find
from harts.data.trajectory import TrajectoryBatch
from harts.errors import ConfigError, DataError
from harts.rl.advantages import group_advantages, leave_one_out_advantages


class GroupSampler:
    """Yields the batch of each step.

    groups_per_step: None for all groups every step. expanded: give every trajectory an identity
    of its own, so that nothing is shared.
    """

    def __init__(
        self,
        batch: TrajectoryBatch,
        *,
        groups_per_step: int | None,
        seed: int,
        expanded: bool = False,
    ) -> None:
        if groups_per_step is not None and find(batch.trajectory_fields, "group_id") is None:
            raise DataError(
                "data.groups_per_step is set, but the rollouts have no group_id; "
                "add the field or leave the option out"
            )
        groups = _codes(_groups_of(batch))
        self._members = [np.flatnonzero(groups == g) for g in range(int(groups.max()) + 1)]
        if groups_per_step is not None and not 1 <= groups_per_step <= len(self._members):
            raise ConfigError(
                f"data.groups_per_step is {groups_per_step}, the rollouts have "
                f"{len(self._members)} groups; give a number from 1 to that"
            )
        self._batch, self._per_step, self._seed = batch, groups_per_step, seed
        self._expanded = expanded

    def step(self, number: int) -> TrajectoryBatch:
        """The batch of a step, numbered from 0; trajectories in file order."""
        if self._per_step is None:
            chosen = np.arange(len(self._batch))
        else:
            per_epoch = len(self._members) // self._per_step
            epoch, index = divmod(number, per_epoch)
            order = np.random.default_rng([self._seed, epoch]).permutation(len(self._members))
            groups = order[index * self._per_step : (index + 1) * self._per_step]
            chosen = np.sort(np.concatenate([self._members[g] for g in groups]))
        batch = self._batch.select(chosen) if len(chosen) < len(self._batch) else self._batch
        return unshared(batch) if self._expanded else batch


def without_unscored_groups(batch: TrajectoryBatch) -> tuple[TrajectoryBatch, list[str]]:
    """The batch without groups that score no token, which no step can train on; their names.

    DataError where nothing would be left.
    """
    values = _groups_of(batch)
    groups = _codes(values)
    scored = np.zeros(int(groups.max()) + 1, np.int64)
    np.add.at(scored, np.repeat(groups, batch.lengths), batch.loss_mask)
    unscored = scored[groups] == 0
    if unscored.all():
        raise DataError(
            f"none of {len(batch)} trajectories scores a token; set loss_mask to 1 where one does"
        )
    if not unscored.any():
        return batch, []
    names = dict.fromkeys(str(values[i]) for i in np.flatnonzero(unscored))
    return batch.select(np.flatnonzero(~unscored)), list(names)


def unshared(batch: TrajectoryBatch) -> TrajectoryBatch:
    """The same batch where no two trajectories share a row: the expanded baseline."""
    identity = np.repeat(np.arange(len(batch)), batch.lengths)
    return dataclasses.replace(
        batch, position_fields={**batch.position_fields, "identity": identity}
    )


def with_advantages(batch: TrajectoryBatch, source: str) -> TrajectoryBatch:
    """Make the advantages that an objective asks for: "field", "group" or "leave_one_out"."""
    if source == "field":
        return batch
    make = {"group": group_advantages, "leave_one_out": leave_one_out_advantages}[source]
    position_fields = dict(batch.position_fields)
    trajectory_fields = dict(batch.trajectory_fields)
    for fields in (position_fields, trajectory_fields):
        fields.pop(find(fields, "advantages") or "", None)
    return dataclasses.replace(
        batch,
        position_fields=position_fields,
        trajectory_fields={**trajectory_fields, "advantages": make(batch)},
    )


def _groups_of(batch: TrajectoryBatch) -> list[object]:
    """The group of each trajectory; one for all where the field is absent."""
    name = find(batch.trajectory_fields, "group_id")
    return [0] * len(batch) if name is None else batch.trajectory_fields[name].tolist()


def _codes(values: list[object]) -> npt.NDArray[np.int64]:
    code_of: dict[object, int] = {}
    return np.array([code_of.setdefault(value, len(code_of)) for value in values], np.int64)
