"""Everything the layers of a model need to know about one microbatch, on its device.

It travels as an argument (`tree=view`), never as a global: recomputation and pipeline schedules
run layers later and in other threads.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch

from harts.plan.microbatch import MicroBatch
from harts.views.attention import AttentionView, build_attention_view
from harts.views.chains import chains_of
from harts.views.conv import ConvView, build_conv_view
from harts.views.gather import on_device
from harts.views.linear import LinearView, build_linear_view
from harts.views.logprobs import LogProbView, build_logprob_view
from harts.views.packing import pack_chains


@dataclass(frozen=True)
class TreeView:
    """tokens, positions, multiplicity: int64 (C,). conv: one view for each kernel width."""

    tokens: torch.Tensor
    positions: torch.Tensor
    multiplicity: torch.Tensor
    attention: AttentionView
    linear: LinearView
    conv: dict[int, ConvView]
    logprobs: LogProbView

    @property
    def num_rows(self) -> int:
        """Compact rows C."""
        return self.tokens.numel()


def build_tree_view(
    microbatch: MicroBatch, *, conv_widths: Collection[int] = (), device: torch.device
) -> TreeView:
    """Turn a microbatch into index tensors. Host work O(rows); one copy a tensor."""
    layout, chains = microbatch.layout, chains_of(microbatch)
    packing = pack_chains(microbatch, chains)
    return TreeView(
        tokens=on_device(layout.tokens.astype(np.int64), device),
        positions=on_device(layout.positions.astype(np.int64), device),
        multiplicity=on_device(layout.multiplicity, device),
        attention=build_attention_view(microbatch, chains, device),
        linear=build_linear_view(microbatch, packing, device),
        conv={w: build_conv_view(packing, chains, w, device) for w in conv_widths},
        logprobs=build_logprob_view(microbatch, device),
    )
