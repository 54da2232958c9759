"""SwiGLU MLPs of transformers models through `harts.ops.activation`."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import nn

from harts.errors import ConfigError
from harts.models.fused.adapter_classes import Adapters, adapter_classes
from harts.ops.activation import swiglu
from harts.ops.projections import project

if TYPE_CHECKING:  # what the transformers class beside a mixin brings
    from torch.nn import Module
else:
    Module = object

_SILU = ("SiLU", "SiLUActivation")  # torch's and transformers' names for the same function


class SwigluMlp(Module):
    """down_proj(silu(gate_proj(x)) * up_proj(x)); x (..., hidden) -> (..., hidden).

    Calls its children, which may be wrapped. Raises ConfigError where the activation is another.
    """

    implementation: ClassVar[Literal["reference", "fused"]] = "fused"
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: nn.Module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(self.act_fn).__name__ not in _SILU:
            raise ConfigError(
                f"{type(self).__name__}: the activation is {type(self.act_fn).__name__}, the fused "
                'kernel computes silu alone; attach the model with token_wise="eager"'
            )
        y: torch.Tensor = self.down_proj(
            swiglu(*project(x, self.gate_proj, self.up_proj), impl=self.implementation)
        )
        return y


_NAMES = (
    "BailingHybridMLP",
    "KimiLinearMLP",
    "Qwen3NextMLP",
    "Qwen3_5MLP",
    "Qwen3_5MoeMLP",
    "Qwen3MLP",
    "LlamaMLP",
    "MistralMLP",
    "OlmoHybridMLP",
)


@cache
def fused_mlp(hf_module: ModuleType) -> Adapters:
    """The adapter of the MLP in a family's modelling module, the same one every time.

    An adapter subclasses the original and replaces `forward` alone. On CPU tensors its forward
    raises ConfigError.
    """
    return adapter_classes(hf_module, dict.fromkeys(_NAMES, SwigluMlp))
