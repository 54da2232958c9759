"""Mixture of experts: router logits, choice of experts, and the experts themselves."""

from harts.ops.moe.api import moe_experts, router_logits, sigmoid_top_k, softmax_top_k

__all__ = ["moe_experts", "router_logits", "sigmoid_top_k", "softmax_top_k"]
