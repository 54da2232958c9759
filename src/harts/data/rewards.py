"""Rewards that lie beside the rollouts: each trajectory finds its entry by group and id.

An id that is unique needs no group; one that repeats in several groups (trial 0 of every task)
does: which reward is meant is never guessed.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import numpy as np

from harts.data.aliases import FIELD_ALIASES, find
from harts.data.columns import trajectory_column
from harts.data.reward_files import (
    GROUP_NAMES,
    ID_NAMES,
    Entry,
    Key,
    RewardMapping,
    load_rewards,
    rewards_of_mapping,
)
from harts.data.trajectory import TrajectoryBatch
from harts.data.values import Array, describe, fail, some_of
from harts.errors import ConfigError, DataError

_SHOWN = 3
"""Groups that a message names."""

Texts = list[str | None]
"""A field as text, (N,), None where it is null."""

Groups = Mapping[str, Collection[str | None]]
"""id -> the groups it is in, in order of appearance."""


def with_rewards(batch: TrajectoryBatch, rewards: str | Path | RewardMapping) -> TrajectoryBatch:
    """The batch with `reward` (and other groups where the entries name such) from beside it.

    A trajectory is looked up by its trajectory id, then its rollout's, then its group's. Entries
    that name groups of the batch must agree in group and id; where they name none of its groups,
    theirs take their place. Raises DataError for a trajectory that is found by none, or by an id
    that several groups have and no group with it. O(trajectories + entries).
    """
    if isinstance(rewards, str | Path):
        entries, place = load_rewards(Path(rewards)), str(rewards)
    elif isinstance(rewards, Mapping):
        entries, place = rewards_of_mapping(rewards, "rewards"), "rewards"
    else:
        problem = f"rewards is {describe(rewards)}"
        raise ConfigError(f"{problem}; give a file or a mapping from ids to numbers")
    lookup = _lookup(batch, entries, place)
    found = [lookup.find(index) for index in range(len(batch))]
    places = [batch.name_of(index) for index in range(len(batch))]
    fields = dict(batch.trajectory_fields)
    for alias in FIELD_ALIASES["reward"]:
        fields.pop(alias, None)
    fields["reward"] = trajectory_column("reward", [entry.reward for entry in found], places)
    pairs = list(zip(found, lookup.groups, strict=True))
    if any(entry.group is not None and str(entry.group) != old for entry, old in pairs):
        for alias in GROUP_NAMES:
            fields.pop(alias, None)
        groups = [old if entry.group is None else entry.group for entry, old in pairs]
        fields["group_id"] = trajectory_column("group_id", groups, places)
    return replace(batch, trajectory_fields=fields)


@dataclass(frozen=True, kw_only=True)
class _Lookup:
    """The ids of a batch beside the entries of a file.

    ids: field -> the id of each trajectory, the most particular field first; groups: its group.
    in_batch: field -> id -> groups of its trajectories. in_file: id -> groups of its entries.
    """

    batch: TrajectoryBatch
    entries: Mapping[Key, Entry]
    place: str
    ids: Mapping[str, Texts]
    group_field: str
    groups: Texts
    in_batch: Mapping[str, Groups]
    in_file: Groups
    names_groups_of_batch: bool

    def find(self, index: int) -> Entry:
        """The entry of a trajectory."""
        group = self.groups[index]
        for field, texts in self.ids.items():
            name = texts[index]
            if name is None:
                continue
            if group is not None and (group, name) in self.entries:
                return self.entries[group, name]
            others = self.in_file.get(name, ())
            if None in others:
                self._require_one_group(field, name, "its reward names no group")
                return self.entries[None, name]
            if others and (group is None or not self.names_groups_of_batch):
                if len(others) > 1:
                    self._fail_for_groups_of_file(index, field, name, others)
                other = next(iter(others))
                self._require_one_group(field, name, f"its reward is for another, {other}")
                return self.entries[other, name]
        if group is not None and (None, group) in self.entries:
            return self.entries[None, group]
        self._fail_to_find(index)

    def _require_one_group(self, field: str, name: str, but: str) -> None:
        groups = self.in_batch[field][name]
        if len(groups) > 1:
            problem = (
                f"{field} {name} is in {len(groups)} groups of the rollouts ({self.group_field} "
                f"{_listed(groups)}), {but}"
            )
            first = next(str(group) for group in groups if group is not None)
            example = f'{{"{first}": {{"{name}": 1.0}}}}'
            advice = f"give {self.group_field}, {field} and reward in each entry, or {example}"
            fail(self.place, problem, advice)

    def _fail_for_groups_of_file(
        self, index: int, field: str, name: str, groups: Collection[str | None]
    ) -> NoReturn:
        own = self.groups[index]
        has = "no group" if own is None else f"another, {own}"
        problem = f"{self.place} has {field} {name} in {len(groups)} groups ({_listed(groups)})"
        advice = "give the rollouts a group_id as in that file"
        fail(self.batch.name_of(index), f"{problem}, the rollout has {has}", advice)

    def _fail_to_find(self, index: int) -> NoReturn:
        names = [texts[index] for texts in self.ids.values()] + [self.groups[index]]
        tried = " or ".join(dict.fromkeys(name for name in names if name is not None))
        problem = f"{self.place} has no reward for it under {tried or 'any id, all are null'}"
        if self.names_groups_of_batch and self.groups[index] is not None:
            problem += f" in group {self.groups[index]}"
        fail(self.batch.name_of(index), problem, "add it (null if there is none)")


def _lookup(batch: TrajectoryBatch, entries: Mapping[Key, Entry], place: str) -> _Lookup:
    fields = batch.trajectory_fields
    ids = {
        name: _texts(fields[name])
        for name in ID_NAMES
        if name in fields and name not in GROUP_NAMES
    }
    group_field = find(fields, "group_id")
    if not ids and group_field is None:
        names = ", ".join(ID_NAMES[:4])
        raise DataError(f"{place}: the rollouts have no ids to find rewards by; name them {names}")
    no_groups: Texts = [None] * len(batch)
    groups = no_groups if group_field is None else _texts(fields[group_field])
    named = {group for group, _ in entries if group is not None}
    return _Lookup(
        batch=batch,
        entries=entries,
        place=place,
        ids=ids,
        group_field=group_field or "group_id",
        groups=groups,
        in_batch={
            name: _groups_by_id(zip(texts, groups, strict=True)) for name, texts in ids.items()
        },
        in_file=_groups_by_id((name, group) for group, name in entries),
        names_groups_of_batch=not named.isdisjoint(groups),
    )


def _groups_by_id(pairs: Iterable[tuple[str | None, str | None]]) -> Groups:
    groups: dict[str, dict[str | None, None]] = {}
    for name, group in pairs:
        if name is not None:
            groups.setdefault(name, {})[group] = None
    return groups


def _texts(values: Array) -> Texts:
    """Entries as text; numbers that became floats beside nulls are whole again."""
    texts: Texts = []
    for value in values.tolist():
        is_float = isinstance(value, float)
        if value is None or (is_float and np.isnan(value)):
            texts.append(None)
        else:
            texts.append(str(int(value)) if is_float and value.is_integer() else str(value))
    return texts


def _listed(groups: Collection[str | None]) -> str:
    return some_of(["null" if group is None else group for group in groups], _SHOWN)
