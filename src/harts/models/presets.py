"""Tiny random models, made on the spot: `tiny:<model_type>` on the command line.

A few layers of each family with all its parts (linear and full attention, dense and MoE), wide
enough to be interesting and small enough for two CPU cores. Weights are drawn wider than
transformers' default, so that log-probabilities and routes differ from row to row.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from harts.errors import UnsupportedModelError

_COMMON: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=128,
    attention_dropout=0.0,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=2,
    initializer_range=0.1,
    max_position_embeddings=131072,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
    tie_word_embeddings=False,
)
_MLA: dict[str, Any] = dict(
    kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=24
)
_EXPERTS: dict[str, Any] = dict(num_experts_per_tok=2, moe_intermediate_size=32)
_GATED_DELTA_NET: dict[str, Any] = dict(
    num_key_value_heads=1,
    head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
)
_QWEN_MOE: dict[str, Any] = dict(num_experts=8, shared_expert_intermediate_size=32, **_EXPERTS)
_PATTERN = ["linear_attention"] * 3 + ["full_attention"]

TINY: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _MLA
    | _EXPERTS
    | dict(
        num_local_experts=8,
        n_group=2,
        topk_group=1,
        head_dim=32,
        q_lora_rank=32,
        layer_group_size=4,
        first_k_dense_replace=1,
        num_mtp_layers=0,
    ),
    "kimi_linear": _MLA
    | _EXPERTS
    | dict(
        num_local_experts=8,
        linear_head_dim=32,
        linear_num_heads=2,
        layer_types=_PATTERN,
        mlp_layer_types=["dense"] + ["sparse"] * 3,
    ),
    "qwen3_next": _GATED_DELTA_NET | _QWEN_MOE,
    "qwen3_5_text": _GATED_DELTA_NET,
    "qwen3_5_moe_text": _GATED_DELTA_NET | _QWEN_MOE,
    "olmo_hybrid": dict(
        layer_types=_PATTERN,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=24,
        linear_value_head_dim=32,
    ),
    "qwen3": dict(head_dim=32, num_key_value_heads=1),
    "llama": dict(num_key_value_heads=1),
    "mistral": dict(num_key_value_heads=1, sliding_window=None),
}
_SHORT = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}


def tiny_model(
    model_type: str, *, vocab_size: int, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """A random model of a family, float32, in evaluation mode; `changes` override the config.

    Raises UnsupportedModelError for a type without a preset.
    """
    name = _SHORT.get(model_type, model_type)
    if name not in TINY:
        raise UnsupportedModelError(
            f"there is no preset tiny:{model_type}; choose one of "
            + ", ".join(f"tiny:{known.removesuffix('_text')}" for known in TINY)
        )
    if name not in CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"the installed transformers has no {name}; install a newer one "
            "(pip install 'transformers>=5.20')"
        )
    options = _COMMON | TINY[name] | changes | {"vocab_size": vocab_size}
    config = CONFIG_MAPPING[name](**options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
