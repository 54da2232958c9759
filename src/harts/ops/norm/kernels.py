"""RMS normalisation in Triton: a program owns a few whole rows, in float32 registers.

Forward programs take one tile of rows each. Backward programs walk every n-th tile, so that each
sums the weight gradient of its rows in registers and writes it once: no atomics, the same bits
every time. Rows may lie apart (slices of a wider projection); columns are adjacent.

Legend: W columns of a row, R rows of a tile, BW the power of two at or above W. A row is
(outer, head) of an (outer, heads, W) tensor with two strides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harts.ops.needs_triton import tl, triton

# Four programs for each of the H200's 132 multiprocessors; a constant, so that the order of the
# weight gradient's sum, and with it the bits, depend on the number of rows alone.
PROGRAMS = 528
TILE = 2048


@dataclass(frozen=True)
class Rows:
    """Rows of a tensor (..., W) as (outer, heads, W), its columns adjacent."""

    data: torch.Tensor
    heads: int
    outer_stride: int
    head_stride: int

    @property
    def layout(self) -> tuple[torch.Tensor, int, int]:
        """What a kernel takes."""
        return self.data, self.outer_stride, self.head_stride


def rows_of(x: torch.Tensor) -> Rows:
    """The rows of x where they lie; copies only where no (outer, heads, W) view exists."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    if x.ndim < 3:
        return Rows(x, 1, x.stride(0) if x.ndim == 2 else 0, 0)
    x = x.flatten(0, -3)
    # Columns of a flattened copy are adjacent; the stride over one outer row means nothing.
    outer_stride = x.stride(0) if x.shape[0] > 1 else 0
    return Rows(x, x.shape[1], outer_stride, x.stride(1))


