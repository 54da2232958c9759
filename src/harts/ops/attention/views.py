"""Tree attention block by block: queries of a chain over [ancestor runs, own rows].

Each chain is lower-right causal attention (Equations 21 and 22). Short chains that follow one
another in row order share a block: in DFS preorder every ancestor of any row of a block lies in
the block or is an ancestor of its first row, so one set of keys serves them all and the interval
test masks what a row may not see. Backward recomputes the probabilities from the log-sum-exp.

Legend: C rows, H query heads, G key heads, R = H / G query heads of a key head, D key width,
V value width, B rows of a block, N keys of a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from harts.ops.kept_results import kept_result
from harts.views.attention import AttentionView, ChainRows

Runs = tuple[tuple[int, int], ...]

# A block of scores should stay in cache on a CPU and fill the device on a GPU. 20,000 rows of
# two heads took 2.3 s forward and backward with 64-row blocks, 3.9 s with 256-row blocks.
CPU_SCORE_BYTES = 8 << 20
CUDA_SCORE_BYTES = 256 << 20
MIN_BLOCK_ROWS, MAX_BLOCK_ROWS = 16, 256

# What a block of its own costs, in (query, key) pairs: calls, and copying each key.
PAIRS_PER_BLOCK = 16_384
PAIRS_PER_COPIED_KEY = 4


@dataclass(frozen=True)
class RowGroup:
    """Rows [start, stop) of one chain, or of short chains in row order, over one set of keys.

    keys: runs of rows, first all ancestors of row start, then the own rows.
    num_ancestors: keys before the own rows. num_shared: leading keys that all own rows see, or
    None for a single chain, where a row sees every key before it.
    """

    start: int
    stop: int
    keys: Runs
    num_ancestors: int
    num_shared: int | None

    def first_masked(self, block_start: int) -> int:
        """Keys before this one are seen by every row of the block that starts at block_start."""
        if self.num_shared is None:
            return self.num_ancestors + block_start - self.start
        return self.num_shared


def chain_attention(
    q_CHD: torch.Tensor,
    k_CGD: torch.Tensor,
    v_CGV: torch.Tensor,
    view: AttentionView,
    scale: float,
) -> torch.Tensor:
    """(C, H, V). Memory beyond inputs and outputs: one group's keys and two blocks of scores."""
    return _ChainAttention.apply(q_CHD, k_CGD, v_CGV, view, scale)


class _ChainAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_CHD: torch.Tensor,
        k_CGD: torch.Tensor,
        v_CGV: torch.Tensor,
        view: AttentionView,
        scale: float,
    ) -> torch.Tensor:
        groups = group_chains(view.chains)
        out_CHV, lse_GCR = kept_result(
            lambda: _attend_groups(q_CHD, k_CGD, v_CGV, view, groups, scale)
        )
        ctx.save_for_backward(q_CHD, k_CGD, v_CGV, out_CHV, lse_GCR)
        ctx.view, ctx.scale, ctx.groups = view, scale, groups
        return out_CHV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out_CHV: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_CHD, k_CGD, v_CGV, out_CHV, lse_GCR = ctx.saved_tensors
        q, k, v = _head_first(q_CHD, k_CGD, v_CGV, ctx.scale)
        num_heads, num_rows, repeats, _ = q.shape
        d_out = _split_heads(d_out_CHV.to(q.dtype), num_heads)
        delta_GCR = (d_out * _split_heads(out_CHV.to(q.dtype), num_heads)).sum(dim=-1)
        d_q, d_k, d_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        rows = torch.arange(num_rows, device=q.device)
        for group in ctx.groups:
            k_GND, v_GNV = _gather(k, group.keys), _gather(v, group.keys)
            d_k_GND, d_v_GNV = _accumulator(d_k, group.keys), _accumulator(d_v, group.keys)
            for start, stop, num_keys in _blocks(group, q):
                scores = _scores(q, k_GND, rows, ctx.view.end, group, start, stop, num_keys)
                weights = scores.sub_(lse_GCR[:, start:stop].reshape(num_heads, -1, 1)).exp_()
                d_out_block = d_out[:, start:stop].flatten(1, 2)
                d_v_GNV[:, :num_keys].baddbmm_(weights.transpose(1, 2), d_out_block)
                d_weights = torch.bmm(d_out_block, v_GNV[:, :num_keys].transpose(1, 2))
                delta = delta_GCR[:, start:stop].reshape(num_heads, -1, 1)
                d_scores = d_weights.sub_(delta).mul_(weights)
                d_q[:, start:stop] = _by_row(torch.bmm(d_scores, k_GND[:, :num_keys]), repeats)
                q_block = q[:, start:stop].flatten(1, 2)
                d_k_GND[:, :num_keys].baddbmm_(d_scores.transpose(1, 2), q_block)
                del scores, weights, d_weights, d_scores  # as in forward
            _add_runs(d_k, d_k_GND, group.keys)
            _add_runs(d_v, d_v_GNV, group.keys)
        d_q_CHD = d_q.mul_(ctx.scale).permute(1, 0, 2, 3).flatten(1, 2)
        d_k_CGD, d_v_CGV = d_k.transpose(0, 1), d_v.transpose(0, 1)
        dtype = q_CHD.dtype
        return d_q_CHD.to(dtype), d_k_CGD.to(dtype), d_v_CGV.to(dtype), None, None


