"""Gated delta rule over the chains of a forest in plain PyTorch: the twin of every fast kernel.

Chunk-local work runs once for all chunks of all chains (delta rule in WY form: Kimi Linear,
arXiv 2510.26692; Gated DeltaNet, arXiv 2412.06464); only the states between chunks run by depth.

Legend: P packed rows, Q chunks in level order, B rows of a padded chunk, N = Q * G,
H key heads, G value heads, K key width, V value width, D width of the gate (K or 1).
"""

from __future__ import annotations

import torch

from harts.ops.linear_attention.decayed_products import decayed_products
from harts.ops.linear_attention.state_scan import state_scan
from harts.ops.linear_attention.unit_lower_solve import unit_lower_solve
from harts.views.linear import LinearView


def chunk_kda_reference(
    q_PHK: torch.Tensor,
    k_PHK: torch.Tensor,
    v_PGV: torch.Tensor,
    log_decay_PGD: torch.Tensor,
    beta_PG: torch.Tensor,
    *,
    view: LinearView,
    scale: float,
    initial_states_XGKV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (P, G, V) and produced states, all in the one floating dtype of the arguments.

    O(P (B (K + V) + K V + K^2)) time, O(P (B + V + K log B)) memory, one Python step a level.
    """
    num_heads, value_width = v_PGV.shape[1:]
    key_width = q_PHK.shape[2]
    group = num_heads // q_PHK.shape[1]
    grid = _ChunkGrid(view)

    q = grid.spread(q_PHK * scale, group)
    k = grid.spread(k_PHK, group)
    v = grid.spread(v_PGV)
    beta = grid.spread(beta_PG.unsqueeze(-1))
    k_beta = k * beta
    qk, bk, from_start, to_end = decayed_products(q, k_beta, k, grid.spread(log_decay_PGD))

    # What each row writes, as a function of the start state S: u - w S.
    right_side = torch.cat((k_beta * from_start, v * beta), dim=-1)
    w, u = unit_lower_solve(bk, right_side).split((key_width, value_width), dim=-1)

    # The chunk as one affine map of its start state: S -> transition S + update.
    leaving = (k * to_end).mT
    whole = from_start[:, -1].expand(-1, key_width)
    transition = torch.baddbmm(torch.diag_embed(whole), leaving, w, alpha=-1)
    update = torch.bmm(leaving, u)
    start, produced = state_scan(
        transition.view(-1, num_heads, key_width, key_width),
        update.view(-1, num_heads, key_width, value_width),
        initial_states_XGKV,
        view,
    )
    start = start.flatten(0, 1)

    written = torch.baddbmm(u, w, start, alpha=-1)
    output = torch.baddbmm(torch.bmm(q * from_start, start), qk, written)
    return grid.collect(output, num_heads), produced


class _ChunkGrid:
    """Packed rows on the padded grid; padding rows are zero and so leave the state unchanged."""

    def __init__(self, view: LinearView) -> None:
        self.num_chunks = view.start_state.shape[0]
        self.num_rows = 1 << max(view.chunk_size - 1, 0).bit_length()
        self.row = view.grid_row
        if self.num_rows != view.chunk_size:
            chunk, offset = self.row // view.chunk_size, self.row % view.chunk_size
            self.row = chunk * self.num_rows + offset

    def spread(self, x: torch.Tensor, group: int = 1) -> torch.Tensor:
        """(P, heads, W) as (Q * heads * group, B, W)."""
        num_heads, width = x.shape[1:]
        grid = x.new_zeros(self.num_chunks * self.num_rows, num_heads, width)
        grid = grid.index_copy(0, self.row, x).view(-1, self.num_rows, num_heads, width)
        grid = grid.transpose(1, 2)
        if group > 1:
            grid = grid.repeat_interleave(group, dim=1)
        return grid.contiguous().view(-1, self.num_rows, width)

    def collect(self, x: torch.Tensor, num_heads: int) -> torch.Tensor:
        """(Q * heads, B, W) as (P, heads, W)."""
        grid = x.view(-1, num_heads, self.num_rows, x.shape[-1]).transpose(1, 2)
        return grid.flatten(0, 1).index_select(0, self.row)
