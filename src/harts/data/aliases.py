"""Names that frameworks give to the fields harts knows; every other field is carried untouched.

A canonical name always wins over its aliases. Two aliases without the canonical name are an
error, because nothing says which of them is meant.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from harts.errors import DataError

FIELD_ALIASES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "advantages": ("advantages", "advantage"),
        "reward": ("reward", "rewards", "score", "scores"),
        "old_log_probs": (
            "old_log_probs",
            "old_logprobs",
            "logprobs",
            "log_probs",
            "rollout_log_probs",
            "rollout_logprobs",
        ),
        "rollout_log_probs": ("rollout_log_probs", "rollout_logprobs"),
        "ref_log_probs": ("ref_log_probs", "ref_log_prob", "ref_logprobs"),
        "temperature": ("temperature", "temperatures"),
        "version": ("version", "versions", "weight_version", "weight_versions"),
        "group_id": ("group_id", "uid", "group_index", "task_id"),
        "rollout_id": ("rollout_id", "trial_id"),
        "identity": ("identity",),
    }
)
"""Accepted names of each well-known field, the canonical one first."""

NUMERIC_FIELDS = frozenset(
    name
    for canonical in (
        "advantages",
        "reward",
        "old_log_probs",
        "rollout_log_probs",
        "ref_log_probs",
        "temperature",
    )
    for name in FIELD_ALIASES[canonical]
)
"""Every name, canonical or not, whose values must be numbers (or None, once a trajectory)."""

TOKEN_NAMES = ("input_ids", "tokens", "token_ids")
MASK_NAMES = ("loss_mask", "loss_masks", "mask")
PROMPT_NAMES = ("prompt_ids", "prompt_token_ids", "prompts", "prompt_tokens")
RESPONSE_NAMES = (
    "response_ids",
    "completion_ids",
    "responses",
    "response_token_ids",
    "completion_token_ids",
    "response_tokens",
)
RESPONSE_MASK_NAMES = (
    "loss_mask",
    "loss_masks",
    "response_mask",
    "env_mask",
    "tool_mask",
    "mask",
)


def find(fields: Iterable[str], canonical: str) -> str | None:
    """The name under which a well-known field is present, or None.

    fields: the names at hand, such as the keys of `MicroBatch.fields`. Raises DataError when two
    aliases are present and the canonical name is not, KeyError for an unknown canonical name.
    """
    return pick(fields, FIELD_ALIASES[canonical])


def pick(fields: Iterable[str], names: tuple[str, ...]) -> str | None:
    """The one of `names` (the canonical first) that is among `fields`, or None."""
    present = set(fields)
    found = [name for name in names if name in present]
    if not found:
        return None
    if len(found) > 1 and found[0] != names[0]:
        raise DataError(
            f"both {found[0]} and {found[1]} could be {names[0]}; keep one or name it {names[0]}"
        )
    return found[0]
