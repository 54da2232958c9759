"""Products of the experts by quack-kernels 0.6.5, which gather rows as they load them.

The functions of `experts.Products`, and with flash-attn-4's adapter the only module that imports
quack. Its internals move with every release, so version and keywords are checked once, at import;
importing raises ConfigError where they do not fit. Import it where it is used.

The library would tune each product by timing; here its tiles are fixed, among the fastest on H200
of those it tries there (65,536 rows, 8 of 128 experts, D = 1,536, I = 512). Milliseconds, beside
torch's grouped matmul over copies of the rows, which cost 0.56 each (ops_moe-h200-20261130-3ee780f
in benchmarks/results):

    gathered      here  torch        plain     here  torch
    gate_up       2.68   2.75        down      1.29   1.78
    d_act         1.37   1.43        d_rows    2.35   2.93
    d_down        1.40   1.34
    d_gate_up     2.57   2.49

Sizes are no part of a compilation: steps of any size run the same six kernels. They are part of
what the library remembers of a call, though, without limit; here it is forgotten now and then.

Legend: C rows, D width, N another width, E experts, M pairs (row, expert) in expert order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from harts.ops.pinned_library import PinnedLibrary

if TYPE_CHECKING:
    from harts.ops.moe.permutation import PairPlan

_LIBRARY = PinnedLibrary(
    "quack-kernels", "0.6.5", "moe_experts: impl 'gathered'", "pip install quack-kernels==0.6.5"
)
_LIBRARY.check_release()
try:
    from quack.gemm import _compile_gemm, _gemm_plan_cache, gemm
except ImportError as error:
    raise _LIBRARY.not_importable(error) from error
_OPERANDS = {"A", "B", "D", "C", "tile_count_semaphore"}
_OPTIONS = {"cu_seqlens_m", "cu_seqlens_k", "A_idx", "tile_M", "tile_N", "cluster_M", "cluster_N"}
_LIBRARY.check_parameters([(gemm, _OPERANDS | _OPTIONS | {"pingpong"})])

_REMEMBERED_CALLS = 1024
"""Each is a few tuples; forgetting them compiles nothing again."""
_GATHERED: dict[str, Any] = dict(tile_M=128, tile_N=256, cluster_M=2, cluster_N=1, pingpong=False)
_PLAIN: dict[str, Any] = dict(tile_M=128, tile_N=192, cluster_M=2, cluster_N=1, pingpong=True)


class GatheredRows(NamedTuple):
    """rows[index] without the copy. rows: (C, D). index: int32 (M,)."""

    rows: torch.Tensor
    index: torch.Tensor


def rows_of_pairs(rows_CD: torch.Tensor, plan: PairPlan) -> GatheredRows:
    """The rows as they are, and which of them each pair has."""
    return GatheredRows(rows_CD.contiguous(), plan.row_of_position)


def times(
    rows_MD: torch.Tensor | GatheredRows, weights_EDN: torch.Tensor, plan: PairPlan
) -> torch.Tensor:
    """(M, N)"""
    rows, index = rows_MD if isinstance(rows_MD, GatheredRows) else (rows_MD, None)
    result = rows.new_empty(plan.num_pairs, weights_EDN.shape[2])
    if result.numel():
        _gemm(
            rows,
            weights_EDN.transpose(1, 2),
            result,
            cu_seqlens_m=plan.expert_bounds,
            A_idx=index,
        )
    return result


def outer(rows_MD: GatheredRows, others_MN: torch.Tensor, plan: PairPlan) -> torch.Tensor:
    """(E, D, N)"""
    num_experts, width = len(plan.expert_ends), rows_MD.rows.shape[1]
    result = others_MN.new_empty(num_experts, width, others_MN.shape[1])
    return _add_outer_products(rows_MD, others_MN, plan, result)


def transposed_outer(
    rows_MD: GatheredRows, others_MN: torch.Tensor, plan: PairPlan
) -> torch.Tensor:
    """(E, N, D)"""
    num_experts, width = len(plan.expert_ends), rows_MD.rows.shape[1]
    result = others_MN.new_empty(num_experts, others_MN.shape[1], width)
    _add_outer_products(rows_MD, others_MN, plan, result.transpose(1, 2))
    return result


def _add_outer_products(
    rows_MD: GatheredRows, others_MN: torch.Tensor, plan: PairPlan, result_EDN: torch.Tensor
) -> torch.Tensor:
    """The gathered side must be the first operand, whichever way the result lies in memory."""
    if plan.num_pairs == 0:
        return result_EDN.zero_()
    _gemm(
        rows_MD.rows.t(),
        others_MN.t(),
        result_EDN,
        cu_seqlens_k=plan.expert_bounds,
        A_idx=rows_MD.index,
    )
    return result_EDN


def _gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    result: torch.Tensor,
    *,
    A_idx: torch.Tensor | None,
    **bounds: torch.Tensor,
) -> None:
    """In place, without a third operand or a semaphore."""
    if len(_gemm_plan_cache) > _REMEMBERED_CALLS:
        _gemm_plan_cache.clear()
    tiles = _PLAIN if A_idx is None else _GATHERED
    gemm(a, b, result, None, None, A_idx=A_idx, **bounds, **tiles)


def num_compilations() -> int:
    """Kernels compiled or loaded from quack's disk cache so far in this process."""
    return len(_compile_gemm.cache)
