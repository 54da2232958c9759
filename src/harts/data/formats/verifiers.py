"""verifiers v1 and prime-rl `traces.jsonl`: each line an episode of traces, a trace a message tree.

A node holds the tokens it adds to its parent's; log-probs and advantages cover its sampled tokens.
A trajectory is a branch, from a root to a leaf; tokens of a node are held once however many
branches pass it. With sampling "step" a trajectory ends at each sampled node and scores that node
alone (the tree holds each step once, so "tree-step" is the same).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harts.data.formats.options import ReadOptions
from harts.data.formats.records import read_documents
from harts.data.formats.values import as_object, get, mask_of, number_or_none, numbers_of, optional
from harts.data.pieces import PieceRow
from harts.data.values import Array, describe, fail, to_tokens

_OVER_SAMPLED = {
    "rollout_log_probs": "logprobs",
    "advantages": "advantages",
    "ref_log_probs": "reference_logprobs",
}
"""Field of the batch -> field of a node, one number a sampled token."""


@dataclass(frozen=True, kw_only=True)
class _Node:
    parent: int | None
    tokens: Array
    mask: Array
    positions: dict[str, Array]


def read_verifiers(path: Path, options: ReadOptions) -> Iterator[PieceRow]:
    """Yield a row a branch, in order of leaves. O(unique tokens + branches x their depth)."""
    for record, source in read_documents(path, progress=options.progress):
        if "nodes" in record:
            yield from _rows_of_trace(record, {}, source, options)
            continue
        for index, trace in enumerate(get(record, "traces", list, source)):
            where = f"{source} trace {index}"
            trace = as_object(trace, f"traces[{index}]", source)
            yield from _rows_of_trace(trace, record, where, options)


def _rows_of_trace(
    trace: dict[str, Any], episode: dict[str, Any], where: str, options: ReadOptions
) -> Iterator[PieceRow]:
    records = get(trace, "nodes", list, where)
    if not records:
        return  # an episode that failed before its first call
    nodes = [
        _node(as_object(record, f"nodes[{index}]", where), index, f"{where} node {index}")
        for index, record in enumerate(records)
    ]
    if not any(node.tokens.size for node in nodes):
        advice = "record the run with token ids (a renderer client), or read it as a chat log"
        fail(where, "no node has token_ids", advice)
    trace_id = trace.get("id") or episode.get("id") or where
    group = optional(episode, "group", dict, where) or {}
    fields = {
        "group_id": group.get("id") or episode.get("id") or trace_id,
        "rollout_id": trace_id,
        "reward": _reward(trace, where),
    }
    names = [
        name
        for name in _OVER_SAMPLED
        if any(name in node.positions for node in nodes if node.mask.any())
    ]
    _require_everywhere(nodes, names, where)
    is_step = options.sampling is not None
    parents = {node.parent for node in nodes}
    for end, node in enumerate(nodes):
        is_end = bool(node.mask.any()) if is_step else end not in parents
        if is_end:
            chain = _chain(nodes, end)
            row = _row(nodes, chain, chain[-1:] if is_step else chain, names)
            place = f"{where} {'node' if is_step else 'leaf'} {end}"
            yield PieceRow(
                tokens=row[0],
                scored=row[1],
                positions=row[2],
                fields={**fields, "trajectory_id": f"{trace_id}/{end}"},
                source=place,
            )


def _node(record: dict[str, Any], index: int, where: str) -> _Node:
    parent = optional(record, "parent", int, where)
    if parent is not None and not 0 <= parent < index:
        fail(where, f"parent is {parent}", "parents come before children, from 0; null is a root")
    tokens = to_tokens(record.get("token_ids") or [], "token_ids", where)
    mask = mask_of(record, "mask", where)
    if mask.size == 0:
        if tokens.size and record.get("sampled"):
            fail(where, "a sampled node has no mask", "give one truth value per token")
        mask = np.zeros(tokens.size, np.bool_)
    if mask.size != tokens.size:
        problem = f"mask has {mask.size} entries, token_ids {tokens.size}"
        fail(where, problem, "they must be equally long")
    positions = {}
    for name, theirs in _OVER_SAMPLED.items():
        if record.get(theirs):  # an empty list is how an absent one is written
            dense = np.zeros(tokens.size)
            dense[mask] = numbers_of(
                record, theirs, int(mask.sum()), "the sampled tokens (true in mask)", where
            )
            positions[name] = dense
    return _Node(parent=parent, tokens=tokens, mask=mask, positions=positions)


def _chain(nodes: list[_Node], end: int) -> list[int]:
    chain, at = [], end
    while True:
        chain.append(at)
        parent = nodes[at].parent
        if parent is None:
            return chain[::-1]
        at = parent


def _row(
    nodes: list[_Node], chain: list[int], scored: list[int], names: list[str]
) -> tuple[list[Array], list[tuple[int, Array]], dict[str, list[tuple[int, Array]]]]:
    """Pieces of one path; scored: the nodes of it whose tokens are trained."""
    tokens, masks = [], []
    positions: dict[str, list[tuple[int, Array]]] = {name: [] for name in names}
    begin, wanted = 0, set(scored)
    for index in chain:
        node = nodes[index]
        tokens.append(node.tokens)
        if index in wanted and node.mask.any():
            masks.append((begin, node.mask))
            for name in names:
                positions[name].append((begin, node.positions[name]))
        begin += node.tokens.size
    return tokens, masks, positions


def _require_everywhere(nodes: list[_Node], names: list[str], where: str) -> None:
    for name in names:
        for index, node in enumerate(nodes):
            if node.mask.any() and name not in node.positions:
                problem = f"there are no {_OVER_SAMPLED[name]}, but other sampled nodes have them"
                fail(f"{where} node {index}", problem, "give them in every sampled node or none")


def _reward(trace: dict[str, Any], where: str) -> float | None:
    """Sum of the named rewards: numbers, {"value"}, or {"score", "weight"}; null is skipped."""
    rewards = optional(trace, "rewards", dict, where)
    if rewards is None:
        return number_or_none(trace.get("reward"), "reward", where)
    total, known = 0.0, False
    for name, entry in rewards.items():
        value: Any = entry
        weight: Any = 1.0
        if isinstance(entry, dict):
            value = entry.get("value")
            if value is None and "score" in entry:
                value, weight = entry["score"], entry.get("weight", 1.0)
            elif "value" not in entry:
                fail(where, f"rewards.{name} is {describe(entry)}", "give a number or a value")
        number = number_or_none(value, f"rewards.{name}", where)
        factor = number_or_none(weight, f"rewards.{name}.weight", where)
        if number is not None:
            total, known = total + number * (1.0 if factor is None else factor), True
    return total if known else None
