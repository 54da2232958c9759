"""Oracles that share no code with harts: the unmodified model, one trajectory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F


def _wide(dtype: Any) -> Any:
    return torch.float64 if dtype is torch.float32 else dtype


@contextmanager
def float64_throughout() -> Iterator[None]:
    """Turn every cast to float32 into one to float64, forward and backward.

    transformers computes norms, gates and routers in float32 whatever the model's dtype; in here
    a float64 model is float64 throughout, tree and expanded run alike. Patches rather than a
    torch function mode: modes are off while checkpointing recomputes.
    """
    to, type_, softmax = torch.Tensor.to, torch.Tensor.type, F.softmax

    def wide_to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs = {k: _wide(v) for k, v in kwargs.items()}
        return to(self, *(_wide(a) for a in args), **kwargs)

    def wide_type(self: torch.Tensor, dtype: Any = None, **kwargs: Any) -> Any:
        return type_(self, **kwargs) if dtype is None else type_(self, _wide(dtype), **kwargs)

    def wide_softmax(*args: Any, dtype: Any = None, **kwargs: Any) -> torch.Tensor:
        return softmax(*args, dtype=_wide(dtype), **kwargs)

    with (
        patch.object(torch.Tensor, "float", lambda self: to(self, torch.float64)),
        patch.object(torch.Tensor, "to", wide_to),
        patch.object(torch.Tensor, "type", wide_type),
        patch.object(F, "softmax", wide_softmax),
    ):
        yield


@dataclass(frozen=True)
class Expanded:
    """What the unmodified model says: per scored position, trajectories in batch order."""

    log_probs: torch.Tensor
    entropy: torch.Tensor


def expanded_run(
    model: torch.nn.Module,
    input_ids: list[list[int]],
    loss_masks: list[list[bool]],
    temperature: list[list[float]] | None = None,
    rows_per_call: int = 1,
) -> Expanded:
    """Dense logits and log-softmax of every trajectory alone; differentiable.

    rows_per_call: trajectories of a padded batch. Padding is on the right, where no causal model
    looks; 1 means no padding at all.
    """
    by_length = sorted(range(len(input_ids)), key=lambda i: len(input_ids[i]))
    log_probs: dict[int, torch.Tensor] = {}
    entropies: dict[int, torch.Tensor] = {}
    for begin in range(0, len(by_length), rows_per_call):
        members = by_length[begin : begin + rows_per_call]
        width = max(len(input_ids[i]) for i in members)
        ids = torch.tensor([input_ids[i] + [0] * (width - len(input_ids[i])) for i in members])
        all_logits = model(input_ids=ids, use_cache=False).logits
        for i, logits in zip(members, all_logits, strict=True):
            targets = torch.tensor(input_ids[i][1:], dtype=torch.int64)
            logits = logits[: len(targets)]
            if temperature is not None:
                logits = logits / torch.tensor(temperature[i][1:], dtype=logits.dtype)[:, None]
            logp = torch.log_softmax(logits, dim=-1)
            scored = torch.tensor(np.flatnonzero(np.asarray(loss_masks[i][1:], bool)))
            log_probs[i] = logp[scored, targets[scored]]
            entropies[i] = -(logp.exp() * logp).sum(-1)[scored]
    places = range(len(input_ids))
    return Expanded(
        torch.cat([log_probs[i] for i in places]), torch.cat([entropies[i] for i in places])
    )


def gradients(model: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradient of every parameter for one loss; None becomes zero."""
    model.zero_grad(set_to_none=True)
    loss().backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }
