"""Mistral without sliding window: full attention only."""

from __future__ import annotations

from typing import Any

from transformers.models.mistral import modeling_mistral as hf

from harts.models.fused.adapters import fused_adapters
from harts.models.protocol import Family


def _refuse(config: Any) -> str | None:
    if config.sliding_window is not None:
        return (
            f"sliding_window is {config.sliding_window}: tree attention sees all ancestors; "
            "set it to None if no trajectory is longer"
        )
    return None


FAMILY = Family(
    model_type="mistral",
    architectures=(hf.MistralForCausalLM,),
    attention=(hf.MistralAttention,),
    fused=fused_adapters(hf),
    token_wise=(
        hf.MistralModel,
        hf.MistralDecoderLayer,
        hf.MistralMLP,
        hf.MistralRMSNorm,
        hf.MistralRotaryEmbedding,
    ),
    refuse=_refuse,
)
