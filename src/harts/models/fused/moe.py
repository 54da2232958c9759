"""MoE of bailing_hybrid, kimi_linear, qwen3_next and qwen3_5_moe through `harts.ops.moe`.

Adapters of routers and blocks have one implementation; those of experts have two, and are chosen
apart from them. Routers return what the originals return, (logits, weights, indices); the choice is
in descending order, which the sigmoid routers leave open. The block runs the shared expert before
the routed ones: what a recomputation needs is then complete after the first matmul of the experts,
and checkpointing with early stop leaves out the rest.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from harts.errors import ConfigError
from harts.models.fused.adapter_classes import Adapters, adapter_classes
from harts.ops.moe import moe_experts, router_logits, sigmoid_top_k, softmax_top_k
from harts.ops.moe.api import ExpertsImplementation, Implementation

_SILU = ("SiLU", "SiLUActivation")  # torch's and transformers' names for the same function


@cache
def fused_moe(hf_module: ModuleType) -> Adapters:
    """Adapters of the router and MoE block in a family's modelling module.

    Empty for a module without these classes; the same adapters every time. An adapter subclasses
    the original and replaces `forward` alone. On CPU tensors its forward raises ConfigError.
    """
    return adapter_classes(hf_module, _MIXINS)


@cache
def expert_adapters(hf_module: ModuleType, implementation: ExpertsImplementation) -> Adapters:
    """The adapter of the experts in a family's modelling module; empty where it has none."""
    return adapter_classes(
        hf_module,
        dict.fromkeys(_EXPERTS, Experts),
        prefix=implementation.title(),
        implementation=implementation,
    )


class _Fused:
    implementation: ClassVar[Implementation] = "fused"


class SigmoidRouter(_Fused):
    """Float32 logits, sigmoid scores, group-limited choice with a correction bias."""

    def forward(
        self: Any, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(..., D) -> logits (C, E), weights (C, K) float32, indices (C, K) int64."""
        logits = router_logits(
            hidden_states.reshape(-1, self.hidden_dim), self.weight, impl=self.implementation
        )
        weights, indices = sigmoid_top_k(
            logits,
            self.e_score_correction_bias,
            top_k=self.top_k,
            num_groups=self.num_group,
            kept_groups=self.topk_group,
            normalise=self.norm_topk_prob,
            scaling=self.routed_scaling_factor,
            impl=self.implementation,
        )
        return logits, weights, indices


class SoftmaxRouter(_Fused):
    """Logits in the model's dtype, softmax in float32, the largest probabilities."""

    def forward(
        self: Any, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(..., D) -> logits (C, E), weights (C, K) in their dtype, indices (C, K) int64."""
        logits = F.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        weights, indices = softmax_top_k(
            logits,
            top_k=self.top_k,
            normalise=getattr(self, "norm_topk_prob", True),  # qwen3_5_moe always does
            impl=self.implementation,
        )
        return logits, weights, indices


class Experts:
    """SwiGLU experts stored as two 3-D parameters."""

    implementation: ClassVar[ExpertsImplementation]

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """(C, D), (C, K), (C, K) -> (C, D). Raises ConfigError for another activation."""
        if type(self.act_fn).__name__ not in _SILU:
            raise ConfigError(
                f"{type(self).__name__}: the activation is {type(self.act_fn).__name__}, the fused "
                "experts compute silu alone; attach the model with experts='eager'"
            )
        if getattr(self, "_is_expert_parallel", False):
            raise ConfigError(
                f"{type(self).__name__}: the experts are spread over several devices, the fused "
                "experts run on one; attach the model with experts='eager'"
            )
        return moe_experts(
            hidden_states,
            top_k_index,
            top_k_weights,
            self.gate_up_proj,
            self.down_proj,
            impl=self.implementation,
        )


class BlockWithSharedExperts(_Fused):
    """Shared experts plus routed experts."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        """(..., D) -> (..., D)"""
        shared = self.shared_experts(hidden_states)
        _, weights, indices = self.gate(hidden_states)
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        routed = self.experts(rows, indices, weights).view(hidden_states.shape)
        output: torch.Tensor = routed + shared
        return output


class BlockWithGatedSharedExpert(_Fused):
    """One shared expert behind a sigmoid gate, plus routed experts."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        """(..., D) -> (..., D)"""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        shared = F.sigmoid(self.shared_expert_gate(rows)) * self.shared_expert(rows)
        _, weights, indices = self.gate(rows)
        output: torch.Tensor = self.experts(rows, indices, weights) + shared
        return output.view(hidden_states.shape)


_MIXINS: dict[str, type[Any]] = {
    "BailingHybridTopkRouter": SigmoidRouter,
    "KimiLinearTopkRouter": SigmoidRouter,
    "Qwen3NextTopKRouter": SoftmaxRouter,
    "Qwen3_5MoeTopKRouter": SoftmaxRouter,
    "BailingHybridMoE": BlockWithSharedExperts,
    "KimiLinearMoE": BlockWithSharedExperts,
    "Qwen3NextSparseMoeBlock": BlockWithGatedSharedExpert,
    "Qwen3_5MoeSparseMoeBlock": BlockWithGatedSharedExpert,
}
_EXPERTS = ("BailingHybridExperts", "KimiLinearExperts", "Qwen3NextExperts", "Qwen3_5MoeExperts")
