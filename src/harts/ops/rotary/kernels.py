"""Assembly of latent attention in Triton: a program owns all heads of one row.

Legend: C rows, H heads, N columns without position, R rotary columns, V value columns; BH, BN, BR,
BV the powers of two at or above. A head of q and k has N + R columns, one of kv N + V.
"""

from __future__ import annotations

import torch

from harts.ops.needs_triton import tl, triton


def rotate(q_CHD: torch.Tensor, cos_CR: torch.Tensor, sin_CR: torch.Tensor) -> torch.Tensor:
    """The rotated queries; q contiguous, rows of cos and sin with adjacent columns."""
    return _launch_rotate(_rotate_kernel, q_CHD, cos_CR, sin_CR)


def rotate_backward(
    dq_CHD: torch.Tensor, cos_CR: torch.Tensor, sin_CR: torch.Tensor
) -> torch.Tensor:
    """The gradient of the queries before rotation; dq contiguous."""
    return _launch_rotate(_rotate_backward_kernel, dq_CHD, cos_CR, sin_CR)


def assemble(
    kv_CHE: torch.Tensor,
    k_rope_CR: torch.Tensor,
    cos_CR: torch.Tensor | None,
    sin_CR: torch.Tensor | None,
    value_width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values; kv contiguous, the rest rows with adjacent columns."""
    num_rows, heads, joint = kv_CHE.shape
    plain, rotary = joint - value_width, k_rope_CR.shape[1]
    keys = kv_CHE.new_empty(num_rows, heads, plain + rotary)
    values = kv_CHE.new_empty(num_rows, heads, value_width)
    if num_rows:
        cos, sin = (k_rope_CR if x is None else x for x in (cos_CR, sin_CR))
        _assemble_kernel[(num_rows,)](
            kv_CHE,
            k_rope_CR,
            cos,
            sin,
            keys,
            values,
            k_rope_CR.stride(0),
            cos.stride(0),
            sin.stride(0),
            ROTATE=cos_CR is not None,
            **_widths(heads, plain, rotary, value_width),
        )
    return keys, values


def assemble_backward(
    d_keys_CHD: torch.Tensor,
    d_values_CHV: torch.Tensor,
    cos_CR: torch.Tensor | None,
    sin_CR: torch.Tensor | None,
    rotary: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of kv (C, H, N + V) and k_rope (C, R); gradients given contiguous."""
    num_rows, heads, value_width = d_values_CHV.shape
    plain = d_keys_CHD.shape[2] - rotary
    d_kv = d_keys_CHD.new_empty(num_rows, heads, plain + value_width)
    d_k_rope = d_keys_CHD.new_empty(num_rows, rotary)
    if num_rows:
        cos, sin = (d_k_rope if x is None else x for x in (cos_CR, sin_CR))
        _assemble_backward_kernel[(num_rows,)](
            d_keys_CHD,
            d_values_CHV,
            cos,
            sin,
            d_kv,
            d_k_rope,
            cos.stride(0),
            sin.stride(0),
            ROTATE=cos_CR is not None,
            **_widths(heads, plain, rotary, value_width),
        )
    return d_kv, d_k_rope


def _launch_rotate(
    kernel: triton.JITFunction, x_CHD: torch.Tensor, cos_CR: torch.Tensor, sin_CR: torch.Tensor
) -> torch.Tensor:
    y = torch.empty_like(x_CHD)
    num_rows, heads, width = x_CHD.shape
    if x_CHD.numel():
        rotary = cos_CR.shape[1]
        widths = _widths(heads, width - rotary, rotary, 1)
        for unused in ("V", "BV"):
            del widths[unused]
        kernel[(num_rows,)](x_CHD, cos_CR, sin_CR, y, cos_CR.stride(0), sin_CR.stride(0), **widths)
    return y


def _widths(heads: int, plain: int, rotary: int, value: int) -> dict[str, int]:
    """Sizes, their powers of two, and a warp for every 512 elements of the widest tile."""
    sizes = {"H": heads, "N": plain, "R": rotary, "V": value}
    blocks = {f"B{name}": triton.next_power_of_2(max(1, size)) for name, size in sizes.items()}
    widest = blocks["BH"] * max(blocks["BN"], blocks["BV"])
    return sizes | blocks | {"num_warps": min(16, max(1, widest // 512))}


@triton.jit
def _copy_columns(
    source,
    target,
    first_source,
    first_target,
    SOURCE_WIDTH: tl.constexpr,
    TARGET_WIDTH: tl.constexpr,
    H: tl.constexpr,
    BH: tl.constexpr,
    W: tl.constexpr,
    BW: tl.constexpr,
):
    """W columns of every head of one row, from one tensor to another."""
    heads = tl.arange(0, BH)[:, None]
    cols = tl.arange(0, BW)[None, :]
    mask = (heads < H) & (cols < W)
    block = tl.load(source + first_source + heads * SOURCE_WIDTH + cols, mask=mask)
    tl.store(target + first_target + heads * TARGET_WIDTH + cols, block, mask=mask)


@triton.jit
def _load_angles(cos, sin, row, cos_stride, sin_stride, R: tl.constexpr, BR: tl.constexpr):
    """Cosine and sine of the row's pairs, (1, BR / 2) each, float32."""
    pairs = tl.arange(0, BR // 2)
    inside = pairs < R // 2
    b_cos = tl.load(cos + row * cos_stride + pairs, mask=inside, other=0.0).to(tl.float32)
    b_sin = tl.load(sin + row * sin_stride + pairs, mask=inside, other=0.0).to(tl.float32)
    return b_cos[None, :], b_sin[None, :]


@triton.jit
def _rotated(x, cos, sin):
    """Halves of the rotated pairs of x (rows, BR), in x's dtype; each product rounded to it."""
    dtype: tl.constexpr = x.dtype
    first, second = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    first, second = first.to(tl.float32), second.to(tl.float32)
    half_0 = (first * cos).to(dtype).to(tl.float32) - (second * sin).to(dtype).to(tl.float32)
    half_1 = (second * cos).to(dtype).to(tl.float32) + (first * sin).to(dtype).to(tl.float32)
    return half_0.to(dtype), half_1.to(dtype)


@triton.jit
def _rotated_back(half_0, half_1, cos, sin):
    """The transpose of the rotation, float32: (rows, BR), pairs interleaved."""
    first = half_0 * cos + half_1 * sin
    second = half_1 * cos - half_0 * sin
    return tl.reshape(tl.join(first, second), [first.shape[0], first.shape[1] * 2])


@triton.jit
def _rotate_kernel(
    q,
    cos,
    sin,
    y,
    cos_stride,
    sin_stride,
    H: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = row * (H * (N + R))
    if N > 0:
        _copy_columns(q, y, first, first, N + R, N + R, H, BH, N, BN)
    heads = tl.arange(0, BH)[:, None]
    at = first + heads * (N + R) + N
    cols = tl.arange(0, BR)[None, :]
    b_q = tl.load(q + at + cols, mask=(heads < H) & (cols < R), other=0.0)
    b_cos, b_sin = _load_angles(cos, sin, row, cos_stride, sin_stride, R, BR)
    half_0, half_1 = _rotated(b_q, b_cos, b_sin)
    pairs = tl.arange(0, BR // 2)[None, :]
    mask = (heads < H) & (pairs < R // 2)
    tl.store(y + at + pairs, half_0, mask=mask)
    tl.store(y + at + R // 2 + pairs, half_1, mask=mask)


@triton.jit
def _rotate_backward_kernel(
    dy,
    cos,
    sin,
    dq,
    cos_stride,
    sin_stride,
    H: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = row * (H * (N + R))
    if N > 0:
        _copy_columns(dy, dq, first, first, N + R, N + R, H, BH, N, BN)
    heads = tl.arange(0, BH)[:, None]
    at = first + heads * (N + R) + N
    pairs = tl.arange(0, BR // 2)[None, :]
    mask = (heads < H) & (pairs < R // 2)
    half_0 = tl.load(dy + at + pairs, mask=mask, other=0.0).to(tl.float32)
    half_1 = tl.load(dy + at + R // 2 + pairs, mask=mask, other=0.0).to(tl.float32)
    b_cos, b_sin = _load_angles(cos, sin, row, cos_stride, sin_stride, R, BR)
    b_dq = _rotated_back(half_0, half_1, b_cos, b_sin).to(dq.dtype.element_ty)
    cols = tl.arange(0, BR)[None, :]
    tl.store(dq + at + cols, b_dq, mask=(heads < H) & (cols < R))


@triton.jit
def _assemble_kernel(
    kv,
    k_rope,
    cos,
    sin,
    keys,
    values,
    k_rope_stride,
    cos_stride,
    sin_stride,
    ROTATE: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    BV: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first_kv, first_key = row * (H * (N + V)), row * (H * (N + R))
    if N > 0:
        _copy_columns(kv, keys, first_kv, first_key, N + V, N + R, H, BH, N, BN)
    _copy_columns(kv, values, first_kv + N, row * (H * V), N + V, V, H, BH, V, BV)
    heads = tl.arange(0, BH)[:, None]
    at = first_key + heads * (N + R) + N
    cols = tl.arange(0, BR)[None, :]
    b_rope = tl.load(k_rope + row * k_rope_stride + cols, mask=cols < R, other=0.0)
    if ROTATE:
        b_cos, b_sin = _load_angles(cos, sin, row, cos_stride, sin_stride, R, BR)
        half_0, half_1 = _rotated(b_rope, b_cos, b_sin)
        pairs = tl.arange(0, BR // 2)[None, :]
        mask = (heads < H) & (pairs < R // 2)
        tl.store(keys + at + pairs, tl.broadcast_to(half_0, [BH, BR // 2]), mask=mask)
        tl.store(keys + at + R // 2 + pairs, tl.broadcast_to(half_1, [BH, BR // 2]), mask=mask)
    else:
        mask = (heads < H) & (cols < R)
        tl.store(keys + at + cols, tl.broadcast_to(b_rope, [BH, BR]), mask=mask)


@triton.jit
def _assemble_backward_kernel(
    d_keys,
    d_values,
    cos,
    sin,
    d_kv,
    d_k_rope,
    cos_stride,
    sin_stride,
    ROTATE: tl.constexpr,
    H: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    BV: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first_kv, first_key = row * (H * (N + V)), row * (H * (N + R))
    if N > 0:
        _copy_columns(d_keys, d_kv, first_key, first_kv, N + R, N + V, H, BH, N, BN)
    _copy_columns(d_values, d_kv, row * (H * V), first_kv + N, V, N + V, H, BH, V, BV)
    heads = tl.arange(0, BH)[:, None]
    at = first_key + heads * (N + R) + N
    cols = tl.arange(0, BR)[None, :]
    if ROTATE:
        pairs = tl.arange(0, BR // 2)[None, :]
        mask = (heads < H) & (pairs < R // 2)
        half_0 = tl.load(d_keys + at + pairs, mask=mask, other=0.0).to(tl.float32)
        half_1 = tl.load(d_keys + at + R // 2 + pairs, mask=mask, other=0.0).to(tl.float32)
        # The heads share the rotation, so their sum is rotated back once.
        half_0, half_1 = tl.sum(half_0, axis=0)[None, :], tl.sum(half_1, axis=0)[None, :]
        b_cos, b_sin = _load_angles(cos, sin, row, cos_stride, sin_stride, R, BR)
        total = _rotated_back(half_0, half_1, b_cos, b_sin)
    else:
        mask = (heads < H) & (cols < R)
        b_rope = tl.load(d_keys + at + cols, mask=mask, other=0.0).to(tl.float32)
        total = tl.sum(b_rope, axis=0)[None, :]
    tl.store(d_k_rope + row * R + cols, total.to(d_k_rope.dtype.element_ty), mask=cols < R)
