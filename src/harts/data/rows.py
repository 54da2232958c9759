"""One row as a user writes it becomes {"input_ids", "loss_mask", every other field}.

Two spellings are read (names in `harts.data.aliases`):
  flat      input_ids and loss_mask, one entry a token each
  response  prompt_ids and response_ids; the mask and other per-token fields cover the response
            (padded with 0 over the prompt) or prompt and response; without a mask the whole
            response is scored
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, NoReturn

import numpy as np

from harts.data.aliases import (
    MASK_NAMES,
    PROMPT_NAMES,
    RESPONSE_MASK_NAMES,
    RESPONSE_NAMES,
    TOKEN_NAMES,
    pick,
)
from harts.data.values import (
    Array,
    describe,
    fail,
    is_sequence,
    refuse_nan,
    some_of,
    to_array,
    to_mask,
    to_tokens,
)
from harts.errors import DataError

Row = Mapping[str, Any]

RESERVED_NAMES = ("position", "trajectory_index")
"""Names that every microbatch adds to the fields it carries."""

_TEXTS = (
    ("input", "output", ", as in verl's rollout_data_dir"),
    ("prompt", "completion", ", as in TRL's logged completions"),
    ("prompt", "response", ""),
)
"""Fields by which frameworks dump text: prompt, response, whose dump it is."""

_SHOWN = 8
"""Fields of a row that a message names."""


def trajectory_name(index: int, source: str | None) -> str:
    """How messages call a trajectory: `trajectory 2 (bad.jsonl:3)` or `trajectory 2`."""
    return f"trajectory {index}" if source is None else f"trajectory {index} ({source})"


def canonical_row(row: Row, where: str) -> dict[str, Any]:
    """Check one row: input_ids int32 (T,), loss_mask bool (T,), then fields in their own order.

    A field is an array (T,) or a scalar, string, dict or None; numpy scalars keep their type.
    where: the trajectory's name in messages. Raises DataError. O(T) a field.
    """
    if not isinstance(row, Mapping):
        fail(where, f"the row is {describe(row)}", "give a dict from field names to values")
    for name in row:
        if not isinstance(name, str) or name in RESERVED_NAMES:
            fail(where, f"a field is named {name!r}", "rename it, harts cannot carry that name")
    tokens_name = _pick(row, TOKEN_NAMES, where)
    if tokens_name is not None:
        canonical, used = _flat(row, tokens_name, where)
    else:
        canonical, used = _prompt_and_response(row, where)
    if canonical["input_ids"].size == 0:
        fail(where, "there are no tokens", "drop the row")
    if canonical["loss_mask"][0]:
        advice = "set it to 0, nothing precedes the first token"
        fail(where, "loss_mask[0] is 1", advice)
    num_prompt = canonical.pop("num_prompt")
    for name, value in row.items():
        if name not in used:
            canonical[name] = _field(name, value, canonical["input_ids"].size, num_prompt, where)
    return canonical


def _flat(row: Row, tokens_name: str, where: str) -> tuple[dict[str, Any], set[str]]:
    tokens = to_tokens(row[tokens_name], tokens_name, where)
    mask_name = _pick(row, MASK_NAMES, where)
    if mask_name is None:
        fail(where, "there is no loss_mask", "give one 0 or 1 per token")
    mask = to_mask(row[mask_name], mask_name, where)
    if mask.size != tokens.size:
        problem = f"{mask_name} has {mask.size} entries, {tokens_name} {tokens.size}"
        fail(where, problem, "they must be equally long")
    return {"input_ids": tokens, "loss_mask": mask, "num_prompt": 0}, {tokens_name, mask_name}


def _prompt_and_response(row: Row, where: str) -> tuple[dict[str, Any], set[str]]:
    prompt_name, response_name = (
        _pick(row, names, where) for names in (PROMPT_NAMES, RESPONSE_NAMES)
    )
    if prompt_name is None or response_name is None:
        _fail_without_tokens(row, prompt_name or response_name, where)
    prompt = to_tokens(row[prompt_name], prompt_name, where)
    response = to_tokens(row[response_name], response_name, where)
    tokens = np.concatenate([prompt, response])
    used = {prompt_name, response_name}
    mask_name = _pick(row, RESPONSE_MASK_NAMES, where)
    mask: Array = np.ones(response.size, np.bool_)
    if mask_name is not None:
        used.add(mask_name)
        mask = to_mask(row[mask_name], mask_name, where)
    if mask.size == response.size:
        mask = np.concatenate([np.zeros(prompt.size, np.bool_), mask])
    if mask.size != tokens.size:
        problem = f"{mask_name} has {mask.size} entries, {response_name} {response.size}"
        fail(where, problem, "they must be equally long")
    return {"input_ids": tokens, "loss_mask": mask, "num_prompt": prompt.size}, used


def _fail_without_tokens(row: Row, found: str | None, where: str) -> NoReturn:
    """Say what the row has instead, and what of it was probably meant. found: one half of it."""
    present = sorted(row, key=lambda name: name != found)
    only = f"only {some_of(present, _SHOWN)}" if present else "the row is empty"
    problem = f"there are no input_ids, {only}"
    for prompt, response, origin in _TEXTS:
        if isinstance(row.get(prompt), str) and isinstance(row.get(response), str):
            advice = (
                "write their token ids as prompt_ids and response_ids (chat logs, as messages, "
                "are read with --tokenizer)"
            )
            fail(where, f"{problem}: {prompt} and {response} hold text only{origin}", advice)
    renamed = [
        f"{name} to {meant}"
        for name, value in row.items()
        if _holds_whole_numbers(value) and (meant := _near_name(name)) is not None
    ]
    hint = f" (rename {', '.join(renamed)}?)" if renamed else ""
    fail(where, problem, f"give input_ids, or prompt_ids and response_ids{hint}")


def _near_name(name: str) -> str | None:
    """The name of token ids that `name` is a misspelling of, in its canonical form."""
    for names in (TOKEN_NAMES, PROMPT_NAMES, RESPONSE_NAMES):
        if name not in names and get_close_matches(name.lower(), names, n=1, cutoff=0.85):
            return names[0]
    return None


def _holds_whole_numbers(value: Any) -> bool:
    if not is_sequence(value) or len(value) == 0:
        return False
    return isinstance(value[0], int | np.integer) and not isinstance(value[0], bool)


def _field(name: str, value: Any, num_tokens: int, num_prompt: int, where: str) -> Any:
    if isinstance(value, np.str_):
        return str(value)
    if not is_sequence(value):
        if getattr(value, "ndim", None) == 0 and hasattr(value, "__array__"):
            value = np.asarray(value)[()]
        refuse_nan(value, name, where)
        return value
    array = to_array(value, name, where)
    if num_prompt and array.size == num_tokens - num_prompt:
        return np.concatenate([np.zeros(num_prompt, array.dtype), array])
    if array.size != num_tokens:
        problem = f"{name} has {array.size} entries, input_ids {num_tokens}"
        advice = "they must be equally long (one value a trajectory also does, or a dict)"
        fail(where, problem, advice)
    return array


def _pick(row: Row, names: tuple[str, ...], where: str) -> str | None:
    try:
        return pick(row, names)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
