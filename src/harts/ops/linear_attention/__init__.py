"""Gated delta-rule linear attention (KDA, Gated DeltaNet) over the chains of a forest."""

from harts.ops.linear_attention.api import chunk_kda

__all__ = ["chunk_kda"]
