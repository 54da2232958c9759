"""Chunk-local work once over all chains, with fla's kernels and own ones; states round by round.

Source: section 3.4 "Round-wise execution". Round by round is needed for states alone: everything
else in the operator reads one chunk. In backward every start state is known, so the recomputation
is one launch over all chains and only the reverse scan has rounds.

Legend: P packed rows, S slots, X external slots, N chains, H key heads, G value heads, K key
width, V value width, D width of the gate (K or 1).
"""

from __future__ import annotations

import torch

from harts.errors import ConfigError
from harts.ops.linear_attention import fla06
from harts.ops.linear_attention.gate import KdaGate, log_decay_of
from harts.ops.linear_attention.per_channel import PerChannelScan
from harts.ops.linear_attention.per_head import PerHeadScan
from harts.views.linear import LinearView


def chunk_kda_scan(
    q_PHK: torch.Tensor,
    k_PHK: torch.Tensor,
    v_PGV: torch.Tensor,
    log_decay_PGD: torch.Tensor,
    beta_PG: torch.Tensor,
    *,
    view: LinearView,
    scale: float,
    safe_gate: bool,
    initial_states_XGKV: torch.Tensor,
    gate: KdaGate | None = None,
    keep_intermediates: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (P, G, V) in v's dtype and produced states (S - X, G, K, V) in float32.

    bfloat16, float16 or float32; matrix products take operands of that dtype (float32: tf32) and
    accumulate in float32, states between chunks stay float32. Deterministic, forward and backward.
    A gate of width 1 (Gated DeltaNet) has kernels of its own.
    Kept for backward, per row and value head: the inputs, the gate (4 D bytes) and two rows of a
    chunk's products (2 B values; one with D = 1); and the pool of S states. With
    keep_intermediates also 3 K + V values a row (K + V with D = 1) and every chunk's start state,
    which backward then need not compute again. With a `gate`, log_decay is its input: for D = K
    one kernel makes the decay and sums it.
    Raises ConfigError where fla or these kernels cannot run: see fla06, and K not a power of two
    from 16 to 128, or V not a multiple of 16.
    """
    tensors = {"q": q_PHK, "k": k_PHK, "v": v_PGV, "log_decay": log_decay_PGD, "beta": beta_PG}
    tensors["initial_states"] = initial_states_XGKV
    fla06.check_limits("scan", tensors, view, max_key_width=128)
    key_width, value_width = q_PHK.shape[2], v_PGV.shape[2]
    if key_width not in (16, 32, 64, 128) or value_width % 16 != 0:
        raise ConfigError(
            "chunk_kda: impl 'scan' needs a key width of 16, 32, 64 or 128 and a value width that "
            f"is a multiple of 16, got {key_width} and {value_width}"
        )
    per_head = log_decay_PGD.shape[2] == 1
    if per_head and gate is not None:
        log_decay_PGD, gate = log_decay_of(log_decay_PGD, gate), None
    inputs = (q_PHK, k_PHK, v_PGV, log_decay_PGD, beta_PG, initial_states_XGKV)
    with torch.cuda.device(q_PHK.device):
        if per_head:
            output, states = PerHeadScan.apply(*inputs, view, scale, keep_intermediates)
        else:
            learned = (None, None) if gate is None else (gate.log_rate, gate.offset)
            bound = None if gate is None else gate.lower_bound
            output, states = PerChannelScan.apply(
                *inputs, *learned, view, scale, safe_gate, bound, keep_intermediates
            )
    return output, states
