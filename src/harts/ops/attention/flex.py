"""Tree attention by PyTorch's FlexAttention: the interval test as its mask, block lists of ours.

Compiled once for each combination of dtype, heads and widths, never again for another number of
rows: rows are padded to whole blocks, whose number is the only thing that varies.

Legend: C rows, P padded rows, H query heads, G key heads, D key width, V value width.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.experimental import _config as shape_config
from torch.nn import functional as F

from harts.errors import ConfigError, HartsError
from harts.ops.attention.block_lists import build_block_lists
from harts.views.attention import AttentionView

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
MIN_WIDTH = 16
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

HOPPER_TILES = {
    "fwd_BLOCK_M": 128,
    "fwd_BLOCK_N": 128,
    "fwd_num_warps": 8,
    "fwd_num_stages": 2,
}
# For latent attention's keys of 192.
HOPPER_WIDE_TILES = {
    "fwd_BLOCK_M": 128,
    "fwd_BLOCK_N": 64,
    "fwd_num_warps": 8,
    "fwd_num_stages": 3,
    "bwd_BLOCK_M1": 64,
    "bwd_BLOCK_N1": 128,
    "bwd_BLOCK_M2": 128,
    "bwd_BLOCK_N2": 64,
    "bwd_num_warps": 8,
    "bwd_num_stages": 1,
}
# FlexAttention's own choice for these needs more shared memory than a GPU has.
WIDE_FLOAT32_TILES = {
    "fwd_BLOCK_M": 32,
    "fwd_BLOCK_N": 32,
    "fwd_num_warps": 4,
    "fwd_num_stages": 1,
}

# Heads of one model differ in few ways; past this many FlexAttention's compiler gives up, loudly.
MAX_COMPILATIONS = 64


def flex_attention(
    q_CHD: torch.Tensor,
    k_CGD: torch.Tensor,
    v_CGV: torch.Tensor,
    view: AttentionView,
    scale: float,
) -> torch.Tensor:
    """(C, H, V). Memory beyond inputs and outputs: log-sum-exp, and copies if C is padded.

    The first call of a dtype, head count or width compiles for some seconds. Raises ConfigError
    without CUDA tensors or Triton, HartsError for widths and dtypes that Triton does not serve.
    """
    _check(q_CHD, v_CGV)
    mask = view.once(_block_mask)
    num_rows, padded_rows = q_CHD.shape[0], mask.seq_lengths[0]
    q, k, v = (_head_first(x, padded_rows) for x in (q_CHD, k_CGD, v_CGV))
    with _compile_rules():
        out = _compiled()(
            q,
            k,
            v,
            block_mask=mask,
            scale=float(scale),
            enable_gqa=True,
            kernel_options=_kernel_options(q_CHD, v_CGV),
        )
    return out[0].transpose(0, 1)[:num_rows]


@contextlib.contextmanager
def _compile_rules() -> Iterator[None]:
    """What a compilation may depend on; PyTorch offers no per-function form of these settings.

    A scale as a variable would be a tensor, so it is a constant. By default two sizes that happen
    to be equal, such as heads and blocks of rows, are taken for one, and tell the next size apart.
    """
    with (
        torch._dynamo.config.patch(specialize_float=True, recompile_limit=MAX_COMPILATIONS),
        shape_config.patch(use_duck_shape=False),
    ):
        yield


@functools.cache
def _compiled() -> Callable[..., Any]:
    """fullgraph, or FlexAttention would fall back to all C x C scores where it cannot compile."""
    from torch.nn.attention import flex_attention as library

    return torch.compile(library.flex_attention, dynamic=True, fullgraph=True)


def _block_mask(view: AttentionView) -> BlockMask:
    from torch.nn.attention.flex_attention import BlockMask

    lists = build_block_lists(view.end, BLOCK, BLOCK)
    end, num_rows = lists.end, lists.end.numel()

    def visible(
        batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return (key <= query) & (query < end[key])

    return BlockMask(
        seq_lengths=(num_rows, num_rows),
        kv_num_blocks=lists.partial_keys.counts[None, None],
        kv_indices=lists.partial_keys.indices[None, None],
        full_kv_num_blocks=lists.full_keys.counts[None, None],
        full_kv_indices=lists.full_keys.indices[None, None],
        q_num_blocks=lists.partial_queries.counts[None, None],
        q_indices=lists.partial_queries.indices[None, None],
        full_q_num_blocks=lists.full_queries.counts[None, None],
        full_q_indices=lists.full_queries.indices[None, None],
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=visible,
    )


def _head_first(x_CHW: torch.Tensor, padded_rows: int) -> torch.Tensor:
    """(1, H, P, width), a view of contiguous (P, H, width): strides too belong to a compilation."""
    padding = padded_rows - x_CHW.shape[0]
    x_PHW = F.pad(x_CHW, (0, 0, 0, 0, 0, padding)) if padding else x_CHW
    return x_PHW.contiguous().transpose(0, 1)[None]


def _kernel_options(q_CHD: torch.Tensor, v_CGV: torch.Tensor) -> dict[str, Any]:
    """Tiles where a measured choice beats FlexAttention's own; whole blocks need no bounds checks.

    One H200, 65,536 rows, 16 heads, bfloat16, TFLOP/s forward / forward and backward: 395 / 378 at
    128, against 360 / 301 without options; 377 / 204 at 192/128, against 339 / 169 with 2 stages
    forward and FlexAttention's own tiles backward.
    """
    key_width, value_width = q_CHD.shape[2], v_CGV.shape[2]
    options: dict[str, Any] = {"IS_DIVISIBLE": True}
    if q_CHD.dtype == torch.float32:
        return options | (WIDE_FLOAT32_TILES if key_width > 128 else {})
    on_hopper = torch.cuda.get_device_capability(q_CHD.device) == (9, 0)
    if on_hopper and value_width <= 128 and 64 < key_width <= 256:
        return options | (HOPPER_TILES if key_width <= 128 else HOPPER_WIDE_TILES)
    return options


def _check(q_CHD: torch.Tensor, v_CGV: torch.Tensor) -> None:
    if not q_CHD.is_cuda:
        raise ConfigError(
            f'tree_attention: impl "flex" needs CUDA tensors, these are on {q_CHD.device}; '
            'use impl="views" there'
        )
    for module in ("triton", "torch.nn.attention.flex_attention"):
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f'tree_attention: impl "flex" needs {module}, which is not installed; '
                'install it or use impl="views"'
            )
    if q_CHD.dtype not in DTYPES:
        raise HartsError(
            f'tree_attention: impl "flex" computes bfloat16, float16 and float32, not '
            f'{q_CHD.dtype}; use impl="views"'
        )
    narrowest = min(q_CHD.shape[2], v_CGV.shape[2])
    if narrowest < MIN_WIDTH:
        raise HartsError(
            f'tree_attention: impl "flex" needs heads of at least {MIN_WIDTH} columns, got '
            f'{narrowest}; use impl="views"'
        )
