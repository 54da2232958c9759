"""Mixture of experts in three operators: router logits, choice of experts, experts.

"reference" is plain PyTorch on any device, differentiated by autograd, in the widest dtype given
(float32 at least). The others need CUDA and Triton, synchronise nothing with the host and are
deterministic. None stands in for another.

Legend: C rows, D hidden width, E experts, K experts a row, I width of an expert.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from harts.errors import HartsError
from harts.ops.fused_checks import Implementation, runs_fused, runs_on_gpu
from harts.ops.moe import reference

ExpertsImplementation = Literal["reference", "grouped", "gathered"]


def router_logits(
    hidden: torch.Tensor, weight: torch.Tensor, *, impl: Implementation = "reference"
) -> torch.Tensor:
    """hidden @ weight^T as a float32 product gives it, (C, E) in float32.

    hidden: (C, D). weight: (E, D). "fused" takes bfloat16 rows as they are: the float32 weight is
    a sum of three bfloat16 terms, so that one bfloat16 product with float32 accumulation has the
    very products of a float32 one, without a float32 copy of the rows; float32 rows go to the
    library's float32 product. Gradients: of the weight, as exact as float32; of the rows, with
    relative error 2^-16 before they are rounded to bfloat16.
    Raises ConfigError for an unknown impl and where "fused" cannot run, HartsError for shapes.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise HartsError(
            f"router_logits: hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}; want "
            "(rows, width) and (experts, width)"
        )
    if not runs_fused("router_logits", impl, hidden):
        return reference.router_logits(hidden, weight)
    from harts.ops.moe import router

    return router.router_logits(hidden, weight)


def sigmoid_top_k(
    logits: torch.Tensor,
    bias: torch.Tensor,
    *,
    top_k: int,
    num_groups: int,
    kept_groups: int,
    normalise: bool,
    scaling: float,
    impl: Implementation = "reference",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Group-limited choice by sigmoid scores plus a bias that only the choice sees (DeepSeek-V3).

    logits: (C, E). bias: (E,). Experts lie in num_groups equal groups; a group's score is the sum
    of its two best biased scores; the kept_groups best groups stay, and of their experts the
    top_k best. Weights are the unbiased scores, divided by their sum + 1e-20 if normalise, times
    scaling.

    Returns weights (C, K), float32 at least, and indices (C, K) int64, in descending order of the
    biased score; the lowest index wins a tie. Weights are differentiable in the logits.
    O(C E K) comparisons. Raises ConfigError, and HartsError for sizes that do not fit.
    """
    _check_logits("sigmoid_top_k", logits, top_k)
    num_experts = logits.shape[1]
    if num_groups < 1 or num_experts % num_groups != 0 or num_experts // num_groups < 2:
        raise HartsError(
            f"sigmoid_top_k: {num_experts} experts in {num_groups} groups; want equal groups of "
            "two experts or more"
        )
    if not 1 <= kept_groups <= num_groups or top_k > kept_groups * (num_experts // num_groups):
        raise HartsError(
            f"sigmoid_top_k: {kept_groups} of {num_groups} groups are kept, which must hold the "
            f"{top_k} experts of a row"
        )
    if bias.shape != (num_experts,):
        raise HartsError(
            f"sigmoid_top_k: bias has shape {tuple(bias.shape)}, want ({num_experts},)"
        )
    options = dict(
        top_k=top_k,
        num_groups=num_groups,
        kept_groups=kept_groups,
        normalise=normalise,
        scaling=scaling,
    )
    if not runs_fused("sigmoid_top_k", impl, logits):
        return reference.sigmoid_top_k(logits, bias, **options)  # type: ignore[arg-type]
    from harts.ops.moe import router

    return router.sigmoid_top_k(logits, bias, **options)  # type: ignore[arg-type]


def softmax_top_k(
    logits: torch.Tensor, *, top_k: int, normalise: bool, impl: Implementation = "reference"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The top_k largest probabilities of a softmax in float32, divided by their sum if normalise.

    logits: (C, E). Returns weights (C, K) in the dtype of the logits and indices (C, K) int64, in
    descending order; the lowest index wins a tie. Weights are differentiable in the logits.
    O(C E K) comparisons. Raises ConfigError, and HartsError for sizes that do not fit.
    """
    _check_logits("softmax_top_k", logits, top_k)
    if not runs_fused("softmax_top_k", impl, logits):
        return reference.softmax_top_k(logits, top_k=top_k, normalise=normalise)
    from harts.ops.moe import router

    return router.softmax_top_k(logits, top_k=top_k, normalise=normalise)


def moe_experts(
    hidden: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    *,
    impl: ExpertsImplementation = "reference",
) -> torch.Tensor:
    """Sum over a row's experts of weight * down(silu(gate(row)) * up(row)), (C, D).

    hidden: (C, D). indices: (C, K) int64 in [0, E), no expert twice in a row. weights: (C, K).
    gate_up_proj: (E, 2 I, D), gates first. down_proj: (E, D, I). Experts without rows are fine.
    Differentiable in hidden, weights and both projections.

    "grouped" and "gathered" take bfloat16 rows and projections, D and I multiples of 8, at most
    1,023 experts. "grouped": torch's grouped matmul between own kernels, over a copy of the row of
    every pair (row, expert). "gathered": quack-kernels 0.6.5 on Hopper, whose products gather the
    rows. Both keep for backward the rows, the weights, 2 I values and 16 bytes a pair, and save
    nothing after the first matmul, so that recomputation with early stop never runs the second
    one. Indices are not checked: that would wait for the device.
    Raises ConfigError for an unknown impl and where the one given cannot run, HartsError for
    shapes.
    """
    _check_experts(hidden, indices, weights, gate_up_proj, down_proj)
    known = get_args(ExpertsImplementation)
    if not runs_on_gpu("moe_experts", impl, hidden, known=known, part="experts"):
        return reference.moe_experts(hidden, indices, weights, gate_up_proj, down_proj)
    from harts.ops.moe import experts

    experts.check_limits(impl, hidden, gate_up_proj, down_proj)
    products = experts.products_of(impl)
    return experts.moe_experts(hidden, indices, weights, gate_up_proj, down_proj, products)


def _check_logits(where: str, logits: torch.Tensor, top_k: int) -> None:
    if logits.ndim != 2 or not 1 <= top_k <= logits.shape[1]:
        raise HartsError(
            f"{where}: logits {tuple(logits.shape)}, top_k {top_k}; want (rows, experts) and at "
            "most that many experts a row"
        )


def _check_experts(
    hidden: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
) -> None:
    tensors = dict(
        hidden=hidden,
        indices=indices,
        weights=weights,
        gate_up_proj=gate_up_proj,
        down_proj=down_proj,
    )
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
    if hidden.ndim != 2 or indices.ndim != 2 or gate_up_proj.ndim != 3 or down_proj.ndim != 3:
        raise HartsError(f"moe_experts: {shapes}; want 2, 2, 2, 3 and 3 dimensions")
    experts, width, inner = down_proj.shape
    fits = (
        hidden.shape == (indices.shape[0], width)
        and weights.shape == indices.shape
        and gate_up_proj.shape == (experts, 2 * inner, width)
    )
    if not fits:
        raise HartsError(
            f"moe_experts: {shapes}; want (C, D), (C, K), (C, K), (E, 2 I, D) and (E, D, I)"
        )
