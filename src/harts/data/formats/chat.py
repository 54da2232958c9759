"""Chat logs: OpenAI-style `messages`, ART's `messages_and_choices`, one rollout a line.

    {"messages": [...], "tools": [...], "reward": 1.0, "task_id": "t1", "trial_id": 0}

Every assistant message is a trained turn, except: `weight` 0 on a message (OpenAI's fine-tuning
files), all but the last where `meta.one_request_per_rollout` says that the others are history, and
in ART all that are not choices. `tools` may name a JSON file beside the log.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from harts.data.aliases import FIELD_ALIASES
from harts.data.chat.messages import Message, normalised
from harts.data.chat.turns import Conversation, Recorded, TurnReader, sampled
from harts.data.formats.options import ReadOptions
from harts.data.formats.records import read_documents
from harts.data.formats.values import (
    as_object,
    checked_numbers,
    get,
    number_or_none,
    optional,
    tokens_of,
)
from harts.data.pieces import PieceRow
from harts.data.values import describe, fail

_GROUP_NAMES = (*FIELD_ALIASES["group_id"], "prompt_id", "instance_id")
_ROLLOUT_NAMES = (*FIELD_ALIASES["rollout_id"], "id", "session_id")


def read_chat(path: Path, options: ReadOptions) -> Iterator[PieceRow]:
    """Yield a row a trained turn. O(letters rendered), of which each message is encoded once."""
    reader = TurnReader(str(path), options)
    tools = _ToolFiles(path.parent)

    def rows() -> Iterator[PieceRow]:
        for record, source in read_documents(path, progress=options.progress):
            for conversation in _conversations(record, source, tools):
                yield from reader.rows(conversation)

    yield from sampled(rows(), options.sampling, path.name)


def _conversations(
    record: dict[str, Any], source: str, tools: "_ToolFiles"
) -> Iterator[Conversation]:
    if "trajectories" in record:  # ART's trajectory group
        for index, entry in enumerate(get(record, "trajectories", list, source)):
            where = f"{source} trajectory {index}"
            entry = as_object(entry, f"trajectories[{index}]", source)
            names = {"group_id": record.get("id", source), "rollout_id": index}
            yield from _conversations({**names, **entry}, where, tools)
        return
    fields = _fields(record, source)
    if "messages_and_choices" not in record:
        yield _conversation(record, "messages", fields, source, tools)
        return
    yield _conversation(record, "messages_and_choices", fields, source, tools)
    histories = optional(record, "additional_histories", list, source) or []
    for index, history in enumerate(histories):
        where = f"{source} history {index}"
        history = as_object(history, f"additional_histories[{index}]", source)
        name = {"trajectory_id": f"{fields['group_id']}/{fields['rollout_id']}/history{index}"}
        yield _conversation(history, "messages_and_choices", fields | name, where, tools)


def _conversation(
    record: dict[str, Any], name: str, fields: dict[str, Any], source: str, tools: "_ToolFiles"
) -> Conversation:
    entries = get(record, name, list, source)
    messages: list[Message] = []
    turns: list[int] = []
    recorded: dict[int, Recorded] = {}
    is_art = name == "messages_and_choices"
    for index, entry in enumerate(entries):
        where = f"{source} message {index}"
        entry = as_object(entry, f"{name}[{index}]", source)
        is_choice = is_art and "message" in entry
        message = normalised(entry["message"] if is_choice else entry, where)
        messages.append(message)
        if is_choice and message["role"] != "assistant":
            fail(where, f"a choice has the role {message['role']}", "choices are the assistant's")
        if is_choice or (not is_art and message["role"] == "assistant" and _has_weight(entry)):
            turns.append(index)
            recorded[index] = recorded_ids(entry, where)
    meta = record.get("meta")
    if isinstance(meta, dict) and meta.get("one_request_per_rollout"):
        turns = turns[-1:]
    if not turns:
        what = "choices (sampled turns)" if is_art else "assistant message to train"
        fail(source, f"there is no {what}", "drop the line")
    return Conversation(
        messages=messages,
        turns=turns,
        fields=fields,
        source=source,
        tools=tools.of(record, source),
        recorded=recorded,
    )


def recorded_ids(entry: dict[str, Any], where: str) -> Recorded:
    """What an OpenAI message or choice holds of its ids: `prompt_token_ids`, `token_ids`, or
    "token_id:N" as the tokens of its log-probs (vLLM), with the log-probs."""
    logprobs = entry.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    prompt = tokens_of(entry, "prompt_token_ids", where)
    completion = tokens_of(entry, "token_ids", where)
    if not content:
        return Recorded(prompt=prompt, completion=completion)
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        fail(where, f"logprobs.content is {describe(content)}", "give a list of objects")
    if completion is None:
        completion = _ids_of_names([part.get("token") for part in content], where)
    if completion is None:
        return Recorded(prompt=prompt)  # log-probs of texts: which ids they belong to is not known
    values = [part.get("logprob") for part in content]
    numbers = checked_numbers(values, "logprobs.content", completion.size, "token_ids", where)
    return Recorded(prompt=prompt, completion=completion, log_probs=numbers)


def _ids_of_names(names: list[Any], where: str) -> Any:
    if not all(isinstance(name, str) and name.startswith("token_id:") for name in names):
        return None
    try:
        return np.array([int(name.removeprefix("token_id:")) for name in names], np.int32)
    except (ValueError, OverflowError):
        fail(where, "logprobs.content has a token_id that is no number", "record it again")


def _fields(record: dict[str, Any], source: str) -> dict[str, Any]:
    metadata = record.get("metadata")
    places = [record, metadata if isinstance(metadata, dict) else {}]
    group = _first(places, _GROUP_NAMES)
    rollout = _first(places, _ROLLOUT_NAMES)
    fields = {
        "group_id": source if group is None else group,
        "rollout_id": source if rollout is None else rollout,
    }
    name = next((n for n in FIELD_ALIASES["reward"] if n in record), "reward")
    fields["reward"] = number_or_none(record.get(name), name, source)
    advantage = next((n for n in FIELD_ALIASES["advantages"] if n in record), None)
    if advantage is not None:
        fields["advantages"] = number_or_none(record[advantage], advantage, source)
    return fields


def _first(places: list[dict[str, Any]], names: tuple[str, ...]) -> Any:
    for place in places:
        for name in names:
            if isinstance(place.get(name), str | int) and not isinstance(place[name], bool):
                return place[name]
    return None


def _has_weight(message: dict[str, Any]) -> bool:
    return message.get("weight") != 0


class _ToolFiles:
    """The tools of a record: a list, or the name of a JSON file beside the log (read once)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, list[Any]] = {}

    def of(self, record: dict[str, Any], source: str) -> list[Any]:
        meta = record.get("meta")
        value = record.get("tools")
        if value is None and isinstance(meta, dict):
            value = meta.get("tools")
        if value is None or isinstance(value, list):
            return value or []
        if not isinstance(value, str):
            advice = "give a list or the name of a JSON file beside the log"
            fail(source, f"tools is {describe(value)}", advice)
        if value not in self._read:
            self._read[value] = self._load(value, source)
        return self._read[value]

    def _load(self, name: str, source: str) -> list[Any]:
        file = self._folder / name
        try:
            tools = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            fail(
                source, f"tools names {name}, which cannot be read ({reason})", f"put it at {file}"
            )
        if not isinstance(tools, list):
            fail(source, f"tools names {name}, which holds {describe(tools)}", "give a list there")
        return tools
