"""Choice of experts and its gradient, and the split of float32 into bfloat16 terms, in Triton.

A program owns a block of rows with all experts of each in registers; the k-th choice is the
maximum of what is left, the lowest index first where scores tie. At 65,536 rows, 128 experts and
8 a row the choice moves 40 MB and its gradient 75 MB, so both are bound by the K passes over
registers rather than by memory.

Legend: C rows, E experts, K experts a row, G groups, S experts of a group; GP, SP, EP, KP the same
rounded up to powers of two.
"""

from __future__ import annotations

import torch

from harts.ops.needs_triton import tl, triton

ELEMENTS = 2048
"""Scores that a program holds: 16 a thread, which leaves registers for five programs at a time."""
NUM_WARPS = 4


def choose_by_sigmoid(
    logits_CE: torch.Tensor,
    bias_E: torch.Tensor,
    *,
    top_k: int,
    num_groups: int,
    kept_groups: int,
    normalise: bool,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (C, K) float32 and indices (C, K) int64, of contiguous logits."""
    num_rows, num_experts = logits_CE.shape
    weights, indices = _outputs(logits_CE, top_k, torch.float32)
    if kept_groups == num_groups:
        num_groups = kept_groups = 1
    group_size = num_experts // num_groups
    padded = (triton.next_power_of_2(num_groups), triton.next_power_of_2(group_size))
    rows = _rows_of_a_program(padded[0] * padded[1])
    _sigmoid_top_k_kernel[(triton.cdiv(num_rows, rows),)](
        logits_CE,
        bias_E,
        weights,
        indices,
        num_rows,
        float(scaling),
        E=num_experts,
        G=num_groups,
        S=group_size,
        GP=padded[0],
        SP=padded[1],
        K=top_k,
        KP=triton.next_power_of_2(top_k),
        KEPT=kept_groups,
        NORMALISE=normalise,
        ROWS=rows,
        num_warps=NUM_WARPS,
    )
    return weights, indices


def choose_by_softmax(
    logits_CE: torch.Tensor, *, top_k: int, normalise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (C, K) in the dtype of the contiguous logits and indices (C, K) int64."""
    num_rows, num_experts = logits_CE.shape
    weights, indices = _outputs(logits_CE, top_k, logits_CE.dtype)
    padded = triton.next_power_of_2(num_experts)
    rows = _rows_of_a_program(padded)
    _softmax_top_k_kernel[(triton.cdiv(num_rows, rows),)](
        logits_CE,
        weights,
        indices,
        num_rows,
        E=num_experts,
        EP=padded,
        K=top_k,
        KP=triton.next_power_of_2(top_k),
        NORMALISE=normalise,
        ROWS=rows,
        num_warps=NUM_WARPS,
    )
    return weights, indices


def choice_gradient(
    logits_CE: torch.Tensor,
    indices_CK: torch.Tensor,
    d_weights_CK: torch.Tensor,
    *,
    softmax: bool,
    normalise: bool,
    scaling: float,
) -> torch.Tensor:
    """Gradient of the logits, (C, E) in their dtype, from that of the weights."""
    num_rows, num_experts = logits_CE.shape
    top_k = indices_CK.shape[1]
    d_logits = torch.empty_like(logits_CE)
    padded = triton.next_power_of_2(num_experts)
    rows = _rows_of_a_program(padded)
    _top_k_gradient_kernel[(triton.cdiv(num_rows, rows),)](
        logits_CE,
        indices_CK,
        d_weights_CK,
        d_logits,
        num_rows,
        float(scaling),
        E=num_experts,
        EP=padded,
        K=top_k,
        KP=triton.next_power_of_2(top_k),
        SOFTMAX=softmax,
        NORMALISE=normalise,
        ROWS=rows,
        num_warps=NUM_WARPS,
    )
    return d_logits


def split_terms(
    x: torch.Tensor, terms: torch.Tensor, *, term_stride: int, row_stride: int, mid_place: int
) -> None:
    """Write float32 x (R, N) as terms of the terms' dtype at four places: low, mid, high, high.

    low + mid + high is x: each term takes the leading 8 bits of what the ones above leave, and a
    float32 has 24 (below 2^-102 the last bits of a bfloat16 term are lost). Element (r, n) of the
    term at place t goes to t * term_stride + r * row_stride + n. Low goes to place 0, mid to
    mid_place (1 or 2), high to the two others.
    """
    num_rows, num_columns = x.shape
    block_n = min(triton.next_power_of_2(num_columns), 512)
    rows = max(1, ELEMENTS // block_n)
    _split_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(num_columns, block_n))](
        x,
        terms,
        num_rows,
        term_stride,
        row_stride,
        N=num_columns,
        MID=mid_place,
        ROWS=rows,
        BLOCK_N=block_n,
        num_warps=NUM_WARPS,
    )


