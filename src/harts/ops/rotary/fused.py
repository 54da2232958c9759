"""Assembly of latent attention as one kernel forward and one backward. Import it where it is used.

Legend: C rows, H heads, D columns of a key, E of key and value together, R rotary, V value columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from harts.ops.rotary import kernels


def rotate_queries_fused(
    q_CHD: torch.Tensor, cos_CR: torch.Tensor, sin_CR: torch.Tensor
) -> torch.Tensor:
    """See `harts.ops.rotary.rotate_queries`."""
    y: torch.Tensor = _RotateQueries.apply(  # type: ignore[no-untyped-call]
        q_CHD.contiguous(), _rows(cos_CR), _rows(sin_CR)
    )
    return y


def assemble_keys_values_fused(
    kv_CHE: torch.Tensor,
    k_rope_CR: torch.Tensor,
    cos_CR: torch.Tensor | None,
    sin_CR: torch.Tensor | None,
    value_width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `harts.ops.rotary.assemble_keys_values`."""
    angles = (None if x is None else _rows(x) for x in (cos_CR, sin_CR))
    keys: torch.Tensor
    values: torch.Tensor
    keys, values = _AssembleKeysValues.apply(  # type: ignore[no-untyped-call]
        kv_CHE.contiguous(), _rows(k_rope_CR), *angles, value_width
    )
    return keys, values


def _rows(x: torch.Tensor) -> torch.Tensor:
    """With adjacent columns."""
    return x if x.stride(-1) == 1 else x.contiguous()


class _RotateQueries(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return kernels.rotate(q, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return kernels.rotate_backward(dy.contiguous(), cos, sin), None, None


class _AssembleKeysValues(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kv: torch.Tensor,
        k_rope: torch.Tensor,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        value_width: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.rotary = k_rope.shape[1]
        return kernels.assemble(kv, k_rope, cos, sin, value_width)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_keys: torch.Tensor, d_values: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        d_kv, d_k_rope = kernels.assemble_backward(
            d_keys.contiguous(), d_values.contiguous(), cos, sin, ctx.rotary
        )
        return d_kv, d_k_rope, None, None, None
