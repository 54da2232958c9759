from harts.ops.attention.api import tree_attention

__all__ = ["tree_attention"]
