"""Linear attention (KDA, Gated DeltaNet) over packed rollout trees."""

from harts.ops.linear_attention.api import chunk_kda
from harts.ops.linear_attention.gate import KdaGate, log_decay_of

__all__ = ["KdaGate", "chunk_kda", "log_decay_of"]
