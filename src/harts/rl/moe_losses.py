"""Router losses and expert loads of the expanded batch from compact rows (paper section 3.5).

A compact row stands for q_c semantic tokens (Equation 20), so every sum over tokens becomes a sum
over rows weighted by q_c; routing itself is done once per row.

Additivity: with total, the semantic tokens of the whole step, the z-losses of the microbatches add
to the step's. The load-balancing loss is a product f_e P_e of two means, so its parts only add if
every microbatch uses the same f_e: pass assignment_counts of the whole step. f_e carries no
gradient, so the counts can come from a forward pass without gradient, or from the step before.

Legend: C compact rows, E experts, k experts a row, L layers, S semantic tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch

from harts.errors import ConfigError
from harts.models.routing import RouterRecord

Scope = Literal["layer", "model"]


def router_z_loss(records: Sequence[RouterRecord], *, total: int | None = None) -> torch.Tensor:
    """Sum over layers of sum_c q_c logsumexp(logits_c)^2 / S (ST-MoE, arXiv 2202.08906, Eq. 5).

    Summed over layers, as Megatron-Core does: a layer's gradient does not depend on the model's
    depth. total: S of the whole step; without it, of these records. Scalar, attached. O(L C E).
    ConfigError: no records, or records without a graph while gradients are on.
    """
    _require_graph(records)
    losses = []
    for record in records:
        weights, num_tokens = _row_weights(record, total)
        z_C = torch.logsumexp(_scores_dtype(record.logits), dim=-1)
        losses.append((weights * z_C**2).sum() / num_tokens)
    return _sum_on_first_device(losses)


def load_balancing_loss(
    records: Sequence[RouterRecord],
    *,
    scope: Scope = "layer",
    total: int | None = None,
    assignment_counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """E sum_e f_e P_e (Switch Transformers, arXiv 2101.03961, Equations 4 to 6), scalar, attached.

    P_e is the q-weighted mean router probability: the softmax, or a sigmoid router's scores divided
    by their sum (DeepSeek-V3, arXiv 2412.19437, Equations 17 to 20, over the batch instead of
    each sequence). f_e is the q-weighted share of assignments.
    scope "layer": f_e = count_e / (S k), 1 per layer when balanced, summed over layers
    (Megatron-Core). scope "model": f_e and P_e are means over the rows of all layers, f_e is not
    divided by k, and the loss is k when balanced (Hugging Face's load_balancing_loss_func).
    total: S of the whole step. assignment_counts: expert_loads of the whole step, int64 (L, E);
    given with total, microbatch losses add exactly. Without it f_e is that of these records alone
    and the microbatch losses, weighted by their tokens, depend on how the step is split.
    ConfigError: as router_z_loss; counts without total or of another shape; experts that differ
    between layers.
    """
    if scope not in get_args(Scope):
        raise ConfigError(f"scope is {scope!r}; choose 'layer' or 'model'")
    _require_graph(records)
    device = records[0].logits.device
    counts_LE = _checked_counts(records, total, assignment_counts).to(device)
    # f_e's own denominator: the tokens that its counts were taken over.
    counted_total = None if assignment_counts is None else total
    losses = []
    for layer, record in enumerate(records):
        weights, num_tokens = _row_weights(record, total)
        _, counted_tokens = _row_weights(record, counted_total)
        probability_E = (weights[:, None] * _probabilities(record)).sum(dim=0) / num_tokens
        if scope == "layer":
            count_E, parts = counts_LE[layer], record.experts_per_row
        else:
            count_E, parts = counts_LE.sum(dim=0), len(records) ** 2
        share_E = count_E.to(probability_E) / (parts * counted_tokens)
        losses.append(record.num_experts * (share_E * probability_E).sum())
    return _sum_on_first_device(losses)


@torch.no_grad()
def expert_loads(records: Sequence[RouterRecord]) -> torch.Tensor:
    """Semantic tokens sent to each expert: q-weighted counts, int64 (L, E). Exact.

    Sums over microbatches and ranks are the loads of the step. ConfigError: no records, or
    experts that differ between layers.
    """
    num_experts = _common_num_experts(records)
    loads = []
    for record in records:
        load_E = torch.zeros(num_experts, dtype=torch.int64, device=record.indices.device)
        tokens = record.multiplicity[:, None].expand_as(record.indices)
        load_E.index_add_(0, record.indices.reshape(-1), tokens.reshape(-1))
        loads.append(load_E.to(records[0].indices.device))
    return torch.stack(loads)


@torch.no_grad()
def update_expert_bias(biases: Sequence[torch.Tensor], loads: torch.Tensor, *, rate: float) -> None:
    """In place, b_e += rate sign(mean load - load_e), layer by layer (DeepSeek-V3, section 2.1.2).

    biases: L float32 or float64 tensors (E,), the selection biases. loads: int64 (L, E), of the
    whole step and all ranks. Loads are compared as integers, so an expert at the mean stays put.
    ConfigError: shapes that differ, or a bias in half precision, where the small steps would be
    lost.
    """
    if len(biases) != len(loads):
        raise ConfigError(f"{len(biases)} expert biases, but loads of {len(loads)} layers")
    for layer, (bias_E, load_E) in enumerate(zip(biases, loads, strict=True)):
        if bias_E.shape != load_E.shape:
            raise ConfigError(
                f"layer {layer}: the expert bias has the shape {tuple(bias_E.shape)}, its loads "
                f"{tuple(load_E.shape)}; they must be equal"
            )
        if bias_E.dtype not in (torch.float32, torch.float64):
            raise ConfigError(f"layer {layer}: the expert bias is {bias_E.dtype}; keep it float32")
        below_mean_E = torch.sign(load_E.sum() - load_E.numel() * load_E)
        bias_E.add_(below_mean_E.to(bias_E), alpha=rate)


def _require_graph(records: Sequence[RouterRecord]) -> None:
    """Refuse logits that lost their graph; layers below the first trained one never had it."""
    if not records:
        raise ConfigError("there are no router records; the model has no MoE layer, drop its loss")
    if not torch.is_grad_enabled():
        return
    attached = [record.logits.requires_grad for record in records]
    first_trained = attached.index(True) if any(attached) else 0
    for record, has_graph in zip(records[first_trained:], attached[first_trained:], strict=True):
        if not has_graph:
            raise ConfigError(
                f"router {record.name}: its logits carry no gradient graph, as under reentrant "
                "checkpointing; use gradient checkpointing with use_reentrant=False"
            )


def _checked_counts(
    records: Sequence[RouterRecord], total: int | None, assignment_counts: torch.Tensor | None
) -> torch.Tensor:
    if assignment_counts is None:
        return expert_loads(records)
    expected = (len(records), _common_num_experts(records))
    if tuple(assignment_counts.shape) != expected:
        raise ConfigError(
            f"assignment_counts have the shape {tuple(assignment_counts.shape)}, the routers need "
            f"(layers, experts) = {expected}; pass expert_loads summed over the step"
        )
    if total is None:
        raise ConfigError("assignment_counts without total; pass the step's semantic tokens too")
    return assignment_counts


def _common_num_experts(records: Sequence[RouterRecord]) -> int:
    if not records:
        raise ConfigError("there are no router records; the model has no MoE layer")
    for record in records:
        if record.num_experts != records[0].num_experts:
            raise ConfigError(
                f"router {record.name} has {record.num_experts} experts, {records[0].name} "
                f"{records[0].num_experts}; pass routers of different width apart"
            )
    return records[0].num_experts


def _row_weights(
    record: RouterRecord, total: int | None
) -> tuple[torch.Tensor, torch.Tensor | int]:
    """q_c in the dtype of the scores (C,), and S: total, or the record's own tokens."""
    if total is not None and total < 1:
        raise ConfigError(f"total is {total}; give the step's semantic tokens, at least 1")
    weights_C = record.multiplicity.to(_scores_dtype(record.logits))
    return weights_C, record.multiplicity.sum().clamp(min=1) if total is None else total


def _probabilities(record: RouterRecord) -> torch.Tensor:
    """Router probabilities (C, E), rows summing to 1."""
    logits_CE = _scores_dtype(record.logits)
    if record.kind == "softmax":
        return logits_CE.softmax(dim=-1)
    scores_CE = logits_CE.sigmoid()
    return scores_CE / scores_CE.sum(dim=-1, keepdim=True)


def _scores_dtype(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _sum_on_first_device(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([loss.to(losses[0].device) for loss in losses]).sum()
