"""Causal depthwise convolution in which the history of a row is its true ancestors.

Source: section 3.4 "Round-wise execution": the context of a bounded local operator is built
from ancestor rows, not from replay or from the packed neighbour.
"""

from __future__ import annotations

from typing import Literal

import torch

from harts.errors import ConfigError, HartsError
from harts.ops.conv.reference import causal_conv_reference
from harts.views.conv import ConvView


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    view: ConvView,
    activation: Literal["silu"] | None,
) -> torch.Tensor:
    """y[c] = activation(bias + sum over t of weight[:, t] * x[ancestor width - 1 - t above c]).

    x: (C, D) compact rows. weight: (D, view.width), the last tap on the row itself. bias: (D,)
    or None. Ancestors before the root count as zero. Returns (C, D) in x's dtype; computed in
    the widest dtype given, float32 at least. Differentiable once in x, weight and bias, with the
    same bits every time on CPU. O(C width D) time, O(C D) memory.
    Raises ConfigError for an unknown activation, HartsError for shapes that do not fit.
    """
    if activation not in ("silu", None):
        raise ConfigError(f"causal_conv: activation is {activation!r}, want 'silu' or None")
    num_rows = view.extended.own.shape[0]
    shapes = f"x {tuple(x.shape)}, weight {tuple(weight.shape)}"
    if x.ndim != 2 or x.shape[0] != num_rows:
        raise HartsError(f"causal_conv: {shapes}; want x of ({num_rows} compact rows, channels)")
    if tuple(weight.shape) != (x.shape[1], view.width):
        raise HartsError(
            f"causal_conv: {shapes}; want weight of ({x.shape[1]} channels, width {view.width})"
        )
    if bias is not None and tuple(bias.shape) != (x.shape[1],):
        raise HartsError(f"causal_conv: {shapes}, bias {tuple(bias.shape)}; want one a channel")
    return causal_conv_reference(x, weight, bias, view, activation)
