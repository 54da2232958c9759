"""KDA and Gated DeltaNet over a packed forest: one operator, differentiable boundary states.

Source: section 3.4 "Differentiable boundary states" and "Round-wise execution", Equation 16.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Literal, get_args

import torch

from harts.errors import ConfigError, HartsError
from harts.ops.linear_attention.gate import KdaGate, log_decay_of
from harts.ops.linear_attention.reference import chunk_kda_reference
from harts.views.linear import LinearView

Implementation = Literal["reference", "scan", "rounds"]


def chunk_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    view: LinearView,
    scale: float | None = None,
    initial_states: torch.Tensor | None = None,
    gate: KdaGate | None = None,
    impl: Implementation = "reference",
    safe_gate: bool = False,
    keep_intermediates: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gated delta rule along every chain: for each of its rows, from its start state S (K, V),

        S <- exp(log_decay) S;   S <- S + beta k (v - k^T S)^T;   output = scale q^T S.

    Packed rows P as in view.packed, replay included; the caller drops the replay rows' output.
    q, k: (P, H, K), l2-normalised by the caller. v: (P, G, V), where G is a multiple of H and
    value head g reads key head g // (G / H). log_decay: (P, G, K), or (P, G, 1) for one gate a
    head (Gated DeltaNet); natural logarithm, at most zero. beta: (P, G).
    scale: K ** -0.5 unless given. initial_states: (view.num_external, G, K, V), needed when the
    view has external slots.
    gate: log_decay then is the gate's input, any real number, and the log decay what
    `log_decay_of` makes of it; differentiable in the gate's tensors too.

    Returns output (P, G, V) in v's dtype, and the states of the slots that the call produces,
    (view.num_slots - view.num_external, G, K, V), in slot order. Both are differentiable in all
    tensor arguments. States are returned in the widest dtype given, float32 at least.

    "reference" is plain PyTorch on any device, in that dtype: chunk-local work once for all
    chunks, then one step per chunk depth. O(P (B + K)) time per channel and O(P (B + K log B))
    memory for chunks of B rows.
    "scan" needs CUDA, fla-core 0.6.0 and chunks of 64 rows: chunk-local kernels once over all
    chains, fla's and in backward harts' where gates are bounded or of one decay a head (float16: of
    one decay a head alone), own state scans round by round. Matrix products in the dtype of q, k, v
    (tf32 for float32). Deterministic; the output is bitwise that of fla's chunk_kda, or with one
    gate a head of its chunk_gated_delta_rule, on each trajectory, where fla runs its kernels in the
    same configurations.
    "rounds" is fla's public chunk_kda alone, one call a round or more: slower, for comparison.

    safe_gate: the caller's promise that log_decay >= -5 everywhere; "scan" and "rounds" then use
    faster kernels for bounded gates. Nothing checks it; a gate with a lower bound of -5 or
    more implies it, the reference needs no promise.
    keep_intermediates: "scan" keeps for backward what it would otherwise compute again, about
    twice the memory; for layers that are themselves recomputed in backward. No bit changes.
    Raises ConfigError for an unknown impl and where an impl cannot run (none stands in for
    another), HartsError for shapes that do not fit.
    """
    _check_shapes(q, k, v, log_decay, beta, view)
    initial_states = _checked_states(initial_states, q, v, view)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    if gate is not None:
        gate.check(log_decay)
        safe_gate = safe_gate or gate.is_bounded
        if impl != "scan":
            log_decay, gate = log_decay_of(log_decay, gate), None
    if impl == "reference":
        dtypes = (x.dtype for x in (q, k, v, log_decay, beta, initial_states))
        dtype = reduce(torch.promote_types, dtypes, torch.float32)
        # Autocast would run the matrix products of the recurrence in half precision.
        with torch.autocast(q.device.type, enabled=False):
            output, states = chunk_kda_reference(
                *(x.to(dtype) for x in (q, k, v, log_decay, beta)),
                view=view,
                scale=scale,
                initial_states_XGKV=initial_states.to(dtype),
            )
        return output.to(v.dtype), states
    if impl in ("scan", "rounds"):
        if not q.is_cuda:
            raise ConfigError(f"chunk_kda: impl {impl!r} needs CUDA tensors, q is on {q.device}")
        return _on_gpu(impl)(
            q,
            k,
            v,
            log_decay,
            beta,
            view=view,
            scale=scale,
            safe_gate=safe_gate,
            initial_states_XGKV=initial_states,
            **({"gate": gate, "keep_intermediates": keep_intermediates} if impl == "scan" else {}),
        )
    known = ", ".join(get_args(Implementation))
    raise ConfigError(f"chunk_kda: impl is {impl!r}, want one of {known}")


def _on_gpu(impl: Implementation) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Imported here: both need fla and Triton, and importing them raises ConfigError without."""
    if impl == "scan":
        from harts.ops.linear_attention.scan import chunk_kda_scan

        return chunk_kda_scan
    from harts.ops.linear_attention.rounds import chunk_kda_rounds

    return chunk_kda_rounds


def _check_shapes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    view: LinearView,
) -> None:
    tensors = {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta}
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
    if not q.ndim == k.ndim == v.ndim == log_decay.ndim == beta.ndim + 1 == 3:
        raise HartsError(f"chunk_kda: {shapes}; want 3 dimensions, and 2 for beta")
    num_packed = view.grid_row.shape[0]
    if any(x.shape[0] != num_packed for x in tensors.values()):
        raise HartsError(
            f"chunk_kda: {shapes}; the view has {num_packed} packed rows, gather them with "
            "view.packed first"
        )
    key_heads, value_heads = q.shape[1], v.shape[1]
    if q.shape != k.shape or key_heads == 0 or value_heads % key_heads != 0:
        raise HartsError(
            f"chunk_kda: {shapes}; q and k must have one shape, and their {key_heads} heads must "
            f"divide the {value_heads} heads of v"
        )
    if log_decay.shape[1] != value_heads or log_decay.shape[2] not in (1, q.shape[2]):
        raise HartsError(
            f"chunk_kda: {shapes}; log_decay must have the {value_heads} heads of v and width "
            f"{q.shape[2]} or 1"
        )
    if beta.shape[1] != value_heads:
        raise HartsError(f"chunk_kda: {shapes}; beta must have the {value_heads} heads of v")
    integer = [name for name, x in tensors.items() if not x.is_floating_point()]
    if integer:
        name = integer[0]
        raise HartsError(f"chunk_kda: {name} is {tensors[name].dtype}; want a floating dtype")


def _checked_states(
    states: torch.Tensor | None, q: torch.Tensor, v: torch.Tensor, view: LinearView
) -> torch.Tensor:
    want = (view.num_external, v.shape[1], q.shape[2], v.shape[2])
    if states is None and view.num_external == 0:
        return q.new_empty(want)
    if states is None or tuple(states.shape) != want:
        got = "None" if states is None else str(tuple(states.shape))
        raise HartsError(
            f"chunk_kda: initial_states is {got}, want {want}: one state for each of the view's "
            f"{view.num_external} external slots"
        )
    return states
