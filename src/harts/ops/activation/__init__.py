from harts.ops.activation.api import gate_heads, swiglu

__all__ = ["gate_heads", "swiglu"]
