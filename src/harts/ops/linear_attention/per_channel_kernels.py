"""Chunk-local backward of the delta rule with a decay for each key channel, in Triton.

For bounded gates it takes the place of two kernels of fla (chunk_kda_bwd_wy_dqkg_fused and
chunk_kda_bwd_intra); nothing goes through memory between the parts. A program owns one chunk of one
value head.

With E_ij = 2^(g_i - g_j) in each channel, T = (I + tril(beta_i (k_i . E_ij k_j), -1))^-1 and
X = beta 2^g k, a chunk computes w = T X, u = T (beta v), v_new = u - w S and
    output = scale ((2^g q) S + tril(q . E k) v_new),   S' = 2^g_end S + (2^(g_end - g) k)^T v_new.

Products over pairs of rows split E_ij at an anchor: the first row of the later row's block of 16
rows, 54 binary orders lower. A decay of at least e^-5 a row keeps both factors between 2^-55 and
2^55 inside a block, which bfloat16 and float32 have room for and float16 has not; between blocks
what underflows is below 2^-70.

Legend: P packed rows, NC chunks, H key heads, G value heads, K key width, V value width, B rows of
a chunk; g is the log2 decay summed within each chunk.
"""

from __future__ import annotations

from harts.ops.needs_triton import tl, triton

BLOCK_ROWS = tl.constexpr(16)
"""Rows that share an anchor."""
SHIFT = tl.constexpr(54.0)
"""Binary orders from a block's first row down to its anchor: half of what 15 rows can decay."""


