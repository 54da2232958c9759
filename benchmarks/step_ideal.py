"""The speed-up that the saved rows, pairs and head rows would give: the step benchmark's ideal.

The ideal speed-up is T / (A / pair ratio + H / head ratio + R / row ratio): of the expanded time T
the attention core A shrinks by the visible (query, key) pairs, the LM head H by the head rows, the
rest R by the rows. A and H are measured alone, on the expanded microbatches' own shapes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from gpu_timing import alternate

from harts.models.tree_model import TreeModel
from harts.ops.attention import tree_attention
from harts.ops.cross_entropy import mapped_log_probs
from harts.views.tree import TreeView

Views = list[TreeView]


def ideal_metrics(
    model: TreeModel,
    tree: Views,
    expanded: Views,
    *,
    expanded_seconds: float,
    row_ratio: float,
    attention_forwards: int,
) -> dict[str, float]:
    """The ideal speed-up and what it is made of.

    attention_forwards: of one step, 2 where layers are recomputed with their attention.
    """
    pair_ratio = _pairs(expanded) / _pairs(tree)
    head_ratio = _head_rows(expanded) / _head_rows(tree)
    attention = _attention_seconds(model, expanded, attention_forwards)
    head = _head_seconds(model, expanded)
    rest = expanded_seconds - attention - head
    ideal = expanded_seconds / (attention / pair_ratio + head / head_ratio + rest / row_ratio)
    return {
        "ideal": ideal,
        "pair_ratio": pair_ratio,
        "head_ratio": head_ratio,
        "attention_share_of_expanded": attention / expanded_seconds,
        "head_share_of_expanded": head / expanded_seconds,
    }


def seconds_of(run: Callable[[], object], samples: int = 3) -> list[float]:
    """Of each call, after one to warm up."""
    return [milliseconds / 1e3 for milliseconds in alternate({"run": run}, samples)["run"]]


def _pairs(views: Views) -> int:
    return sum(
        int((view.attention.end.long() - torch.arange(view.num_rows, device="cuda")).sum())
        for view in views
    )


def _head_rows(views: Views) -> int:
    return sum(view.logprobs.compact_row.numel() for view in views)


def _attention_seconds(model: TreeModel, views: Views, forwards: int) -> float:
    """The attention core of a step: all layers."""
    config = model._causal_lm.config
    layers = sum(model.family.kind_of(m) in model.family.attention for m in model.model.modules())
    key_width, value_width = _head_widths(config)
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    total = 0.0
    for view in views:
        q, k, v, d_out = (
            torch.randn(view.num_rows, n, width, device="cuda", dtype=torch.bfloat16)
            for n, width in (
                (heads, key_width),
                (key_heads, key_width),
                (key_heads, value_width),
                (heads, value_width),
            )
        )
        leaves = [x.requires_grad_() for x in (q, k, v)]

        def run(
            leaves: list[torch.Tensor] = leaves,
            d_out: torch.Tensor = d_out,
            view: TreeView = view,
        ) -> None:
            for _ in range(forwards):
                out = tree_attention(
                    *leaves,
                    view=view.attention,
                    scale=key_width**-0.5,
                    impl=model.kernels.attention,
                    deterministic=model.kernels.deterministic,
                )
            torch.autograd.grad(out, leaves, d_out)

        total += layers * statistics.median(seconds_of(run))
    return total


def _head_widths(config: Any) -> tuple[int, int]:
    """Key and value width of an attention head."""
    key_width = getattr(config, "qk_head_dim", None)
    if key_width is None and hasattr(config, "qk_nope_head_dim"):
        key_width = config.qk_nope_head_dim + config.qk_rope_head_dim
    key_width = key_width or config.head_dim
    return key_width, getattr(config, "v_head_dim", None) or key_width


def _head_seconds(model: TreeModel, views: Views) -> float:
    """LM head, log-probs and their backward."""
    weight = model._causal_lm.get_output_embeddings().weight
    total = 0.0
    for view in views:
        hidden = torch.randn(
            view.num_rows, weight.shape[1], device="cuda", dtype=weight.dtype
        ).requires_grad_()

        def run(hidden: torch.Tensor = hidden, view: TreeView = view) -> None:
            log_probs, _ = mapped_log_probs(
                hidden, weight, view=view.logprobs, impl=model.kernels.log_probs
            )
            torch.autograd.grad(log_probs.sum(), (hidden, weight))

        total += statistics.median(seconds_of(run))
    return total
