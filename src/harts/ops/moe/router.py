"""Router on GPU: float32 logits of bfloat16 rows without a float32 copy, and the choice.

A float32 weight is exactly the sum of three bfloat16 terms, and the product of two bfloat16 is
exact in float32. So hidden @ [low; mid; high]^T, one bfloat16 product with float32 output, has the
products of the float32 product of transformers; what differs is the order of the sums.

At C = 65,536, D = 1,536, E = 128: forward 77 GFLOP, reads 0.2 GB and writes 0.1 GB; the cast and
the float32 product that it replaces move 1 GB and take 26 GFLOP without tensor cores. Backward
twice that product: its rows' gradient needs two terms on each side (hh + hm + mh; what is left
out is below 2^-16 of the result, which is rounded to 2^-9), its weight's gradient three on one.

Legend: C rows, D hidden width, E experts, K experts a row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from harts.errors import ConfigError
from harts.ops.moe.router_kernels import (
    choice_gradient,
    choose_by_sigmoid,
    choose_by_softmax,
    split_terms,
)


def router_logits(hidden_CD: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
    """(C, E) float32, of bfloat16 or float32 rows and a weight of either dtype."""
    for name, tensor in (("hidden", hidden_CD), ("weight", weight_ED)):
        if tensor.dtype not in (torch.bfloat16, torch.float32):
            raise ConfigError(
                f"router_logits: impl 'fused' takes bfloat16 or float32, {name} is {tensor.dtype}"
            )
    weight_ED = weight_ED.float()
    if hidden_CD.dtype == torch.float32:
        with torch.autocast(hidden_CD.device.type, enabled=False):
            return F.linear(hidden_CD, weight_ED)
    logits: torch.Tensor = _ExactLogits.apply(hidden_CD, weight_ED)
    return logits


def sigmoid_top_k(
    logits_CE: torch.Tensor,
    bias_E: torch.Tensor,
    *,
    top_k: int,
    num_groups: int,
    kept_groups: int,
    normalise: bool,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (C, K) float32 and indices (C, K) int64."""
    options = dict(
        top_k=top_k,
        num_groups=num_groups,
        kept_groups=kept_groups,
        normalise=normalise,
        scaling=scaling,
    )
    weights, indices = _TopK.apply(logits_CE, bias_E, options)
    return weights, indices


def softmax_top_k(
    logits_CE: torch.Tensor, *, top_k: int, normalise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (C, K) in the dtype of the logits and indices (C, K) int64."""
    weights, indices = _TopK.apply(logits_CE, None, dict(top_k=top_k, normalise=normalise))
    return weights, indices


class _ExactLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        hidden, weight = hidden.contiguous(), weight.contiguous()
        ctx.save_for_backward(hidden, weight)
        num_experts = weight.shape[0]
        low_mid_high = _weight_terms(weight, hidden.dtype)[: 3 * num_experts]
        products = _mm_float32(hidden, low_mid_high.t())
        low, mid, high = products.split(num_experts, dim=1)
        logits: torch.Tensor = (low + mid).add_(high)
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logits: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        num_rows, num_experts = d_logits.shape
        # columns low, high, mid, high
        terms = hidden.new_empty(num_rows, 4 * num_experts)
        split_terms(
            d_logits.contiguous(),
            terms,
            term_stride=num_experts,
            row_stride=4 * num_experts,
            mid_place=2,
        )
        d_hidden = d_weight = None
        if ctx.needs_input_grad[0]:
            # high, mid, high against mid, high, high
            d_hidden = terms[:, num_experts:] @ _weight_terms(weight, hidden.dtype)[num_experts:]
        if ctx.needs_input_grad[1]:
            products = _mm_float32(terms[:, : 3 * num_experts].t(), hidden)
            low, high, mid = products.split(num_experts)
            d_weight = (low + mid).add_(high)
        return d_hidden, d_weight


def _weight_terms(weight_ED: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(4 E, D): low, mid, high, high."""
    num_experts, width = weight_ED.shape
    terms = weight_ED.new_empty(4 * num_experts, width, dtype=dtype)
    split_terms(weight_ED, terms, term_stride=num_experts * width, row_stride=width, mid_place=1)
    return terms


def _mm_float32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, b, out_dtype=torch.float32)


class _TopK(torch.autograd.Function):
    """Sigmoid with a bias, softmax without one."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, bias: torch.Tensor | None, options: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits.contiguous()
        if bias is None:
            weights, indices = choose_by_softmax(logits, **options)
        else:
            weights, indices = choose_by_sigmoid(logits, bias.contiguous(), **options)
        ctx.save_for_backward(logits, indices)
        ctx.mark_non_differentiable(indices)
        ctx.softmax = bias is None
        ctx.normalise, ctx.scaling = options["normalise"], options.get("scaling", 1.0)
        return weights, indices

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_weights: torch.Tensor, _: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        logits, indices = ctx.saved_tensors
        d_logits = choice_gradient(
            logits,
            indices,
            d_weights.contiguous(),
            softmax=ctx.softmax,
            normalise=ctx.normalise,
            scaling=ctx.scaling,
        )
        return d_logits, None, None
