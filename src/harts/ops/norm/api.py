"""RMS normalisation over the last dimension, plain and with an output gate.

Source: Zhang and Sennrich 2019; the gated form closes the linear-attention layers of Kimi Linear,
Ling 3 and the Qwen3-Next family. Where a model rounds is part of what it computes: `scaling`.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from harts.errors import ConfigError, HartsError
from harts.ops.fused_checks import Implementation, runs_fused
from harts.ops.norm.reference import gated_rms_norm_reference, rms_norm_reference

Scaling = Literal["rounded", "wide", "one_plus"]
Activation = Literal["sigmoid", "silu"]

MAX_WIDTH = 8192


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    scaling: Scaling = "rounded",
    impl: Implementation = "reference",
) -> torch.Tensor:
    """y = weight * x / sqrt(mean(x^2) + eps) over the last dimension, computed in float32.

    x: (..., W). weight: (W,), in x's dtype or float32. scaling says where x's dtype comes in:
        "rounded"   weight * round(normalised x); float32 for a float32 weight, as PyTorch promotes
        "wide"      round(weight * normalised x)
        "one_plus"  round((1 + weight) * normalised x)
    Differentiable once in x and weight. Gradients are computed in float32 and rounded once.

    "reference" is plain PyTorch on any device; float64 stays float64.
    "fused" needs CUDA, Triton and W <= 8192, and is fastest where 16 divides W: one kernel forward
    (reads x, writes y, saves one float32 a row), one backward (reads x and dy, writes dx) and one
    sum of at most 528 partial weight gradients. Deterministic. O(rows W) time.

    Raises ConfigError for an unknown option and where an impl cannot run (none stands in for
    another), HartsError for shapes or dtypes that do not fit.
    """
    _check_option("rms_norm", "scaling", scaling, Scaling)
    _check_tensors("rms_norm", x, weight)
    if not runs_fused("rms_norm", impl, x):
        return rms_norm_reference(x, weight, eps, scaling)
    _check_width("rms_norm", x)
    from harts.ops.norm.fused import rms_norm_fused

    return rms_norm_fused(x, weight, eps, scaling)


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    activation: Activation,
    scaling: Literal["rounded", "wide"],
    impl: Implementation = "reference",
) -> torch.Tensor:
    """y = activation(gate) * rms_norm(x, weight), the gate in float32, rounded to x's dtype.

    x, gate: (..., W), the same shape; the gate's dtype is free. weight: (W,), in x's dtype or
    float32. scaling "rounded" rounds the norm as `rms_norm` does before it meets the gate, "wide"
    rounds nothing but y. Differentiable once in x, gate and weight.
    impl and errors as in `rms_norm`; fused, the backward reads x, gate and dy, writes dx and dgate.
    """
    _check_option("gated_rms_norm", "scaling", scaling, Literal["rounded", "wide"])
    _check_option("gated_rms_norm", "activation", activation, Activation)
    _check_tensors("gated_rms_norm", x, weight)
    if gate.shape != x.shape:
        raise HartsError(
            f"gated_rms_norm: x {tuple(x.shape)}, gate {tuple(gate.shape)}; want the same shape"
        )
    if not runs_fused("gated_rms_norm", impl, x, gate):
        return gated_rms_norm_reference(x, gate, weight, eps, activation, scaling)
    _check_width("gated_rms_norm", x)
    from harts.ops.norm.fused import gated_rms_norm_fused

    return gated_rms_norm_fused(x, gate, weight, eps, activation, scaling)


def _check_option(op: str, name: str, value: str, known: object) -> None:
    if value not in get_args(known):
        raise ConfigError(f"{op}: {name} is {value!r}, want one of {', '.join(get_args(known))}")


def _check_tensors(op: str, x: torch.Tensor, weight: torch.Tensor) -> None:
    if x.ndim == 0 or tuple(weight.shape) != tuple(x.shape[-1:]):
        raise HartsError(
            f"{op}: x {tuple(x.shape)}, weight {tuple(weight.shape)}; want one weight a column"
        )
    if not x.is_floating_point() or weight.dtype not in (x.dtype, torch.float32):
        raise HartsError(
            f"{op}: x is {x.dtype}, weight {weight.dtype}; want x floating and the weight in the "
            "same dtype or float32"
        )


def _check_width(op: str, x: torch.Tensor) -> None:
    if x.shape[-1] > MAX_WIDTH:
        raise HartsError(
            f"{op}: impl 'fused' takes rows of at most {MAX_WIDTH:,} columns, got {x.shape[-1]:,}"
        )
