"""Check every index of a view against the trajectories it stands for.

A checker raises AssertionError (or IndexError) on any wrong entry. It knows the trie of the
microbatch as a dictionary of prefixes, the execution model of paper section 3.3, and the
documented meaning of each index; nothing of how views are built.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from tests.planner_oracles import prefix_counts

ZERO = -1  # the state before the first row; any other state is the row it has absorbed last


@dataclass(frozen=True)
class Truth:
    """The rows of a microbatch: parent row (-1), depth, token, labels a row; by trajectory."""

    parent: list[int]
    depth: list[int]
    token: list[int]
    count: list[int]
    rows_of: list[list[int]]
    tokens_of: list[list[int]]
    masks_of: list[list[bool]]

    @property
    def num_rows(self) -> int:
        return len(self.parent)

    def path(self, row: int) -> list[int]:
        """Ancestors of a row and itself, from the root."""
        path = []
        while row != ZERO:
            path.append(row)
            row = self.parent[row]
        return path[::-1]

    def absorb(self, state: int, row: int) -> int:
        """A recurrent state that takes one more row: legal only on the row's own path."""
        assert self.parent[row] == state, f"row {row} fed to the state of row {state}"
        return row


def truth_of(microbatch) -> Truth:
    """Number the prefixes as the layout does; each prefix must have exactly one row."""
    batch, ids = microbatch.batch, microbatch.trajectory_ids.tolist()
    identity = batch.position_fields.get("identity")
    mapped = iter(microbatch.layout.semantic_to_compact.tolist())
    prefix_of_row: dict[int, tuple] = {}
    rows_of, tokens_of, masks_of, paths = [], [], [], []
    for i in ids:
        span = slice(int(batch.offsets[i]), int(batch.offsets[i + 1]))
        tokens_of.append(batch.tokens[span].tolist())
        masks_of.append(batch.loss_mask[span].tolist())
        marks = [0] * len(tokens_of[-1]) if identity is None else identity[span].tolist()
        path = tuple(zip(tokens_of[-1], marks, strict=True))
        paths.append(path)
        rows_of.append([next(mapped) for _ in path])
        for n, row in enumerate(rows_of[-1], start=1):
            assert prefix_of_row.setdefault(row, path[:n]) == path[:n]
    counts = prefix_counts(paths)
    row_of_prefix = {prefix: row for row, prefix in prefix_of_row.items()}
    assert sorted(prefix_of_row) == list(range(len(counts))) == sorted(row_of_prefix.values())
    prefixes = [prefix_of_row[row] for row in range(len(counts))]
    return Truth(
        parent=[row_of_prefix.get(prefix[:-1], ZERO) for prefix in prefixes],
        depth=[len(prefix) - 1 for prefix in prefixes],
        token=[prefix[-1][0] for prefix in prefixes],
        count=[counts[prefix] for prefix in prefixes],
        rows_of=rows_of,
        tokens_of=tokens_of,
        masks_of=masks_of,
    )


def check_gather(gather, num_rows):
    for tensor in vars(gather).values():
        assert tensor.dtype == torch.int64 and tensor.ndim == 1
    source, own = gather.source.tolist(), gather.own.tolist()
    assert all(-1 <= row < num_rows for row in source)
    assert len(own) == num_rows == len(set(own))
    assert all(0 <= place < len(source) for place in own)
    assert [source[place] for place in own] == list(range(num_rows))
    is_own = set(own)
    extra = [p for p, row in enumerate(source) if row >= 0 and p not in is_own]
    assert gather.extra_packed.tolist() == extra
    assert gather.extra_compact.tolist() == [source[p] for p in extra]
    repeated = sorted({source[p] for p in extra})
    assert gather.repeated.tolist() == repeated
    shown = [[own[row]] + [p for p in extra if source[p] == row] for row in repeated]
    assert gather.shown_packed.tolist() == [p for places in shown for p in places]
    ptr = gather.shown_ptr.tolist()
    assert ptr[0] == 0 and [b - a for a, b in pairwise(ptr)] == [len(places) for places in shown]


