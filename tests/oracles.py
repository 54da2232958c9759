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
    router_logits: list[list[torch.Tensor]]  # per trajectory, per MoE layer


def expanded_run(
    model: torch.nn.Module,
    input_ids: list[list[int]],
    loss_masks: list[list[bool]],
    temperature: list[list[float]] | None = None,
) -> Expanded:
    """Dense logits and log-softmax of every trajectory alone; differentiable."""
    log_probs, entropies, routers = [], [], []
    for i, (tokens, mask) in enumerate(zip(input_ids, loss_masks, strict=True)):
        ids = torch.tensor([tokens])
        output = model(input_ids=ids, use_cache=False, **_router_kwargs(model))
        logits = output.logits[0, :-1]
        if temperature is not None:
            logits = logits / torch.tensor(temperature[i][1:], dtype=logits.dtype)[:, None]
        logp = torch.log_softmax(logits, dim=-1)
        scored = torch.tensor(np.flatnonzero(np.asarray(mask[1:], bool)))
        log_probs.append(logp[scored, ids[0, 1:][scored]])
        entropies.append(-(logp.exp() * logp).sum(-1)[scored])
        routers.append(list(getattr(output, "router_logits", None) or []))
    return Expanded(torch.cat(log_probs), torch.cat(entropies), routers)


def _router_kwargs(model: torch.nn.Module) -> dict[str, bool]:
    return {"output_router_logits": True} if hasattr(model.config, "output_router_logits") else {}


def gradients(
    model: torch.nn.Module, loss: Callable[[], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Gradient of every parameter for one loss; None becomes zero."""
    model.zero_grad(set_to_none=True)
    loss().backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }
