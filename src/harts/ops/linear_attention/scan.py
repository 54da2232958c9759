"""Chunk-local work once over all chains with fla's kernels; only the states run round by round.

Source: section 3.4 "Round-wise execution". Round by round is needed for states alone: everything
else in the operator reads one chunk. In backward every start state is known, so the recomputation
is one launch over all chains and only the reverse scan has rounds.

Legend: P packed rows, S slots, X external slots, N chains, H key heads, G value heads, K key
width, V value width, D width of the gate (K or 1).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from harts.errors import ConfigError
from harts.ops.linear_attention import fla06
from harts.ops.linear_attention.gate import KdaGate
from harts.ops.linear_attention.scan_kernels import (
    external_state_gradients,
    scan_state_gradients,
    scan_states,
)
from harts.views.linear import LinearView


def chunk_kda_scan(
    q_PHK: torch.Tensor,
    k_PHK: torch.Tensor,
    v_PGV: torch.Tensor,
    log_decay_PGD: torch.Tensor,
    beta_PG: torch.Tensor,
    *,
    view: LinearView,
    scale: float,
    safe_gate: bool,
    initial_states_XGKV: torch.Tensor,
    gate: KdaGate | None = None,
    keep_intermediates: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (P, G, V) in v's dtype and produced states (S - X, G, K, V) in float32.

    bfloat16, float16 or float32; matrix products take operands of that dtype (float32: tf32) and
    accumulate in float32, states between chunks stay float32. Deterministic, forward and backward.
    Kept for backward, per row and value head: the inputs, the gate (4 D bytes) and two rows of a
    chunk's products (2 B values); and the pool of S states. With keep_intermediates also 3 K + V
    values a row and every chunk's start state, which backward then need not compute again. With a
    `gate`, log_decay is its input: one kernel makes the decay and sums it.
    Raises ConfigError where fla or these kernels cannot run: see fla06, and K not a power of two
    from 16 to 128, or V not a multiple of 16.
    """
    tensors = {"q": q_PHK, "k": k_PHK, "v": v_PGV, "log_decay": log_decay_PGD, "beta": beta_PG}
    tensors["initial_states"] = initial_states_XGKV
    fla06.check_limits("scan", tensors, view, max_key_width=128)
    key_width, value_width = q_PHK.shape[2], v_PGV.shape[2]
    if key_width not in (16, 32, 64, 128) or value_width % 16 != 0:
        raise ConfigError(
            "chunk_kda: impl 'scan' needs a key width of 16, 32, 64 or 128 and a value width that "
            f"is a multiple of 16, got {key_width} and {value_width}"
        )
    inputs = (q_PHK, k_PHK, v_PGV, log_decay_PGD, beta_PG, initial_states_XGKV)
    learned = (None, None) if gate is None else (gate.log_rate, gate.offset)
    lower_bound = None if gate is None else gate.lower_bound
    with torch.cuda.device(q_PHK.device):
        output, states = _ScanKda.apply(
            *inputs, *learned, view, scale, safe_gate, lower_bound, keep_intermediates
        )
    return output, states


