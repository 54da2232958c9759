"""Plain PyTorch twins of the three operators, differentiated by autograd.

Legend: C rows, D hidden width, E experts, K experts a row, I width of an expert.
"""

from __future__ import annotations

from functools import reduce

import torch
import torch.nn.functional as F


def router_logits(hidden_CD: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
    """(C, E) in the widest dtype, float32 at least."""
    dtype = _wide(hidden_CD, weight_ED)
    return F.linear(hidden_CD.to(dtype), weight_ED.to(dtype))


def sigmoid_top_k(
    logits_CE: torch.Tensor,
    bias_E: torch.Tensor,
    *,
    top_k: int,
    num_groups: int,
    kept_groups: int,
    normalise: bool,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and indices (C, K) of the group-limited choice."""
    scores = logits_CE.to(_wide(logits_CE)).sigmoid()
    with torch.no_grad():
        choice = (scores + bias_E).unflatten(1, (num_groups, -1))
        group_scores = choice.topk(2, dim=-1).values.sum(-1)
        kept = torch.zeros_like(group_scores, dtype=torch.bool)
        kept.scatter_(1, _best(group_scores, kept_groups), True)
        choice = choice.masked_fill(~kept[..., None], float("-inf")).flatten(1)
        indices = _best(choice, top_k)
    weights = scores.gather(1, indices)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scaling, indices


def softmax_top_k(
    logits_CE: torch.Tensor, *, top_k: int, normalise: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights, in the dtype of the logits, and indices (C, K)."""
    probabilities = logits_CE.to(_wide(logits_CE)).softmax(-1)
    indices = _best(probabilities.detach(), top_k)
    weights = probabilities.gather(1, indices)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits_CE.dtype), indices


def moe_experts(
    hidden_CD: torch.Tensor,
    indices_CK: torch.Tensor,
    weights_CK: torch.Tensor,
    gate_up_EOD: torch.Tensor,
    down_EDI: torch.Tensor,
) -> torch.Tensor:
    """(C, D) in the dtype of the rows; one expert after the other."""
    dtype = _wide(hidden_CD, weights_CK, gate_up_EOD, down_EDI)
    hidden, weights = hidden_CD.to(dtype), weights_CK.to(dtype)
    output = torch.zeros_like(hidden)
    for expert in range(gate_up_EOD.shape[0]):
        rows, slots = torch.where(indices_CK == expert)
        gate, up = F.linear(hidden[rows], gate_up_EOD[expert].to(dtype)).chunk(2, dim=-1)
        contribution = F.linear(F.silu(gate) * up, down_EDI[expert].to(dtype))
        output = output.index_add(0, rows, contribution * weights[rows, slots, None])
    return output.to(hidden_CD.dtype)


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the largest, descending; the lowest index first where scores tie."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _wide(*tensors: torch.Tensor) -> torch.dtype:
    return reduce(torch.promote_types, (x.dtype for x in tensors), torch.float32)
