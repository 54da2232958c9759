"""All adapters of a family: modules that compute the same with fused kernels."""

from __future__ import annotations

from types import ModuleType

from harts.models.fused.adapter_classes import Adapters
from harts.models.fused.mla import fused_mla
from harts.models.fused.mlp import fused_mlp
from harts.models.fused.moe import expert_adapters, fused_moe
from harts.models.fused.norms import fused_norms


def fused_adapters(hf_module: ModuleType) -> Adapters:
    """Original class -> adapter, for the classes of a modelling module that have one."""
    topics = (fused_norms, fused_mlp, fused_mla, fused_moe)
    return {kind: adapter for topic in topics for kind, adapter in topic(hf_module).items()}


def fused_experts(hf_module: ModuleType) -> dict[str, Adapters]:
    """Original class -> adapter of MoE experts, by the name of the implementation in `Kernels`."""
    return {name: expert_adapters(hf_module, name) for name in ("grouped", "gathered")}
