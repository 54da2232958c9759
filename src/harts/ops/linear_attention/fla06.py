"""fla-core 0.6.0 behind typed thin functions: the only module that imports fla.

fla's internals move with every release, so the version and the keywords used here are checked
once, at import; importing raises ConfigError where they do not fit. Import it where it is used.

Legend: all tensors have fla's leading batch dimension of 1. P packed rows, NC chunks, B rows of a
chunk, H key heads, G value heads, K key width, V value width. gate is the log2 decay summed within
each chunk, float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from harts.errors import ConfigError
from harts.ops.linear_attention.gate import KdaGate
from harts.ops.pinned_library import PinnedLibrary
from harts.views.linear import LinearView

_LIBRARY = PinnedLibrary(
    "fla-core",
    "0.6.0",
    "linear attention on GPU",
    "pip install fla-core==0.6.0 einops packaging",
)
_LIBRARY.check_release()
try:
    from fla.ops.common.chunk_o import chunk_bwd_dv_local, chunk_fwd_o
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as _public_chunk_gated_delta_rule
    from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
    from fla.ops.gated_delta_rule.wy_fast import recompute_w_u_fwd as recompute_per_head_w_u_fwd
    from fla.ops.gla.chunk import chunk_gla_fwd_o_gk
    from fla.ops.kda import chunk_kda as _public_chunk_kda
    from fla.ops.kda.chunk_bwd import chunk_kda_bwd_dAv, chunk_kda_bwd_wy_dqkg_fused
    from fla.ops.kda.chunk_intra import chunk_kda_bwd_intra, chunk_kda_fwd_intra
    from fla.ops.kda.gate import kda_gate_bwd, kda_gate_chunk_cumsum
    from fla.ops.kda.wy_fast import recompute_w_u_fwd
    from fla.ops.utils import chunk_local_cumsum
    from fla.ops.utils.constant import RCP_LN2
except ImportError as error:
    raise _LIBRARY.not_importable(error) from error

_VARLEN = {"cu_seqlens", "chunk_indices"}
_USES: list[tuple[Callable[..., Any], set[str]]] = [
    (chunk_local_cumsum, {"g", "chunk_size", "reverse", "scale", *_VARLEN}),
    (
        kda_gate_chunk_cumsum,
        {"g", "A_log", "dt_bias", "chunk_size", "scale", "lower_bound", *_VARLEN},
    ),
    (kda_gate_bwd, {"g", "A_log", "dt_bias", "dyg", "lower_bound"}),
    (
        chunk_kda_fwd_intra,
        {"q", "k", "v", "gk", "beta", "scale", "chunk_size", "safe_gate", "disable_recompute"}
        | _VARLEN,
    ),
    (recompute_w_u_fwd, {"q", "k", "v", "beta", "A", "gk", *_VARLEN}),
    (chunk_gla_fwd_o_gk, {"q", "v", "g", "A", "h", "scale", "chunk_size", *_VARLEN}),
    (chunk_kda_bwd_dAv, {"q", "k", "v", "do", "A", "scale", "chunk_size", *_VARLEN}),
    (
        chunk_kda_bwd_wy_dqkg_fused,
        {"q", "k", "v", "v_new", "g", "beta", "A", "h", "do", "dh", "dv", "scale", "chunk_size"}
        | _VARLEN,
    ),
    (
        chunk_kda_bwd_intra,
        {"q", "k", "g", "beta", "dAqk", "dAkk", "dq", "dk", "db", "dg", "chunk_size", "safe_gate"}
        | _VARLEN,
    ),
    (chunk_gated_delta_rule_fwd_intra, {"k", "v", "g", "beta", "chunk_size", *_VARLEN}),
    (recompute_per_head_w_u_fwd, {"k", "v", "g", "beta", "A", *_VARLEN}),
    (chunk_fwd_o, {"q", "k", "v", "h", "g", "scale", "chunk_size", *_VARLEN}),
    (chunk_bwd_dv_local, {"q", "k", "do", "g", "scale", "chunk_size", *_VARLEN}),
    (
        _public_chunk_gated_delta_rule,
        {"q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state"}
        | {"cu_seqlens", "cu_seqlens_cpu"},
    ),
    (
        _public_chunk_kda,
        {"q", "k", "v", "g", "beta", "scale", "initial_state", "output_final_state", "safe_gate"}
        | {"cu_seqlens", "cu_seqlens_cpu"},
    ),
]
_LIBRARY.check_parameters(_USES)


def check_limits(
    impl: str, tensors: dict[str, torch.Tensor], view: LinearView, max_key_width: int
) -> None:
    """Raise ConfigError in one line for what fla's kernels cannot run.

    tensors: q, k, v, log_decay, beta, initial_states by name, shapes already checked.
    """
    where = f"chunk_kda: impl {impl!r}"
    if view.chunk_size != 64:
        raise ConfigError(f"{where} needs chunk_size 64, the view has {view.chunk_size}")
    key_width = tensors["q"].shape[2]
    if key_width > max_key_width:
        raise ConfigError(f"{where} needs a key width of at most {max_key_width}, got {key_width}")
    dtypes = {tensors[name].dtype for name in ("q", "k", "v")}
    if len(dtypes) > 1 or not dtypes <= {torch.bfloat16, torch.float16, torch.float32}:
        got = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise ConfigError(f"{where} needs q, k, v of one dtype up to float32, got {got}")
    for name, x in tensors.items():
        if x.dtype == torch.float64:
            raise ConfigError(f"{where} computes in float32, {name} is float64; use 'reference'")
        if x.device != tensors["q"].device:
            raise ConfigError(f"{where}: {name} is on {x.device}, q on {tensors['q'].device}")


def chunk_cumsum(
    x: torch.Tensor, view: LinearView, *, reverse: bool = False, to_log2: bool = False
) -> torch.Tensor:
    """Sums within each chunk over rows, (1, P, G) or (1, P, G, K), in float32.

    to_log2 turns natural logarithms into binary ones, which all kernels exponentiate.
    """
    scale = RCP_LN2 if to_log2 else None
    summed: torch.Tensor = chunk_local_cumsum(
        g=x, chunk_size=view.chunk_size, reverse=reverse, scale=scale, **_packing(view)
    )
    return summed


def gate_cumsum(raw: torch.Tensor, gate: KdaGate, view: LinearView) -> torch.Tensor:
    """log2 decay of the gate's input (1, P, G, K), summed within each chunk, in float32."""
    summed: torch.Tensor = kda_gate_chunk_cumsum(
        g=raw,
        A_log=gate.log_rate,
        dt_bias=gate.offset.flatten(),
        chunk_size=view.chunk_size,
        scale=RCP_LN2,
        lower_bound=gate.lower_bound,
        **_packing(view),
    )
    return summed