def _outputs(
    logits: torch.Tensor, top_k: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=dtype), logits.new_empty(shape, dtype=torch.int64)


def _rows_of_a_program(num_padded: int) -> int:
    return max(1, min(32, ELEMENTS // num_padded))


@triton.jit
def _pick(
    choice,
    score,
    o_e,
    K: tl.constexpr,
    KP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The K largest of each row of choice: their score and place, (ROWS, KP)."""
    o_k = tl.arange(0, KP)
    picked = tl.zeros([ROWS, KP], dtype=tl.float32)
    places = tl.zeros([ROWS, KP], dtype=tl.int32)
    for j in range(K):
        place = tl.argmax(choice, axis=1)
        hit = o_e[None, :] == place[:, None]
        value = tl.sum(tl.where(hit, score, 0.0), axis=1)
        picked = tl.where(o_k[None, :] == j, value[:, None], picked)
        places = tl.where(o_k[None, :] == j, place[:, None], places)
        choice = tl.where(hit, float("-inf"), choice)
    return picked, places


@triton.jit(do_not_specialize=["num_rows", "scaling"])
def _sigmoid_top_k_kernel(
    logits,
    bias,
    weights,
    indices,
    num_rows,
    scaling,
    E: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    GP: tl.constexpr,
    SP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    KEPT: tl.constexpr,
    NORMALISE: tl.constexpr,
    ROWS: tl.constexpr,
):
    o_r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_r = o_r < num_rows
    o_r = o_r.to(tl.int64)
    # place p of the padded grid is expert (p // SP) * S + p % SP: ascending, so ties stay right
    o_p = tl.arange(0, GP * SP)
    o_e = (o_p // SP) * S + o_p % SP
    m_e = (o_p // SP < G) & (o_p % SP < S)
    mask = m_r[:, None] & m_e[None, :]
    x = tl.load(logits + o_r[:, None] * E + o_e[None, :], mask=mask, other=0.0).to(tl.float32)
    score = 1.0 / (1.0 + tl.exp(-x))
    b_bias = tl.load(bias + o_e, mask=m_e, other=0.0).to(tl.float32)
    choice = tl.where(m_e[None, :], score + b_bias[None, :], float("-inf"))
    if KEPT < G:
        grouped = tl.reshape(choice, [ROWS, GP, SP])
        best = tl.max(grouped, axis=2)
        at = tl.argmax(grouped, axis=2)
        o_s = tl.arange(0, SP)
        others = tl.where(o_s[None, None, :] == at[:, :, None], float("-inf"), grouped)
        group_score = best + tl.max(others, axis=2)
        o_g = tl.arange(0, GP)
        kept = tl.zeros([ROWS, GP], dtype=tl.int32)
        for _ in range(KEPT):
            group = tl.argmax(group_score, axis=1)
            hit = o_g[None, :] == group[:, None]
            kept = tl.where(hit, 1, kept)
            group_score = tl.where(hit, float("-inf"), group_score)
        grouped = tl.where(kept[:, :, None] > 0, grouped, float("-inf"))
        choice = tl.reshape(grouped, [ROWS, GP * SP])
    picked, places = _pick(choice, score, o_p, K, KP, ROWS)
    if NORMALISE:
        picked = picked / (tl.sum(picked, axis=1) + 1e-20)[:, None]
    picked = picked * scaling
    # a NaN leaves no maximum; the index stays a legal one all the same
    experts = tl.minimum((places // SP) * S + places % SP, E - 1)
    o_k = tl.arange(0, KP)
    at_k = o_r[:, None] * K + o_k[None, :]
    m_k = m_r[:, None] & (o_k < K)[None, :]
    tl.store(weights + at_k, picked.to(weights.dtype.element_ty), mask=m_k)
    tl.store(indices + at_k, experts.to(tl.int64), mask=m_k)


@triton.jit(do_not_specialize=["num_rows"])
def _softmax_top_k_kernel(
    logits,
    weights,
    indices,
    num_rows,
    E: tl.constexpr,
    EP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    NORMALISE: tl.constexpr,
    ROWS: tl.constexpr,
):
    o_r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_r = o_r < num_rows
    o_r = o_r.to(tl.int64)
    o_e = tl.arange(0, EP)
    m_e = o_e < E
    mask = m_r[:, None] & m_e[None, :]
    x = tl.load(logits + o_r[:, None] * E + o_e[None, :], mask=mask, other=0.0).to(tl.float32)
    x = tl.where(m_e[None, :], x, float("-inf"))
    score = tl.exp(x - tl.max(x, axis=1)[:, None])
    score = score / tl.sum(score, axis=1)[:, None]
    choice = tl.where(m_e[None, :], score, float("-inf"))
    picked, places = _pick(choice, score, o_e, K, KP, ROWS)
    if NORMALISE:
        picked = picked / tl.sum(picked, axis=1)[:, None]
    o_k = tl.arange(0, KP)
    at_k = o_r[:, None] * K + o_k[None, :]
    m_k = m_r[:, None] & (o_k < K)[None, :]
    tl.store(weights + at_k, picked.to(weights.dtype.element_ty), mask=m_k)
    tl.store(indices + at_k, tl.minimum(places, E - 1).to(tl.int64), mask=m_k)


@triton.jit(do_not_specialize=["num_rows", "scaling"])
def _top_k_gradient_kernel(
    logits,
    indices,
    d_weights,
    d_logits,
    num_rows,
    scaling,
    E: tl.constexpr,
    EP: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORMALISE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """With scores s of the picked experts, Z their sum, g the weights' gradient times scaling:
    d s = (g - <g, s> / Z) / Z if normalised, else g. Then d x = d s s (1 - s) for sigmoid, and
    p (d s - <d s, s>) over all experts for softmax."""
    o_r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_r = o_r < num_rows
    o_r = o_r.to(tl.int64)
    o_k = tl.arange(0, KP)
    at_k = o_r[:, None] * K + o_k[None, :]
    m_k = m_r[:, None] & (o_k < K)[None, :]
    expert = tl.load(indices + at_k, mask=m_k, other=0).to(tl.int32)
    g = tl.load(d_weights + at_k, mask=m_k, other=0.0).to(tl.float32) * scaling
    x_k = tl.load(logits + o_r[:, None] * E + expert, mask=m_k, other=0.0).to(tl.float32)
    o_e = tl.arange(0, EP)
    at_e = o_r[:, None] * E + o_e[None, :]
    m_e = m_r[:, None] & (o_e < E)[None, :]
    if SOFTMAX:
        x = tl.load(logits + at_e, mask=m_e, other=0.0).to(tl.float32)
        x = tl.where((o_e < E)[None, :], x, float("-inf"))
        top = tl.max(x, axis=1)
        p = tl.exp(x - top[:, None])
        total = tl.sum(p, axis=1)
        p = p / total[:, None]
        score = tl.exp(x_k - top[:, None]) / total[:, None]
    else:
        score = 1.0 / (1.0 + tl.exp(-x_k))
    score = tl.where(m_k, score, 0.0)
    if NORMALISE:
        z = tl.sum(score, axis=1) + (0.0 if SOFTMAX else 1e-20)
        z = tl.where(m_r, z, 1.0)
        g = (g - (tl.sum(g * score, axis=1) / z)[:, None]) / z[:, None]
    common = tl.sum(g * score, axis=1)
    if not SOFTMAX:
        g = g * score * (1.0 - score)
    gradient = tl.zeros([ROWS, EP], dtype=tl.float32)
    for j in range(K):
        is_j = o_k[None, :] == j
        expert_j = tl.sum(tl.where(is_j, expert, 0), axis=1)
        g_j = tl.sum(tl.where(is_j, g, 0.0), axis=1)
        gradient = tl.where(o_e[None, :] == expert_j[:, None], g_j[:, None], gradient)
    if SOFTMAX:
        gradient = p * (gradient - common[:, None])
    tl.store(d_logits + at_e, gradient.to(d_logits.dtype.element_ty), mask=m_e)


@triton.jit(do_not_specialize=["num_rows"])
def _split_kernel(
    x,
    terms,
    num_rows,
    term_stride,
    row_stride,
    N: tl.constexpr,
    MID: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    o_r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (o_r < num_rows)[:, None] & (o_n < N)[None, :]
    o_r = o_r.to(tl.int64)
    value = tl.load(x + o_r[:, None] * N + o_n[None, :], mask=mask, other=0.0)
    at = terms + o_r[:, None] * row_stride + o_n[None, :]
    high = value.to(terms.dtype.element_ty)
    rest = value - high.to(tl.float32)
    mid = rest.to(terms.dtype.element_ty)
    low = (rest - mid.to(tl.float32)).to(terms.dtype.element_ty)
    tl.store(at, low, mask=mask)
    tl.store(at + MID * term_stride, mid, mask=mask)
    tl.store(at + (3 - MID) * term_stride, high, mask=mask)
    tl.store(at + 3 * term_stride, high, mask=mask)
