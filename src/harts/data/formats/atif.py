"""ATIF v1.0 to v1.8, the trajectories of Harbor and terminal-bench: one document a file or line.

Each agent step that called the model is a row: its prompt and completion ids where the metrics
hold them, else the messages so far through a tokenizer. Steps copied from an earlier trajectory
(`is_copied_context`) are context, never rows. Continuations and subagents, embedded or in files
beside this one, are followed; they share the root's group and rollout.
"""

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

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

VERSIONS = tuple(f"ATIF-v1.{minor}" for minor in range(9))
_ROLES = {"system": "system", "user": "user", "agent": "assistant"}


@dataclass(frozen=True)
class _Document:
    record: dict[str, Any]
    source: str
    folder: Path
    files: frozenset[Path]
    """Files opened on the way here, so that a circle of references ends in an error."""
    name: str
    fields: dict[str, Any] = field(default_factory=dict)


def read_atif(path: Path, options: ReadOptions) -> Iterator[PieceRow]:
    """Yield a row a model call: the root's steps, then continuations and subagents depth first."""
    reader = TurnReader(str(path), options)

    def rows() -> Iterator[PieceRow]:
        for record, source in read_documents(path, progress=options.progress):
            root = _root(record, source, path)
            for document in _family(root):
                yield from _rows_of(document, reader)

    found = list(rows())
    if not found:
        fail(path.name, "no agent step called the model", "give a trajectory with agent steps")
    yield from sampled(found, options.sampling, path.name)


def _root(record: dict[str, Any], source: str, path: Path) -> _Document:
    session = record.get("session_id") or record.get("trajectory_id") or source
    extra = record.get("extra")
    extra = extra if isinstance(extra, dict) else {}
    group = next((extra[n] for n in ("task_id", "task_name") if extra.get(n)), session)
    fields = {
        "group_id": str(group),
        "rollout_id": str(session),
        "reward": number_or_none(extra.get("reward"), "extra.reward", source),
    }
    name = str(record.get("trajectory_id") or session)
    return _Document(record, source, path.parent, frozenset({path.resolve()}), name, fields)


def _family(root: _Document) -> Iterator[_Document]:
    """The document, what continues it and its subagents, without recursion."""
    pending = [root]
    while pending:
        document = pending.pop()
        yield document
        pending.extend(reversed([*_continuation(document), *_subagents(document)]))


def _continuation(document: _Document) -> list[_Document]:
    ref = optional(document.record, "continued_trajectory_ref", str, document.source)
    return [] if ref is None else _opened(document, ref, "continued_trajectory_ref")


def _subagents(document: _Document) -> list[_Document]:
    embedded = optional(document.record, "subagent_trajectories", list, document.source) or []
    found: list[_Document] = []
    names = set()
    for index, record in enumerate(embedded):
        where = f"{document.source} subagent {index}"
        record = as_object(record, f"subagent_trajectories[{index}]", document.source)
        name = get(record, "trajectory_id", str, where)
        if name in names:
            fail(where, f"trajectory_id {name!r} is there twice", "ids of subagents are unique")
        names.add(name)
        found.append(replace(document, record=record, source=where, name=name))
    opened = set()
    for ref, where in _references(document):
        path = optional(ref, "trajectory_path", str, where)
        if ref.get("trajectory_id") in names:
            continue
        if path is None:
            problem = f"subagent {ref.get('trajectory_id')!r} is not in subagent_trajectories"
            fail(where, problem, "embed it or give trajectory_path")
        if path not in opened:
            opened.add(path)
            found.extend(_opened(document, path, "trajectory_path"))
    return found


def _references(document: _Document) -> Iterator[tuple[dict[str, Any], str]]:
    for index, step in enumerate(document.record.get("steps") or []):
        where = f"{document.source} step {index + 1}"
        if not isinstance(step, dict) or step.get("is_copied_context"):
            continue
        for result in _results(step, where):
            refs = result.get("subagent_trajectory_ref")
            for ref in [refs] if isinstance(refs, dict) else refs or []:  # one object before v1.4
                yield as_object(ref, "subagent_trajectory_ref", where), where


