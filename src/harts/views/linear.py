"""Linear attention: chains with their replay in front, rounds, and the slots of shared states.

Legend: N chains, P packed rows, NC chunks, G value heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from harts.plan.microbatch import MicroBatch
from harts.views.chains import Ints
from harts.views.gather import RowGather, build_row_gather, on_device
from harts.views.packing import ChainPacking


@dataclass(frozen=True)
class LinearView:
    """What a packed chunkwise operator needs to run a forest (paper section 3.4, Equation 16).

    Chains are ordered by round. Each is its replay rows, then its own rows, and begins at a chunk
    boundary of its trajectory, so every row keeps the chunk phase of trajectory-wise training.

    cu_seqlens: int64 (N+1,), packed rows of chain n are [cu[n], cu[n+1]).
    chunk_offsets: int64 (N+1,), chunks before chain n.
    chunk_indices: int64 (NC, 2), chain of each chunk and its place in that chain, packed order.
    round_ptr: chains [round_ptr[r], round_ptr[r+1]) run in round r+1.
    init_slot: int32 (N,), the slot a chain starts from, -1 for the zero state.
    store_slot: int32 (NC+N,), entry chunk_offsets[n]+n+i is the slot that receives the state
        before chunk i of chain n (i = number of chunks: after the last one), -1 for none.
    num_slots, num_external: slots [0, num_external) are given from outside.
    consumer_ptr (num_slots+1,), consumers: CSR of the chains that start from each slot, ascending.

    The reference runs by chunk depth instead of rounds, on chunks renumbered so that a level is
    contiguous and depends on earlier levels only:
    grid_row: int64 (P,), place of packed row p on the padded grid of NC * chunk_size rows.
    level_ptr: chunks [level_ptr[l], level_ptr[l+1]) form level l.
    start_state: int64 (NC,), the state that chunk c starts from, as an index into
        [zero, external states, end states of the chunks in level order].
    produced_state: int64 (num_slots - num_external,), the same index for each produced slot.
    """

    chunk_size: int
    packed: RowGather
    cu_seqlens: torch.Tensor
    chunk_offsets: torch.Tensor
    chunk_indices: torch.Tensor
    round_ptr: tuple[int, ...]
    init_slot: torch.Tensor
    store_slot: torch.Tensor
    num_slots: int
    num_external: int
    consumer_ptr: torch.Tensor
    consumers: torch.Tensor
    grid_row: torch.Tensor
    level_ptr: tuple[int, ...]
    start_state: torch.Tensor
    produced_state: torch.Tensor


def build_linear_view(
    microbatch: MicroBatch, packing: ChainPacking, device: torch.device
) -> LinearView:
    """Rounds, slots and levels of the packed chains. O(P + N)."""
    chunk, sequences = microbatch.chunk_size, microbatch.calls.sequences
    by_round, place_of_chain = packing.by_round, packing.place_of_chain
    cu_seqlens = packing.cu_seqlens
    num_chunks = -(-np.diff(cu_seqlens) // chunk)
    chunk_offsets = np.concatenate([[0], np.cumsum(num_chunks)])
    chain_of_chunk = np.repeat(np.arange(len(sequences)), num_chunks)
    place_in_chain = np.arange(chunk_offsets[-1]) - chunk_offsets[chain_of_chunk]

    init_slot = np.full(len(sequences), -1, np.int32)
    store_slot = np.full(int(chunk_offsets[-1]) + len(sequences), -1, np.int32)
    slot_at: dict[int, int] = {}  # place in store_slot -> slot
    for index, sequence in enumerate(sequences):  # sources come before their consumers
        if sequence.source < 0:
            continue
        source_place = place_of_chain[sequence.source]
        distance = (sequence.anchor - sequences[sequence.source].anchor) // chunk
        if distance == 0:  # the same boundary that the source itself started from
            init_slot[place_of_chain[index]] = init_slot[source_place]
            continue
        boundary = int(chunk_offsets[source_place] + source_place + distance)
        slot = slot_at.setdefault(boundary, len(slot_at))
        store_slot[boundary] = slot
        init_slot[place_of_chain[index]] = slot
    consumer_ptr, consumers = _by_slot(init_slot, len(slot_at))
    schedule = _by_level(cu_seqlens, chunk_offsets, init_slot, store_slot, len(slot_at), chunk)

    rounds = np.array([s.round for s in sequences])[by_round]
    round_ptr = np.searchsorted(rounds, np.arange(1, microbatch.calls.num_rounds + 2))
    return LinearView(
        chunk_size=chunk,
        packed=build_row_gather(packing.source, packing.is_own, device),
        cu_seqlens=on_device(cu_seqlens, device),
        chunk_offsets=on_device(chunk_offsets, device),
        chunk_indices=on_device(np.stack([chain_of_chunk, place_in_chain], axis=1), device),
        round_ptr=tuple(round_ptr.tolist()),
        init_slot=on_device(init_slot, device),
        store_slot=on_device(store_slot, device),
        num_slots=len(slot_at),
        num_external=0,
        consumer_ptr=on_device(consumer_ptr, device),
        consumers=on_device(consumers, device),
        grid_row=on_device(schedule.grid_row, device),
        level_ptr=tuple(schedule.level_ptr.tolist()),
        start_state=on_device(schedule.start_state, device),
        produced_state=on_device(schedule.produced_state, device),
    )


def _by_slot(init_slot: np.ndarray, num_slots: int) -> tuple[Ints, Ints]:
    """CSR from slots to the chains that start from them."""
    consumers = np.argsort(init_slot, kind="stable")
    consumers = consumers[init_slot[consumers] >= 0]
    counts = np.bincount(init_slot[consumers], minlength=num_slots)
    return np.concatenate([[0], np.cumsum(counts)]), consumers


@dataclass(frozen=True)
class _LevelSchedule:
    grid_row: Ints
    level_ptr: Ints
    start_state: Ints
    produced_state: Ints


def _by_level(
    cu_seqlens: Ints,
    chunk_offsets: Ints,
    init_slot: np.ndarray,
    store_slot: np.ndarray,
    num_slots: int,
    chunk: int,
) -> _LevelSchedule:
    """Order all chunks by the number of chunks above them in the forest.

    A chunk at depth d of its trajectory starts from the end state of one at depth d - 1, so a
    level is all chunks of equal depth, whatever chain or tree they belong to.
    """
    num_chains, num_chunks = len(init_slot), int(chunk_offsets[-1])
    producer = np.full(num_slots, -1, np.int64)  # chunk whose end state a slot receives
    for boundary in np.flatnonzero(store_slot >= 0).tolist():
        # entry offset[n] + n + i is the state before chunk i, so after chunk offset[n] + i - 1
        n = int(np.searchsorted(chunk_offsets + np.arange(num_chains + 1), boundary, "right")) - 1
        producer[store_slot[boundary]] = boundary - n - 1
    first = chunk_offsets[:-1]
    previous = np.arange(num_chunks) - 1
    previous[first] = np.where(init_slot >= 0, producer[init_slot], -1) if num_slots else -1
    level = np.zeros(num_chunks, np.int64)
    for n in range(num_chains):  # chains are ordered by round: producers come first
        begin, stop = int(chunk_offsets[n]), int(chunk_offsets[n + 1])
        base = level[previous[begin]] + 1 if previous[begin] >= 0 else 0
        level[begin:stop] = base + np.arange(stop - begin)
    by_level = np.argsort(level, kind="stable")
    rank = np.empty(num_chunks, np.int64)
    rank[by_level] = np.arange(num_chunks)
    start = previous[by_level]
    start_state = np.where(start >= 0, 1 + rank[start], 0)
    packed_chain = np.repeat(np.arange(num_chains), np.diff(cu_seqlens))
    within = np.arange(cu_seqlens[-1]) - cu_seqlens[packed_chain]
    grid_row = rank[chunk_offsets[packed_chain] + within // chunk] * chunk + within % chunk
    level_ptr = np.searchsorted(level[by_level], np.arange(level.max() + 2))
    return _LevelSchedule(grid_row, level_ptr, start_state, 1 + rank[producer])
