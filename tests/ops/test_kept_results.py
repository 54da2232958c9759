"""What a recomputed layer keeps: computed once, the same bits, gone with the graph."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import harts
from harts.data.synthetic import agent_batch
from harts.ops.attention import tree_attention, views
from harts.ops.kept_results import layer_runs_again
from harts.views.attention import AttentionView
from harts.views.tree import build_tree_view

Calls = list[int]


@pytest.fixture(scope="module")
def view() -> AttentionView:
    batch = agent_batch(seed=0, shape="agent_tree", compression=2.0, raw_tokens=400)
    (microbatch,) = harts.plan_step(batch, 400).microbatches()
    return build_tree_view(microbatch, device=torch.device("cpu")).attention


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Grows by one with every pass over the pairs."""
    made: Calls = []
    attend = views._attend_groups

    def counted(*args: Any) -> Any:
        made.append(1)
        return attend(*args)

    monkeypatch.setattr(views, "_attend_groups", counted)
    return made


def _layer(x: torch.Tensor, weight: torch.Tensor, view: AttentionView) -> torch.Tensor:
    """Two attention calls with different inputs, so that their order counts."""
    for step in (1.0, 2.0):
        q, k, v = (x @ weight).view(len(x), 3, 2, 8).unbind(1)
        x = x + step * tree_attention(q, k, v, view=view, scale=0.3).flatten(1)
    return x.tanh()


def _leaves(view: AttentionView) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((view.end.numel(), 16), (16, 48))
    x, weight = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return x.requires_grad_(), weight.requires_grad_()


def _kept(x: torch.Tensor, weight: torch.Tensor, view: AttentionView) -> torch.Tensor:
    output: torch.Tensor = checkpoint(
        _layer, x, weight, view, use_reentrant=False, context_fn=harts.keep_attention
    )
    return output


def test_attention_runs_once_and_no_bit_changes(view: AttentionView, calls: Calls) -> None:
    leaves = _leaves(view)
    want = torch.autograd.grad(_layer(*leaves, view).square().sum(), leaves)
    calls.clear()
    loss = _kept(*leaves, view).square().sum()
    for _ in range(2):  # a graph may run backward twice
        got = torch.autograd.grad(loss, leaves, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert len(calls) == 2


def test_what_is_kept_goes_with_the_graph_and_needs_no_collector(view: AttentionView) -> None:
    leaves, made = _leaves(view), []

    def contexts() -> tuple[Any, Any]:
        both = harts.keep_attention()
        made.extend(weakref.ref(context) for context in both)
        return both

    gc.collect()
    gc.disable()
    try:
        output = checkpoint(_layer, *leaves, view, use_reentrant=False, context_fn=contexts)
        loss = output.sum()
        assert made[1]() is not None
        loss.backward()
        del output, loss
        assert all(context() is None for context in made)
    finally:
        gc.enable()


def test_layers_and_threads_do_not_meet(view: AttentionView, calls: Calls) -> None:
    x, weight = _leaves(view)
    want = torch.autograd.grad(_layer(_layer(x, weight, view), weight, view).sum(), (x, weight))
    calls.clear()
    loss = _kept(_kept(x, weight, view), weight, view).sum()
    assert not layer_runs_again()
    got: list[torch.Tensor] = []
    backward = threading.Thread(target=lambda: got.extend(torch.autograd.grad(loss, (x, weight))))
    with harts.keep_attention()[0]:  # as if this thread were in another layer's first pass
        assert layer_runs_again()
        backward.start()
        _layer(x, weight, view)
        backward.join()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert len(calls) == 6
