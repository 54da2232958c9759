"""Models of the step benchmark: real shapes with random weights, made on the GPU."""

from __future__ import annotations

from typing import Any

import torch

_LING_3_TINY: dict[str, Any] = dict(
    model_type="bailing_hybrid",
    hidden_size=1536,
    intermediate_size=4608,
    moe_intermediate_size=512,
    num_hidden_layers=24,
    num_attention_heads=16,
    num_key_value_heads=16,
    head_dim=128,
    q_lora_rank=256,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    first_k_dense_replace=1,
    num_local_experts=128,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    layer_group_size=4,
    num_mtp_layers=0,
    vocab_size=157184,
)
_GATED_DELTA_NET: dict[str, Any] = dict(
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    vocab_size=157184,
)
SHAPES: dict[str, dict[str, Any]] = {
    # 7.89 B parameters: the shape of Ling-3.0-tiny
    "ling-3-tiny": _LING_3_TINY,
    # the same layers, few and narrow in experts: for smoke tests and fidelity runs
    "ling-3-tiny-4layers": _LING_3_TINY | dict(num_hidden_layers=4, num_local_experts=32),
    # 2 B parameters, dense, the layer shapes of Qwen3.5
    "qwen3_5-2b": _GATED_DELTA_NET
    | dict(
        model_type="qwen3_5_text",
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
    ),
    # 2.6 B parameters, MoE, the layer shapes of Qwen3-Next with fewer experts
    "qwen3_next-3b": _GATED_DELTA_NET
    | dict(
        model_type="qwen3_next",
        hidden_size=2048,
        intermediate_size=5120,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=2,
        num_experts=64,
        num_experts_per_tok=8,
    ),
}


def build_model(name: str, *, seed: int = 0, device: str = "cuda", **changes: Any) -> Any:
    """A bfloat16 model in training mode; what transformers keeps in float32 stays so."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    options = SHAPES[name] | changes | dict(pad_token_id=None, bos_token_id=None, eos_token_id=None)
    config = CONFIG_MAPPING[options["model_type"]](
        **{k: v for k, v in options.items() if k != "model_type"}, tie_word_embeddings=False
    )
    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
