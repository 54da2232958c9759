"""Triton kernels of the fused convolution: rows forward, sums and taps backward.

A program owns a block of channels (one head where heads are scaled to length one) and walks rows.
Everything is float32 between loading and storing.

Legend: P packed rows, D channels, W width of the kernel, T row tiles of a weight gradient.
"""

from __future__ import annotations

import torch

from harts.ops.conv.reference import UNIT_EPSILON
from harts.ops.needs_triton import tl, triton
from harts.views.conv import ConvView

# The fastest of a sweep on H200: 66,156 rows of 2,048 channels, bfloat16.
_FORWARD_ROWS, _FORWARD_WARPS = 8, 2
_TAPS_ROWS, _TAPS_WARPS = 16, 4
_TILE_ROWS, _TILE_WARPS = 512, 2
"""Rows that one program sums a weight's gradient over."""
_TILE_BLOCK_ROWS, _TILE_BLOCK_ROWS_OF_UNIT = 4, 8
"""How many of them it holds in registers at a time, and where heads are scaled to length one."""
MAX_WIDTH = 4
"""Taps whose gradients fit into registers."""
_CHANNELS = 128
"""Channels of a program where no head says otherwise."""


def convolve_rows(
    x_PD: torch.Tensor,
    weight_DW: torch.Tensor,
    bias_D: torch.Tensor | None,
    view: ConvView,
    activation: str | None,
    unit_width: int | None,
) -> torch.Tensor:
    """The operator itself, (P, D) in x's dtype."""
    num_rows, num_channels = x_PD.shape
    y = torch.empty(num_rows, num_channels, dtype=x_PD.dtype, device=x_PD.device)
    group = unit_width or min(num_channels, _CHANNELS)
    grid = (triton.cdiv(num_rows, _FORWARD_ROWS), triton.cdiv(num_channels, group))
    _convolve_kernel[grid](
        x_PD,
        weight_DW,
        weight_DW if bias_D is None else bias_D,
        view.window,
        y,
        num_rows,
        x_PD.stride(0),
        D=num_channels,
        GROUP=group,
        BD=triton.next_power_of_2(group),
        W=view.width,
        BT=_FORWARD_ROWS,
        BIAS=bias_D is not None,
        SILU=activation == "silu",
        UNIT=unit_width is not None,
        EPSILON=UNIT_EPSILON,
        num_warps=_FORWARD_WARPS,
    )
    return y


