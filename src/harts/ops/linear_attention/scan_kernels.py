"""State scans over the chains of one round, forward and reverse, in Triton.

A program owns one chain, one value head and one block of value columns: it walks the chain's
chunks with the state in float32 registers. The arithmetic is fla's (chunk_gated_delta_rule_fwd_h
and bwd_dhu): operands of matrix products are rounded to the input dtype, nothing else is.

The gate is the log2 decay summed within each chunk. With a decay for each key channel, (P, G, K),
queries and keys come decayed, one row a value head. With one decay a head, (P, G), they come as
they are, (P, H, K), and what rows write is decayed instead.

Legend: P packed rows, N chains, NC chunks, S slots, X external slots, H key heads, G value heads,
K key width, V value width, D width of the gate (K or none), B rows of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harts.ops.needs_triton import tl, triton
from harts.views.linear import LinearView


@dataclass(frozen=True, kw_only=True)
class ScanLaunch:
    """How a scan is launched; the bits do not depend on it.

    block_v: value columns of a program. num_warps, num_stages: as in Triton.
    """

    block_v: int
    num_warps: int
    num_stages: int


# The fastest of a sweep on H200 (benchmarks/ops_linear.py --sweep): 16 heads x 128, 66,023 rows.
FORWARD = ScanLaunch(block_v=32, num_warps=4, num_stages=2)
RECOMPUTE = ScanLaunch(block_v=64, num_warps=4, num_stages=3)
REVERSE = ScanLaunch(block_v=32, num_warps=4, num_stages=1)
REVERSE_PER_HEAD = ScanLaunch(block_v=32, num_warps=4, num_stages=2)
SINGLE_PRECISION = ScanLaunch(block_v=32, num_warps=4, num_stages=1)
"""float32 rows take twice the shared memory: no pipelining."""


def new_pool(initial_states_XGKV: torch.Tensor, view: LinearView) -> torch.Tensor:
    """(S, G, K, V) in float32, of which the external slots are filled."""
    state_shape = initial_states_XGKV.shape[1:]
    pool = initial_states_XGKV.new_empty(view.num_slots, *state_shape, dtype=torch.float32)
    pool[: view.num_external] = initial_states_XGKV
    return pool


def scan_states(
    k_PHK: torch.Tensor,
    w_PGK: torch.Tensor,
    u_PGV: torch.Tensor,
    gate_PGD: torch.Tensor,
    pool_SGKV: torch.Tensor,
    view: LinearView,
    *,
    fill_pool: bool,
    launch: ScanLaunch | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """State at the start of every chunk (NC, G, K, V) and what rows write, v_new (P, G, V).

    k: decayed to the chunk's end, with H = G, where the gate has a width; else as it is.
    fill_pool: round by round, storing the states that later rounds start from into their slots
    of the float32 pool. Otherwise the pool holds them already: one launch for all chains.
    """
    num_heads, key_width = w_PGK.shape[1:]
    value_width = u_PGV.shape[2]
    states = w_PGK.new_empty(len(view.chunk_indices), num_heads, key_width, value_width)
    v_new = torch.empty_like(u_PGV)
    launch = launch or _launch_for(w_PGK, FORWARD if fill_pool else RECOMPUTE)
    block_v = _block_v(launch, value_width)
    for first, stop in _rounds(view) if fill_pool else [(0, len(view.init_slot))]:
        _scan_states_kernel[((stop - first) * num_heads * (value_width // block_v),)](
            k_PHK,
            w_PGK,
            u_PGV,
            gate_PGD,
            states,
            v_new,
            pool_SGKV,
            view.cu_seqlens,
            view.chunk_offsets,
            view.init_slot,
            view.store_slot,
            first,
            H=k_PHK.shape[1],
            G=num_heads,
            K=key_width,
            V=value_width,
            B=view.chunk_size,
            BV=block_v,
            PER_HEAD=gate_PGD.ndim == 2,
            FILL_POOL=fill_pool,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )
    return states, v_new


def scan_state_gradients(
    q_PHK: torch.Tensor,
    k_PHK: torch.Tensor,
    w_PGK: torch.Tensor,
    gate_PGD: torch.Tensor,
    d_output_PGV: torch.Tensor,
    d_v_new_PGV: torch.Tensor,
    d_states_SGKV: torch.Tensor | None,
    view: LinearView,
    *,
    scale: float,
    launch: ScanLaunch | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rounds in reverse. d_v_new_PGV holds what comes from within each chunk.

    q, k: decayed from the chunk's start and to its end, with H = G, where the gate has a width;
    else as they are.
    d_states_SGKV: gradients from outside of the produced slots, float32, or None.
    Returns the gradient of the state after every chunk (NC, G, K, V), of v_new (P, G, V), and of
    each chain's start state (N, G, K, V) in float32. A slot receives its consumers' gradients in
    ascending order of chains, then the one from outside: the same bits every time.
    """
    num_heads, key_width = w_PGK.shape[1:]
    value_width = d_output_PGV.shape[2]
    d_end = w_PGK.new_empty(len(view.chunk_indices), num_heads, key_width, value_width)
    d_v_new = torch.empty_like(d_v_new_PGV)
    num_chains = len(view.init_slot)
    d_start = w_PGK.new_empty(num_chains, num_heads, key_width, value_width, dtype=torch.float32)
    reverse = REVERSE_PER_HEAD if gate_PGD.ndim == 2 else REVERSE
    launch = launch or _launch_for(w_PGK, reverse)
    block_v = _block_v(launch, value_width)
    for first, stop in reversed(_rounds(view)):
        _scan_state_gradients_kernel[((stop - first) * num_heads * (value_width // block_v),)](
            q_PHK,
            k_PHK,
            w_PGK,
            gate_PGD,
            d_output_PGV,
            d_v_new_PGV,
            d_end,
            d_v_new,
            d_start,
            d_start if d_states_SGKV is None else d_states_SGKV,
            view.cu_seqlens,
            view.chunk_offsets,
            view.store_slot,
            view.consumer_ptr,
            view.consumers,
            scale,
            first,
            view.num_external,
            H=k_PHK.shape[1],
            G=num_heads,
            K=key_width,
            V=value_width,
            B=view.chunk_size,
            BV=block_v,
            PER_HEAD=gate_PGD.ndim == 2,
            FROM_OUTSIDE=d_states_SGKV is not None,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )
    return d_end, d_v_new, d_start


def external_state_gradients(d_start_NGKV: torch.Tensor, view: LinearView) -> torch.Tensor:
    """Gradients of the external slots (num_external, G, K, V), float32: their consumers' sum."""
    state_shape = d_start_NGKV.shape[1:]
    gradients = d_start_NGKV.new_empty(view.num_external, *state_shape)
    size, block = state_shape.numel(), 1024
    if view.num_external:
        _sum_consumers_kernel[(view.num_external, triton.cdiv(size, block))](
            d_start_NGKV,
            gradients,
            view.consumer_ptr,
            view.consumers,
            SIZE=size,
            BLOCK=block,
        )
    return gradients


def _rounds(view: LinearView) -> list[tuple[int, int]]:
    """Chains [first, stop) of each round that has any."""
    bounds = zip(view.round_ptr[:-1], view.round_ptr[1:], strict=True)
    return [(first, stop) for first, stop in bounds if stop > first]


def _launch_for(rows: torch.Tensor, half: ScanLaunch) -> ScanLaunch:
    return SINGLE_PRECISION if rows.dtype == torch.float32 else half


def _block_v(launch: ScanLaunch, value_width: int) -> int:
    """The launch's block, or the largest power of two that divides the value width."""
    return min(launch.block_v, value_width & -value_width)


@triton.jit(do_not_specialize=["first_chain"])
def _scan_states_kernel(
    k,
    w,
    u,
    gate,
    states,
    v_new,
    pool,
    cu_seqlens,
    chunk_offsets,
    init_slot,
    store_slot,
    first_chain,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    B: tl.constexpr,
    BV: tl.constexpr,
    PER_HEAD: tl.constexpr,
    FILL_POOL: tl.constexpr,
):
    """S <- decay S + k_to_end^T (u - w S), chunk by chunk."""
    num_blocks: tl.constexpr = V // BV
    program = tl.program_id(0)
    block = program % num_blocks
    head = (program // num_blocks) % G
    chain = (first_chain + program // (num_blocks * G)).to(tl.int64)
    row_begin = tl.load(cu_seqlens + chain)
    num_rows = (tl.load(cu_seqlens + chain + 1) - row_begin).to(tl.int32)
    first_chunk = tl.load(chunk_offsets + chain)
    stores = store_slot + first_chunk + chain
    o_k = tl.arange(0, K)
    o_v = block * BV + tl.arange(0, BV)
    in_state = head * (K * V) + o_k[:, None] * V + o_v[None, :]

    b_state = tl.zeros([K, BV], dtype=tl.float32)
    slot = tl.load(init_slot + chain).to(tl.int64)
    if slot >= 0:
        b_state += tl.load(pool + slot * (G * K * V) + in_state)
    num_chunks = tl.cdiv(num_rows, B)
    for i in range(num_chunks):
        chunk = first_chunk + i
        tl.store(states + chunk * (G * K * V) + in_state, b_state.to(states.dtype.element_ty))
        o_t = i * B + tl.arange(0, B)
        m_t = o_t < num_rows
        rows = (row_begin + o_t) * G + head
        b_w = tl.load(w + rows[:, None] * K + o_k[None, :], mask=m_t[:, None], other=0.0)
        b_v = tl.dot(b_w, b_state.to(b_w.dtype))
        at_v = rows[:, None] * V + o_v[None, :]
        b_v = tl.load(u + at_v, mask=m_t[:, None], other=0.0) - b_v
        tl.store(v_new + at_v, b_v.to(v_new.dtype.element_ty), mask=m_t[:, None])
        last = (row_begin + tl.minimum((i + 1) * B, num_rows) - 1) * G + head
        if PER_HEAD:
            b_decay = tl.load(gate + last)
            b_gate = tl.load(gate + rows, mask=m_t, other=0.0)
            b_v *= tl.where(m_t, tl.exp2(b_decay - b_gate), 0.0)[:, None]
            b_state *= tl.exp2(b_decay)
        else:
            b_state *= tl.exp2(tl.load(gate + last * K + o_k))[:, None]
        key_rows = (row_begin + o_t) * H + head // (G // H)
        b_k = tl.load(k + key_rows[None, :] * K + o_k[:, None], mask=m_t[None, :], other=0.0)
        b_state = tl.dot(b_k, b_v.to(b_k.dtype), b_state)
        if FILL_POOL:
            slot = tl.load(stores + i + 1).to(tl.int64)
            if slot >= 0:
                tl.store(pool + slot * (G * K * V) + in_state, b_state)


@triton.jit(do_not_specialize=["first_chain", "num_external"])
def _scan_state_gradients_kernel(
    q,
    k,
    w,
    gate,
    d_output,
    d_v_new_within,
    d_end,
    d_v_new,
    d_start,
    d_slots,
    cu_seqlens,
    chunk_offsets,
    store_slot,
    consumer_ptr,
    consumers,
    scale,
    first_chain,
    num_external,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    B: tl.constexpr,
    BV: tl.constexpr,
    PER_HEAD: tl.constexpr,
    FROM_OUTSIDE: tl.constexpr,
):
    """dv_new += k_to_end dS;   dS <- decay dS + scale q_from_start^T do - w^T dv_new."""
    num_blocks: tl.constexpr = V // BV
    program = tl.program_id(0)
    block = program % num_blocks
    head = (program // num_blocks) % G
    chain = (first_chain + program // (num_blocks * G)).to(tl.int64)
    row_begin = tl.load(cu_seqlens + chain)
    num_rows = (tl.load(cu_seqlens + chain + 1) - row_begin).to(tl.int32)
    first_chunk = tl.load(chunk_offsets + chain)
    stores = store_slot + first_chunk + chain
    o_k = tl.arange(0, K)
    o_v = block * BV + tl.arange(0, BV)
    in_state = head * (K * V) + o_k[:, None] * V + o_v[None, :]

    b_grad = tl.zeros([K, BV], dtype=tl.float32)
    num_chunks = tl.cdiv(num_rows, B)
    for done in range(num_chunks):
        i = num_chunks - 1 - done
        slot = tl.load(stores + i + 1).to(tl.int64)
        if slot >= 0:
            begin = tl.load(consumer_ptr + slot)
            stop = tl.load(consumer_ptr + slot + 1)
            for place in range(begin, stop):
                consumer = tl.load(consumers + place)
                b_grad += tl.load(d_start + consumer * (G * K * V) + in_state)
            if FROM_OUTSIDE:
                b_grad += tl.load(d_slots + (slot - num_external) * (G * K * V) + in_state)
        chunk = first_chunk + i
        tl.store(d_end + chunk * (G * K * V) + in_state, b_grad.to(d_end.dtype.element_ty))
        o_t = i * B + tl.arange(0, B)
        m_t = o_t < num_rows
        rows = (row_begin + o_t) * G + head
        key_rows = (row_begin + o_t) * H + head // (G // H)
        last = (row_begin + tl.minimum((i + 1) * B, num_rows) - 1) * G + head
        at_v = rows[:, None] * V + o_v[None, :]
        b_k = tl.load(k + key_rows[:, None] * K + o_k[None, :], mask=m_t[:, None], other=0.0)
        b_dv = tl.dot(b_k, b_grad.to(b_k.dtype))
        if PER_HEAD:
            b_decay = tl.load(gate + last)
            b_gate = tl.load(gate + rows, mask=m_t, other=0.0)
            b_dv *= tl.where(m_t, tl.exp2(b_decay - b_gate), 0.0)[:, None]
        b_dv += tl.load(d_v_new_within + at_v, mask=m_t[:, None], other=0.0)
        tl.store(d_v_new + at_v, b_dv.to(d_v_new.dtype.element_ty), mask=m_t[:, None])
        b_q = tl.load(q + key_rows[None, :] * K + o_k[:, None], mask=m_t[None, :], other=0.0)
        b_w = tl.load(w + rows[None, :] * K + o_k[:, None], mask=m_t[None, :], other=0.0)
        b_do = tl.load(d_output + at_v, mask=m_t[:, None], other=0.0)
        if PER_HEAD:
            b_q = (b_q * tl.exp2(b_gate)[None, :]).to(b_w.dtype)
            b_grad *= tl.exp2(b_decay)
        else:
            b_grad *= tl.exp2(tl.load(gate + last * K + o_k))[:, None]
        b_grad += tl.dot(b_q, b_do.to(b_q.dtype)) * scale - tl.dot(b_w, b_dv.to(b_w.dtype))
    tl.store(d_start + chain * (G * K * V) + in_state, b_grad)


@triton.jit
def _sum_consumers_kernel(
    d_start, gradients, consumer_ptr, consumers, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """gradients[slot] = sum over the slot's consumers, in their order."""
    slot = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < SIZE
    total = tl.zeros([BLOCK], dtype=tl.float32)
    begin = tl.load(consumer_ptr + slot)
    stop = tl.load(consumer_ptr + slot + 1)
    for place in range(begin, stop):
        consumer = tl.load(consumers + place)
        total += tl.load(d_start + consumer * SIZE + offsets, mask=inside, other=0.0)
    tl.store(gradients + slot * SIZE + offsets, total, mask=inside)
