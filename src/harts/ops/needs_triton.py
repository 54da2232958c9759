"""Triton, for the modules that hold kernels: importing this raises ConfigError where it is missing.

    from harts.ops.needs_triton import tl, triton

Kernel modules are imported where they are used, so that harts itself never needs Triton.
"""

from __future__ import annotations

from harts.errors import ConfigError

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ConfigError(
        f"fast kernels need Triton, which cannot be imported ({error}); install a CUDA build of "
        "torch, which brings it, or choose the reference implementations"
    ) from None

__all__ = ["tl", "triton"]
