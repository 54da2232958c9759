"""Chunk-local backward of the delta rule with one decay a head, in Triton: one pass over a chunk.

fla's own (chunk_bwd_dqkwg) is refused on Hopper with Triton 3.4 to 3.7.0, which miscompile it. This
one also does what fla leaves to a second kernel (prepare_wy_repr_bwd), and nothing goes through
memory between the two. A program owns one chunk of one value head.

With r_ij = 2^(g_i - g_j), T = (I + tril(beta_i k_i . k_j r_ij, -1))^-1 and X = beta 2^g k, a chunk
computes w = T X, u = T (beta v), v_new = u - w S and
    output = scale ((2^g q) S + tril(q k^T r) v_new),   S' = 2^g_end S + (2^(g_end - g) k)^T v_new.

Legend: P packed rows, NC chunks, H key heads, G value heads, K key width, V value width, B rows of
a chunk; g is the log2 decay summed within each chunk.
"""

from __future__ import annotations

from harts.ops.needs_triton import tl, triton


@triton.jit(do_not_specialize=["scale"])
def per_head_kernel(
    q,
    k,
    v,
    v_new,
    gate,
    beta,
    transform,
    states,
    d_output,
    d_end,
    d_v_new,
    d_q,
    d_k,
    d_v,
    d_beta,
    d_gate,
    cu_seqlens,
    chunk_indices,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    B: tl.constexpr,
    BV: tl.constexpr,
):
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chain = tl.load(chunk_indices + 2 * chunk)
    begin = tl.load(cu_seqlens + chain) + tl.load(chunk_indices + 2 * chunk + 1) * B
    num_rows = tl.minimum(tl.load(cu_seqlens + chain + 1) - begin, B).to(tl.int32)
    o_t, o_k = tl.arange(0, B), tl.arange(0, K)
    m_t = o_t < num_rows
    # one 64-bit offset a tensor, 32-bit ones within: wide ones would fill the registers
    first_row = begin * G + head
    first_key = begin * H + head // (G // H)
    rows, key_rows = o_t * G, o_t * H
    q, k = q + first_key * K, k + first_key * K
    gate, d_gate = gate + first_row, d_gate + first_row
    beta, d_beta = beta + first_row, d_beta + first_row
    v, v_new, d_v = v + first_row * V, v_new + first_row * V, d_v + first_row * V
    d_output, d_v_new = d_output + first_row * V, d_v_new + first_row * V
    d_q, d_k = d_q + first_row * K, d_k + first_row * K
    transform += first_row * B
    states, d_end = states + (chunk * G + head) * (K * V), d_end + (chunk * G + head) * (K * V)

    at_k = rows[:, None] * K + o_k[None, :]
    at_key = key_rows[:, None] * K + o_k[None, :]
    b_k = tl.load(k + at_key, mask=m_t[:, None], other=0.0)
    b_beta = tl.load(beta + rows, mask=m_t, other=0.0).to(tl.float32)
    g = tl.load(gate + rows, mask=m_t, other=0.0)
    g_end = tl.load(gate + (num_rows - 1) * G)
    decay = tl.exp2(g)
    inside = m_t[:, None] & m_t[None, :]
    below = (o_t[:, None] > o_t[None, :]) & inside

    # The values come in three passes: what one pass sums up would fill the registers otherwise.
    # First through u = T (beta v) and w = T X.
    b_T = tl.load(transform + rows[:, None] * B + o_t[None, :], mask=inside, other=0.0)
    b_T = tl.trans(b_T)
    to_w = tl.zeros([B, K], dtype=tl.float32)
    to_T = tl.zeros([B, B], dtype=tl.float32)
    b_d_beta = tl.zeros([B], dtype=tl.float32)
    for first in range(0, V, BV):
        o_v = first + tl.arange(0, BV)
        at_v = rows[:, None] * V + o_v[None, :]
        b_state = tl.load(states + o_k[:, None] * V + o_v[None, :])
        b_du = tl.load(d_v_new + at_v, mask=m_t[:, None], other=0.0)
        b_v = tl.load(v + at_v, mask=m_t[:, None], other=0.0)
        to_w = tl.dot(b_du, tl.trans(b_state), to_w)
        to_T = tl.dot(b_du, tl.trans((b_v * b_beta[:, None]).to(b_v.dtype)), to_T)
        b_dy = tl.dot(b_T, b_du)
        b_d_beta += tl.sum(b_dy * b_v, axis=1)
        tl.store(d_v + at_v, (b_dy * b_beta[:, None]).to(d_v.dtype.element_ty), mask=m_t[:, None])
    b_dw = (-to_w).to(b_k.dtype)
    grown = b_beta * decay
    to_T = tl.dot(b_dw, tl.trans((b_k * grown[:, None]).to(b_k.dtype)), to_T)
    b_dk = tl.dot(b_T, b_dw)
    along = tl.sum(b_dk * b_k, axis=1)
    b_d_beta += along * decay
    b_dg = along * grown
    b_dk *= grown[:, None]
    # d tril = -T^T dT T^T, of which only the entries below the diagonal count
    b_dT = tl.where(below, to_T, 0.0).to(b_k.dtype)
    half_way = tl.dot(b_dT, b_T).to(b_k.dtype)
    d_tril = tl.where(below, -tl.dot(b_T, half_way), 0.0)
    d_tril *= tl.exp2(tl.where(below, g[:, None] - g[None, :], 0.0))
    products = d_tril * tl.dot(b_k, tl.trans(b_k))
    b_d_beta += tl.sum(products, axis=1)
    products *= b_beta[:, None]
    b_dg += tl.sum(products, axis=1) - tl.sum(products, axis=0)
    tl.store(d_beta + rows, b_d_beta, mask=m_t)
    d_lower = (d_tril * b_beta[:, None]).to(b_k.dtype)
    b_dk = tl.dot(d_lower, b_k, b_dk)
    b_dk = tl.dot(tl.trans(d_lower), b_k, b_dk)

    # then the output
    to_q = tl.zeros([B, K], dtype=tl.float32)
    d_pairs = tl.zeros([B, B], dtype=tl.float32)
    for first in range(0, V, BV):
        o_v = first + tl.arange(0, BV)
        at_v = rows[:, None] * V + o_v[None, :]
        b_state = tl.load(states + o_k[:, None] * V + o_v[None, :])
        b_do = tl.load(d_output + at_v, mask=m_t[:, None], other=0.0)
        b_v_new = tl.load(v_new + at_v, mask=m_t[:, None], other=0.0)
        to_q = tl.dot(b_do, tl.trans(b_state), to_q)
        d_pairs = tl.dot(b_do, tl.trans(b_v_new), d_pairs)
    seen = (o_t[:, None] >= o_t[None, :]) & inside
    d_pairs *= tl.where(seen, tl.exp2(tl.where(seen, g[:, None] - g[None, :], 0.0)) * scale, 0.0)
    pairs = d_pairs.to(b_k.dtype)
    to_q = tl.dot(pairs, b_k, to_q * (decay * scale)[:, None])
    b_q = tl.load(q + at_key, mask=m_t[:, None], other=0.0)
    b_dg += tl.sum(to_q * b_q, axis=1)
    tl.store(d_q + at_k, to_q.to(d_q.dtype.element_ty), mask=m_t[:, None])
    from_pairs = tl.dot(tl.trans(pairs), b_q)
    b_dg -= tl.sum(from_pairs * b_k, axis=1)
    b_dk += from_pairs

    # and the state after the chunk
    to_k = tl.zeros([B, K], dtype=tl.float32)
    at_end = tl.zeros([K], dtype=tl.float32)
    for first in range(0, V, BV):
        o_v = first + tl.arange(0, BV)
        at_state = o_k[:, None] * V + o_v[None, :]
        b_d_end = tl.load(d_end + at_state)
        b_v_new = tl.load(v_new + rows[:, None] * V + o_v[None, :], mask=m_t[:, None], other=0.0)
        to_k = tl.dot(b_v_new, tl.trans(b_d_end), to_k)
        at_end += tl.sum(b_d_end.to(tl.float32) * tl.load(states + at_state), axis=1)
    to_k *= tl.where(m_t, tl.exp2(g_end - g), 0.0)[:, None]
    along = tl.sum(to_k * b_k, axis=1)
    b_dg -= along
    last = tl.sum(along, axis=0) + tl.sum(at_end, axis=0) * tl.exp2(g_end)
    b_dg += tl.where(o_t == num_rows - 1, last, 0.0)
    tl.store(d_k + at_k, (b_dk + to_k).to(d_k.dtype.element_ty), mask=m_t[:, None])
    tl.store(d_gate + rows, b_dg, mask=m_t)