@triton.jit(do_not_specialize=["scale"])
def per_channel_kernel(
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
    gate, d_gate = gate + first_row * K, d_gate + first_row * K
    beta, d_beta = beta + first_row, d_beta + first_row
    v, v_new, d_v = v + first_row * V, v_new + first_row * V, d_v + first_row * V
    d_output, d_v_new = d_output + first_row * V, d_v_new + first_row * V
    d_q, d_k = d_q + first_row * K, d_k + first_row * K
    transform += first_row * B
    states, d_end = states + (chunk * G + head) * (K * V), d_end + (chunk * G + head) * (K * V)
    at_k = rows[:, None] * K + o_k[None, :]
    at_key = key_rows[:, None] * K + o_k[None, :]
    b_beta = tl.load(beta + rows, mask=m_t, other=0.0).to(tl.float32)
    block = o_t // BLOCK_ROWS
    at_anchor = (block * (BLOCK_ROWS * G * K))[:, None] + o_k[None, :]

    # Registers hold two (B, K) sums at most: what comes back later is loaded again.
    # u = T (beta v), w = T X, and the pairs of the output
    inside = m_t[:, None] & m_t[None, :]
    below = (o_t[:, None] > o_t[None, :]) & inside
    b_T = tl.load(transform + rows[:, None] * B + o_t[None, :], mask=inside, other=0.0)
    b_T = tl.trans(b_T)
    to_w = tl.zeros([B, K], dtype=tl.float32)
    to_T = tl.zeros([B, B], dtype=tl.float32)
    d_pairs = tl.zeros([B, B], dtype=tl.float32)
    b_d_beta = tl.zeros([B], dtype=tl.float32)
    for first in range(0, V, BV):
        o_v = first + tl.arange(0, BV)
        at_v = rows[:, None] * V + o_v[None, :]
        b_state = tl.load(states + o_k[:, None] * V + o_v[None, :])
        b_du = tl.load(d_v_new + at_v, mask=m_t[:, None], other=0.0)
        to_w = tl.dot(b_du, tl.trans(b_state), to_w)
        b_v = tl.load(v + at_v, mask=m_t[:, None], other=0.0)
        to_T = tl.dot(b_du, tl.trans((b_v * b_beta[:, None]).to(b_v.dtype)), to_T)
        b_dy = tl.dot(b_T, b_du)
        b_d_beta += tl.sum(b_dy * b_v, axis=1)
        tl.store(d_v + at_v, (b_dy * b_beta[:, None]).to(d_v.dtype.element_ty), mask=m_t[:, None])
        b_do = tl.load(d_output + at_v, mask=m_t[:, None], other=0.0)
        b_v_new = tl.load(v_new + at_v, mask=m_t[:, None], other=0.0)
        d_pairs = tl.dot(b_do, tl.trans(b_v_new), d_pairs)
    d_pairs *= scale
    # a row's pair with itself has no decay: rounded in two ways it would leave one
    own_pair = tl.sum(tl.where((o_t[:, None] == o_t[None, :]) & inside, d_pairs, 0.0), axis=1)
    pairs = tl.where(below, d_pairs, 0.0).to(b_T.dtype)
    b_dw = (-to_w).to(b_T.dtype)
    b_k = tl.load(k + at_key, mask=m_t[:, None], other=0.0)
    g = tl.load(gate + at_k, mask=m_t[:, None], other=0.0)
    b_x = (b_k * tl.exp2(g) * b_beta[:, None]).to(b_k.dtype)
    to_T = tl.dot(b_dw, tl.trans(b_x), to_T)
    # d tril = -T^T dT T^T, of which only the entries below the diagonal count
    half_way = tl.dot(tl.where(below, to_T, 0.0).to(b_T.dtype), b_T).to(b_T.dtype)
    lower = tl.where(below, -tl.dot(b_T, half_way), 0.0).to(b_T.dtype)

    # what adds to a key's gradient as the later row of a pair, and through X: its decay multiplies
    anchor = tl.load(gate + at_anchor, mask=m_t[:, None], other=0.0) - SHIFT
    raised = tl.dot(b_T, b_dw) * tl.exp2(anchor)
    for r in range(B // BLOCK_ROWS):
        earlier = _earlier(b_k, g, gate, num_rows, o_t, o_k, r, G, K)
        raised = tl.dot(_rows_of_block(lower, block, r), earlier, raised)
    raised *= tl.exp2(g - anchor)
    b_d_beta += tl.sum(raised * b_k, axis=1)
    tl.store(d_beta + rows, b_d_beta, mask=m_t)
    raised *= b_beta[:, None]

    # as the earlier row of a pair, and in the state after the chunk: its decay divides
    b_q = tl.load(q + at_key, mask=m_t[:, None], other=0.0)
    lowered = tl.zeros([B, K], dtype=tl.float32)
    for r in range(B // BLOCK_ROWS):
        at_first = tl.minimum(r * BLOCK_ROWS, num_rows - 1) * (G * K)
        since_anchor = g - tl.load(gate + at_first + o_k)[None, :] + SHIFT
        far = ((o_t >= r * BLOCK_ROWS) & m_t)[:, None]
        growth = tl.where(far, tl.exp2(tl.where(far, since_anchor, 0.0)), 0.0)
        later = (b_q * growth).to(b_k.dtype)
        lowered = tl.dot(_rows_of_block(tl.trans(pairs), block, r), later, lowered)
        later = (b_k * growth * b_beta[:, None]).to(b_k.dtype)
        lowered = tl.dot(_rows_of_block(tl.trans(lower), block, r), later, lowered)
    lowered *= tl.exp2(anchor - g)
    to_k = tl.zeros([B, K], dtype=tl.float32)
    at_end = tl.zeros([K], dtype=tl.float32)
    for first in range(0, V, BV):
        o_v = first + tl.arange(0, BV)
        at_state = o_k[:, None] * V + o_v[None, :]
        b_d_end = tl.load(d_end + at_state)
        b_v_new = tl.load(v_new + rows[:, None] * V + o_v[None, :], mask=m_t[:, None], other=0.0)
        to_k = tl.dot(b_v_new, tl.trans(b_d_end), to_k)
        at_end += tl.sum(b_d_end.to(tl.float32) * tl.load(states + at_state), axis=1)
    g_end = tl.load(gate + (num_rows - 1) * (G * K) + o_k)
    g = tl.load(gate + at_k, mask=m_t[:, None], other=0.0)
    b_k = tl.load(k + at_key, mask=m_t[:, None], other=0.0)
    to_k *= tl.where(m_t[:, None], tl.exp2(g_end[None, :] - g), 0.0)
    at_end = at_end * tl.exp2(g_end) + tl.sum(to_k * b_k, axis=0)
    lowered += to_k
    b_dk = raised + lowered + own_pair[:, None] * b_q
    tl.store(d_k + at_k, b_dk.to(d_k.dtype.element_ty), mask=m_t[:, None])
    b_dg = (raised - lowered) * b_k
    b_dg += tl.where((o_t == num_rows - 1)[:, None], at_end[None, :], 0.0)

    # the output
    to_q = tl.zeros([B, K], dtype=tl.float32)
    for first in range(0, V, BV):
        o_v = first + tl.arange(0, BV)
        b_state = tl.load(states + o_k[:, None] * V + o_v[None, :])
        b_do = tl.load(d_output + rows[:, None] * V + o_v[None, :], mask=m_t[:, None], other=0.0)
        to_q = tl.dot(b_do, tl.trans(b_state), to_q)
    anchor = tl.load(gate + at_anchor, mask=m_t[:, None], other=0.0) - SHIFT
    to_q *= tl.exp2(anchor) * scale
    for r in range(B // BLOCK_ROWS):
        earlier = _earlier(b_k, g, gate, num_rows, o_t, o_k, r, G, K)
        to_q = tl.dot(_rows_of_block(pairs, block, r), earlier, to_q)
    to_q *= tl.exp2(g - anchor)
    b_dq = to_q + own_pair[:, None] * b_k
    tl.store(d_q + at_k, b_dq.to(d_q.dtype.element_ty), mask=m_t[:, None])
    b_q = tl.load(q + at_key, mask=m_t[:, None], other=0.0)
    tl.store(d_gate + at_k, b_dg + to_q * b_q, mask=m_t[:, None])


@triton.jit
def _earlier(b_k, g, gate, num_rows, o_t, o_k, r, G: tl.constexpr, K: tl.constexpr):
    """Keys of rows up to block r, decayed from its anchor back to them."""
    at_first = tl.minimum(r * BLOCK_ROWS, num_rows - 1) * (G * K)
    to_anchor = tl.load(gate + at_first + o_k)[None, :] - SHIFT - g
    near = (o_t < (r + 1) * BLOCK_ROWS)[:, None]
    return (b_k * tl.where(near, tl.exp2(tl.where(near, to_anchor, 0.0)), 0.0)).to(b_k.dtype)


@triton.jit
def _rows_of_block(matrix, block, r):
    return tl.where((block == r)[:, None], matrix, 0.0).to(matrix.dtype)
