"""Chunk-local backward of the delta rule in one launch, for both widths of the gate.

Legend: P packed rows, N chunks, H key heads, G value heads, K key width, V value width, D width of
the gate (K or none), B rows of a chunk; g is the log2 decay summed within each chunk.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from harts.ops.linear_attention.rows_backward_kernel import rows_backward_kernel
from harts.views.linear import LinearView

_BLOCK_K, _BLOCK_V, _BLOCK_V_OF_FLOAT32 = 64, 64, 16
_WARPS_PER_HEAD, _WARPS_PER_CHANNEL = 4, 8
"""The fastest of a sweep on H200 (16 and 32 heads of 128, 66,156 rows, bfloat16), and right: on
Hopper Triton 3.6 gives wrong results, or reads outside shared memory, for blocks of 16 and 32 key
channels with 4 warps, and for float32 with one decay a head and 8. Narrower heads get channels of
zeros."""
_STAGES = 1
"""No pipelining: on Hopper Triton 3.6 keeps one buffer too few for a tile that an asynchronous
matrix product and registers both read (d_end here), and the next copy overwrites it early."""


def rows_backward(
    q_PHK: torch.Tensor,
    k_PHK: torch.Tensor,
    v_PGV: torch.Tensor,
    v_new_PGV: torch.Tensor,
    gate_PGD: torch.Tensor,
    beta_PG: torch.Tensor,
    T_PGB: torch.Tensor,
    states_NGKV: torch.Tensor,
    d_output_PGV: torch.Tensor,
    d_end_NGKV: torch.Tensor,
    d_v_new_PGV: torch.Tensor,
    view: LinearView,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q and k for each value head (P, G, K) and of v (P, G, V) in their dtypes; of
    beta (P, G) and of the summed decay (P, G, D), which is a natural logarithm here, in float32.

    gate: (P, G); or (P, G, K) with decays of at least e^-5 a row, not in float16. T: the inverse
    that `rows_backward_kernel` defines, zero above the diagonal. states: at the start of every
    chunk. d_end: of the state after it. d_v_new: complete. In half precision d_q and d_k are
    rounded for each value head, before the caller sums those of a key head, as fla does.
    """
    num_rows, num_heads, value_width = v_PGV.shape
    key_heads, key_width = q_PHK.shape[1:]
    per_head = gate_PGD.ndim == 2
    width = max(key_width, _BLOCK_K)
    if key_width < width:
        zeros = (0, width - key_width)
        q_PHK, k_PHK = F.pad(q_PHK, zeros), F.pad(k_PHK, zeros)
        gate_PGD = gate_PGD if per_head else F.pad(gate_PGD, zeros)
        states_NGKV, d_end_NGKV = (F.pad(x, (0, 0, *zeros)) for x in (states_NGKV, d_end_NGKV))
    block_v = _BLOCK_V if q_PHK.dtype.itemsize == 2 else _BLOCK_V_OF_FLOAT32
    parts = width // _BLOCK_K
    d_q = q_PHK.new_empty(num_rows, num_heads, width)
    d_k, d_v = torch.empty_like(d_q), torch.empty_like(v_PGV)
    d_beta = gate_PGD.new_empty(num_rows, num_heads, parts)
    d_gate = torch.empty_like(d_beta if per_head else gate_PGD)
    rows_backward_kernel[(len(view.chunk_indices) * parts, num_heads)](
        q_PHK,
        k_PHK,
        v_PGV,
        v_new_PGV,
        gate_PGD,
        beta_PG,
        T_PGB,
        states_NGKV,
        d_output_PGV,
        d_end_NGKV,
        d_v_new_PGV,
        d_q,
        d_k,
        d_v,
        d_beta,
        d_gate,
        view.cu_seqlens,
        view.chunk_indices,
        scale,
        PER_HEAD=per_head,
        H=key_heads,
        G=num_heads,
        K=width,
        V=value_width,
        B=view.chunk_size,
        BK=_BLOCK_K,
        BV=min(block_v, value_width & -value_width),
        num_warps=_WARPS_PER_HEAD if per_head else _WARPS_PER_CHANNEL,
        num_stages=_STAGES,
    )
    d_gate = d_gate.sum(2) if per_head else d_gate[..., :key_width]
    return d_q[..., :key_width], d_k[..., :key_width], d_v, d_beta.sum(2), d_gate