def _opened(document: _Document, name: str, what: str) -> list[_Document]:
    if re.match(r"[a-z][a-z0-9+.-]*://", name):
        fail(document.source, f"{what} is {name}", "fetch it and name the local file")
    file = document.folder / name
    if file.resolve() in document.files:
        fail(document.source, f"{what} {name} leads back to itself", "references make no circle")
    if not file.is_file():
        fail(document.source, f"{what} names {name}, which is not there", f"put it at {file}")
    files = document.files | {file.resolve()}
    stem = file.name.removesuffix(".json")
    return [
        replace(
            document,
            record=record,
            source=source,
            folder=file.parent,
            files=files,
            name=str(record.get("trajectory_id") or f"{document.name}/{stem}"),
        )
        for record, source in read_documents(file)
    ]


def _rows_of(document: _Document, reader: TurnReader) -> Iterator[PieceRow]:
    record, where = document.record, document.source
    version = record.get("schema_version")
    if version not in VERSIONS:
        problem = f"schema_version is {describe(version)}"
        fail(where, problem, f"{VERSIONS[0]} to {VERSIONS[-1]} are read")
    messages: list[Message] = []
    turns: list[int] = []
    recorded: dict[int, Recorded] = {}
    step_ids: list[int] = []
    for index, step in enumerate(get(record, "steps", list, where)):
        place = f"{where} step {index + 1}"
        step = as_object(step, f"steps[{index}]", where)
        role = _ROLES.get(str(step.get("source")))
        if role is None:
            got = describe(step.get("source"))
            fail(place, f"source is {got}", f"use one of {', '.join(_ROLES)}")
        is_call = role == "assistant" and step.get("llm_call_count") != 0
        if is_call and not step.get("is_copied_context"):
            turns.append(len(messages))
            step_ids.append(index + 1)
            recorded[len(messages)] = _recorded(step, place)
        messages.append(_message(step, role, place))
        messages.extend(_answers(step, place))
    if not turns:
        return
    agent = optional(record, "agent", dict, where) or {}
    conversation = Conversation(
        messages=messages,
        turns=turns,
        fields={**document.fields, "trajectory_id": document.name},
        source=where,
        tools=optional(agent, "tool_definitions", list, where) or (),
        recorded=recorded,
    )
    if any(ids.prompt is None or ids.completion is None for ids in recorded.values()):
        message = f"{where}: steps without token ids are tokenised anew, which may differ from"
        warnings.warn(f"{message} what the model saw", stacklevel=2)
    for row, number in zip(reader.rows(conversation), step_ids, strict=True):
        name = f"{document.name}/{number}"
        fields = {**row.fields, "trajectory_id": name}
        yield replace(row, source=f"{where} step {number}", fields=fields)


def _recorded(step: dict[str, Any], where: str) -> Recorded:
    metrics = optional(step, "metrics", dict, where) or {}
    prompt = tokens_of(metrics, "prompt_token_ids", where)
    completion = tokens_of(metrics, "completion_token_ids", where)
    numbers = None
    if completion is not None and metrics.get("logprobs"):
        of = "completion_token_ids"
        numbers = checked_numbers(metrics["logprobs"], "logprobs", completion.size, of, where)
    return Recorded(prompt=prompt, completion=completion, log_probs=numbers)


def _message(step: dict[str, Any], role: str, where: str) -> Message:
    calls = [
        {
            "id": call.get("tool_call_id"),
            "name": call.get("function_name"),
            "arguments": call.get("arguments") or {},
        }
        for call in (
            as_object(call, f"tool_calls[{index}]", where)
            for index, call in enumerate(optional(step, "tool_calls", list, where) or [])
        )
    ]
    entry = {
        "role": role,
        "content": step.get("message"),
        "reasoning_content": step.get("reasoning_content"),
        "tool_calls": calls,
    }
    return normalised(entry, where)


def _answers(step: dict[str, Any], where: str) -> list[Message]:
    """What came back: tool messages for results of calls, a user message for any other."""
    answers = []
    for result in _results(step, where):
        call = result.get("source_call_id")
        entry = {
            "role": "tool" if call is not None else "user",
            "content": result.get("content"),
            "tool_call_id": call,
        }
        answers.append(normalised(entry, where))
    return answers


def _results(step: dict[str, Any], where: str) -> list[dict[str, Any]]:
    observation = optional(step, "observation", dict, where) or {}
    results = optional(observation, "results", list, where) or []
    return [as_object(result, f"results[{index}]", where) for index, result in enumerate(results)]
