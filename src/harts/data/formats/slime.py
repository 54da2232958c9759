"""slime and miles debug dumps, `--save-debug-rollout-data`: torch.save of {"samples": [...]}.

A sample holds the tokens of prompt and response; its mask and log-probs cover the response alone.
It is a pickle, so it is opened only with trust=True (`--trust`), and even then only data in it.
Texts and multimodal inputs are left out; so are expert routes (router replay is not a row field).
"""

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harts.data.formats.flat import adapted
from harts.data.formats.options import ReadOptions
from harts.data.formats.torch_pickle import load_torch
from harts.data.formats.values import get
from harts.data.values import describe, fail
from harts.errors import ConfigError

_CARRIED = (
    "reward",
    "group_index",
    "index",
    "rollout_id",
    "status",
    "session_id",
    "rollout_log_probs",
    "teacher_log_probs",
    "weight_versions",
)


def read_slime(path: Path, options: ReadOptions) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield (row, "name sample n"), samples from 0. Raises ConfigError without trust."""
    if not options.trust:
        raise ConfigError(
            f"{path}: a .pt file is a Python pickle, which can run code when it is opened; "
            "read it only if you trust who made it, with trust=True (--trust)"
        )
    dump = load_torch(path, options.progress)
    if not isinstance(dump, dict):
        fail(path.name, f"holds {describe(dump)}", 'give a dict with "samples"')
    samples = get(dump, "samples", list, path.name)
    if not samples:
        fail(path.name, "samples is empty", "dump a step that has samples")
    carried = [n for n in _CARRIED if any(isinstance(s, dict) and _is_set(s, n) for s in samples)]
    if any(isinstance(s, dict) and s.get("rollout_routed_experts") is not None for s in samples):
        message = f"{path.name}: recorded expert routes are not read; routing is computed anew"
        warnings.warn(message, stacklevel=2)
    for index, sample in enumerate(samples):
        where = f"{path.name} sample {index}"
        if not isinstance(sample, dict):
            fail(where, f"is {describe(sample)}", "give a dict, as Sample.to_dict() does")
        yield _row(sample, carried, dump, where), where


def _is_set(sample: dict[str, Any], name: str) -> bool:
    value = sample.get(name)
    return value is not None and not (isinstance(value, list) and not value)


def _row(
    sample: dict[str, Any], carried: list[str], dump: dict[str, Any], where: str
) -> Mapping[str, Any]:
    if sample.get("tokens") is None:
        fail(where, "there are no tokens", "give prompt and response token ids")
    length = sample.get("response_length")
    row: dict[str, Any] = {
        "tokens": sample["tokens"],
        "response_length": 0 if length is None else length,
        "loss_mask": sample.get("loss_mask"),
    }
    if row["loss_mask"] is None:
        del row["loss_mask"]
    if sample.get("remove_sample"):  # slime keeps it in the batch without a loss
        row["loss_mask"] = [0] * row["response_length"]
    for name in carried:
        row[name] = sample.get(name)
        if name == "weight_versions":  # one a call; the newest tells how stale the sample is
            row[name] = str(row[name][-1]) if _is_set(sample, name) else None
        if name.endswith("log_probs") and not _is_set(sample, name):
            fail(where, f"there are no {name}, but other samples have them", "give them in all")
    return adapted(row, where)
