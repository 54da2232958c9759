"""Results of an operator that outlive its layer's recomputation.

A layer that runs again in backward repeats its forward pass; torch.utils.checkpoint lets two
contexts surround the two passes, and an operator that wraps its work in `kept_result` does it in
the first only. That pays where a result is small and dear: attention at 65,536 rows costs a pass
over all visible pairs and returns a row's width.

The contexts are entered by the thread that runs the pass, so backward threads and pipeline
schedules do not meet. What is kept lives as long as the recorded graph.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from typing import Any

import torch

KEEPING = ("fa4", "views")
"""Implementations of tree attention whose results are kept."""

Tensors = tuple[torch.Tensor, ...]
_active: ContextVar[_Pass | None] = ContextVar("kept_results", default=None)


def keep_attention() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts for a checkpointed layer whose attention is not to run again in backward.

        hf_model.gradient_checkpointing_enable(
            {"use_reentrant": False, "context_fn": harts.keep_attention}
        )

    The `context_fn` of `torch.utils.checkpoint`: called once a layer and microbatch. Keeps, for
    each attention layer, H (2 V + 4) bytes a row in bfloat16 (H query heads, V value width); no bit
    of a deterministic step changes. The implementations in KEEPING take part, others run again.
    """
    kept: list[Tensors] = []
    return _First(kept), _Again(kept)


def kept_result(compute: Callable[[], Tensors]) -> Tensors:
    """compute(), or what the same call returned in the first pass; for use without gradients.

    Calls are matched by their order within the layer.
    """
    current = _active.get()
    return compute() if current is None else current.result(compute)


def layer_runs_again() -> bool:
    """Whether the current pass belongs to a layer with these contexts, first pass or second."""
    return _active.get() is not None


class _Pass(AbstractContextManager[None]):
    """One pass over a layer; may be entered again, as a graph may run backward twice."""

    def __init__(self, kept: list[Tensors]) -> None:
        self.kept = kept
        self._token: Token[_Pass | None] | None = None

    def __enter__(self) -> None:
        self._token = _active.set(self)

    def __exit__(self, *_: Any) -> None:
        assert self._token is not None
        _active.reset(self._token)

    def result(self, compute: Callable[[], Tensors]) -> Tensors:
        raise NotImplementedError


class _First(_Pass):
    def result(self, compute: Callable[[], Tensors]) -> Tensors:
        tensors = compute()
        # detached: the tensors themselves will point to the graph, which holds this list
        self.kept.append(tuple(x.detach() for x in tensors))
        return tensors


class _Again(_Pass):
    def __enter__(self) -> None:
        super().__enter__()
        self._next = 0

    def result(self, compute: Callable[[], Tensors]) -> Tensors:
        assert self._next < len(self.kept), "a recomputed layer attends more often than before"
        self._next += 1
        return tuple(x.detach() for x in self.kept[self._next - 1])
