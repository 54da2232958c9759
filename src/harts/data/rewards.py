"""Rewards that lie beside the rollouts: a file or a mapping from an id to a number.

{"trial-1": 1.0, "trial-2": 0.0}                        one JSON object
{"rollout_id": "trial-1", "reward": 1.0, "group_id": "t1"}   JSON lines (or a list), one a rollout
rollout_id,reward                                       CSV with a header
"""

import csv
import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from harts.data.aliases import FIELD_ALIASES
from harts.data.columns import trajectory_column
from harts.data.compression import open_for_reading
from harts.data.formats.records import read_documents
from harts.data.formats.values import number_or_none
from harts.data.trajectory import TrajectoryBatch
from harts.data.values import describe, fail
from harts.errors import ConfigError, DataError

_ID_NAMES = (
    "trajectory_id",
    *FIELD_ALIASES["rollout_id"],
    "session_id",
    "trial_name",
    "id",
    *FIELD_ALIASES["group_id"],
)
"""Fields by which a trajectory is found, the most particular first."""

_Entry = tuple[float | None, Any]
"""(reward, group or None)."""


def with_rewards(
    batch: TrajectoryBatch, rewards: str | Path | Mapping[str, float | None]
) -> TrajectoryBatch:
    """The batch with `reward` (and `group_id` where the entries name it) from beside it.

    A trajectory is looked up by its trajectory id, then its rollout's, then its group's. Raises
    DataError for one that is found by none. O(trajectories + entries).
    """
    if isinstance(rewards, str | Path):
        entries, place = _load(Path(rewards)), str(rewards)
    elif isinstance(rewards, Mapping):
        place = "rewards"
        entries = {
            str(name): (number_or_none(value, str(name), place), None)
            for name, value in rewards.items()
        }
    else:
        problem = f"rewards is {describe(rewards)}"
        raise ConfigError(f"{problem}; give a file or a mapping from ids to numbers")
    columns = [batch.trajectory_fields[n] for n in _ID_NAMES if n in batch.trajectory_fields]
    if not columns:
        names = ", ".join(_ID_NAMES[:4])
        raise DataError(f"{place}: the rollouts have no ids to find rewards by; name them {names}")
    found: list[_Entry] = []
    for index in range(len(batch)):
        ids = [str(column[index]) for column in columns]
        entry = next((entries[name] for name in ids if name in entries), None)
        if entry is None:
            problem = f"{place} has no reward for it under {' or '.join(dict.fromkeys(ids))}"
            fail(batch.name_of(index), problem, "add it (null if there is none)")
        found.append(entry)
    places = [batch.name_of(index) for index in range(len(batch))]
    fields = dict(batch.trajectory_fields)
    for alias in FIELD_ALIASES["reward"]:
        fields.pop(alias, None)
    fields["reward"] = trajectory_column("reward", [reward for reward, _ in found], places)
    if any(group is not None for _, group in found):
        for alias in FIELD_ALIASES["group_id"]:
            fields.pop(alias, None)
        fields["group_id"] = trajectory_column("group_id", [group for _, group in found], places)
    return replace(batch, trajectory_fields=fields)


def _load(path: Path) -> dict[str, _Entry]:
    if path.suffix == ".csv":
        records = _csv_records(path)
    else:
        records = list(read_documents(path))
        if len(records) == 1 and not _is_entry(records[0][0]):
            only, source = records[0]
            return {
                name: (number_or_none(value, name, source), None) for name, value in only.items()
            }
    entries: dict[str, _Entry] = {}
    for record, source in records:
        name = next((n for n in _ID_NAMES if record.get(n) is not None), None)
        reward = next((n for n in FIELD_ALIASES["reward"] if n in record), None)
        if name is None or reward is None:
            advice = f"give one of {', '.join(_ID_NAMES[:4])} and reward"
            fail(source, f"there is no {'id' if name is None else 'reward'}", advice)
        group = next((record[n] for n in FIELD_ALIASES["group_id"] if n in record), None)
        key = str(record[name])
        if key in entries:
            fail(source, f"{name} {key} is there twice", "give one reward each")
        entries[key] = (number_or_none(record[reward], reward, source), group)
    return entries


def _is_entry(record: dict[str, Any]) -> bool:
    return any(name in record for name in _ID_NAMES) and any(
        name in record for name in FIELD_ALIASES["reward"]
    )


def _csv_records(path: Path) -> list[tuple[dict[str, Any], str]]:
    with open_for_reading(path) as stream:
        try:
            text = stream.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            fail(str(path), f"byte {error.start + 1} is not UTF-8", "write it as UTF-8")
    records: list[tuple[dict[str, Any], str]] = []
    reader = csv.DictReader(io.StringIO(text))
    for row in reader:
        source = f"{path.name}:{reader.line_num}"
        plain: dict[str, Any] = {name: value for name, value in row.items() if name}
        for name in FIELD_ALIASES["reward"]:
            if name in plain:
                plain[name] = _csv_number(plain[name], name, source)
        records.append((plain, source))
    return records


def _csv_number(text: str | None, name: str, source: str) -> float | None:
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        fail(source, f"{name} is {describe(text)}", "give a number or nothing")
