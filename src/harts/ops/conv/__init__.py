"""Causal depthwise convolution over compact rows."""

from harts.ops.conv.api import causal_conv

__all__ = ["causal_conv"]