def gate_backward(
    raw: torch.Tensor, gate: KdaGate, d_log_decay: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the gate's input (1, P, G, K), log_rate (G,) and offset (G, K)."""
    d_raw, d_log_rate, d_offset = kda_gate_bwd(
        g=raw,
        A_log=gate.log_rate,
        dt_bias=gate.offset.flatten(),
        dyg=d_log_decay,
        lower_bound=gate.lower_bound,
    )
    return d_raw, d_log_rate, d_offset.view_as(gate.offset)


def intra_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float,
    safe_gate: bool,
    with_q: bool,
    view: LinearView,
) -> tuple[torch.Tensor | None, ...]:
    """w (1, P, G, K), u (1, P, G, V), q decayed from the chunk's start if asked for and k decayed
    to its end (1, P, G, K), Aqk and Akk (1, P, G, B)."""
    products: tuple[torch.Tensor | None, ...] = chunk_kda_fwd_intra(
        q=q,
        k=k,
        v=v,
        gk=gate,
        beta=beta,
        scale=scale,
        chunk_size=view.chunk_size,
        safe_gate=safe_gate,
        disable_recompute=with_q,
        **_packing(view),
    )
    return products


def decayed_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    Akk: torch.Tensor,
    *,
    view: LinearView,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """w, u, q decayed from the chunk's start and k decayed to its end, for backward."""
    w, u, q_from_start, k_to_end = recompute_w_u_fwd(
        q=q, k=k, v=v, beta=beta, A=Akk, gk=gate, **_packing(view)
    )
    return w, u, q_from_start, k_to_end


def output_forward(
    q: torch.Tensor,
    v_new: torch.Tensor,
    gate: torch.Tensor,
    Aqk: torch.Tensor,
    states: torch.Tensor,
    *,
    scale: float,
    view: LinearView,
) -> torch.Tensor:
    """Output (1, P, G, V) from the state at the start of every chunk, (1, NC, G, K, V)."""
    output: torch.Tensor = chunk_gla_fwd_o_gk(
        q=q,
        v=v_new,
        g=gate,
        A=Aqk,
        h=states,
        scale=scale,
        chunk_size=view.chunk_size,
        **_packing(view),
    )
    return output


def output_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v_new: torch.Tensor,
    d_output: torch.Tensor,
    Aqk: torch.Tensor,
    *,
    scale: float,
    view: LinearView,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient of Aqk, and the part of v_new's gradient that comes from within its chunk."""
    d_Aqk, d_v_new = chunk_kda_bwd_dAv(
        q=q,
        k=k,
        v=v_new,
        do=d_output,
        A=Aqk,
        scale=scale,
        chunk_size=view.chunk_size,
        **_packing(view),
    )
    return d_Aqk, d_v_new


