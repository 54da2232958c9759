"""Products of the experts by torch's grouped matmul, over a copy of the row of every pair.

The functions of `experts.Products`. Runs on any GPU that the grouped matmul runs on.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from harts.ops.moe.permutation import PairPlan, spread_rows


def rows_of_pairs(rows_CD: torch.Tensor, plan: PairPlan) -> torch.Tensor:
    """(M, D), a copy."""
    return spread_rows(rows_CD, plan.position_of_pair)


def times(rows_MD: torch.Tensor, weights_EDN: torch.Tensor, plan: PairPlan) -> torch.Tensor:
    """(M, N)"""
    return F.grouped_mm(rows_MD, weights_EDN, offs=plan.expert_ends)


def outer(rows_MD: torch.Tensor, others_MN: torch.Tensor, plan: PairPlan) -> torch.Tensor:
    """(E, D, N)"""
    return F.grouped_mm(rows_MD.t(), others_MN, offs=plan.expert_ends)


def transposed_outer(
    rows_MD: torch.Tensor, others_MN: torch.Tensor, plan: PairPlan
) -> torch.Tensor:
    """(E, N, D)"""
    return F.grouped_mm(others_MN.t(), rows_MD, offs=plan.expert_ends)
