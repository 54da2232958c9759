from harts.ops.rotary.api import assemble_keys_values, rotate_queries

__all__ = ["assemble_keys_values", "rotate_queries"]
