"""Which blocks of keys a block of queries must visit, from the interval ends alone.

Rows lie in DFS preorder and row q sees row k iff k <= q < end[k], where end[k] > k. For queries
[q0, q1) and keys [k0, k1):

- some pair is visible iff k0 < q1 and max(end over the keys) > q0. Blocks that share a row have
  the pair of that row with itself. Otherwise k1 <= q0, and the key with the largest end sees q0.
- every pair is visible iff k1 - 1 <= q0 and min(end over the keys) >= q1.

So two reductions over `end` decide every pair of blocks, and no pair of rows is looked at.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional as F


@dataclass(frozen=True)
class BlockList:
    """Blocks listed for each of N blocks: the first counts[n] entries of indices[n], ascending.

    counts: int32 (N,). indices: int32 (N, M), each row a permutation of all M blocks.
    """

    counts: torch.Tensor
    indices: torch.Tensor


@dataclass(frozen=True)
class BlockLists:
    """Blocks to visit, by query block (forward) and by key block (backward).

    end: int32 (P,), padded to a multiple of both block sizes; a padding row sees only itself.
    full: all pairs of the two blocks are visible, no mask is needed. partial: some, but not all.
    """

    end: torch.Tensor
    partial_keys: BlockList
    full_keys: BlockList
    partial_queries: BlockList
    full_queries: BlockList


def build_block_lists(end: torch.Tensor, query_block: int, key_block: int) -> BlockLists:
    """Lists for blocks of query_block and key_block rows, on the device of `end`, int32 (C,).

    P is at least two blocks of each kind: compiled code would treat one block as a size of its
    own. Never waits for the device. O(C + (P / query_block) (P / key_block)) time and memory.
    """
    end = _pad(end, math.lcm(query_block, key_block))
    query_start = torch.arange(0, end.numel(), query_block, device=end.device)[:, None]
    key_start = torch.arange(0, end.numel(), key_block, device=end.device)
    end_of_block = end.view(-1, key_block)
    query_stop, last_key = query_start + query_block, key_start + key_block - 1
    some = (key_start < query_stop) & (end_of_block.amax(dim=1) > query_start)
    full = (last_key <= query_start) & (end_of_block.amin(dim=1) >= query_stop)
    partial = some & ~full
    return BlockLists(
        end=end,
        partial_keys=_listed(partial),
        full_keys=_listed(full),
        partial_queries=_listed(partial.T),
        full_queries=_listed(full.T),
    )


def _pad(end: torch.Tensor, multiple: int) -> torch.Tensor:
    num_rows = end.numel()
    padded_rows = max(2, -(-num_rows // multiple)) * multiple
    own_end = torch.arange(1, padded_rows + 1, device=end.device, dtype=end.dtype)
    return torch.where(own_end > num_rows, own_end, F.pad(end, (0, padded_rows - num_rows)))


def _listed(chosen_NM: torch.Tensor) -> BlockList:
    """The chosen columns of each row, ascending, then the others: a stable sort by counting."""
    column = torch.arange(chosen_NM.shape[1], device=chosen_NM.device)
    chosen_so_far = chosen_NM.cumsum(dim=1)
    counts = chosen_so_far[:, -1]
    place = torch.where(chosen_NM, chosen_so_far - 1, counts[:, None] + column - chosen_so_far)
    indices = torch.empty_like(place, dtype=torch.int32, memory_format=torch.contiguous_format)
    indices.scatter_(1, place, column.to(torch.int32).expand_as(place))
    return BlockList(counts.to(torch.int32), indices)
