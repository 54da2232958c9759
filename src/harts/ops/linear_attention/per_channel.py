"""The scan with a decay for each key channel (KDA): fla's kernels within chunks, own state scans.

For bounded gates backward within chunks is one own kernel in place of two of fla, but in float16.

Legend: P packed rows, S slots, X external slots, G value heads, K key width, V value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from harts.ops.linear_attention import fla06
from harts.ops.linear_attention.gate import KdaGate
from harts.ops.linear_attention.layout import batched, over_group
from harts.ops.linear_attention.rows_backward import rows_backward
from harts.ops.linear_attention.scan_kernels import (
    external_state_gradients,
    new_pool,
    scan_state_gradients,
    scan_states,
)
from harts.views.linear import LinearView


class PerChannelScan(torch.autograd.Function):
    """Output (P, G, V) and produced states (S - X, G, K, V).

    log_decay: (P, G, K), or with a learned gate its input.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor,
        initial_states: torch.Tensor,
        log_rate: torch.Tensor | None,
        offset: torch.Tensor | None,
        view: LinearView,
        scale: float,
        safe_gate: bool,
        lower_bound: float | None,
        keep_intermediates: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, log_decay, beta = (batched(x) for x in (q, k, v, log_decay, beta))
        if log_rate is None or offset is None:
            gate, raw = fla06.chunk_cumsum(log_decay, view, to_log2=True), None
        else:
            raw = log_decay
            gate = fla06.gate_cumsum(raw, KdaGate(log_rate, offset, lower_bound), view)
        w, u, q_from_start, k_to_end, Aqk, Akk = fla06.intra_forward(
            q,
            k,
            v,
            gate,
            beta,
            scale=scale,
            safe_gate=safe_gate,
            with_q=keep_intermediates,
            view=view,
        )

        pool = new_pool(initial_states, view)
        states, v_new = scan_states(k_to_end[0], w[0], u[0], gate[0], pool, view, fill_pool=True)
        output = fla06.output_forward(
            q, v_new[None], gate, Aqk, states[None], scale=scale, view=view
        )

        inputs = (q, k, v, gate, beta, Aqk, Akk, pool, raw, log_rate, offset)
        kept = (w, q_from_start, k_to_end, states, v_new) if keep_intermediates else ()
        ctx.save_for_backward(*inputs, *kept)
        ctx.view, ctx.scale, ctx.safe_gate, ctx.lower_bound = view, scale, safe_gate, lower_bound
        ctx.dtypes = (log_decay.dtype, initial_states.dtype)
        ctx.set_materialize_grads(False)
        return output[0], pool[view.num_external :]

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_output: torch.Tensor | None, d_states: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        q, k, v, gate, beta, Aqk, Akk, pool, raw, log_rate, offset, *kept = ctx.saved_tensors
        view, scale = ctx.view, ctx.scale
        decay_dtype, external_dtype = ctx.dtypes
        d_output = torch.zeros_like(v) if d_output is None else batched(d_output)
        if d_states is not None:
            d_states = d_states.contiguous()

        if kept:
            w, q_from_start, k_to_end, states, v_new = kept
        else:
            w, u, q_from_start, k_to_end = fla06.decayed_rows(q, k, v, gate, beta, Akk, view=view)
            states, v_new = scan_states(
                k_to_end[0], w[0], u[0], gate[0], pool, view, fill_pool=False
            )
            del u
        # its first result is for any gates alone: fla has no kernel for the second by itself
        d_Aqk, d_v_new = fla06.output_backward(
            q, k, v_new[None], d_output, Aqk, scale=scale, view=view
        )
        d_end, d_v_new, d_start = scan_state_gradients(
            q_from_start[0],
            k_to_end[0],
            w[0],
            gate[0],
            d_output[0],
            d_v_new[0],
            d_states,
            view,
            scale=scale,
        )
        del w, q_from_start, k_to_end, kept
        rows = (q, k, v, v_new[None], gate, beta, Akk, states[None], d_output)
        if ctx.safe_gate and q.dtype != torch.float16:  # float16 has no room for the anchors
            del d_Aqk
            d_q, d_k, d_v, d_beta, d_gate = rows_backward(
                *(x[0] for x in rows), d_end, d_v_new, view, scale=scale
            )
        else:
            d_q, d_k, d_v, d_beta, d_gate = _rows_backward_of_any_gate(
                rows, d_Aqk, d_end[None], d_v_new[None], scale=scale, view=view
            )
        d_decay = fla06.chunk_cumsum(d_gate[None], view, reverse=True)[0]
        d_log_rate = d_offset = None
        if raw is not None:
            learned = KdaGate(log_rate, offset, ctx.lower_bound)
            d_raw, d_log_rate, d_offset = fla06.gate_backward(raw, learned, d_decay[None])
            d_decay = d_raw[0]
        num_key_heads = q.shape[2]
        return (
            over_group(d_q, num_key_heads).to(q.dtype),
            over_group(d_k, num_key_heads).to(k.dtype),
            d_v.to(v.dtype),
            d_decay.to(decay_dtype),
            d_beta.to(beta.dtype),
            external_state_gradients(d_start, view).to(external_dtype)
            if ctx.needs_input_grad[5]
            else None,
            d_log_rate,
            d_offset,
            *(None,) * 5,
        )


def _rows_backward_of_any_gate(
    rows: tuple[torch.Tensor, ...],
    d_Aqk: torch.Tensor,
    d_end: torch.Tensor,
    d_v_new: torch.Tensor,
    *,
    scale: float,
    view: LinearView,
) -> list[torch.Tensor]:
    """By fla's kernels, which need no bound: results as of `rows_backward`.

    Every tensor has a leading dimension of 1 but those of the results.
    """
    q, k, v, v_new, gate, beta, Akk, states, d_output = rows
    d_q, d_k, d_v, d_beta, d_gate, d_Akk = fla06.wy_backward(
        q,
        k,
        v,
        v_new,
        gate,
        beta,
        Akk,
        states,
        d_output,
        d_end,
        d_v_new,
        scale=scale,
        view=view,
    )
    d_q, d_k, d_beta, d_gate = fla06.intra_backward(
        q,
        k,
        gate,
        beta,
        d_Aqk,
        d_Akk,
        d_q,
        d_k,
        d_beta,
        d_gate,
        view=view,
    )
    return [x[0] for x in (d_q, d_k, d_v, d_beta, d_gate)]
