"""Gates in Triton: elementwise over flat elements, or a tile of (row, head) vectors a program.

Legend: N elements, W columns of a head, R heads of a tile, BW the power of two at or above W.
"""

from __future__ import annotations

import torch

from harts.ops.needs_triton import tl, triton

BLOCK = 2048
NUM_WARPS = 4


def swiglu_elements(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of contiguous tensors."""
    y = torch.empty_like(gate)
    num_elements = y.numel()
    if num_elements:
        _swiglu_kernel[(triton.cdiv(num_elements, BLOCK),)](
            gate, up, y, num_elements, BLOCK=BLOCK, num_warps=NUM_WARPS
        )
    return y


def swiglu_elements_backward(
    gate: torch.Tensor, up: torch.Tensor, dy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """dgate and dup of contiguous tensors."""
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    num_elements = dy.numel()
    if num_elements:
        _swiglu_backward_kernel[(triton.cdiv(num_elements, BLOCK),)](
            gate, up, dy, dgate, dup, num_elements, BLOCK=BLOCK, num_warps=NUM_WARPS
        )
    return dgate, dup


def gate_vectors(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(logits): contiguous vectors (..., W), one logit each."""
    y = torch.empty_like(x)
    num_vectors = logits.numel()
    if x.numel():
        tile = _tile(x.shape[-1])
        _gate_vectors_kernel[(triton.cdiv(num_vectors, tile["R"]),)](
            x, logits, y, num_vectors, W=x.shape[-1], **tile, num_warps=NUM_WARPS
        )
    return y


def gate_vectors_backward(
    x: torch.Tensor, logits: torch.Tensor, dy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """dx (..., W) and dlogits (...), of contiguous tensors."""
    dx, dlogits = torch.empty_like(x), torch.zeros_like(logits)
    num_vectors = logits.numel()
    if x.numel():
        tile = _tile(x.shape[-1])
        _gate_vectors_backward_kernel[(triton.cdiv(num_vectors, tile["R"]),)](
            x, logits, dy, dx, dlogits, num_vectors, W=x.shape[-1], **tile, num_warps=NUM_WARPS
        )
    return dx, dlogits


def _tile(width: int) -> dict[str, int]:
    """About as many elements as a block, whole vectors."""
    block = triton.next_power_of_2(width)
    return {"R": max(1, BLOCK // block), "BW": block}


# num_elements is specialised on whether 16 divides it, as loads of 16 bytes need: where it
# divides the width it always does, so that another number of rows compiles nothing.
@triton.jit
def _swiglu_kernel(gate, up, y, num_elements, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_elements
    b_gate = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    b_up = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    b_silu = (b_gate * tl.sigmoid(b_gate)).to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + at, (b_silu * b_up).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward_kernel(gate, up, dy, dgate, dup, num_elements, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_elements
    b_gate = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    b_up = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    b_dy = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    b_open = tl.sigmoid(b_gate)
    b_slope = b_open + b_gate * b_open * (1.0 - b_open)
    tl.store(dgate + at, (b_dy * b_up * b_slope).to(dgate.dtype.element_ty), mask=inside)
    tl.store(dup + at, (b_dy * b_gate * b_open).to(dup.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_vectors"])
def _gate_vectors_kernel(
    x, logits, y, num_vectors, W: tl.constexpr, R: tl.constexpr, BW: tl.constexpr
):
    rows = tl.program_id(0) * R + tl.arange(0, R)
    cols = tl.arange(0, BW)
    inside = rows < num_vectors
    mask = inside[:, None] & (cols < W)[None, :]
    at = rows.to(tl.int64)[:, None] * W + cols[None, :]
    b_open = tl.sigmoid(tl.load(logits + rows, mask=inside, other=0.0).to(tl.float32))
    b_open = b_open.to(x.dtype.element_ty).to(tl.float32)
    b_x = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + at, (b_x * b_open[:, None]).to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_vectors"])
def _gate_vectors_backward_kernel(
    x,
    logits,
    dy,
    dx,
    dlogits,
    num_vectors,
    W: tl.constexpr,
    R: tl.constexpr,
    BW: tl.constexpr,
):
    rows = tl.program_id(0) * R + tl.arange(0, R)
    cols = tl.arange(0, BW)
    inside = rows < num_vectors
    mask = inside[:, None] & (cols < W)[None, :]
    at = rows.to(tl.int64)[:, None] * W + cols[None, :]
    b_open = tl.sigmoid(tl.load(logits + rows, mask=inside, other=0.0).to(tl.float32))
    b_x = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    b_dy = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
    b_dlogits = tl.sum(b_x * b_dy, axis=1) * b_open * (1.0 - b_open)
    b_open = b_open.to(x.dtype.element_ty).to(tl.float32)
    tl.store(dx + at, (b_dy * b_open[:, None]).to(dx.dtype.element_ty), mask=mask)
    tl.store(dlogits + rows, b_dlogits.to(dlogits.dtype.element_ty), mask=inside)