def wy_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    v_new: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    Akk: torch.Tensor,
    states: torch.Tensor,
    d_output: torch.Tensor,
    d_end_states: torch.Tensor,
    d_v_new: torch.Tensor,
    *,
    scale: float,
    view: LinearView,
) -> tuple[torch.Tensor, ...]:
    """Gradients of q, k (1, P, G, K), v, beta, gate and Akk, without what Aqk and Akk add."""
    gradients: tuple[torch.Tensor, ...] = chunk_kda_bwd_wy_dqkg_fused(
        q=q,
        k=k,
        v=v,
        v_new=v_new,
        g=gate,
        beta=beta,
        A=Akk,
        h=states,
        do=d_output,
        dh=d_end_states,
        dv=d_v_new,
        scale=scale,
        chunk_size=view.chunk_size,
        **_packing(view),
    )
    return gradients


def intra_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    d_Aqk: torch.Tensor,
    d_Akk: torch.Tensor,
    d_q: torch.Tensor,
    d_k: torch.Tensor,
    d_beta: torch.Tensor,
    d_gate: torch.Tensor,
    *,
    view: LinearView,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """d_q, d_k, d_beta, d_gate with what comes through Aqk and Akk added, for any gate."""
    d_q, d_k, d_beta, d_gate = chunk_kda_bwd_intra(
        q=q,
        k=k,
        g=gate,
        beta=beta,
        dAqk=d_Aqk,
        dAkk=d_Akk,
        dq=d_q,
        dk=d_k,
        db=d_beta,
        dg=d_gate,
        chunk_size=view.chunk_size,
        safe_gate=False,
        **_packing(view),
    )
    return d_q, d_k, d_beta, d_gate


def per_head_intra(
    k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor, beta: torch.Tensor, *, view: LinearView
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """w (1, P, G, K), u (1, P, G, V) and T (1, P, G, B) of one decay a head, (1, P, G)."""
    w, u, T = chunk_gated_delta_rule_fwd_intra(
        k=k, v=v, g=gate, beta=beta, chunk_size=view.chunk_size, **_packing(view)
    )
    return w, u, T


def per_head_rows(
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    T: torch.Tensor,
    *,
    view: LinearView,
) -> tuple[torch.Tensor, torch.Tensor]:
    """w and u again, for backward."""
    w, u = recompute_per_head_w_u_fwd(k=k, v=v, beta=beta, A=T, g=gate, **_packing(view))
    return w, u


def per_head_output(
    q: torch.Tensor,
    k: torch.Tensor,
    v_new: torch.Tensor,
    gate: torch.Tensor,
    states: torch.Tensor,
    *,
    scale: float,
    view: LinearView,
) -> torch.Tensor:
    """Output (1, P, G, V) from the state at the start of every chunk, (1, NC, G, K, V)."""
    output: torch.Tensor = chunk_fwd_o(
        q=q,
        k=k,
        v=v_new,
        h=states,
        g=gate,
        scale=scale,
        chunk_size=view.chunk_size,
        **_packing(view),
    )
    return output


def per_head_within(
    q: torch.Tensor,
    k: torch.Tensor,
    gate: torch.Tensor,
    d_output: torch.Tensor,
    *,
    scale: float,
    view: LinearView,
) -> torch.Tensor:
    """The part of v_new's gradient (1, P, G, V) that comes from within its chunk."""
    d_v_new: torch.Tensor = chunk_bwd_dv_local(
        q=q, k=k, g=gate, do=d_output, scale=scale, chunk_size=view.chunk_size, **_packing(view)
    )
    return d_v_new


def chunk_gated_delta_rule_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float,
    initial_states: torch.Tensor | None,
    lengths: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """fla's public operator with one decay a head (1, P, G); backward is refused on some GPUs.

    Output (1, P, G, V) and end states (N, G, K, V) in float32; lengths as in chunk_kda_packed.
    """
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    output, states = _public_chunk_gated_delta_rule(
        q=q,
        k=k,
        v=v,
        g=log_decay,
        beta=beta,
        scale=scale,
        initial_state=initial_states,
        output_final_state=True,
        cu_seqlens=cu_seqlens.to(q.device),
        cu_seqlens_cpu=cu_seqlens,
    )
    return output, states


def chunk_kda_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float,
    safe_gate: bool,
    initial_states: torch.Tensor,
    lengths: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """fla's public operator: output (1, P, G, V) and end states (N, G, K, V) in float32.

    lengths: rows of each of the N packed sequences.
    """
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    output, states = _public_chunk_kda(
        q=q,
        k=k,
        v=v,
        g=log_decay,
        beta=beta,
        scale=scale,
        initial_state=initial_states,
        output_final_state=True,
        safe_gate=safe_gate,
        cu_seqlens=cu_seqlens.to(q.device),
        cu_seqlens_cpu=cu_seqlens,
    )
    return output, states


def _packing(view: LinearView) -> dict[str, torch.Tensor]:
    """Both given, so that fla derives nothing from device tensors (which would wait for it)."""
    return {"cu_seqlens": view.cu_seqlens, "chunk_indices": view.chunk_indices}
