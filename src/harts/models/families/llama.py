"""Llama: full attention only."""

from __future__ import annotations

from transformers.models.llama import modeling_llama as hf

from harts.models.fused.adapters import fused_adapters
from harts.models.protocol import Family

FAMILY = Family(
    model_type="llama",
    architectures=(hf.LlamaForCausalLM,),
    attention=(hf.LlamaAttention,),
    fused=fused_adapters(hf),
    token_wise=(
        hf.LlamaModel,
        hf.LlamaDecoderLayer,
        hf.LlamaMLP,
        hf.LlamaRMSNorm,
        hf.LlamaRotaryEmbedding,
    ),
)
