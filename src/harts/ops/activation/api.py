"""Gates between two projections: SwiGLU of an MLP, and one sigmoid a head after attention.

Source: Shazeer 2020 (SwiGLU); the head gate is Ling 3's.
"""

from __future__ import annotations

import torch

from harts.errors import HartsError
from harts.ops.activation.reference import gate_heads_reference, swiglu_reference
from harts.ops.fused_checks import Implementation, runs_fused


def swiglu(
    gate: torch.Tensor, up: torch.Tensor, *, impl: Implementation = "reference"
) -> torch.Tensor:
    """silu(gate) * up, elementwise; silu is rounded to the dtype before the product, as in eager.

    gate, up: one shape, one floating dtype. Differentiable once in both; "fused" computes gradients
    in float32 and rounds once.

    "reference" is plain PyTorch on any device. "fused" needs CUDA and Triton: one kernel forward
    (reads two tensors, writes one), one backward (reads three, writes two). Deterministic.
    Raises ConfigError for an unknown impl and where it cannot run, HartsError for shapes or dtypes
    that do not fit.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype or not gate.is_floating_point():
        raise HartsError(
            f"swiglu: gate {tuple(gate.shape)} {gate.dtype}, up {tuple(up.shape)} {up.dtype}; "
            "want one shape and one floating dtype"
        )
    if not runs_fused("swiglu", impl, gate):
        return swiglu_reference(gate, up)
    from harts.ops.activation.fused import swiglu_fused

    return swiglu_fused(gate, up)


def gate_heads(
    x: torch.Tensor, logits: torch.Tensor, *, impl: Implementation = "reference"
) -> torch.Tensor:
    """x * sigmoid(logits), one logit a head; the sigmoid in float32, rounded to x's dtype.

    x: (..., H, V). logits: (..., H), of any floating dtype. Returns x's shape and dtype.
    Differentiable once in both; "fused" computes gradients in float32 and rounds once.

    "reference" is plain PyTorch on any device. "fused" needs CUDA and Triton: one kernel forward
    (reads and writes x once), one backward (reads x and dy, writes dx, sums each head's row for
    the logit). Deterministic. Errors as in `swiglu`; fused, V is at most 2,048.
    """
    if x.ndim == 0 or logits.shape != x.shape[:-1]:
        raise HartsError(
            f"gate_heads: x {tuple(x.shape)}, logits {tuple(logits.shape)}; want one logit a row"
        )
    if not runs_fused("gate_heads", impl, x, logits):
        return gate_heads_reference(x, logits)
    if x.shape[-1] > 2048:
        raise HartsError(
            f'gate_heads: impl "fused" takes heads of at most 2,048 columns, got {x.shape[-1]:,}'
        )
    from harts.ops.activation.fused import gate_heads_fused

    return gate_heads_fused(x, logits)
