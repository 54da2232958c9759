"""One call of fla's public chunk_kda a round: the paper's contract, and the oracle on GPU.

Source: section 3.4 "Round-wise execution". The public operator returns a state only at the end of
a sequence, so a chain is cut where a later chain starts: a round with cut chains takes one call
for each cut. Cuts are at chunk boundaries and states are float32, so cutting changes no bit.

Legend: P packed rows, S slots, X external slots, H key heads, G value heads, K key width, V value
width, D width of the gate (K or 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from harts.ops.linear_attention import fla06
from harts.views.linear import LinearView


def chunk_kda_rounds(
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (P, G, V) in v's dtype and produced states (S - X, G, K, V) in float32.

    Reads the view's index tensors on the host, so it waits for the device. A state that several
    chains start from gets their gradients in no fixed order. Raises ConfigError as fla06 says.
    """
    tensors = {"q": q_PHK, "k": k_PHK, "v": v_PGV, "log_decay": log_decay_PGD, "beta": beta_PG}
    tensors["initial_states"] = initial_states_XGKV
    fla06.check_limits("rounds", tensors, view, max_key_width=256)
    device = q_PHK.device
    log_decay_PGK = log_decay_PGD.expand(-1, -1, q_PHK.shape[2])
    rows = (q_PHK, k_PHK, v_PGV, log_decay_PGK, beta_PG)
    calls, slot_states = _schedule(view)

    zero = initial_states_XGKV.new_zeros(1, *initial_states_XGKV.shape[1:])
    known = torch.cat([zero, initial_states_XGKV]).float()
    outputs = []
    for call in calls:
        packed_rows = torch.cat([torch.arange(a, b) for a, b in call.stretches]).to(device)
        output, end_states = fla06.chunk_kda_packed(
            *(x.index_select(0, packed_rows).unsqueeze(0) for x in rows),
            scale=scale,
            safe_gate=safe_gate,
            initial_states=known.index_select(0, torch.tensor(call.start_states, device=device)),
            lengths=[b - a for a, b in call.stretches],
        )
        outputs.append((packed_rows, output[0]))
        known = torch.cat([known, end_states])
    order = torch.cat([packed_rows for packed_rows, _ in outputs]).argsort()
    output = torch.cat([output for _, output in outputs]).index_select(0, order)
    produced = slot_states[view.num_external :]
    return output, known.index_select(0, torch.tensor(produced, dtype=torch.int64, device=device))


@dataclass
class _Call:
    """Stretches of packed rows [a, b) that run together, and the known state each starts from."""

    stretches: list[tuple[int, int]]
    start_states: list[int]


def _schedule(view: LinearView) -> tuple[list[_Call], list[int]]:
    """Calls in order, and for each slot its place among the known states.

    Known states: zero, the external ones, then the end state of every stretch in call order.
    """
    cu_seqlens, chunk_offsets = view.cu_seqlens.tolist(), view.chunk_offsets.tolist()
    init_slot, store_slot = view.init_slot.tolist(), view.store_slot.tolist()
    slot_states = [1 + slot if slot < view.num_external else -1 for slot in range(view.num_slots)]
    num_known = 1 + view.num_external
    calls: list[_Call] = []
    for first, stop in zip(view.round_ptr[:-1], view.round_ptr[1:], strict=True):
        # (packed row where it ends, slot that takes its end state or -1) of each stretch
        waiting: dict[int, list[tuple[int, int]]] = {}
        begin, state = {}, {}
        for n in range(first, stop):
            stores = store_slot[chunk_offsets[n] + n : chunk_offsets[n + 1] + n + 1]
            cuts = [(i, slot) for i, slot in enumerate(stores) if slot >= 0]
            waiting[n] = [
                (min(cu_seqlens[n] + i * view.chunk_size, cu_seqlens[n + 1]), slot)
                for i, slot in cuts
            ]
            if not cuts or waiting[n][-1][0] < cu_seqlens[n + 1]:
                waiting[n].append((cu_seqlens[n + 1], -1))
            begin[n] = cu_seqlens[n]
            state[n] = slot_states[init_slot[n]] if init_slot[n] >= 0 else 0
        while waiting:
            call = _Call([], [])
            for n in list(waiting):
                end, slot = waiting[n].pop(0)
                call.stretches.append((begin[n], end))
                call.start_states.append(state[n])
                begin[n], state[n] = end, num_known
                if slot >= 0:
                    slot_states[slot] = num_known
                num_known += 1
                if not waiting[n]:
                    del waiting[n]
            calls.append(call)
    return calls, slot_states
