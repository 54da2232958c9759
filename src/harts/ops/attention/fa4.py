"""Tree attention by FlashAttention-4: the interval test as its mask, block lists of ours.

Compiled once for each combination of dtype, widths and query heads a key head, never again for
another number of rows or other lists.

Legend: C rows, P rows with padding, H query heads, G key heads, D key width, V value width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from harts.errors import ConfigError
from harts.ops.attention.block_lists import (
    BlockList,
    QueuedLists,
    classify_blocks,
    list_blocks,
    pad_ends,
    queue_blocks,
)
from harts.ops.kept_results import kept_result
from harts.views.attention import AttentionView

if TYPE_CHECKING:
    from types import ModuleType

DTYPES = (torch.bfloat16, torch.float16)

# A key block that waits its turn at a late query block holds up all that it visits afterwards, and
# the library's kernels visit masked blocks first. Deterministic on compute capability 10.x, a short
# list is therefore visited in order, masked throughout, and a long list visits its full blocks
# without the mask. The kernel for 9.0 visits every list in order and masks where it must.
MAX_FULL_BLOCKS_MASKED = 64


@dataclass(frozen=True)
class Blocks:
    """Rows of a query block and of a key block, as the kernels want them: no other pair runs."""

    forward: tuple[int, int]
    backward: tuple[int, int]


@dataclass(frozen=True)
class _Plan:
    """What the kernels need of a view. end: int32 (P,); partial, full: key blocks (forward)."""

    end: torch.Tensor
    partial: BlockList
    full: BlockList
    queue: QueuedLists
    blocks: Blocks


def fa4_attention(
    q_CHD: torch.Tensor,
    k_CGD: torch.Tensor,
    v_CGV: torch.Tensor,
    view: AttentionView,
    scale: float,
    deterministic: bool,
) -> torch.Tensor:
    """(C, H, V), contiguous. Never waits for the device; the first call of a kind compiles.

    Memory beyond inputs and outputs: log-sum-exp; backward, float32 sums of q's gradient, and of
    those of k and v where query heads share key heads. No input is copied whose last dimension is
    contiguous, whose other strides are multiples of 16 bytes and whose first element lies on one:
    projections of (C, H x D), slices of fused ones, transposed (H, C, D). Others are, and so are
    dimensions of stride 0 and inputs of fewer rows than two blocks.

    Raises ConfigError for devices, dtypes and widths that FlashAttention-4 does not run.
    """
    blocks = _checked_blocks(q_CHD, k_CGD, v_CGV)
    plan = view.once(_plan_builder(blocks, _max_full_blocks_masked(q_CHD.device, deterministic)))
    num_rows, padded_rows = q_CHD.shape[0], plan.end.numel()
    q, k, v = (_layout(x, padded_rows) for x in (q_CHD, k_CGD, v_CGV))
    out: torch.Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        q, k, v, plan, float(scale), deterministic
    )
    return out if num_rows == padded_rows else out[:num_rows]


def block_sizes(capability: tuple[int, int], key_width: int, value_width: int) -> Blocks:
    """Block sizes of flash-attn-4 4.0.0b36 for a compute capability of 9.0 or 10.x.

    The backward sizes are the smallest that it takes: fewer invisible pairs are computed. Those of
    10.x follow the library's rules and have not been run.
    """
    if capability[0] == 10:
        return Blocks((256, 128), (128, 256 if key_width >= 128 else 128))
    if key_width <= 64:
        return Blocks((128, 128), (128, 128))
    if key_width <= 128:
        return Blocks((128, 128), (64, 128))
    if key_width <= 192:
        return Blocks((128, 128 if value_width <= 128 else 112), (64, 96))
    return Blocks((128, 80), (64, 64))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_PHD: torch.Tensor,
        k_PGD: torch.Tensor,
        v_PGV: torch.Tensor,
        plan: _Plan,
        scale: float,
        deterministic: bool,
    ) -> torch.Tensor:
        out, lse = kept_result(
            lambda: _library().forward(
                q_PHD,
                k_PGD,
                v_PGV,
                plan.end,
                plan.partial,
                plan.full,
                blocks=plan.blocks.forward,
                scale=scale,
            )
        )
        ctx.save_for_backward(q_PHD, k_PGD, v_PGV, out, lse)
        ctx.plan, ctx.scale, ctx.deterministic = plan, scale, deterministic
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out_PHV: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_PHD, k_PGD, v_PGV, out_PHV, lse = ctx.saved_tensors
        gradients = _library().backward(
            q_PHD,
            k_PGD,
            v_PGV,
            out_PHV,
            _layout(d_out_PHV, d_out_PHV.shape[0]),
            lse,
            ctx.plan.end,
            ctx.plan.queue,
            blocks=ctx.plan.blocks.backward,
            scale=ctx.scale,
            deterministic=ctx.deterministic,
        )
        return *gradients, None, None, None


def _library() -> ModuleType:
    from harts.ops.attention import fa4_b36

    return fa4_b36


def _max_full_blocks_masked(device: torch.device, deterministic: bool) -> int | None:
    if not deterministic:
        return 0
    on_hopper = torch.cuda.get_device_capability(device) == (9, 0)
    return None if on_hopper else MAX_FULL_BLOCKS_MASKED


@functools.cache
def _plan_builder(blocks: Blocks, max_full_masked: int | None) -> Callable[[AttentionView], _Plan]:
    """The same function for the same arguments, as a view keeps what each function built."""

    def build(view: AttentionView) -> _Plan:
        # Compiled code would take one block for a size of its own.
        min_rows = 2 * max(*blocks.forward, *blocks.backward)
        end = view.end.contiguous()
        if end.numel() < min_rows:
            end = pad_ends(end, min_rows)
        partial, full = classify_blocks(end, *blocks.forward)
        queue = queue_blocks(end, *blocks.backward, max_moved=max_full_masked)
        return _Plan(end, list_blocks(partial), list_blocks(full), queue, blocks)

    return build


def _layout(x_CHW: torch.Tensor, padded_rows: int) -> torch.Tensor:
    """(P, heads, width) without strides of 0, which belong to a compilation."""
    padding = padded_rows - x_CHW.shape[0]
    x_PHW = F.pad(x_CHW, (0, 0, 0, 0, 0, padding)) if padding else x_CHW
    return x_PHW.contiguous() if 0 in x_PHW.stride() else x_PHW


def _checked_blocks(q_CHD: torch.Tensor, k_CGD: torch.Tensor, v_CGV: torch.Tensor) -> Blocks:
    where = 'tree_attention: impl "fa4"'
    if not q_CHD.is_cuda:
        raise ConfigError(
            f'{where} needs CUDA tensors, these are on {q_CHD.device}; use impl="views" there'
        )
    capability = torch.cuda.get_device_capability(q_CHD.device)
    if capability != (9, 0) and capability[0] != 10:
        raise ConfigError(
            f"{where} needs a GPU of compute capability 9.0 or 10.x, this one has "
            f'{capability[0]}.{capability[1]}; use impl="flex"'
        )
    if q_CHD.dtype not in DTYPES:
        raise ConfigError(
            f'{where} computes bfloat16 and float16, not {q_CHD.dtype}; use impl="flex"'
        )
    widths = (q_CHD.shape[2], v_CGV.shape[2])
    grouped = q_CHD.shape[1] != k_CGD.shape[1]
    problem = width_problem(capability, *widths, grouped=grouped)
    if problem:
        raise ConfigError(
            f"{where} got widths {widths[0]} (keys) and {widths[1]} (values): {problem}; "
            'use impl="flex"'
        )
    _library()
    return block_sizes(capability, *widths)


def width_problem(
    capability: tuple[int, int], key_width: int, value_width: int, *, grouped: bool
) -> str:
    """Why flash-attn-4 cannot train heads of these widths on this GPU; empty if it can.

    At keys of 16 or 80 its backward kernel lays the sums of q's gradient out for a multiple of 16,
    and what reads them for one of 32; values of 8 do not compile.
    """
    if key_width % 32 or value_width % 32:
        return "they must be multiples of 32"
    if capability[0] == 10:
        fits = max(key_width, value_width) <= 128 or (key_width, value_width) == (192, 128)
        return "" if fits else "compute capability 10.x runs up to 128, or 192 and 128"
    if grouped and key_width != value_width:
        return "heads that share keys need values as wide as the keys"
    if value_width > key_width or key_width > 256:
        return "keys may have up to 256 and values no more than the keys"
    return ""
