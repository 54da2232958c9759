"""Chunk-local backward of the delta rule in Triton, for both widths of the decay: one launch.

It takes the place of two kernels of fla each (chunk_kda_bwd_wy_dqkg_fused and chunk_kda_bwd_intra;
chunk_bwd_dqkwg, which fla refuses on Hopper with Triton 3.4 to 3.7.0, and prepare_wy_repr_bwd), and
nothing goes through memory between the parts. A program owns BK key channels of one chunk of one
value head; what is a sum over all key channels it leaves in parts.

With E_ij = 2^(g_i - g_j) in each channel, T = (I + tril(beta_i (k_i . E_ij k_j), -1))^-1 and
X = beta 2^g k, a chunk computes v_new = T (beta v - X S) and
    output = scale ((2^g q) S + tril(q . E k) v_new),   S' = 2^g_end S + (2^(g_end - g) k)^T v_new.
Write y = beta v - X S and dy = T^T dv_new. Since T^-1 is unit lower triangular and T^-1 v_new = y,
    d(v) = beta dy,   d(X) = -dy S^T,   d(T^-1) = -tril(dy v_new^T, -1):
neither T's gradient nor the rows w = T X and u = T (beta v) are needed.

Decays of each channel do not leave a product over channels, so E_ij is split at an anchor: the
first row of the block of 16 rows that holds the row whose gradient is formed, 54 binary orders
lower. A decay of at least e^-5 a row keeps both factors between 2^-55 and 2^55 inside a block,
which bfloat16 and float32 have room for and float16 has not; between blocks what underflows is
below 2^-70. Anchors are loaded where they are used: kept, they would fill the registers.

Legend: P packed rows, N chunks, H key heads, G value heads, K key width, V value width, B rows of
a chunk; g is the log2 decay summed within each chunk.
"""

from __future__ import annotations

from harts.ops.needs_triton import tl, triton

BLOCK_ROWS = tl.constexpr(16)
"""Rows that share an anchor."""
SHIFT = tl.constexpr(54.0)
"""Binary orders from a block's first row down to its anchor: half of what 15 rows can decay."""