class _ScanKda(torch.autograd.Function):
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
        q, k, v, log_decay, beta = (_batched(x) for x in (q, k, v, log_decay, beta))
        if log_rate is None or offset is None:
            gate, raw = _chunk_gate(log_decay, view), None
        else:
            raw = log_decay
            gate = fla06.gate_cumsum(raw, KdaGate(log_rate, offset, lower_bound), view)
        wide_gate = _over_key_width(gate, q.shape[-1])
        w, u, q_from_start, k_to_end, Aqk, Akk = fla06.intra_forward(
            q,
            k,
            v,
            wide_gate,
            beta,
            scale=scale,
            safe_gate=safe_gate,
            with_q=keep_intermediates,
            view=view,
        )

        pool = initial_states.new_empty(
            view.num_slots, *initial_states.shape[1:], dtype=torch.float32
        )
        pool[: view.num_external] = initial_states
        states, v_new = scan_states(
            k_to_end[0], w[0], u[0], wide_gate[0], pool, view, fill_pool=True
        )
        output = fla06.output_forward(
            q, v_new[None], wide_gate, Aqk, states[None], scale=scale, view=view
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
        d_output = torch.zeros_like(v) if d_output is None else _batched(d_output)
        if d_states is not None:
            d_states = d_states.contiguous()

        wide_gate = _over_key_width(gate, q.shape[-1])
        if kept:
            w, q_from_start, k_to_end, states, v_new = kept
        else:
            w, u, q_from_start, k_to_end = fla06.decayed_rows(
                q, k, v, wide_gate, beta, Akk, view=view
            )
            states, v_new = scan_states(
                k_to_end[0], w[0], u[0], wide_gate[0], pool, view, fill_pool=False
            )
            del u
        states, v_new = states[None], v_new[None]
        d_Aqk, d_v_new = fla06.output_backward(q, k, v_new, d_output, Aqk, scale=scale, view=view)
        d_end, d_v_new, d_start = scan_state_gradients(
            q_from_start[0],
            k_to_end[0],
            w[0],
            wide_gate[0],
            d_output[0],
            d_v_new[0],
            d_states,
            view,
            scale=scale,
        )
        del w, q_from_start, k_to_end, kept

        d_q, d_k, d_v, d_beta, d_gate, d_Akk = fla06.rows_backward(
            q,
            k,
            v,
            v_new,
            wide_gate,
            beta,
            Akk,
            states,
            d_output,
            d_end[None],
            d_v_new[None],
            scale=scale,
            view=view,
        )
        d_q, d_k, d_beta, d_gate = fla06.intra_backward(
            q,
            k,
            wide_gate,
            beta,
            d_Aqk,
            d_Akk,
            d_q,
            d_k,
            d_beta,
            d_gate,
            safe_gate=ctx.safe_gate,
            view=view,
        )
        d_decay = _decay_gradient(d_gate, gate, view)
        d_log_rate = d_offset = None
        if raw is not None:
            learned = KdaGate(log_rate, offset, ctx.lower_bound)
            d_raw, d_log_rate, d_offset = fla06.gate_backward(raw, learned, d_decay[None])
            d_decay = d_raw[0]
        num_key_heads = q.shape[2]
        return (
            _over_group(d_q, num_key_heads).to(q.dtype),
            _over_group(d_k, num_key_heads).to(k.dtype),
            d_v[0].to(v.dtype),
            d_decay.to(decay_dtype),
            d_beta[0].to(beta.dtype),
            external_state_gradients(d_start, view).to(external_dtype)
            if ctx.needs_input_grad[5]
            else None,
            d_log_rate,
            d_offset,
            *(None,) * 5,
        )


def _batched(x: torch.Tensor) -> torch.Tensor:
    """With fla's batch dimension; its kernels read rows without strides."""
    return x.contiguous().unsqueeze(0)


def _chunk_gate(log_decay: torch.Tensor, view: LinearView) -> torch.Tensor:
    """(1, P, G) or (1, P, G, K): a gate of one number a head is summed before it is widened."""
    narrow = log_decay.shape[-1] == 1
    return fla06.chunk_cumsum(log_decay.squeeze(-1) if narrow else log_decay, view, to_log2=True)


def _over_key_width(gate: torch.Tensor, key_width: int) -> torch.Tensor:
    """Gated DeltaNet is KDA with one decay for all key channels."""
    if gate.ndim == 4:
        return gate
    return gate.unsqueeze(-1).expand(-1, -1, -1, key_width).contiguous()


def _decay_gradient(d_gate: torch.Tensor, gate: torch.Tensor, view: LinearView) -> torch.Tensor:
    """(P, G, K) or (P, G, 1), from the gradient of the widened sums."""
    if gate.ndim == 4:
        return fla06.chunk_cumsum(d_gate, view, reverse=True)[0]
    return fla06.chunk_cumsum(d_gate.sum(-1), view, reverse=True)[0].unsqueeze(-1)


def _over_group(gradient: torch.Tensor, num_key_heads: int) -> torch.Tensor:
    """(1, P, G, K) summed over the value heads that share a key head: (P, H, K)."""
    num_heads = gradient.shape[2]
    if num_heads == num_key_heads:
        return gradient[0]
    return gradient[0].unflatten(1, (num_key_heads, num_heads // num_key_heads)).sum(2)