def check_linear(view, truth, *, chunk_size, num_rounds):
    assert view.chunk_size == chunk_size
    assert view.num_external == 0
    check_gather(view.packed, truth.num_rows)
    chains = _check_chains(view, truth)
    round_of_chain = _check_rounds(view, truth, chains, num_rounds)
    state_of_slot = _run_rounds(view, truth, chains, round_of_chain)
    _check_consumers(view)
    _run_levels(view, truth, chains, state_of_slot)


def _check_chains(view, truth):
    """Packed rows of every chain: replay in front, then own rows, consecutive on one path."""
    source, own, chunk = view.packed.source.tolist(), view.packed.own.tolist(), view.chunk_size
    assert -1 not in source
    cu, offsets = view.cu_seqlens.tolist(), view.chunk_offsets.tolist()
    assert view.cu_seqlens.dtype == view.chunk_offsets.dtype == torch.int64
    assert cu[0] == 0 and cu[-1] == len(source) and all(a < b for a, b in pairwise(cu))
    chains = [source[a:b] for a, b in pairwise(cu)]
    assert offsets[0] == 0 and len(offsets) == len(cu)
    assert [b - a for a, b in pairwise(offsets)] == [-(-len(rows) // chunk) for rows in chains]
    assert view.chunk_indices.dtype == torch.int64
    assert view.chunk_indices.tolist() == [
        [n, place] for n, rows in enumerate(chains) for place in range(-(-len(rows) // chunk))
    ]
    for begin, rows in zip(cu, chains, strict=False):
        is_own = [own[row] == begin + place for place, row in enumerate(rows)]
        replay = is_own.index(True)
        assert all(is_own[replay:]), "own rows follow the replay without a gap"
        assert replay == truth.depth[rows[replay]] % chunk, "replay starts at the nearest boundary"
        assert [truth.depth[row] % chunk for row in rows] == [k % chunk for k in range(len(rows))]
        assert all(truth.parent[b] == a for a, b in pairwise(rows))
    return chains


def _check_rounds(view, truth, chains, num_rounds):
    """Every chain runs in the earliest round that its start state allows."""
    ptr = view.round_ptr
    assert len(ptr) == num_rounds + 1 and ptr[0] == 0 and ptr[-1] == len(chains)
    assert all(a < b for a, b in pairwise(ptr))
    round_of_chain = [r for r, (a, b) in enumerate(pairwise(ptr), start=1) for _ in range(b - a)]
    own, cu = view.packed.own.tolist(), view.cu_seqlens.tolist()
    owner = {}  # chain that computes each row
    for row in range(truth.num_rows):
        owner[row] = max(n for n in range(len(chains)) if cu[n] <= own[row])
    for n, rows in enumerate(chains):
        before = truth.parent[rows[0]]
        earliest = 1 if before == ZERO else round_of_chain[owner[before]] + 1
        assert round_of_chain[n] == earliest
    return round_of_chain


def _run_rounds(view, truth, chains, round_of_chain):
    """Run the rounds on symbolic states; returns the state that each slot received."""
    assert view.init_slot.dtype == view.store_slot.dtype == torch.int32
    init, store = view.init_slot.tolist(), view.store_slot.tolist()
    offsets, chunk = view.chunk_offsets.tolist(), view.chunk_size
    assert len(init) == len(chains) and len(store) == offsets[-1] + len(chains)
    assert all(-1 <= slot < view.num_slots for slot in (*init, *store))
    slots: dict[int, int] = {}
    for round_ in range(1, max(round_of_chain) + 1):
        stored: dict[int, int] = {}  # visible once the call of this round has returned
        for n in [n for n, r in enumerate(round_of_chain) if r == round_]:
            rows, state = chains[n], ZERO
            if init[n] >= 0:
                assert init[n] in slots, f"chain {n} starts before its state exists"
                state = slots[init[n]]
            boundaries = store[offsets[n] + n : offsets[n + 1] + n + 1]
            assert boundaries[0] == -1, "a start state is stored by the chain that produces it"
            for i, slot in enumerate(boundaries):
                if slot >= 0:
                    assert slot not in slots and slot not in stored, "stored twice"
                    stored[slot] = state
                for row in rows[i * chunk : (i + 1) * chunk]:
                    state = truth.absorb(state, row)
        slots |= stored
    assert sorted(slots) == list(range(view.num_slots))
    assert ZERO not in slots.values() and len(set(slots.values())) == len(slots)
    assert all((truth.depth[row] + 1) % chunk == 0 for row in slots.values())
    return slots


def _check_consumers(view):
    init = view.init_slot.tolist()
    by_slot = [[n for n, s in enumerate(init) if s == slot] for slot in range(view.num_slots)]
    assert all(by_slot), "every slot has a consumer"
    assert view.consumers.tolist() == [n for chains in by_slot for n in chains]
    ptr = view.consumer_ptr.tolist()
    assert ptr[0] == 0 and [b - a for a, b in pairwise(ptr)] == [len(c) for c in by_slot]


def _run_levels(view, truth, chains, state_of_slot):
    """Run the chunks by level on symbolic states: the schedule of the reference."""
    chunk, grid = view.chunk_size, view.grid_row.tolist()
    num_chunks, start = view.chunk_offsets.tolist()[-1], view.start_state.tolist()
    assert view.grid_row.dtype == view.start_state.dtype == view.produced_state.dtype == torch.int64
    packed = [row for rows in chains for row in rows]
    assert len(grid) == len(packed) and len(start) == num_chunks
    chunks: list[list[tuple[int, int]]] = [[] for _ in range(num_chunks)]
    for place, cell in enumerate(grid):
        assert 0 <= cell < num_chunks * chunk
        chunks[cell // chunk].append((cell % chunk, place))
    begins = {
        begin + k: len(rows[k : k + chunk])
        for begin, rows in zip(view.cu_seqlens.tolist(), chains, strict=False)
        for k in range(0, len(rows), chunk)
    }
    for cells in chunks:  # each is the next rows of one chain, in order, from offset 0
        first = cells[0][1]
        assert cells == [(k, first + k) for k in range(begins.pop(first))]
    assert not begins
    levels = view.level_ptr
    assert levels[0] == 0 and levels[-1] == num_chunks and all(a < b for a, b in pairwise(levels))
    pool = [ZERO]
    for level, (a, b) in enumerate(pairwise(levels)):
        ends = []
        for c in range(a, b):
            rows = [packed[place] for _, place in chunks[c]]
            assert truth.depth[rows[0]] == level * chunk
            assert 0 <= start[c] < len(pool), "a level starts from earlier levels only"
            state = pool[start[c]]
            for row in rows:
                state = truth.absorb(state, row)
            ends.append(state)
        pool += ends
    produced = view.produced_state.tolist()
    assert len(produced) == view.num_slots - view.num_external
    assert all(0 <= index < len(pool) for index in produced)
    assert [pool[index] for index in produced] == [state_of_slot[s] for s in range(len(produced))]


def check_conv(view, linear, truth, *, width):
    assert view.width == width
    shows, own_place = linear.packed.source.tolist(), linear.packed.own.tolist()
    check_gather(view.extended, len(shows))
    _check_windows(view, shows, own_place, linear.cu_seqlens.tolist(), truth)
    source, own = view.extended.source.tolist(), view.extended.own.tolist()
    read = set()
    for place in range(len(shows)):
        window = range(own[place] - width + 1, own[place] + 1)
        assert window[0] >= 0
        assert [source[at] for at in window] == view.window[place].tolist()
        read |= set(window)
    assert read == set(range(len(source))), "no row that no window reads"


def _check_windows(view, shows, own_place, cu_seqlens, truth):
    """Each window shows the last rows of the path, in the own chain or at their own places."""
    width = view.width
    tables = (view.window, view.branch_rows, view.branch_ptr, view.branch_reads)
    assert all(table.dtype == torch.int32 for table in tables)
    window = view.window.tolist()
    first_of_chain = {p: begin for begin, end in pairwise(cu_seqlens) for p in range(begin, end)}
    readers: list[list[int]] = [[] for _ in shows]
    for p, row in enumerate(shows):
        path = [ZERO] * width + truth.path(row)
        for tap, wanted in enumerate(path[-width:]):
            place, neighbour = window[p][tap], p - (width - 1 - tap)
            if wanted == ZERO:
                assert place == -1
                continue
            in_chain = neighbour >= first_of_chain[p]
            assert place == (neighbour if in_chain else own_place[wanted])
            assert shows[place] == wanted
            if place != neighbour:
                readers[place].append(p * width + tap)
    assert view.branch_rows.tolist() == [row for row, r in enumerate(readers) if r]
    ptr = view.branch_ptr.tolist()
    assert ptr[0] == 0 and [b - a for a, b in pairwise(ptr)] == [len(r) for r in readers if r]
    assert view.branch_reads.tolist() == [read for r in readers for read in r]


def check_attention(view, truth):
    assert view.end.dtype == torch.int32
    end = view.end.tolist()
    last = list(range(truth.num_rows))  # last descendant or self of each row
    for row in range(truth.num_rows):
        for above in truth.path(row):
            last[above] = max(last[above], row)
    assert end == [row + 1 for row in last]
    stop = 0
    for chain in view.chains:
        assert chain.start == stop < chain.stop, "chains cover the rows in order"
        stop = chain.stop
        runs = chain.ancestors
        assert all(a < b for a, b in runs) and all(a[1] < b[0] for a, b in pairwise(runs))
        ancestors = [row for a, b in runs for row in range(a, b)]
        for row in range(chain.start, chain.stop):
            assert ancestors + list(range(chain.start, row + 1)) == truth.path(row)
    assert stop == truth.num_rows


def check_logprobs(view, truth, temperatures=None):
    """temperatures: one list a trajectory, or None."""
    wanted = []  # (row, temperature, target) of every scored position, in output order
    for i, mask in enumerate(truth.masks_of):
        for t, scored in enumerate(mask):
            if scored:
                temperature = 1.0 if temperatures is None else temperatures[i][t]
                wanted.append((truth.rows_of[i][t - 1], temperature, truth.tokens_of[i][t]))
    heads = sorted({(row, temperature) for row, temperature, _ in wanted})
    for tensor in (view.compact_row, view.target, view.head_row, view.original):
        assert tensor.dtype == torch.int64
    assert view.compact_row.tolist() == [row for row, _ in heads]
    if all(temperature == 1 for _, temperature in heads):
        assert view.temperature is None
    else:
        assert view.temperature.tolist() == [temperature for _, temperature in heads]
    assert view.num_positions == len(wanted)
    original, head_row = view.original.tolist(), view.head_row.tolist()
    assert sorted(original) == list(range(len(wanted)))
    got = [
        (*heads[head], target)
        for head, target in zip(head_row, view.target.tolist(), strict=True)
        if head >= 0
    ]
    assert got == [wanted[place] for place in original]
    assert head_row == sorted(head_row)
    ptr = view.row_ptr.tolist()
    assert len(ptr) == len(heads) + 1 and ptr[0] == 0 and ptr[-1] == len(wanted)
    for head, (a, b) in enumerate(pairwise(ptr)):
        assert head_row[a:b] == [head] * (b - a) and a < b


def check_rows(view, truth):
    for tensor, wanted in (
        (view.tokens, truth.token),
        (view.positions, truth.depth),
        (view.multiplicity, truth.count),
    ):
        assert tensor.dtype == torch.int64 and tensor.tolist() == wanted
    assert view.num_rows == truth.num_rows


def check_tree_view(view, microbatch, *, temperatures=None):
    truth = truth_of(microbatch)
    check_rows(view, truth)
    check_attention(view.attention, truth)
    check_linear(
        view.linear,
        truth,
        chunk_size=microbatch.chunk_size,
        num_rounds=microbatch.calls.num_rounds,
    )
    for width, conv in view.conv.items():
        check_conv(conv, view.linear, truth, width=width)
    check_logprobs(view.logprobs, truth, temperatures)
    # attention and linear attention cut the rows into the same chains
    cu = view.linear.cu_seqlens.tolist()
    own = view.linear.packed.own.tolist()
    chain_of_row = [sum(begin <= place for begin in cu) for place in own]
    cuts = [row for row in range(1, len(own)) if chain_of_row[row] != chain_of_row[row - 1]]
    assert [chain.start for chain in view.attention.chains] == [0, *cuts]
