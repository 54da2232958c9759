"""Multi-head latent attention over a tree, assembled by `harts.ops.rotary`.

The projections and the attention interface are called as transformers calls them; between them,
one kernel rotates the queries, one builds keys and values, and one applies the head gate.

Legend: C rows, H heads, D columns of a query or key, R rotary columns, V value columns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from harts.models.fused.adapter_classes import Adapters, adapter_classes
from harts.ops.activation import gate_heads
from harts.ops.rotary import assemble_keys_values, rotate_queries

if TYPE_CHECKING:  # what the transformers class beside a mixin brings
    from torch.nn import Module
else:
    Module = object

Output = tuple[torch.Tensor, torch.Tensor | None]

_CACHES = ("cache", "past_key_values")  # the name moved between releases of transformers


class LatentAttention(Module):
    """The parts that both families share."""

    implementation: ClassVar[Literal["reference", "fused"]] = "fused"
    eager_attention: ClassVar[Callable[..., Any]]
    config: Any
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    num_heads: int
    attention_dropout: float
    scaling: float
    q_proj: nn.Module
    q_a_proj: nn.Module
    q_a_layernorm: nn.Module
    q_b_proj: nn.Module
    kv_a_proj_with_mqa: nn.Module
    kv_a_layernorm: nn.Module
    kv_b_proj: nn.Module
    o_proj: nn.Module

    def _queries(self, hidden: torch.Tensor) -> torch.Tensor:
        """(C, H, D), not rotated; hidden (C, hidden)."""
        if self.q_lora_rank is None:
            flat: torch.Tensor = self.q_proj(hidden)
        else:
            flat = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
        return flat.view(len(hidden), self.num_heads, -1)

    def _keys_values(
        self, hidden: torch.Tensor, cos_CR: torch.Tensor | None, sin_CR: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(C, H, D), (C, H, V)."""
        compressed = self.kv_a_proj_with_mqa(hidden)
        latent, k_rope_CR = compressed.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(len(hidden), self.num_heads, -1)
        return assemble_keys_values(
            kv, k_rope_CR, cos_CR, sin_CR, value_width=self.v_head_dim, impl=self.implementation
        )

    def _attend(
        self,
        query_CHD: torch.Tensor,
        key_CHD: torch.Tensor,
        value_CHV: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> Output:
        """(1, C, H, V), by the interface that the model's configuration names."""
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, self.eager_attention
        )
        output: Output = interface(
            self,
            *(x.transpose(0, 1)[None] for x in (query_CHD, key_CHD, value_CHV)),
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **{name: value for name, value in kwargs.items() if name not in _CACHES},
        )
        return output


class GatedRotaryLatentAttention(LatentAttention):
    """Ling 3's: rotary embedding on part of the heads, one sigmoid gate a head on the output.

    hidden_states (1, C, hidden) -> (1, C, hidden). Without a tree, or with a cache, the
    transformers forward.
    """

    g_proj: nn.Module

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Output:
        if _is_ordinary(args, kwargs):
            return super().forward(  # type: ignore[no-any-return]
                hidden_states, position_embeddings, attention_mask, *args, **kwargs
            )
        hidden = hidden_states.squeeze(0)
        cos, sin = (x[0] for x in position_embeddings)
        query = rotate_queries(self._queries(hidden), cos, sin, impl=self.implementation)
        key, value = self._keys_values(hidden, cos, sin)
        output, weights = self._attend(query, key, value, attention_mask, **kwargs)
        output = gate_heads(output, self.g_proj(hidden_states), impl=self.implementation)
        return self.o_proj(output.flatten(2)), weights


class PlainLatentAttention(LatentAttention):
    """Kimi Linear's: no positions and no gate; as `GatedRotaryLatentAttention` otherwise."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Output:
        if _is_ordinary(args, kwargs):
            return super().forward(  # type: ignore[no-any-return]
                hidden_states, attention_mask, *args, **kwargs
            )
        hidden = hidden_states.squeeze(0)
        key, value = self._keys_values(hidden, None, None)
        output, weights = self._attend(self._queries(hidden), key, value, attention_mask, **kwargs)
        return self.o_proj(output.flatten(2)), weights


def _is_ordinary(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call has no tree, or a cache (the next positional argument)."""
    caches = [*args[:1], *(kwargs.get(name) for name in _CACHES)]
    return kwargs.get("tree") is None or any(cache is not None for cache in caches)


_MIXINS: dict[str, type[Any]] = {
    "BailingHybridAttention": GatedRotaryLatentAttention,
    "KimiLinearAttention": PlainLatentAttention,
}


@cache
def fused_mla(hf_module: ModuleType) -> Adapters:
    """The adapter of the latent attention in a family's modelling module, if it has one.

    An adapter subclasses the original and replaces `forward` alone. On CPU tensors its forward
    raises ConfigError when it is given a tree. The same class every time.
    """
    if not any(hasattr(hf_module, name) for name in _MIXINS):
        return {}
    eager_attention = staticmethod(hf_module.eager_attention_forward)
    return adapter_classes(hf_module, _MIXINS, eager_attention=eager_attention)
