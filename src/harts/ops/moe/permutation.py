"""Pairs (row, expert) in the order of their expert: the plan, and rows there and back.

The plan needs no answer from the device: a stable sort of the pairs by expert (one byte a key up
to 256 experts) and the expert ends by binary search in the sorted keys. Both row kernels walk the
compact rows, not the pairs: a row is read (or written) once and its K copies, whole rows of D
values, lie wherever the plan says. At C = 65,536, K = 8, D = 1,536 in bfloat16 each moves
0.2 + 1.6 GB, where a gather in the order of the pairs would move 3.2 GB. `spread_rows` and
`combine_rows` (without weights) are each other's gradient.

Legend: C rows, D width, E experts, K experts a row, M = C K pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from harts.ops.moe.permutation_kernels import (
    combine_kernel,
    inverse_and_rows,
    launch_rows,
    spread_kernel,
)


class PairPlan(NamedTuple):
    """Where each pair goes. A pair's number is row * K + slot.

    pair_of_position: int64 (M,), pairs ordered by expert, then by number.
    position_of_pair: int32 (M,), its inverse.
    row_of_position: int32 (M,), the row of each pair in that order.
    expert_ends: int32 (E,), expert e has the positions [ends[e - 1], ends[e]).
    expert_bounds: int32 (E + 1,), the same with the 0 in front.
    """

    pair_of_position: torch.Tensor
    position_of_pair: torch.Tensor
    row_of_position: torch.Tensor
    expert_ends: torch.Tensor
    expert_bounds: torch.Tensor

    @property
    def num_pairs(self) -> int:
        return self.pair_of_position.shape[0]


def plan_pairs(indices_CK: torch.Tensor, num_experts: int) -> PairPlan:
    """The plan of one layer from the experts of each row, int64 (C, K). O(M), no host wait."""
    key_dtype = torch.uint8 if num_experts <= 256 else torch.int16
    keys = indices_CK.reshape(-1).to(key_dtype)
    sorted_keys, pair_of_position = torch.sort(keys, stable=True)
    experts = torch.arange(num_experts, dtype=key_dtype, device=keys.device)
    expert_ends = torch.searchsorted(sorted_keys, experts, right=True, out_int32=True)
    return PairPlan(
        pair_of_position,
        *inverse_and_rows(pair_of_position, top_k=indices_CK.shape[1]),
        expert_ends,
        F.pad(expert_ends, (1, 0)),
    )


def spread_rows(rows_CD: torch.Tensor, position_of_pair: torch.Tensor) -> torch.Tensor:
    """(M, D): a copy of each row at the position of each of its pairs. Bits are kept."""
    num_pairs, num_rows = position_of_pair.shape[0], rows_CD.shape[0]
    spread = rows_CD.new_empty(num_pairs, rows_CD.shape[1])
    launch_rows(spread_kernel, rows_CD.contiguous(), spread, position_of_pair, num_rows)
    return spread


def combine_rows(rows_MD: torch.Tensor, position_of_pair: torch.Tensor, top_k: int) -> torch.Tensor:
    """(C, D): the sum of each row's pairs, in the order of their slots, float32 until the end."""
    num_rows = position_of_pair.shape[0] // top_k
    combined = rows_MD.new_empty(num_rows, rows_MD.shape[1])
    launch_rows(combine_kernel, rows_MD, combined, position_of_pair, num_rows)
    return combined
