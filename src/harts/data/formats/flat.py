"""Flat rows of frameworks that pad, or that say how long the response is: made plain.

  attention_mask   AReaL (padded right), verl (prompts padded left, responses right): what it
                   masks is dropped from every per-token list
  response_length  slime and miles: loss_mask and log-probs cover the last tokens only
  trajectory_ids   SkyRL: {"instance_id", "repetition_id"} names the group and the rollout
  token_level_scores   verl: their sum is the reward
Anything else passes untouched; the names are those of `harts.data.aliases`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from harts.data.aliases import (
    FIELD_ALIASES,
    MASK_NAMES,
    PROMPT_NAMES,
    RESPONSE_NAMES,
    TOKEN_NAMES,
)
from harts.data.values import Array, describe, fail, is_sequence, to_array, to_mask

_WORKS_ON = ("attention_mask", "response_length", "trajectory_ids", "token_level_scores")


def adapted(row: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The row without padding, with one entry a token in every list; O(its tokens) if changed."""
    if not any(name in row for name in _WORKS_ON):
        return row
    plain = dict(row)
    if plain.get("attention_mask") is not None:
        plain = _without_padding(plain, where)
    if plain.get("response_length") is not None and "tokens" in plain:
        plain = _with_whole_mask(plain, where)
    if is_sequence(plain.get("token_level_scores")):
        scores = to_array(plain.pop("token_level_scores"), "token_level_scores", where)
        if not any(name in plain for name in FIELD_ALIASES["reward"]):
            plain["reward"] = float(scores.sum())
    identity = plain.get("trajectory_ids")
    if isinstance(identity, Mapping) and "instance_id" in identity:
        if not any(name in plain for name in FIELD_ALIASES["group_id"]):
            plain["group_id"] = identity["instance_id"]
        repetition = identity.get("repetition_id")
        if repetition is not None and "rollout_id" not in plain:
            plain["rollout_id"] = f"{identity['instance_id']}/{repetition}"
    return plain


def _without_padding(row: dict[str, Any], where: str) -> dict[str, Any]:
    real = to_mask(row.pop("attention_mask"), "attention_mask", where)
    row.pop("position_ids", None)
    prompt, response = _present(row, PROMPT_NAMES), _present(row, RESPONSE_NAMES)
    if prompt is None or response is None:
        tokens = _present(row, TOKEN_NAMES)
        if tokens is None:
            return row
        _require_length(real.size, _size(row[tokens]), tokens, where)
        return {name: _kept(value, real, name, where) for name, value in row.items()}
    num_prompt, num_response = _size(row[prompt]), _size(row[response])
    _require_length(real.size, num_prompt + num_response, f"{prompt} and {response}", where)
    if _present(row, MASK_NAMES) is None:  # verl repeats both in input_ids
        for name in TOKEN_NAMES:
            row.pop(name, None)
    in_response = real[num_prompt:]
    plain = {prompt: _kept(row.pop(prompt), real[:num_prompt], prompt, where)}
    for name, value in row.items():
        covers_response = is_sequence(value) and _size(value) == num_response
        plain[name] = _kept(value, in_response if covers_response else real, name, where)
    return plain


def _with_whole_mask(row: dict[str, Any], where: str) -> dict[str, Any]:
    length, num_tokens = row["response_length"], _size(row["tokens"])
    if (
        isinstance(length, bool)
        or not isinstance(length, int | np.integer)
        or not 0 <= length <= num_tokens
    ):
        problem = f"response_length is {describe(length)}, tokens has {num_tokens} entries"
        fail(where, problem, "give the number of response tokens at the end of tokens")
    tokens = row["tokens"]
    mask_name = _present(row, MASK_NAMES)
    mask = None if mask_name is None else row.pop(mask_name)
    del row["tokens"], row["response_length"]
    plain = {
        "prompt_ids": tokens[: num_tokens - length],
        "response_ids": tokens[num_tokens - length :],
        "loss_mask": [1] * length if mask is None else mask,
    }
    return plain | row


def _kept(value: Any, real: Array, name: str, where: str) -> Any:
    if not is_sequence(value) or _size(value) != real.size:
        return value
    return to_array(value, name, where)[real]


def _present(row: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if is_sequence(row.get(name))), None)


def _size(value: Any) -> int:
    return len(np.asarray(value)) if hasattr(value, "__array__") else len(value)


def _require_length(got: int, want: int, of: str, where: str) -> None:
    if got != want:
        problem = f"attention_mask has {got} entries, {of} {want}"
        fail(where, problem, "they must be equally long")
