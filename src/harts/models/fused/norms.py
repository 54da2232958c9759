"""RMS norms of transformers models through `harts.ops.norm`: the same parameters, fewer passes.

transformers repeats three plain and two gated norms in every family under other names; the tables
say which class is which. They differ in where the input's dtype is rounded to, and that is kept.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from harts.models.fused.adapter_classes import Adapters, adapter_classes
from harts.ops.norm import gated_rms_norm, rms_norm

if TYPE_CHECKING:  # what the transformers class beside a mixin brings
    from torch.nn import Module
else:
    Module = object


class RoundedNorm(Module):
    """weight * round(normalised x), as in Llama; hidden_states (..., W) -> (..., W)."""

    implementation: ClassVar[Literal["reference", "fused"]] = "fused"
    scaling: ClassVar[Literal["rounded", "wide"]] = "rounded"
    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(
            hidden_states,
            self.weight,
            eps=self.variance_epsilon,
            scaling=self.scaling,
            impl=self.implementation,
        )


class WideNorm(RoundedNorm):
    """round(weight * normalised x), as in OLMo."""

    scaling: ClassVar[Literal["rounded", "wide"]] = "wide"


class OnePlusNorm(Module):
    """round((1 + weight) * normalised x), as in Gemma and Qwen3-Next; x (..., W) -> (..., W)."""

    implementation: ClassVar[Literal["reference", "fused"]] = "fused"
    weight: torch.Tensor
    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, eps=self.eps, scaling="one_plus", impl=self.implementation)


class WideGatedNorm(Module):
    """Norm times the gate's activation, rounded once; hidden_states, gate (..., W) -> (..., W)."""

    implementation: ClassVar[Literal["reference", "fused"]] = "fused"
    scaling: ClassVar[Literal["rounded", "wide"]] = "wide"
    weight: torch.Tensor
    variance_epsilon: float
    activation: Literal["sigmoid", "silu"]

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return gated_rms_norm(
            hidden_states,
            gate,
            self.weight,
            eps=self.variance_epsilon,
            activation=self.activation,
            scaling=self.scaling,
            impl=self.implementation,
        )


class RoundedGatedNorm(WideGatedNorm):
    """Llama's norm times the gate's activation."""

    scaling: ClassVar[Literal["rounded", "wide"]] = "rounded"


_MIXINS: dict[str, type[Any]] = {
    "BailingHybridRMSNorm": RoundedNorm,
    "KimiLinearRMSNorm": RoundedNorm,
    "Qwen3RMSNorm": RoundedNorm,
    "LlamaRMSNorm": RoundedNorm,
    "MistralRMSNorm": RoundedNorm,
    "OlmoHybridRMSNorm": WideNorm,
    "Qwen3NextRMSNorm": OnePlusNorm,
    "Qwen3_5RMSNorm": OnePlusNorm,
    "Qwen3_5MoeRMSNorm": OnePlusNorm,
    "BailingHybridRMSNormGated": WideGatedNorm,
    "KimiLinearRMSNormGated": WideGatedNorm,
    "Qwen3NextRMSNormGated": RoundedGatedNorm,
    "Qwen3_5RMSNormGated": RoundedGatedNorm,
    "Qwen3_5MoeRMSNormGated": RoundedGatedNorm,
    "OlmoHybridRMSNormGated": RoundedGatedNorm,
}


@cache
def fused_norms(hf_module: ModuleType) -> Adapters:
    """The adapter of every RMS norm in a family's modelling module, the same one every time.

    An adapter subclasses the original and replaces `forward` alone. On CPU tensors its forward
    raises ConfigError.
    """
    return adapter_classes(hf_module, _MIXINS)
