"""Full attention over compact rows: every row attends to its ancestors and itself.

Source: section 3.4 "Full attention on compact tokens" and Equations 21 and 22.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from harts.errors import ConfigError, HartsError
from harts.ops.attention.fa4 import fa4_attention
from harts.ops.attention.flex import flex_attention
from harts.ops.attention.reference import dense_attention
from harts.ops.attention.views import chain_attention
from harts.views.attention import AttentionView

Implementation = Literal["views", "reference", "flex", "fa4"]


def tree_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    view: AttentionView,
    scale: float,
    impl: Implementation = "views",
    deterministic: bool = True,
) -> torch.Tensor:
    """Softmax attention of each compact row over its ancestors and itself.

    q: (C, H, D). k: (C, G, D). v: (C, G, Dv), where H is a multiple of G and query head h reads
    key head h // (H / G); Dv may differ from D. All three share one floating dtype and device.
    Returns (C, H, Dv) in that dtype.

    "views" works block by block along the chains: time follows the visible (query, key) pairs,
    memory one block of scores, the same bits every time. "reference" holds all C x C scores.
    Both compute bfloat16 and float16 in float32. "flex" is FlexAttention on a GPU, bfloat16 and
    float16 on its matrix units. "fa4" is FlashAttention-4 on GPUs of compute capability 9.0 and
    10.x, in bfloat16 and float16. For either, the first call of a dtype, head count or width
    compiles for some seconds, another number of rows does not.

    deterministic: the same bits every time. Only "fa4" has a faster backward pass without; all
    others are deterministic either way.

    Raises ConfigError for an unknown impl or one that cannot run here, HartsError for shapes or a
    dtype that do not fit.
    """
    _check_shapes(q, k, v, view)
    if impl == "views":
        return chain_attention(q, k, v, view, scale)
    if impl == "reference":
        return dense_attention(q, k, v, view, scale)
    if impl == "flex":
        return flex_attention(q, k, v, view, scale)
    if impl == "fa4":
        return fa4_attention(q, k, v, view, scale, deterministic)
    known = ", ".join(get_args(Implementation))
    raise ConfigError(f"tree_attention: impl is {impl!r}, want one of {known}")


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, view: AttentionView) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 3:
        raise HartsError(f"tree_attention: {shapes}; want three (rows, heads, width) tensors")
    num_rows = view.end.numel()
    if not q.shape[0] == k.shape[0] == v.shape[0] == num_rows:
        raise HartsError(f"tree_attention: {shapes}; the view has {num_rows} rows, pass as many")
    if q.shape[2] != k.shape[2]:
        raise HartsError(f"tree_attention: {shapes}; q and k must have the same width")
    if k.shape[1] != v.shape[1] or k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise HartsError(
            f"tree_attention: {shapes}; k and v must have the same number of heads, "
            "and it must divide the number of query heads"
        )
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise HartsError(
            f"tree_attention: q is {q.dtype}, k {k.dtype}, v {v.dtype}; "
            "want one floating dtype for all three"
        )
