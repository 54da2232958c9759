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


@dataclass(frozen=True)
class QueuedLists:
    """Query blocks that each key block visits, masked ones first, and its turn at each of them.

    masked: blocks with an invisible pair, and full blocks moved there so that a list is ascending
    as a whole. full: the other full blocks; None if all were moved. masked_turns, full_turns: int32
    (N, M), beside the indices: how many key blocks visit that query block before this one. The last
    key block goes first; entries past the counts mean nothing.

    whole_until: int32 (N,). A query block that starts at the last key of its key block or later is
    full iff it stops at this row or before; 0 for a last key block that reaches past the last row.
    """

    masked: BlockList
    full: BlockList | None
    masked_turns: torch.Tensor
    full_turns: torch.Tensor | None
    whole_until: torch.Tensor


def build_block_lists(end: torch.Tensor, query_block: int, key_block: int) -> BlockLists:
    """Lists for blocks of query_block and key_block rows, on the device of `end`, int32 (C,).

    P is at least two blocks of each kind: compiled code would treat one block as a size of its
    own. Never waits for the device. O(C + (P / query_block) (P / key_block)) time and memory.
    """
    multiple = math.lcm(query_block, key_block)
    end = pad_ends(end, max(2, -(-end.numel() // multiple)) * multiple)
    partial, full = classify_blocks(end, query_block, key_block)
    return BlockLists(
        end=end,
        partial_keys=list_blocks(partial),
        full_keys=list_blocks(full),
        partial_queries=list_blocks(partial.T),
        full_queries=list_blocks(full.T),
    )


def pad_ends(end: torch.Tensor, padded_rows: int) -> torch.Tensor:
    """int32 (C,) -> (padded_rows,): each row added sees itself alone."""
    num_rows = end.numel()
    own_end = torch.arange(1, padded_rows + 1, device=end.device, dtype=end.dtype)
    return torch.where(own_end > num_rows, own_end, F.pad(end, (0, padded_rows - num_rows)))


def classify_blocks(
    end: torch.Tensor, query_block: int, key_block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(partial, full), bool (M, N): M query blocks by N key blocks cover the rows of int32 (C,).

    A last block may reach past the last row. No pair there is visible, so it is never full.
    """
    num_rows = end.numel()
    query_start = torch.arange(0, num_rows, query_block, device=end.device)[:, None]
    key_start = torch.arange(0, num_rows, key_block, device=end.device)
    end_of_block = _ends_by_key_block(end, key_block)
    query_stop, last_key = query_start + query_block, key_start + key_block - 1
    some = (key_start < query_stop) & (end_of_block.amax(dim=1) > query_start)
    full = (last_key <= query_start) & (end_of_block.amin(dim=1) >= query_stop)
    return some & ~full, full


def _ends_by_key_block(end: torch.Tensor, key_block: int) -> torch.Tensor:
    """(C,) -> (N, key_block); a key past the last row ends at row 0, so no query sees it."""
    return F.pad(end, (0, -end.numel() % key_block)).view(-1, key_block)


def queue_blocks(
    end: torch.Tensor, query_block: int, key_block: int, max_moved: int | None
) -> QueuedLists:
    """Lists and turns of a backward pass in which key blocks add to queries one after another.

    A key block with at most max_moved full blocks has them all among its masked ones; None: each.
    """
    partial_MN, full_MN = classify_blocks(end, query_block, key_block)
    visited_MN = partial_MN | full_MN
    turns_NM = (visited_MN.sum(dim=1, keepdim=True) - visited_MN.cumsum(dim=1)).to(torch.int32).T
    full = full_turns = None
    if max_moved is not None:
        kept_MN = full_MN & (full_MN.sum(dim=0) > max_moved)
        visited_MN = visited_MN & ~kept_MN
        full = list_blocks(kept_MN.T)
        full_turns = turns_NM.gather(1, full.indices.long())
    masked = list_blocks(visited_MN.T)
    return QueuedLists(
        masked=masked,
        full=full,
        masked_turns=turns_NM.gather(1, masked.indices.long()),
        full_turns=full_turns,
        whole_until=_ends_by_key_block(end, key_block).amin(dim=1).to(torch.int32),
    )


def list_blocks(chosen_NM: torch.Tensor) -> BlockList:
    """The chosen columns of each row, ascending, then the others: a stable sort by counting."""
    column = torch.arange(chosen_NM.shape[1], device=chosen_NM.device)
    chosen_so_far = chosen_NM.cumsum(dim=1)
    counts = chosen_so_far[:, -1]
    place = torch.where(chosen_NM, chosen_so_far - 1, counts[:, None] + column - chosen_so_far)
    indices = torch.empty_like(place, dtype=torch.int32, memory_format=torch.contiguous_format)
    indices.scatter_(1, place, column.to(torch.int32).expand_as(place))
    return BlockList(counts.to(torch.int32), indices)