def sum_gradients(
    x_PD: torch.Tensor,
    weight_DW: torch.Tensor,
    bias_D: torch.Tensor | None,
    d_y_PD: torch.Tensor,
    view: ConvView,
    activation: str | None,
    unit_width: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the sums before activation (P, D) in x's dtype, and the parts of the weight's
    (T, D, W) and the bias's (T, D) in float32, one for each tile of rows."""
    num_rows, num_channels = x_PD.shape
    group = unit_width or min(num_channels, _CHANNELS)
    block_rows = _TILE_BLOCK_ROWS if unit_width is None else _TILE_BLOCK_ROWS_OF_UNIT
    num_tiles = triton.cdiv(num_rows, _TILE_ROWS)
    d_sums = torch.empty(num_rows, num_channels, dtype=x_PD.dtype, device=x_PD.device)
    d_weight = x_PD.new_empty(num_tiles, num_channels, view.width, dtype=torch.float32)
    d_bias = x_PD.new_empty(num_tiles, num_channels, dtype=torch.float32)
    _sum_gradients_kernel[(num_tiles, triton.cdiv(num_channels, group))](
        x_PD,
        weight_DW,
        weight_DW if bias_D is None else bias_D,
        view.window,
        d_y_PD,
        d_sums,
        d_weight,
        d_bias,
        num_rows,
        x_PD.stride(0),
        d_y_PD.stride(0),
        D=num_channels,
        GROUP=group,
        BD=triton.next_power_of_2(group),
        W=view.width,
        BT=block_rows,
        BLOCKS=_TILE_ROWS // block_rows,
        BIAS=bias_D is not None,
        SILU=activation == "silu",
        UNIT=unit_width is not None,
        EPSILON=UNIT_EPSILON,
        num_warps=_TILE_WARPS,
    )
    return d_sums, d_weight, d_bias


def taps_gradient(d_sums_PD: torch.Tensor, weight_DW: torch.Tensor, view: ConvView) -> torch.Tensor:
    """Gradient of x (P, D): each row collects from the rows that read it."""
    num_rows, num_channels = d_sums_PD.shape
    d_x = torch.empty_like(d_sums_PD)
    channel_blocks = triton.cdiv(num_channels, _CHANNELS)
    sizes = dict(D=num_channels, BD=_CHANNELS, W=view.width, num_warps=_TAPS_WARPS)
    _taps_gradient_kernel[(triton.cdiv(num_rows, _TAPS_ROWS), channel_blocks)](
        d_sums_PD, weight_DW, view.window, d_x, num_rows, BT=_TAPS_ROWS, **sizes
    )
    num_branches = view.branch_rows.shape[0]
    if num_branches > 0:  # these rows again, with their readers in other chains
        _branch_gradient_kernel[(num_branches, channel_blocks)](
            d_sums_PD,
            weight_DW,
            view.window,
            view.branch_rows,
            view.branch_ptr,
            view.branch_reads,
            d_x,
            num_rows,
            **sizes,
        )
    return d_x


@triton.jit
def _tap(x, window, row, rows_left, channel, in_group, stride, tap: tl.constexpr, W: tl.constexpr):
    """What tap reads for a block of rows, (BT, BD) in float32."""
    read = tl.load(window + row * W + tap, mask=rows_left, other=-1)
    return tl.load(
        x + read.to(tl.int64)[:, None] * stride + channel[None, :],
        mask=(read >= 0)[:, None] & in_group[None, :],
        other=0.0,
    ).to(tl.float32)


@triton.jit
def _sums(
    x, weight, bias, window, row, rows_left, channel, in_group, stride,
    BT: tl.constexpr, BD: tl.constexpr, W: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Bias and taps of a block of rows, (BT, BD)."""
    sums = tl.zeros((BT, BD), tl.float32)
    if BIAS:
        sums += tl.load(bias + channel, mask=in_group, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(W):
        w = tl.load(weight + channel * W + tap, mask=in_group, other=0.0).to(tl.float32)
        sums += _tap(x, window, row, rows_left, channel, in_group, stride, tap, W) * w[None, :]
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def _convolve_kernel(
    x, weight, bias, window, y, num_rows, stride,
    D: tl.constexpr, GROUP: tl.constexpr, BD: tl.constexpr, W: tl.constexpr, BT: tl.constexpr,
    BIAS: tl.constexpr, SILU: tl.constexpr, UNIT: tl.constexpr, EPSILON: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BT + tl.arange(0, BT)
    in_row = row < num_rows
    lane = tl.arange(0, BD)
    channel = tl.program_id(1) * GROUP + lane
    in_group = (lane < GROUP) & (channel < D)
    out = _sums(x, weight, bias, window, row, in_row, channel, in_group, stride, BT, BD, W, BIAS)
    if SILU:
        out = out * tl.sigmoid(out)
    if UNIT:
        out = out * tl.rsqrt(tl.sum(out * out, axis=1) + EPSILON)[:, None]
    tl.store(
        y + row.to(tl.int64)[:, None] * D + channel[None, :],
        out.to(y.dtype.element_ty),
        mask=in_row[:, None] & in_group[None, :],
    )


@triton.jit
def _store_part(d_weight, at, in_group, part, tap: tl.constexpr, W: tl.constexpr):
    """One tap's part of the weight's gradient, the sum of (BT, BD) over rows."""
    tl.store(d_weight + at * W + tap, tl.sum(part, axis=0), mask=in_group)


@triton.jit(do_not_specialize=["num_rows"])
def _sum_gradients_kernel(
    x, weight, bias, window, d_y, d_sums, d_weight, d_bias, num_rows, stride, stride_d_y,
    D: tl.constexpr, GROUP: tl.constexpr, BD: tl.constexpr, W: tl.constexpr,
    BT: tl.constexpr, BLOCKS: tl.constexpr,
    BIAS: tl.constexpr, SILU: tl.constexpr, UNIT: tl.constexpr, EPSILON: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    lane = tl.arange(0, BD)
    channel = tl.program_id(1) * GROUP + lane
    in_group = (lane < GROUP) & (channel < D)
    w_0 = _taps_of(weight, channel, in_group, 0, W)
    w_1 = _taps_of(weight, channel, in_group, 1, W)
    w_2 = _taps_of(weight, channel, in_group, 2, W)
    w_3 = _taps_of(weight, channel, in_group, 3, W)
    b = tl.load(bias + channel, mask=in_group, other=0.0).to(tl.float32) if BIAS else 0.0
    # parts stay (BT, BD) and are summed over rows once: a reduction a block would cost more
    part_0 = tl.zeros((BT, BD), tl.float32)
    part_1 = tl.zeros((BT, BD), tl.float32)
    part_2 = tl.zeros((BT, BD), tl.float32)
    part_3 = tl.zeros((BT, BD), tl.float32)
    bias_part = tl.zeros((BT, BD), tl.float32)
    for block in range(BLOCKS):
        row = (tile * BLOCKS + block) * BT + tl.arange(0, BT)
        in_row = row < num_rows
        at = row.to(tl.int64)[:, None]
        seen = in_row[:, None] & in_group[None, :]
        grad = tl.load(d_y + at * stride_d_y + channel[None, :], mask=seen, other=0.0)
        grad = grad.to(tl.float32)
        # each tap is read once, for the sums and for its weight's gradient
        sums = tl.zeros((BT, BD), tl.float32) + b
        x_0 = _tap(x, window, row, in_row, channel, in_group, stride, 0, W)
        sums += x_0 * w_0[None, :]
        if W > 1:
            x_1 = _tap(x, window, row, in_row, channel, in_group, stride, 1, W)
            sums += x_1 * w_1[None, :]
        if W > 2:
            x_2 = _tap(x, window, row, in_row, channel, in_group, stride, 2, W)
            sums += x_2 * w_2[None, :]
        if W > 3:
            x_3 = _tap(x, window, row, in_row, channel, in_group, stride, 3, W)
            sums += x_3 * w_3[None, :]
        gate = tl.sigmoid(sums) if SILU else tl.full((BT, BD), 1.0, tl.float32)
        if UNIT:
            active = sums * gate
            inverse = tl.rsqrt(tl.sum(active * active, axis=1) + EPSILON)[:, None]
            unit = active * inverse
            grad = inverse * (grad - unit * tl.sum(grad * unit, axis=1)[:, None])
        if SILU:
            grad = grad * gate * (1 + sums * (1 - gate))
        tl.store(d_sums + at * D + channel[None, :], grad.to(d_sums.dtype.element_ty), mask=seen)
        if BIAS:
            bias_part += grad
        part_0 += grad * x_0
        if W > 1:
            part_1 += grad * x_1
        if W > 2:
            part_2 += grad * x_2
        if W > 3:
            part_3 += grad * x_3
    place = tile.to(tl.int64) * D + channel
    _store_part(d_weight, place, in_group, part_0, 0, W)
    if W > 1:
        _store_part(d_weight, place, in_group, part_1, 1, W)
    if W > 2:
        _store_part(d_weight, place, in_group, part_2, 2, W)
    if W > 3:
        _store_part(d_weight, place, in_group, part_3, 3, W)
    if BIAS:
        tl.store(d_bias + place, tl.sum(bias_part, axis=0), mask=in_group)


@triton.jit
def _taps_of(weight, channel, in_group, tap: tl.constexpr, W: tl.constexpr):
    """One tap's weights (BD,), zero for a tap that the kernel does not have."""
    return tl.load(weight + channel * W + tap, mask=in_group & (tap < W), other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def _taps_gradient_kernel(
    d_sums, weight, window, d_x, num_rows,
    D: tl.constexpr, BD: tl.constexpr, W: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BT + tl.arange(0, BT)
    in_row = row < num_rows
    channel = tl.program_id(1) * BD + tl.arange(0, BD)
    in_group = channel < D
    total = tl.zeros((BT, BD), tl.float32)
    for ahead in tl.static_range(W):
        reader = row + ahead
        read = tl.load(window + reader * W + W - 1 - ahead, mask=reader < num_rows, other=-1)
        w = tl.load(weight + channel * W + W - 1 - ahead, mask=in_group, other=0.0).to(tl.float32)
        grad = tl.load(
            d_sums + reader.to(tl.int64)[:, None] * D + channel[None, :],
            mask=(read == row)[:, None] & in_row[:, None] & in_group[None, :],
            other=0.0,
        )
        total += grad.to(tl.float32) * w[None, :]
    tl.store(
        d_x + row.to(tl.int64)[:, None] * D + channel[None, :],
        total.to(d_x.dtype.element_ty),
        mask=in_row[:, None] & in_group[None, :],
    )


@triton.jit(do_not_specialize=["num_rows"])
def _branch_gradient_kernel(
    d_sums, weight, window, branch_rows, branch_ptr, branch_reads, d_x, num_rows,
    D: tl.constexpr, BD: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    branch = tl.program_id(0)
    row = tl.load(branch_rows + branch)
    channel = tl.program_id(1) * BD + tl.arange(0, BD)
    in_group = channel < D
    total = tl.zeros((BD,), tl.float32)
    for ahead in tl.static_range(W):
        reader = row + ahead
        read = tl.load(window + reader * W + W - 1 - ahead, mask=reader < num_rows, other=-1)
        w = tl.load(weight + channel * W + W - 1 - ahead, mask=in_group, other=0.0).to(tl.float32)
        near = in_group & (read == row)
        grad = tl.load(d_sums + reader.to(tl.int64) * D + channel, mask=near, other=0.0)
        total += grad.to(tl.float32) * w
    for place in range(tl.load(branch_ptr + branch), tl.load(branch_ptr + branch + 1)):
        entry = tl.load(branch_reads + place)
        far_w = tl.load(weight + channel * W + entry % W, mask=in_group, other=0.0).to(tl.float32)
        far = d_sums + (entry // W).to(tl.int64) * D + channel
        total += tl.load(far, mask=in_group, other=0.0).to(tl.float32) * far_w
    tl.store(d_x + row.to(tl.int64) * D + channel, total.to(d_x.dtype.element_ty), mask=in_group)
