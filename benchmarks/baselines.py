"""How a tree is computed without chains, rounds or interval attention, for comparison on a GPU.

"nodes": linear attention by one fla call for each fork-free segment, from its parent's end state.
"kv-views": FlashAttention-4 over a copy of each chain's keys and values, [ancestor runs, own rows],
causal from the lower right (the paper's own full attention, section 3.4).
Either takes the place of one operator of harts in an attached model; the rest stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch

from harts.ops.linear_attention.gate import KdaGate, log_decay_of
from harts.plan.microbatch import MicroBatch
from harts.views.attention import AttentionView
from harts.views.linear import LinearView
from harts.views.tree import TreeView

Baseline = Literal["nodes", "kv-views"]


@contextmanager
def baseline(name: Baseline, microbatches: Sequence[tuple[MicroBatch, TreeView]]) -> Iterator[None]:
    """Models whose kernels are "scan" and "fa4" run the baseline meanwhile."""
    if name == "kv-views":
        with mock.patch("harts.ops.attention.api.fa4_attention", kv_views_attention):
            yield
        return
    segments = {id(view.linear): microbatch for microbatch, view in microbatches}

    def chunk_kda(*rows: torch.Tensor, view: LinearView, **options: Any) -> Any:
        return node_by_node(*rows, microbatch=segments[id(view)], view=view, **options)

    with mock.patch("harts.models.linear_layers.chunk_kda", chunk_kda):
        yield


def node_by_node(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    microbatch: MicroBatch,
    view: LinearView,
    gate: KdaGate | None = None,
    safe_gate: bool = False,
    impl: str = "scan",
    keep_intermediates: bool = False,
) -> tuple[torch.Tensor, None]:
    """Packed rows as in `harts.ops.linear_attention.chunk_kda`; output of replay rows is zero.

    impl and keep_intermediates are taken, as a layer passes them, and say nothing here.
    """
    from harts.ops.linear_attention.fla06 import chunk_kda_packed

    if gate is not None:
        safe_gate = safe_gate or gate.is_bounded
        log_decay = log_decay_of(log_decay, gate)
    log_decay = log_decay.expand(-1, -1, q.shape[2])
    own = view.packed.own
    compact = [x.index_select(0, own)[None] for x in (q, k, v, log_decay, beta)]
    zero = q.new_zeros(1, v.shape[1], q.shape[2], v.shape[2], dtype=torch.float32)
    states: list[torch.Tensor] = []
    outputs: dict[int, torch.Tensor] = {}
    first, lengths = microbatch.layout.first_row.tolist(), microbatch.forest.length.tolist()
    for parent, row, length in zip(microbatch.forest.parent, first, lengths, strict=True):
        output, state = chunk_kda_packed(
            *(x[:, row : row + length] for x in compact),
            scale=q.shape[2] ** -0.5,
            safe_gate=safe_gate,
            initial_states=states[parent] if parent >= 0 else zero,
            lengths=[length],
        )
        states.append(state)
        outputs[row] = output[0]
    in_order = torch.cat([outputs[row] for row in sorted(outputs)])
    return v.new_zeros(v.shape).index_copy(0, own, in_order), None


@dataclass(frozen=True)
class _KeyViews:
    """keys: rows of every chain's keys, chain after chain. The rest as FlashAttention wants it."""

    keys: torch.Tensor
    cu_queries: torch.Tensor
    cu_keys: torch.Tensor
    max_queries: int
    max_keys: int


def kv_views_attention(
    q_CHD: torch.Tensor,
    k_CGD: torch.Tensor,
    v_CGV: torch.Tensor,
    view: AttentionView,
    scale: float,
    deterministic: bool,
) -> torch.Tensor:
    """(C, H, V). Copies of the keys and values: as many rows as all chains see."""
    from flash_attn.cute.interface import flash_attn_varlen_func

    views = view.once(_key_views)
    output: torch.Tensor
    output, *_ = flash_attn_varlen_func(
        q_CHD,
        k_CGD.index_select(0, views.keys),
        v_CGV.index_select(0, views.keys),
        cu_seqlens_q=views.cu_queries,
        cu_seqlens_k=views.cu_keys,
        max_seqlen_q=views.max_queries,
        max_seqlen_k=views.max_keys,
        softmax_scale=scale,
        causal=True,
        deterministic=deterministic,
    )
    return output


def _key_views(view: AttentionView) -> _KeyViews:
    runs = [[*chain.ancestors, (chain.start, chain.stop)] for chain in view.chains]
    queries = [chain.stop - chain.start for chain in view.chains]
    keys = [sum(stop - start for start, stop in of_chain) for of_chain in runs]
    device = view.end.device

    def offsets(lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)

    rows = torch.cat([torch.arange(*run) for of_chain in runs for run in of_chain])
    return _KeyViews(rows.to(device), offsets(queries), offsets(keys), max(queries), max(keys))
