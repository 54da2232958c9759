"""The parts that all linear-attention layers share.

A layer runs on the packed rows of `LinearView`: chains one after another, each with its replay in
front. It gathers its input into them once and takes its own rows out of its last projection, so
that between the two it is an ordinary packed layer; only convolution and core know the tree.

Legend: C compact rows, P packed rows, H key heads, G value heads, K key width, V value width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from harts.models.tree_run import TreeRun
from harts.ops.conv import causal_conv
from harts.ops.fused_checks import Implementation
from harts.ops.gather import gather_rows, own_rows
from harts.ops.kept_results import layer_runs_again
from harts.ops.linear_attention import KdaGate, chunk_kda


def pack(hidden_states: torch.Tensor, tree: TreeRun) -> torch.Tensor:
    """(1, C, D) -> (P, D)."""
    packed = tree.view.linear.packed
    return gather_rows(hidden_states.squeeze(0), packed, impl=_row_gathers(tree))


def unpack(output: torch.Tensor, tree: TreeRun) -> torch.Tensor:
    """(P, D) -> (1, C, D): the rows at their own places; replay has no output."""
    return own_rows(output, tree.view.linear.packed, impl=_row_gathers(tree))[None]


def _row_gathers(tree: TreeRun) -> Implementation:
    return "fused" if tree.kernels.token_wise == "fused" else "reference"


def convolve(
    streams: Sequence[torch.Tensor],
    conv1d: nn.Conv1d,
    activation: Any,
    tree: TreeRun,
    *,
    unit_widths: Sequence[int | None],
) -> list[torch.Tensor]:
    """One depthwise causal convolution over several streams (P, D_i), whose channels it joins.

    unit_widths: for each stream the width of heads that are scaled to length one, or None.
    """
    view = tree.view.conv[conv1d.kernel_size[0]]
    widths = [stream.shape[1] for stream in streams]
    taps = conv1d.weight.squeeze(1).split(widths)
    biases = [None] * len(widths) if conv1d.bias is None else conv1d.bias.split(widths)
    return [
        causal_conv(
            stream,
            weight,
            bias,
            view=view,
            activation=activation,
            unit_width=unit_width,
            impl=tree.kernels.convolution,
        )
        for stream, weight, bias, unit_width in zip(streams, taps, biases, unit_widths, strict=True)
    ]


def linear_core(
    streams: Sequence[torch.Tensor],
    conv1d: nn.Conv1d,
    activation: Any,
    log_decay_PGK: torch.Tensor,
    beta_PG: torch.Tensor,
    tree: TreeRun,
    *,
    key_width: int,
    value_width: int,
    gate: KdaGate | None = None,
) -> torch.Tensor:
    """Convolution and (gated) delta rule over packed rows, (P, G, V).

    streams: projected queries and keys (P, H K) and values (P, G V); queries and keys are scaled
    to length one behind the convolution. log_decay has last dimension 1 for a gate that is equal
    over the key width (GDN), and is the gate's input where there is a `gate`.
    """
    widths = (key_width, key_width, value_width)
    convolved = convolve(
        streams, conv1d, activation, tree, unit_widths=(key_width, key_width, None)
    )
    output, _ = chunk_kda(
        *(x.unflatten(1, (-1, width)) for x, width in zip(convolved, widths, strict=True)),
        log_decay_PGK,
        beta_PG,
        view=tree.view.linear,
        gate=gate,
        impl=tree.kernels.linear_attention,
        keep_intermediates=tree.recomputed or layer_runs_again(),
    )
    return output


def gated_delta_decay(step_PG: torch.Tensor, layer: Any) -> torch.Tensor:
    """Gated DeltaNet's log decay (P, G, 1) from its projected step sizes, float32 at least."""
    shifted = step_PG.float() + layer.dt_bias
    return (-layer.A_log.float().exp() * F.softplus(shifted))[..., None]
