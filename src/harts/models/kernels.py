"""Which implementation each part of an attached model runs; nothing stands in for another."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Literal, get_args, get_type_hints

import torch

from harts.errors import ConfigError
from harts.ops.attention.api import Implementation as Attention
from harts.ops.conv.api import Implementation as Convolution
from harts.ops.cross_entropy.api import Implementation as LogProbs
from harts.ops.linear_attention.api import Implementation as LinearAttention

_MODULES = {
    ("linear_attention", "scan"): "harts.ops.linear_attention.scan",
    ("linear_attention", "rounds"): "harts.ops.linear_attention.rounds",
    ("attention", "fa4"): "harts.ops.attention.fa4_b36",
    ("convolution", "fused"): "harts.ops.conv.fused_kernels",
    ("log_probs", "fused"): "harts.ops.cross_entropy.fused_kernels",
    ("token_wise", "fused"): "harts.ops.norm.kernels",
    ("experts", "grouped"): "harts.ops.moe.experts",
    ("experts", "gathered"): "harts.ops.moe.quack065",
}


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Implementations by part, under the names of each operator's `impl`.

    token_wise: "eager" keeps the model's own norms, activations and routers; "fused" replaces
    them, under the same parameter names, where the family lists an adapter, and gathers the rows
    of linear-attention layers in one kernel a pass.
    experts: "eager" keeps the model's own; "grouped" and "gathered" as in `harts.ops.moe`.
    deterministic: the same inputs give the same bits, forward and backward. Only "fa4" is faster
    without; every other part is deterministic either way.
    The defaults are the references in plain PyTorch, on any device and in any dtype.
    Raises ConfigError for a name that a part does not have.
    """

    linear_attention: LinearAttention = "reference"
    attention: Attention = "views"
    convolution: Convolution = "reference"
    log_probs: LogProbs = "reference"
    token_wise: Literal["eager", "fused"] = "eager"
    experts: Literal["eager", "grouped", "gathered"] = "eager"
    deterministic: bool = True

    def __post_init__(self) -> None:
        for part, kind in get_type_hints(Kernels).items():
            given = getattr(self, part)
            known = (False, True) if kind is bool else get_args(kind)
            if not any(type(given) is type(name) and given == name for name in known):
                choices = ", ".join(map(repr, known))
                raise ConfigError(f"harts.Kernels: {part} is {given!r}; choose one of {choices}")

    def check(self, *, has_experts: bool = True) -> None:
        """Raise ConfigError, with what to install, for a part whose packages are missing.

        has_experts: of the model that will run; without, the choice of experts does not matter.
        """
        for (part, name), module in _MODULES.items():
            if getattr(self, part) != name or (part == "experts" and not has_experts):
                continue
            try:
                import_module(module)
            except ConfigError as error:
                raise ConfigError(
                    f"{part}={name!r}: {error}; or choose others: "
                    "attach(model, kernels=harts.Kernels())"
                ) from None


def fast_kernels(device: torch.device, *, deterministic: bool = False) -> Kernels:
    """The fastest on a GPU, for models in bfloat16: what `attach` takes there.

    FlashAttention-4 on Hopper and Blackwell, FlexAttention on other GPUs; experts whose products
    gather their rows on Hopper, grouped products of copied rows on others.
    """
    capability = torch.cuda.get_device_capability(device)[0]
    return Kernels(
        linear_attention="scan",
        attention="fa4" if capability in (9, 10) else "flex",
        convolution="fused",
        log_probs="fused",
        token_wise="fused",
        experts="gathered" if capability == 9 else "grouped",
        deterministic=deterministic,
    )


def kernels_for(device: torch.device, dtype: torch.dtype) -> Kernels:
    """The default of `attach`: fast for bfloat16 on a GPU, else the references.

    float32 and float64 on a GPU are for checking, and the fast kernels multiply in tf32 at best.
    Deterministic where torch.use_deterministic_algorithms says so.
    """
    if device.type == "cuda" and dtype == torch.bfloat16:
        return fast_kernels(device, deterministic=torch.are_deterministic_algorithms_enabled())
    return Kernels()
