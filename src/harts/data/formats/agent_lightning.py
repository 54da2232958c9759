"""Agent Lightning events, one a line: model requests of many rollouts interleaved, then rewards.

A model request that succeeded is a row: its ids where they are recorded (in `data` or in the
response), else its messages through a tokenizer. The last reward of an attempt is the reward of
all its rows; attempts of one rollout are rollouts of their own in one group.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from harts.data.chat.messages import Message, normalised
from harts.data.chat.turns import Conversation, Recorded, TurnReader, sampled
from harts.data.formats.chat import recorded_ids
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
from harts.data.values import fail

_LOG_PROBS = ("response_log_probs", "response_logprobs")


def read_agent_lightning(path: Path, options: ReadOptions) -> Iterator[PieceRow]:
    """Yield a row a model request, in order of the file. Rows wait for the rewards at the end."""
    reader = TurnReader(str(path), options)
    rows: list[tuple[tuple[str, str], PieceRow]] = []
    rewards: dict[tuple[str, str], float | None] = {}
    turns: Counter[tuple[str, str]] = Counter()
    for event, source in read_documents(path, progress=options.progress):
        kind = get(event, "event_type", str, source)
        if kind not in ("model_request", "reward"):
            continue
        attempt = (_name(event, "rollout_id", source), _name(event, "attempt_id", source))
        data = get(event, "data", dict, source)
        if kind == "reward":
            if data.get("value") is None:
                fail(source, "the reward has no value", "give a number in data.value")
            rewards[attempt] = number_or_none(data["value"], "data.value", source)
        elif _succeeded(data):
            rows.append((attempt, _row(event, data, attempt, turns[attempt], reader, source)))
            turns[attempt] += 1
    if not rows:
        fail(path.name, "no model_request succeeded", "give events of at least one answer")
    known = (
        replace(row, fields={**row.fields, "reward": rewards.get(attempt)}) for attempt, row in rows
    )
    yield from sampled(known, options.sampling, path.name)


def _name(event: dict[str, Any], name: str, where: str) -> str:
    value = event.get(name)
    if value is None and name == "attempt_id":
        return "0"
    if not isinstance(value, str | int) or isinstance(value, bool):
        fail(where, f"there is no {name}", "give a text")
    return str(value)


def _succeeded(data: dict[str, Any]) -> bool:
    status = data.get("http_status")
    return data.get("status") != "error" and not (isinstance(status, int) and status >= 400)


def _row(
    event: dict[str, Any],
    data: dict[str, Any],
    attempt: tuple[str, str],
    turn: int,
    reader: TurnReader,
    where: str,
) -> PieceRow:
    recorded, choice = _recorded(data, where)
    messages: list[Message] = []
    tools: list[Any] = []
    if recorded.prompt is None or recorded.completion is None:
        request = get(data, "request", dict, where)
        entries = get(request, "messages", list, where)
        messages = [normalised(m, f"{where} message {i}") for i, m in enumerate(entries)]
        messages.append(normalised(choice.get("message"), f"{where} answer"))
        tools = optional(request, "tools", list, where) or []
    rollout, number = attempt
    metadata = event.get("metadata")
    group = metadata.get("data_id") if isinstance(metadata, dict) else None
    group = group or event.get("data_id") or event.get("group_id") or rollout
    last = max(len(messages) - 1, 0)
    conversation = Conversation(
        messages=messages,
        turns=[last],
        fields={
            "group_id": str(group),
            "rollout_id": rollout if number == "0" else f"{rollout}/{number}",
            "reward": None,
            "trajectory_id": f"{rollout}/{number}",
        },
        source=where,
        tools=tools,
        recorded={last: recorded},
    )
    row = next(reader.rows(conversation))
    name = f"{rollout}/{number}/{turn}"
    return replace(row, source=where, fields={**row.fields, "trajectory_id": name})


def _recorded(data: dict[str, Any], where: str) -> tuple[Recorded, dict[str, Any]]:
    """The ids in `data` itself (the trainer's triplets) or in the response of the server."""
    response = optional(data, "response", dict, where) or {}
    choices = optional(response, "choices", list, where) or [{}]
    choice = as_object(choices[0], "response.choices[0]", where)
    completion = tokens_of(data, "response_token_ids", where)
    prompt = tokens_of(data, "prompt_token_ids", where)
    if completion is not None:
        name = next((n for n in _LOG_PROBS if data.get(n) is not None), None)
        numbers = None
        if name is not None:
            of = "response_token_ids"
            numbers = checked_numbers(data[name], name, completion.size, of, where)
        return Recorded(prompt=prompt, completion=completion, log_probs=numbers), choice
    found = recorded_ids(choice, where)
    if prompt is None:
        prompt = (
            found.prompt
            if found.prompt is not None
            else tokens_of(response, "prompt_token_ids", where)
        )
    return replace(found, prompt=prompt), choice