def _attend_groups(
    q_CHD: torch.Tensor,
    k_CGD: torch.Tensor,
    v_CGV: torch.Tensor,
    view: AttentionView,
    groups: list[RowGroup],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs (C, H, V) in q's dtype and log-sum-exp (G, C, R)."""
    q, k, v = _head_first(q_CHD, k_CGD, v_CGV, scale)
    num_heads, num_rows, repeats, _ = q.shape
    out_CGRV = q.new_empty(num_rows, num_heads, repeats, v.shape[-1])
    lse_GCR = q.new_empty(num_heads, num_rows, repeats)
    rows = torch.arange(num_rows, device=q.device)
    for group in groups:
        k_GND, v_GNV = _gather(k, group.keys), _gather(v, group.keys)
        for start, stop, num_keys in _blocks(group, q):
            scores = _scores(q, k_GND, rows, view.end, group, start, stop, num_keys)
            out, lse = _attend(scores, v_GNV[:, :num_keys])
            del scores  # or it would live on while the next block's are made
            out_CGRV[start:stop] = _by_row(out, repeats).transpose(0, 1)
            lse_GCR[:, start:stop] = lse.unflatten(1, (-1, repeats))
    return out_CGRV.flatten(1, 2).to(q_CHD.dtype), lse_GCR


def group_chains(chains: tuple[ChainRows, ...]) -> list[RowGroup]:
    """Chains in row order, joined while a shared block costs less than one more block.

    Time is proportional to the number of ancestor runs.
    """
    groups: list[RowGroup] = []
    members: list[ChainRows] = []
    for chain in chains:
        row = members[-1].stop if members else 0
        assert chain.start == row, f"a chain starts at row {chain.start}, the one before at {row}"
        if members and not _joins(members[0], chain):
            groups.append(_close(members))
            members = []
        members.append(chain)
    if members:
        groups.append(_close(members))
    return groups


def _joins(first: ChainRows, chain: ChainRows) -> bool:
    if chain.stop - first.start > MAX_BLOCK_ROWS:
        return False
    own, earlier = chain.stop - chain.start, chain.start - first.start
    needed = _length(chain.ancestors)
    unseen = own * (_length(first.ancestors) + earlier - needed) + earlier * own
    return unseen <= PAIRS_PER_BLOCK + PAIRS_PER_COPIED_KEY * needed


def _close(members: list[ChainRows]) -> RowGroup:
    first, last = members[0], members[-1]
    return RowGroup(
        start=first.start,
        stop=last.stop,
        keys=(*first.ancestors, (first.start, last.stop)),
        num_ancestors=_length(first.ancestors),
        num_shared=None if first is last else _common_prefix(first.ancestors, last.ancestors),
    )


def _common_prefix(first: Runs, last: Runs) -> int:
    """Leading keys of both: the common ancestors, which every row between them has as well."""
    shared = 0
    for (first_start, first_stop), (last_start, last_stop) in zip(first, last, strict=False):
        if first_start != last_start:
            break
        shared += min(first_stop, last_stop) - first_start
    return shared


def _length(runs: Runs) -> int:
    return sum(stop - start for start, stop in runs)


def _blocks(group: RowGroup, q_GCRD: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """(start, stop, number of leading keys) of each block of query rows."""
    heads = q_GCRD.shape[0] * q_GCRD.shape[2]
    score_bytes = CUDA_SCORE_BYTES if q_GCRD.is_cuda else CPU_SCORE_BYTES
    start = group.start
    while start < group.stop:
        num_keys = group.num_ancestors + start - group.start + MIN_BLOCK_ROWS
        fitting = score_bytes // (heads * num_keys * q_GCRD.element_size())
        stop = min(group.stop, start + min(max(fitting, MIN_BLOCK_ROWS), MAX_BLOCK_ROWS))
        yield start, stop, group.num_ancestors + stop - group.start
        start = stop


def _scores(
    q_GCRD: torch.Tensor,
    k_GND: torch.Tensor,
    rows: torch.Tensor,
    end: torch.Tensor,
    group: RowGroup,
    start: int,
    stop: int,
    num_keys: int,
) -> torch.Tensor:
    """(G, B * R, keys) scaled scores of rows [start, stop), -inf where a row may not see a key."""
    scores = torch.bmm(q_GCRD[:, start:stop].flatten(1, 2), k_GND[:, :num_keys].transpose(1, 2))
    masked = slice(group.first_masked(start), num_keys)
    if stop - start > 1 or group.num_shared is not None:
        key_row = _gather(rows[None], group.keys)[0, masked]
        row = rows[start:stop, None]
        unseen = (key_row > row) | (end[key_row] <= row)
        _by_row(scores, q_GCRD.shape[2])[..., masked].masked_fill_(unseen[:, None], -torch.inf)
    return scores


def _attend(scores: torch.Tensor, v_GNV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(G, B * R, V) outputs and (G, B * R) log-sum-exp. Overwrites the scores."""
    largest = scores.amax(dim=-1, keepdim=True)
    weights = scores.sub_(largest).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    return torch.bmm(weights, v_GNV).div_(total), (largest + total.log()).squeeze(-1)


def _head_first(
    q_CHD: torch.Tensor, k_CGD: torch.Tensor, v_CGV: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scaled q (G, C, R, D), k (G, C, D) and v (G, C, V), contiguous, float32 or float64."""
    dtype = torch.float32 if q_CHD.dtype.itemsize < 4 else q_CHD.dtype
    q = _split_heads(q_CHD.to(dtype) * scale, k_CGD.shape[1]).contiguous()
    k = k_CGD.to(dtype).transpose(0, 1).contiguous()
    v = v_CGV.to(dtype).transpose(0, 1).contiguous()
    return q, k, v


def _split_heads(x_CHW: torch.Tensor, num_key_heads: int) -> torch.Tensor:
    """(G, C, R, width) of (C, H, width)."""
    return x_CHW.unflatten(1, (num_key_heads, -1)).transpose(0, 1)


def _by_row(x: torch.Tensor, repeats: int) -> torch.Tensor:
    """(G, B, R, width) of (G, B * R, width)."""
    return x.unflatten(1, (-1, repeats))


def _gather(x_GCW: torch.Tensor, runs: Runs) -> torch.Tensor:
    """(G, N, width): the rows of the runs; a view where there is one run."""
    if len(runs) == 1:
        return x_GCW[:, runs[0][0] : runs[0][1]]
    return torch.cat([x_GCW[:, start:stop] for start, stop in runs], dim=1)


def _accumulator(total_GCW: torch.Tensor, runs: Runs) -> torch.Tensor:
    """Where a group adds the gradients of its keys: in place, or aside if they are not one run."""
    if len(runs) == 1:
        return total_GCW[:, runs[0][0] : runs[0][1]]
    return total_GCW.new_zeros(total_GCW.shape[0], _length(runs), total_GCW.shape[2])


def _add_runs(total_GCW: torch.Tensor, part_GNW: torch.Tensor, runs: Runs) -> None:
    """Adds what _accumulator kept aside to the rows of the runs, run by run."""
    if len(runs) == 1:
        return
    offset = 0
    for start, stop in runs:
        total_GCW[:, start:stop] += part_GNW[:, offset : offset + stop - start]
        offset += stop - start