@triton.jit(do_not_specialize=["scale"])
def rows_backward_kernel(
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
    PER_HEAD: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    B: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    PARTS: tl.constexpr = K // BK
    part = tl.program_id(0) % PARTS
    chunk, head = (tl.program_id(0) // PARTS).to(tl.int64), tl.program_id(1)
    chain = tl.load(chunk_indices + 2 * chunk)
    begin = tl.load(cu_seqlens + chain) + tl.load(chunk_indices + 2 * chunk + 1) * B
    num_rows = tl.minimum(tl.load(cu_seqlens + chain + 1) - begin, B).to(tl.int32)
    # one 64-bit offset a tensor, 32-bit ones within: wide ones would fill the registers
    first_row = begin * G + head
    first_key = begin * H + head // (G // H)
    q, k = q + first_key * K, k + first_key * K
    d_q, d_k = d_q + first_row * K, d_k + first_row * K
    beta, d_beta = beta + first_row, d_beta + first_row * PARTS + part
    v, v_new, d_v = v + first_row * V, v_new + first_row * V, d_v + first_row * V
    d_output, d_v_new = d_output + first_row * V, d_v_new + first_row * V
    transform += first_row * B
    states, d_end = states + (chunk * G + head) * (K * V), d_end + (chunk * G + head) * (K * V)
    o_t, o_k = tl.arange(0, B), part * BK + tl.arange(0, BK)
    rows = o_t * G
    in_chunk = o_t < num_rows
    in_first_part = in_chunk[:, None] & (part == 0)
    inside = in_chunk[:, None] & in_chunk[None, :]
    below = (o_t[:, None] > o_t[None, :]) & inside
    seen = (o_t[:, None] >= o_t[None, :]) & inside

    b_T = tl.load(transform + rows[:, None] * B + o_t[None, :], mask=inside, other=0.0)
    b_T = tl.trans(b_T)
    b_beta = tl.load(beta + rows, mask=in_chunk, other=0.0).to(tl.float32)
    to_x = tl.zeros([B, BK], dtype=tl.float32)
    to_q = tl.zeros([B, BK], dtype=tl.float32)
    d_lower = tl.zeros([B, B], dtype=tl.float32)
    d_pairs = tl.zeros([B, B], dtype=tl.float32)
    b_d_beta = tl.zeros([B], dtype=tl.float32)
    for first in range(0, V, BV):
        o_v = first + tl.arange(0, BV)
        at_v = rows[:, None] * V + o_v[None, :]
        b_d_v_new = tl.load(d_v_new + at_v, mask=in_chunk[:, None], other=0.0)
        b_v_new = tl.load(v_new + at_v, mask=in_chunk[:, None], other=0.0)
        b_d_output = tl.load(d_output + at_v, mask=in_chunk[:, None], other=0.0)
        b_state = tl.load(states + o_k[:, None] * V + o_v[None, :])
        b_dy = tl.dot(b_T, b_d_v_new)
        b_v = tl.load(v + at_v, mask=in_first_part, other=0.0)
        b_d_beta += tl.sum(b_dy * b_v, axis=1)
        b_d_v = (b_dy * b_beta[:, None]).to(d_v.dtype.element_ty)
        tl.store(d_v + at_v, b_d_v, mask=in_first_part)
        b_dy = b_dy.to(b_T.dtype)
        d_lower = tl.dot(b_dy, tl.trans(b_v_new), d_lower)
        d_pairs = tl.dot(b_d_output, tl.trans(b_v_new), d_pairs)
        to_x = tl.dot(b_dy, tl.trans(b_state), to_x)
        to_q = tl.dot(b_d_output, tl.trans(b_state), to_q)
    to_q *= scale
    d_pairs *= scale

    at_k = rows[:, None] * K + o_k[None, :]
    at_key = (o_t * H)[:, None] * K + o_k[None, :]
    b_k = tl.load(k + at_key, mask=in_chunk[:, None], other=0.0)
    if PER_HEAD:
        gate, d_gate = gate + first_row, d_gate + first_row * PARTS + part
        g = tl.load(gate + rows, mask=in_chunk, other=0.0)
        g_end = tl.load(gate + (num_rows - 1) * G)
        decay = tl.exp2(g)
        between = tl.exp2(tl.where(seen, g[:, None] - g[None, :], 0.0))
        # through X
        along = -tl.sum(to_x * b_k, axis=1) * decay
        b_d_beta += along
        b_d_gate = along * b_beta
        b_d_k = -to_x * (decay * b_beta)[:, None]
        # through T^-1
        d_lower = tl.where(below, -d_lower * between, 0.0)
        products = d_lower * tl.dot(b_k, tl.trans(b_k))
        b_d_beta += tl.sum(products, axis=1)
        products *= b_beta[:, None]
        b_d_gate += tl.sum(products, axis=1) - tl.sum(products, axis=0)
        lower = (d_lower * b_beta[:, None]).to(b_k.dtype)
        b_d_k = tl.dot(lower, b_k, b_d_k)
        b_d_k = tl.dot(tl.trans(lower), b_k, b_d_k)
        # through the output
        b_q = tl.load(q + at_key, mask=in_chunk[:, None], other=0.0)
        pairs = tl.where(seen, d_pairs * between, 0.0).to(b_k.dtype)
        b_d_q = tl.dot(pairs, b_k, to_q * decay[:, None])
        b_d_gate += tl.sum(b_d_q * b_q, axis=1)
        tl.store(d_q + at_k, b_d_q.to(d_q.dtype.element_ty), mask=in_chunk[:, None])
        from_pairs = tl.dot(tl.trans(pairs), b_q)
        b_d_gate -= tl.sum(from_pairs * b_k, axis=1)
        # and through the state after the chunk
        to_k, d_decay_of_state = _through_state(
            v_new, states, d_end, rows, in_chunk, o_k, V, B, BK, BV
        )
        to_k *= tl.where(in_chunk, tl.exp2(g_end - g), 0.0)[:, None]
        along = tl.sum(to_k * b_k, axis=1)
        b_d_gate -= along
        last = tl.sum(along, axis=0) + tl.sum(d_decay_of_state, axis=0) * tl.exp2(g_end)
        b_d_gate += tl.where(o_t == num_rows - 1, last, 0.0)
        b_d_k += from_pairs + to_k
        tl.store(d_gate + rows * PARTS, b_d_gate, mask=in_chunk)
    else:
        gate, d_gate = gate + first_row * K, d_gate + first_row * K
        block = o_t // BLOCK_ROWS
        at_anchor = (block * (BLOCK_ROWS * G * K))[:, None] + o_k[None, :]
        g = tl.load(gate + at_k, mask=in_chunk[:, None], other=0.0)
        anchor = tl.load(gate + at_anchor, mask=in_chunk[:, None], other=0.0) - SHIFT
        # a row's pair with itself has no decay: rounded in two ways it would leave one
        own = tl.sum(tl.where((o_t[:, None] == o_t[None, :]) & inside, d_pairs, 0.0), axis=1)
        pairs = tl.where(below, d_pairs, 0.0).to(b_k.dtype)
        lower = tl.where(below, -d_lower, 0.0).to(b_k.dtype)
        # what adds to the gradient of the later row of a pair: its decay multiplies
        from_anchor = tl.exp2(anchor)
        raised = -to_x * from_anchor
        b_d_q = to_q * from_anchor
        for r in range(B // BLOCK_ROWS):
            at_first = tl.minimum(r * BLOCK_ROWS, num_rows - 1) * (G * K)
            to_anchor = tl.load(gate + at_first + o_k)[None, :] - SHIFT - g
            near = (o_t < (r + 1) * BLOCK_ROWS)[:, None]
            shrunk = tl.where(near, tl.exp2(tl.where(near, to_anchor, 0.0)), 0.0)
            earlier = (b_k * shrunk).to(b_k.dtype)
            raised = tl.dot(_rows_of_block(lower, block, r), earlier, raised)
            b_d_q = tl.dot(_rows_of_block(pairs, block, r), earlier, b_d_q)
        anchor = tl.load(gate + at_anchor, mask=in_chunk[:, None], other=0.0) - SHIFT
        since_anchor = tl.exp2(g - anchor)
        raised *= since_anchor
        b_d_beta += tl.sum(raised * b_k, axis=1)
        raised *= b_beta[:, None]
        b_d_q *= since_anchor
        b_q = tl.load(q + at_key, mask=in_chunk[:, None], other=0.0)
        b_d_gate = b_d_q * b_q + raised * b_k
        b_d_q += own[:, None] * b_k
        tl.store(d_q + at_k, b_d_q.to(d_q.dtype.element_ty), mask=in_chunk[:, None])
        # and of the earlier row, also in the state after the chunk: its decay divides
        lowered = tl.zeros([B, BK], dtype=tl.float32)
        lowered_by_q = tl.zeros([B, BK], dtype=tl.float32)
        for r in range(B // BLOCK_ROWS):
            at_first = tl.minimum(r * BLOCK_ROWS, num_rows - 1) * (G * K)
            from_first = g - tl.load(gate + at_first + o_k)[None, :] + SHIFT
            far = ((o_t >= r * BLOCK_ROWS) & in_chunk)[:, None]
            grown = tl.where(far, tl.exp2(tl.where(far, from_first, 0.0)), 0.0)
            later = (b_q * grown).to(b_k.dtype)
            lowered_by_q = tl.dot(_rows_of_block(tl.trans(pairs), block, r), later, lowered_by_q)
            later = (b_k * grown * b_beta[:, None]).to(b_k.dtype)
            lowered = tl.dot(_rows_of_block(tl.trans(lower), block, r), later, lowered)
        anchor = tl.load(gate + at_anchor, mask=in_chunk[:, None], other=0.0) - SHIFT
        lowered = (lowered + lowered_by_q) * tl.exp2(anchor - g)
        to_k, d_decay_of_state = _through_state(
            v_new, states, d_end, rows, in_chunk, o_k, V, B, BK, BV
        )
        g_end = tl.load(gate + (num_rows - 1) * (G * K) + o_k)
        to_k *= tl.where(in_chunk[:, None], tl.exp2(g_end[None, :] - g), 0.0)
        last = d_decay_of_state * tl.exp2(g_end) + tl.sum(to_k * b_k, axis=0)
        lowered += to_k
        b_d_gate -= lowered * b_k
        b_d_gate += tl.where((o_t == num_rows - 1)[:, None], last[None, :], 0.0)
        b_d_k = raised + lowered + own[:, None] * b_q
        tl.store(d_gate + at_k, b_d_gate, mask=in_chunk[:, None])
    tl.store(d_beta + rows * PARTS, b_d_beta, mask=in_chunk)
    tl.store(d_k + at_k, b_d_k.to(d_k.dtype.element_ty), mask=in_chunk[:, None])


@triton.jit
def _through_state(
    v_new,
    states,
    d_end,
    rows,
    in_chunk,
    o_k,
    V: tl.constexpr,
    B: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """v_new dS'^T, before its decay, and sum(S . dS') in each key channel.

    A pass of its own over the values: with the others' sums it would fill the registers.
    """
    to_k = tl.zeros([B, BK], dtype=tl.float32)
    d_decay = tl.zeros([BK], dtype=tl.float32)
    for first in range(0, V, BV):
        o_v = first + tl.arange(0, BV)
        at_v = rows[:, None] * V + o_v[None, :]
        at_state = o_k[:, None] * V + o_v[None, :]
        b_v_new = tl.load(v_new + at_v, mask=in_chunk[:, None], other=0.0)
        b_d_end = tl.load(d_end + at_state)
        to_k = tl.dot(b_v_new, tl.trans(b_d_end), to_k)
        d_decay += tl.sum(b_d_end.to(tl.float32) * tl.load(states + at_state), axis=1)
    return to_k, d_decay


@triton.jit
def _rows_of_block(matrix, block, r):
    return tl.where((block == r)[:, None], matrix, 0.0).to(matrix.dtype)
