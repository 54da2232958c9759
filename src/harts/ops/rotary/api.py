"""Queries, keys and values of multi-head latent attention, assembled with rotary embedding.

Source: DeepSeek-V2, section 2.1; the pairs are interleaved going in and halves coming out, as
transformers' apply_rotary_pos_emb_interleave leaves them.

Legend: C rows, H heads, N columns without position, R rotary columns, V value columns.
"""

from __future__ import annotations

import torch

from harts.errors import HartsError
from harts.ops.fused_checks import Implementation, runs_fused
from harts.ops.rotary.reference import assemble_keys_values_reference, rotate_queries_reference


def rotate_queries(
    q_CHD: torch.Tensor,
    cos_CR: torch.Tensor,
    sin_CR: torch.Tensor,
    *,
    impl: Implementation = "reference",
) -> torch.Tensor:
    """(C, H, N + R) with the last R columns of every head rotated; a new contiguous tensor.

    cos_CR, sin_CR: (C, R), of which the first R / 2 columns are read: the angle of each pair
    (x[2i], x[2i + 1]), which becomes columns i and R / 2 + i of the rotary part. Every product is
    rounded to the dtype, as in eager; the backward is computed in float32 and rounded once.
    Differentiable once in q_CHD; no gradient flows to cos and sin.

    "reference" is plain PyTorch on any device. "fused" needs CUDA and Triton: one kernel forward,
    one backward, each reading and writing 2 C H (N + R) elements in all. Deterministic.
    Raises ConfigError for an unknown impl and where it cannot run, HartsError for shapes or dtypes
    that do not fit.
    """
    if q_CHD.ndim != 3:
        raise HartsError(f"rotate_queries: q is {tuple(q_CHD.shape)}; want (rows, heads, columns)")
    _check_angles("rotate_queries", q_CHD, q_CHD.shape[2], cos_CR, sin_CR)
    if not runs_fused("rotate_queries", impl, q_CHD):
        return rotate_queries_reference(q_CHD, cos_CR, sin_CR)
    from harts.ops.rotary.fused import rotate_queries_fused

    return rotate_queries_fused(q_CHD, cos_CR, sin_CR)


def assemble_keys_values(
    kv_CHE: torch.Tensor,
    k_rope_CR: torch.Tensor,
    cos_CR: torch.Tensor | None,
    sin_CR: torch.Tensor | None,
    *,
    value_width: int,
    impl: Implementation = "reference",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys (C, H, N + R) and values (C, H, V), both new and contiguous.

    kv_CHE: (C, H, N + V), each head's key part before its value part. k_rope_CR: (C, R), the key
    part that all heads share, rotated as in `rotate_queries`; its rows may lie apart. Without cos
    and sin it is copied as it is. Differentiable once in kv_CHE and k_rope_CR; the gradient of
    k_rope_CR is summed over the heads in float32.

    impl and errors as in `rotate_queries`. "fused" moves C (H (2 N + 2 V + R) + R) elements in each
    direction.
    """
    op = "assemble_keys_values"
    if kv_CHE.ndim != 3 or not 0 < value_width <= kv_CHE.shape[2]:
        raise HartsError(
            f"{op}: kv is {tuple(kv_CHE.shape)}, values {value_width} wide; want (rows, heads, "
            "key and value columns)"
        )
    if k_rope_CR.ndim != 2 or len(k_rope_CR) != len(kv_CHE) or k_rope_CR.dtype != kv_CHE.dtype:
        raise HartsError(
            f"{op}: k_rope is {tuple(k_rope_CR.shape)} {k_rope_CR.dtype}, kv "
            f"{tuple(kv_CHE.shape)} {kv_CHE.dtype}; want (rows, columns) of one dtype"
        )
    if (cos_CR is None) != (sin_CR is None):
        raise HartsError(f"{op}: got one of cos and sin; give both, or neither for no rotation")
    if cos_CR is not None and sin_CR is not None:
        _check_angles(op, k_rope_CR, k_rope_CR.shape[1], cos_CR, sin_CR)
        if cos_CR.shape[1] != k_rope_CR.shape[1]:
            raise HartsError(
                f"{op}: cos has {cos_CR.shape[1]} columns, k_rope {k_rope_CR.shape[1]}; "
                "want as many"
            )
    if not runs_fused(op, impl, kv_CHE, k_rope_CR):
        return assemble_keys_values_reference(kv_CHE, k_rope_CR, cos_CR, sin_CR, value_width)
    from harts.ops.rotary.fused import assemble_keys_values_fused

    return assemble_keys_values_fused(kv_CHE, k_rope_CR, cos_CR, sin_CR, value_width)


def _check_angles(
    op: str, x: torch.Tensor, width: int, cos_CR: torch.Tensor, sin_CR: torch.Tensor
) -> None:
    angles = f"cos {tuple(cos_CR.shape)} {cos_CR.dtype}, sin {tuple(sin_CR.shape)} {sin_CR.dtype}"
    if cos_CR.shape != sin_CR.shape or cos_CR.ndim != 2 or len(cos_CR) != len(x):
        raise HartsError(f"{op}: {angles}; want ({len(x)} rows, rotary columns) for both")
    if cos_CR.shape[1] % 2 or cos_CR.shape[1] > width:
        raise HartsError(f"{op}: {angles}; want an even number of columns, at most {width}")
    if not x.dtype == cos_CR.dtype == sin_CR.dtype or not x.is_floating_point():
        raise HartsError(f"{op}: {angles}; want the dtype of the heads, {x.dtype}")
