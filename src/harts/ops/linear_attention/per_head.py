"""The scan with one decay a head (Gated DeltaNet): fla's kernels forward, own ones beside them.

KDA's kernels with the decay repeated over the key width compute the same, but must guard every
product of decays against overflow, which one factor a pair of rows does not need. fla's backward is
refused on Hopper with Triton 3.4 to 3.7.0; its place has an own kernel.

Legend: P packed rows, S slots, X external slots, H key heads, G value heads, K key width, V value
width, B rows of a chunk. gate is the log2 decay summed within each chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from harts.ops.linear_attention import fla06
from harts.ops.linear_attention.layout import batched, over_group
from harts.ops.linear_attention.rows_backward import rows_backward
from harts.ops.linear_attention.scan_kernels import (
    external_state_gradients,
    new_pool,
    scan_state_gradients,
    scan_states,
)
from harts.views.linear import LinearView


class PerHeadScan(torch.autograd.Function):
    """Output (P, G, V) and produced states (S - X, G, K, V); log_decay: (P, G, 1)."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor,
        initial_states: torch.Tensor,
        view: LinearView,
        scale: float,
        keep_intermediates: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        decay_dtype, external_dtype = log_decay.dtype, initial_states.dtype
        q, k, v, log_decay, beta = (batched(x) for x in (q, k, v, log_decay.squeeze(-1), beta))
        gate = fla06.chunk_cumsum(log_decay, view, to_log2=True)
        w, u, T = fla06.per_head_intra(k, v, gate, beta, view=view)

        pool = new_pool(initial_states, view)
        states, v_new = scan_states(k[0], w[0], u[0], gate[0], pool, view, fill_pool=True)
        output = fla06.per_head_output(
            q, k, v_new[None], gate, states[None], scale=scale, view=view
        )

        kept = (w[0], states, v_new) if keep_intermediates else ()
        ctx.save_for_backward(q, k, v, gate, beta, T, pool, *kept)
        ctx.view, ctx.scale, ctx.dtypes = view, scale, (decay_dtype, external_dtype)
        ctx.set_materialize_grads(False)
        return output[0], pool[view.num_external :]

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_output: torch.Tensor | None, d_states: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        q, k, v, gate, beta, T, pool, *kept = ctx.saved_tensors
        view, scale = ctx.view, ctx.scale
        decay_dtype, external_dtype = ctx.dtypes
        d_output = torch.zeros_like(v) if d_output is None else batched(d_output)
        if d_states is not None:
            d_states = d_states.contiguous()

        if kept:
            w, states, v_new = kept
        else:
            w, u = (x[0] for x in fla06.per_head_rows(k, v, gate, beta, T, view=view))
            states, v_new = scan_states(k[0], w, u, gate[0], pool, view, fill_pool=False)
            del u
        d_v_new = fla06.per_head_within(q, k, gate, d_output, scale=scale, view=view)
        d_end, d_v_new, d_start = scan_state_gradients(
            q[0], k[0], w, gate[0], d_output[0], d_v_new[0], d_states, view, scale=scale
        )
        del w, kept
        d_q, d_k, d_v, d_beta, d_gate = rows_backward(
            q[0],
            k[0],
            v[0],
            v_new,
            gate[0],
            beta[0],
            T[0],
            states,
            d_output[0],
            d_end,
            d_v_new,
            view,
            scale=scale,
        )
        d_decay = fla06.chunk_cumsum(d_gate[None], view, reverse=True)[0]
        num_key_heads = q.shape[2]
        return (
            over_group(d_q, num_key_heads),
            over_group(d_k, num_key_heads),
            d_v,
            d_decay.unsqueeze(-1).to(decay_dtype),
            d_beta.to(beta.dtype),
            external_state_gradients(d_start, view).to(external_dtype)
            if ctx.needs_input_grad[5]
            else None,
            *(None,) * 3,
        )
