"""Causal depthwise convolution in which the history of a row is its true ancestors.

Source: section 3.4 "Round-wise execution": the context of a bounded local operator is built
from ancestor rows, not from replay or from the packed neighbour.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from harts.errors import ConfigError, HartsError
from harts.ops.conv.reference import causal_conv_reference
from harts.views.conv import ConvView

Implementation = Literal["reference", "fused"]


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    view: ConvView,
    activation: Literal["silu"] | None,
    unit_width: int | None = None,
    impl: Implementation = "reference",
) -> torch.Tensor:
    """y[p] = activation(bias + sum over t of weight[:, t] * x[ancestor width - 1 - t above p]).

    x: (P, D) packed rows. weight: (D, view.width), the last tap on the row itself. bias: (D,)
    or None. Ancestors before the root count as zero. unit_width: each run of that many channels
    (a head) is then scaled to length one, y / sqrt(sum of squares + 1e-6), as linear attention
    wants its queries and keys. Returns (P, D) in x's dtype; computed in the widest dtype given,
    float32 at least, and rounded once. Differentiable once in x, weight and bias, with the same
    bits every time. O(P width D) time, O(P D) memory.

    "reference" is plain PyTorch on any device. "fused" needs CUDA and Triton: one pass forward,
    two backward, and no copy of the rows that several chains read.
    Raises ConfigError for an unknown activation or impl and where an impl cannot run, HartsError
    for shapes that do not fit.
    """
    if activation not in ("silu", None):
        raise ConfigError(f"causal_conv: activation is {activation!r}, want 'silu' or None")
    num_rows = view.window.shape[0]
    shapes = f"x {tuple(x.shape)}, weight {tuple(weight.shape)}"
    if x.ndim != 2 or x.shape[0] != num_rows:
        raise HartsError(f"causal_conv: {shapes}; want x of ({num_rows} packed rows, channels)")
    if tuple(weight.shape) != (x.shape[1], view.width):
        raise HartsError(
            f"causal_conv: {shapes}; want weight of ({x.shape[1]} channels, width {view.width})"
        )
    if bias is not None and tuple(bias.shape) != (x.shape[1],):
        raise HartsError(f"causal_conv: {shapes}, bias {tuple(bias.shape)}; want one a channel")
    if unit_width is not None and (unit_width < 1 or x.shape[1] % unit_width != 0):
        raise HartsError(f"causal_conv: {shapes}; unit_width {unit_width} must divide the channels")
    if impl == "reference":
        return causal_conv_reference(x, weight, bias, view, activation, unit_width)
    if impl == "fused":
        if not x.is_cuda:
            raise ConfigError(f"causal_conv: impl 'fused' needs CUDA tensors, x is on {x.device}")
        from harts.ops.conv.fused import causal_conv_fused

        return causal_conv_fused(x, weight, bias, view, activation, unit_width)
    known = ", ".join(get_args(Implementation))
    raise ConfigError(f"causal_conv: impl is {impl!r}, want one of {known}")
