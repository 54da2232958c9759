"""Rewards as a file or a mapping states them: entries by (group, id).

{"trial-1": 1.0, "trial-2": 0.0}                        one JSON object
{"t1": {"0": 1.0, "1": 0.0}, "t2": {"0": 0.0}}          the same by group, where ids repeat
{"rollout_id": "trial-1", "reward": 1.0, "group_id": "t1"}   JSON lines (or a list), one a rollout
rollout_id,reward                                       CSV with a header
"""

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harts.data.aliases import FIELD_ALIASES
from harts.data.compression import open_for_reading
from harts.data.formats.records import read_documents
from harts.data.formats.values import number_or_none
from harts.data.values import describe, fail

GROUP_NAMES = FIELD_ALIASES["group_id"]

ID_NAMES = (
    "trajectory_id",
    *FIELD_ALIASES["rollout_id"],
    "session_id",
    "trial_name",
    "id",
    *GROUP_NAMES,
)
"""Fields by which a trajectory is found, the most particular first."""

RewardMapping = Mapping[str, float | Mapping[str, float | None] | None]
"""id -> reward, or group -> id -> reward."""

Key = tuple[str | None, str]
"""(group or None, id) as text."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """reward: None is unknown. group: as the file writes it, None where it names none."""

    reward: float | None
    group: Any


def load_rewards(path: Path) -> dict[Key, Entry]:
    """The entries of a JSON or CSV file; DataError, one line, for one that is wrong or twice."""
    if path.suffix == ".csv":
        records = _csv_records(path)
    else:
        records = list(read_documents(path))
        if len(records) == 1 and not _is_entry(records[0][0]):
            return rewards_of_mapping(*records[0])
    entries: dict[Key, Entry] = {}
    for record, source in records:
        key, entry = _entry_of(record, source)
        if key in entries:
            group, name = key
            id_name = _first(record, ID_NAMES)
            of_group = "" if group is None else f" of {_first(record, GROUP_NAMES)} {group}"
            fail(source, f"{id_name} {name}{of_group} is there twice", "give one reward each")
        entries[key] = entry
    return entries


def rewards_of_mapping(rewards: Mapping[str, Any], place: str) -> dict[Key, Entry]:
    """The entries of a mapping; place: who holds it, for messages."""
    entries: dict[Key, Entry] = {}
    for name, value in rewards.items():
        if not isinstance(value, Mapping):
            entries[None, str(name)] = Entry(
                reward=number_or_none(value, str(name), place), group=None
            )
            continue
        for id_text, reward in value.items():
            checked = number_or_none(reward, f"{name}.{id_text}", place)
            entries[str(name), str(id_text)] = Entry(reward=checked, group=name)
    return entries


def _entry_of(record: dict[str, Any], source: str) -> tuple[Key, Entry]:
    name, reward = _first(record, ID_NAMES), _named(record, FIELD_ALIASES["reward"])
    if name is None or reward is None:
        advice = f"give one of {', '.join(ID_NAMES[:4])} and reward"
        fail(source, f"there is no {'id' if name is None else 'reward'}", advice)
    group_name = _first(record, GROUP_NAMES)
    group = None if group_name is None else record[group_name]
    # an entry for a whole group has that group's id as its own
    of_group = None if group is None or name in GROUP_NAMES else str(group)
    number = number_or_none(record[reward], reward, source)
    return (of_group, str(record[name])), Entry(reward=number, group=group)


def _first(record: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if record.get(name) is not None), None)


def _named(record: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in record), None)


def _is_entry(record: dict[str, Any]) -> bool:
    return _named(record, ID_NAMES) is not None and (
        _named(record, FIELD_ALIASES["reward"]) is not None
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
        plain: dict[str, Any] = {name: value or None for name, value in row.items() if name}
        for name in FIELD_ALIASES["reward"]:
            if name in plain:
                plain[name] = _csv_number(plain[name], name, source)
        records.append((plain, source))
    return records


def _csv_number(text: str | None, name: str, source: str) -> float | None:
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        fail(source, f"{name} is {describe(text)}", "give a number or nothing")