def norm_rows(
    x: torch.Tensor, weight: torch.Tensor, eps: float, scaling: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """y (..., W) and 1 / rms of every row, float32."""
    dtype = torch.promote_types(x.dtype, weight.dtype) if scaling == "rounded" else x.dtype
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    width, num_rows, grid = _forward_grid(x)
    rstd = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows:
        rows = rows_of(x)
        _norm_rows_kernel[grid](
            *rows.layout,
            weight,
            y,
            rstd,
            num_rows,
            rows.heads,
            eps,
            W=width,
            SCALING=scaling,
            **_tile(width),
        )
    return y, rstd


def norm_rows_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    dy: torch.Tensor,
    scaling: str,
    *,
    weight_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """dx (..., W), and dweight (W,) where it is asked for."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width, num_rows, num_programs = _backward_grid(x)
    partial = _partial_sums(weight, num_programs if weight_gradient else 0)
    if num_rows:
        rows, dy_rows = rows_of(x), rows_of(dy)
        _norm_rows_backward_kernel[(num_programs,)](
            *rows.layout,
            weight,
            rstd,
            *dy_rows.layout,
            dx,
            partial,
            num_rows,
            rows.heads,
            W=width,
            SCALING=scaling,
            WEIGHT_GRADIENT=weight_gradient,
            STAGES=_stages(width),
            **_tile(width),
        )
    return dx, _summed(partial, weight) if weight_gradient else None


def gated_norm_rows(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    activation: str,
    scaling: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y (..., W) and 1 / rms of every row, float32."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width, num_rows, grid = _forward_grid(x)
    rstd = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows:
        rows, gate_rows = rows_of(x), rows_of(gate)
        _gated_norm_rows_kernel[grid](
            *rows.layout,
            *gate_rows.layout,
            weight,
            y,
            rstd,
            num_rows,
            rows.heads,
            eps,
            W=width,
            ACTIVATION=activation,
            SCALING=scaling,
            **_tile(width),
        )
    return y, rstd


def gated_norm_rows_backward(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    dy: torch.Tensor,
    activation: str,
    *,
    weight_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """dx, dgate (..., W), and dweight (W,) where it is asked for."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dgate = torch.empty(x.shape, dtype=gate.dtype, device=x.device)
    width, num_rows, num_programs = _backward_grid(x)
    partial = _partial_sums(weight, num_programs if weight_gradient else 0)
    if num_rows:
        rows, gate_rows, dy_rows = rows_of(x), rows_of(gate), rows_of(dy)
        _gated_norm_rows_backward_kernel[(num_programs,)](
            *rows.layout,
            *gate_rows.layout,
            weight,
            rstd,
            *dy_rows.layout,
            dx,
            dgate,
            partial,
            num_rows,
            rows.heads,
            W=width,
            ACTIVATION=activation,
            WEIGHT_GRADIENT=weight_gradient,
            STAGES=_stages(width),
            **_tile(width),
        )
    return dx, dgate, _summed(partial, weight) if weight_gradient else None


def _tile(width: int) -> dict[str, int]:
    """2,048 elements or one row: 16 elements a thread, two 16-byte loads of half precision."""
    block = triton.next_power_of_2(width)
    rows = max(1, TILE // block)
    return {"R": rows, "BW": block, "num_warps": max(4, block * rows // 512)}


def _stages(width: int) -> int:
    """Tiles in flight; the widest rows fill shared memory with two."""
    return 3 if width <= TILE else 2


def _forward_grid(x: torch.Tensor) -> tuple[int, int, tuple[int]]:
    width = x.shape[-1]
    num_rows = x.numel() // width if width else 0
    return width, num_rows, (triton.cdiv(num_rows, _tile(width)["R"]) if num_rows else 0,)


def _backward_grid(x: torch.Tensor) -> tuple[int, int, int]:
    width, num_rows, (num_tiles,) = _forward_grid(x)
    return width, num_rows, min(PROGRAMS, num_tiles)


def _partial_sums(weight: torch.Tensor, num_programs: int) -> torch.Tensor:
    return torch.empty(num_programs, *weight.shape, dtype=torch.float32, device=weight.device)


def _summed(partial: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return partial.sum(0).to(weight.dtype)


@triton.jit
def _places(rows, heads, outer_stride, head_stride):
    """Where each row of an (outer, heads, W) tensor begins."""
    outer = (rows // heads).to(tl.int64)
    return outer * outer_stride + (rows % heads).to(tl.int64) * head_stride


@triton.jit
def _scaled(normalised, weight, dtype: tl.constexpr, SCALING: tl.constexpr):
    """The weighted rows in float32; weight is (1, BW), dtype x's."""
    if SCALING == "rounded":
        normalised = normalised.to(dtype).to(tl.float32)
    return normalised * weight


@triton.jit
def _load_weight(weight, cols, W: tl.constexpr, SCALING: tl.constexpr):
    """(1, BW), float32, zero past the last column."""
    values = tl.load(weight + cols, mask=cols < W, other=0.0).to(tl.float32)
    if SCALING == "one_plus":
        values += 1.0
    return values[None, :]


@triton.jit
def _gradient_through_norm(d_normalised, normalised, rstd, W: tl.constexpr):
    """d_x of normalised = rstd x: what changes the row's length is taken out."""
    along = tl.sum(d_normalised * normalised, axis=1) / W
    return rstd[:, None] * (d_normalised - normalised * along[:, None])


@triton.jit(do_not_specialize=["num_rows", "heads"])
def _norm_rows_kernel(
    x,
    x_outer_stride,
    x_head_stride,
    weight,
    y,
    rstd,
    num_rows,
    heads,
    eps,
    W: tl.constexpr,
    SCALING: tl.constexpr,
    R: tl.constexpr,
    BW: tl.constexpr,
):
    rows = tl.program_id(0) * R + tl.arange(0, R)
    cols = tl.arange(0, BW)
    inside = rows < num_rows
    mask = inside[:, None] & (cols < W)[None, :]
    places = _places(rows, heads, x_outer_stride, x_head_stride)
    b_x = tl.load(x + places[:, None] + cols[None, :], mask=mask, other=0.0)
    b_wide = b_x.to(tl.float32)
    b_rstd = tl.rsqrt(tl.sum(b_wide * b_wide, axis=1) / W + eps)
    b_weight = _load_weight(weight, cols, W, SCALING)
    b_y = _scaled(b_wide * b_rstd[:, None], b_weight, x.dtype.element_ty, SCALING)
    at = rows.to(tl.int64)[:, None] * W + cols[None, :]
    tl.store(y + at, b_y.to(y.dtype.element_ty), mask=mask)
    tl.store(rstd + rows, b_rstd, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "heads"])
def _norm_rows_backward_kernel(
    x,
    x_outer_stride,
    x_head_stride,
    weight,
    rstd,
    dy,
    dy_outer_stride,
    dy_head_stride,
    dx,
    partial,
    num_rows,
    heads,
    W: tl.constexpr,
    SCALING: tl.constexpr,
    WEIGHT_GRADIENT: tl.constexpr,
    STAGES: tl.constexpr,
    R: tl.constexpr,
    BW: tl.constexpr,
):
    cols = tl.arange(0, BW)
    b_weight = _load_weight(weight, cols, W, SCALING)
    b_dweight = tl.zeros([R, BW], dtype=tl.float32)
    first, step = tl.program_id(0), tl.num_programs(0)
    for tile in tl.range(first, tl.cdiv(num_rows, R), step, num_stages=STAGES):
        rows = tile * R + tl.arange(0, R)
        inside = rows < num_rows
        mask = inside[:, None] & (cols < W)[None, :]
        x_at = _places(rows, heads, x_outer_stride, x_head_stride)[:, None] + cols[None, :]
        dy_at = _places(rows, heads, dy_outer_stride, dy_head_stride)[:, None] + cols[None, :]
        b_x = tl.load(x + x_at, mask=mask, other=0.0).to(tl.float32)
        b_dy = tl.load(dy + dy_at, mask=mask, other=0.0).to(tl.float32)
        b_rstd = tl.load(rstd + rows, mask=inside, other=0.0)
        normalised = b_x * b_rstd[:, None]
        b_dweight += b_dy * normalised
        b_dx = _gradient_through_norm(b_dy * b_weight, normalised, b_rstd, W)
        at = rows.to(tl.int64)[:, None] * W + cols[None, :]
        tl.store(dx + at, b_dx.to(dx.dtype.element_ty), mask=mask)
    if WEIGHT_GRADIENT:
        at = tl.program_id(0) * W + cols
        tl.store(partial + at, tl.sum(b_dweight, axis=0), mask=cols < W)


@triton.jit(do_not_specialize=["num_rows", "heads"])
def _gated_norm_rows_kernel(
    x,
    x_outer_stride,
    x_head_stride,
    gate,
    gate_outer_stride,
    gate_head_stride,
    weight,
    y,
    rstd,
    num_rows,
    heads,
    eps,
    W: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SCALING: tl.constexpr,
    R: tl.constexpr,
    BW: tl.constexpr,
):
    rows = tl.program_id(0) * R + tl.arange(0, R)
    cols = tl.arange(0, BW)
    inside = rows < num_rows
    mask = inside[:, None] & (cols < W)[None, :]
    x_at = _places(rows, heads, x_outer_stride, x_head_stride)[:, None] + cols[None, :]
    gate_at = _places(rows, heads, gate_outer_stride, gate_head_stride)[:, None] + cols[None, :]
    b_x = tl.load(x + x_at, mask=mask, other=0.0).to(tl.float32)
    b_gate = tl.load(gate + gate_at, mask=mask, other=0.0).to(tl.float32)
    b_rstd = tl.rsqrt(tl.sum(b_x * b_x, axis=1) / W + eps)
    b_weight = _load_weight(weight, cols, W, SCALING)
    b_y = _scaled(b_x * b_rstd[:, None], b_weight, x.dtype.element_ty, SCALING)
    if SCALING == "rounded":
        # A float32 weight lifts the product to float32, a narrow one does not.
        b_y = b_y.to(weight.dtype.element_ty).to(tl.float32)
    b_open = tl.sigmoid(b_gate)
    if ACTIVATION == "silu":
        b_open *= b_gate
    at = rows.to(tl.int64)[:, None] * W + cols[None, :]
    tl.store(y + at, (b_y * b_open).to(y.dtype.element_ty), mask=mask)
    tl.store(rstd + rows, b_rstd, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "heads"])
def _gated_norm_rows_backward_kernel(
    x,
    x_outer_stride,
    x_head_stride,
    gate,
    gate_outer_stride,
    gate_head_stride,
    weight,
    rstd,
    dy,
    dy_outer_stride,
    dy_head_stride,
    dx,
    dgate,
    partial,
    num_rows,
    heads,
    W: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WEIGHT_GRADIENT: tl.constexpr,
    STAGES: tl.constexpr,
    R: tl.constexpr,
    BW: tl.constexpr,
):
    cols = tl.arange(0, BW)
    b_weight = _load_weight(weight, cols, W, "wide")
    b_dweight = tl.zeros([R, BW], dtype=tl.float32)
    first, step = tl.program_id(0), tl.num_programs(0)
    for tile in tl.range(first, tl.cdiv(num_rows, R), step, num_stages=STAGES):
        rows = tile * R + tl.arange(0, R)
        inside = rows < num_rows
        mask = inside[:, None] & (cols < W)[None, :]
        x_at = _places(rows, heads, x_outer_stride, x_head_stride)[:, None] + cols[None, :]
        gate_at = _places(rows, heads, gate_outer_stride, gate_head_stride)
        dy_at = _places(rows, heads, dy_outer_stride, dy_head_stride)[:, None] + cols[None, :]
        b_x = tl.load(x + x_at, mask=mask, other=0.0).to(tl.float32)
        b_gate = tl.load(gate + gate_at[:, None] + cols[None, :], mask=mask, other=0.0)
        b_dy = tl.load(dy + dy_at, mask=mask, other=0.0).to(tl.float32)
        b_rstd = tl.load(rstd + rows, mask=inside, other=0.0)
        b_gate = b_gate.to(tl.float32)
        b_open = tl.sigmoid(b_gate)
        b_slope = b_open * (1.0 - b_open)
        if ACTIVATION == "silu":
            b_slope = b_open + b_gate * b_slope
            b_open *= b_gate
        normalised = b_x * b_rstd[:, None]
        b_dgate = b_dy * normalised * b_weight * b_slope
        b_dy *= b_open
        b_dweight += b_dy * normalised
        b_dx = _gradient_through_norm(b_dy * b_weight, normalised, b_rstd, W)
        at = rows.to(tl.int64)[:, None] * W + cols[None, :]
        tl.store(dx + at, b_dx.to(dx.dtype.element_ty), mask=mask)
        tl.store(dgate + at, b_dgate.to(dgate.dtype.element_ty), mask=mask)
    if WEIGHT_GRADIENT:
        at = tl.program_id(0) * W + cols
        tl.store(partial + at, tl.sum(b_dweight, axis=0), mask=cols < W)
