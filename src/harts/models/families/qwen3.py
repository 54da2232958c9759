"""Qwen3, dense: full attention only."""

from __future__ import annotations

from typing import Any

from transformers.models.qwen3 import modeling_qwen3 as hf

from harts.models.fused.adapters import fused_adapters
from harts.models.protocol import Family


def _refuse(config: Any) -> str | None:
    for index, kind in enumerate(config.layer_types):
        if kind != "full_attention":
            return f"layer {index} is {kind!r}: only full_attention layers run on a tree"
    return None


FAMILY = Family(
    model_type="qwen3",
    architectures=(hf.Qwen3ForCausalLM,),
    attention=(hf.Qwen3Attention,),
    fused=fused_adapters(hf),
    token_wise=(
        hf.Qwen3Model,
        hf.Qwen3DecoderLayer,
        hf.Qwen3MLP,
        hf.Qwen3RMSNorm,
        hf.Qwen3RotaryEmbedding,
    ),
    refuse=_refuse,
)
