"""Token-by-token recurrences, one trajectory at a time, and views built row by row.

A forest here is `parents`: parents[row] < row, -1 for a root, rows in DFS preorder with the
direct child first. Nothing is shared with harts but the dataclasses that views are made of.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from hypothesis import strategies as st

from harts.views.conv import ConvView
from harts.views.gather import RowGather
from harts.views.linear import LinearView

# ---- forests ----


def forest_of(segments: list[tuple[int, int]]) -> list[int]:
    """Rows of segments (parent segment, length) in DFS preorder; children in the given order."""
    children: dict[int, list[int]] = {}
    for segment, (above, _) in enumerate(segments):
        children.setdefault(above, []).append(segment)
    parents: list[int] = []
    last_row: dict[int, int] = {-1: -1}
    stack = children[-1][::-1]
    while stack:
        segment = stack.pop()
        above, length = segments[segment]
        for step in range(length):
            parents.append(last_row[above] if step == 0 else len(parents) - 1)
        last_row[segment] = len(parents) - 1
        stack.extend(children.get(segment, [])[::-1])
    return parents


@st.composite
def forests(draw: st.DrawFn, chunk_size: int, max_segments: int = 7) -> list[int]:
    """Forks favour the chunk boundaries and their neighbours, position 1 and one-token leaves."""
    favoured = sorted({1, chunk_size - 1, chunk_size, chunk_size + 1, 2 * chunk_size} - {0})
    length = st.sampled_from(favoured) | st.integers(1, 2 * chunk_size + 1)
    segments = [(-1, draw(length))]
    for segment in range(1, draw(st.integers(1, max_segments))):
        segments.append((draw(st.integers(-1, segment - 1)), draw(length)))
    return forest_of(segments)


def depths_of(parents: list[int]) -> list[int]:
    depths: list[int] = []
    for above in parents:
        depths.append(0 if above < 0 else depths[above] + 1)
    return depths


def path_to(parents: list[int], row: int) -> list[int]:
    """Ancestors of a row and the row itself, root first."""
    path = []
    while row >= 0:
        path.append(row)
        row = parents[row]
    return path[::-1]


def leaves_of(parents: list[int]) -> list[int]:
    return sorted(set(range(len(parents))) - set(parents))


def chains_of(parents: list[int]) -> list[list[int]]:
    """Own rows of each chain: a row continues the row before it exactly if that is its parent."""
    chains: list[list[int]] = []
    for row, above in enumerate(parents):
        if row > 0 and above == row - 1:
            chains[-1].append(row)
        else:
            chains.append([row])
    return chains


# ---- views ----


def gather_from(source: list[int], is_own: list[bool]) -> RowGather:
    own = {row: p for p, row in enumerate(source) if is_own[p]}
    extra = [p for p, row in enumerate(source) if row >= 0 and not is_own[p]]
    repeated = sorted({source[p] for p in extra})
    shown = [[own[row]] + [p for p in extra if source[p] == row] for row in repeated]
    columns = {
        "source": source,
        "own": [own[row] for row in range(len(own))],
        "extra_packed": extra,
        "extra_compact": [source[p] for p in extra],
        "repeated": repeated,
        "shown_packed": [p for places in shown for p in places],
        "shown_ptr": [0, *accumulate(len(places) for places in shown)],
    }
    return RowGather(**{k: torch.tensor(v, dtype=torch.int64) for k, v in columns.items()})


def conv_view(parents: list[int], width: int) -> ConvView:
    source: list[int] = []
    is_own: list[bool] = []
    for chain in chains_of(parents):
        above = path_to(parents, parents[chain[0]])
        source += ([-1] * (width - 1) + above)[len(above) :] + chain
        is_own += [False] * (width - 1) + [True] * len(chain)
    window, reads = [], {row: [] for row in range(len(parents))}
    for row in range(len(parents)):
        window.append(([-1] * width + path_to(parents, row))[-width:])
        for tap, read in enumerate(window[-1]):
            if read >= 0 and read != row - (width - 1 - tap):
                reads[read].append(row * width + tap)
    return ConvView(
        width=width,
        window=torch.tensor(window, dtype=torch.int32),
        branch_rows=torch.tensor([row for row, r in reads.items() if r], dtype=torch.int32),
        branch_ptr=torch.tensor(
            [0, *accumulate(len(r) for r in reads.values() if r)], dtype=torch.int32
        ),
        branch_reads=torch.tensor([x for r in reads.values() for x in r], dtype=torch.int32),
        extended=gather_from(source, is_own),
    )


@dataclass(frozen=True)
class Packed:
    """A linear view and, for each produced slot, the row after which its state is."""

    view: LinearView
    row_of_produced: list[int]


def linear_view(
    parents: list[int],
    chunk_size: int,
    *,
    external_of_root: dict[int, int] | None = None,
    requested: tuple[int, ...] = (),
) -> Packed:
    """Chunk by chunk. Roots in external_of_root start from that external slot.

    requested: rows whose state (at a chunk end, or at the end of a chain) becomes a slot too.
    """
    external_of_root = external_of_root or {}
    num_external = len(set(external_of_root.values()))
    depths = depths_of(parents)
    chains = chains_of(parents)
    packed_of_chain, end_chunk_of_row, chunks = [], {}, []
    for index, own in enumerate(chains):
        anchor = depths[own[0]] // chunk_size * chunk_size
        path = path_to(parents, own[-1])
        packed_of_chain.append(path[anchor:])
        for start in range(anchor, len(path), chunk_size):
            rows = path[start : start + chunk_size]
            if rows[-1] in own:
                end_chunk_of_row[rows[-1]] = len(chunks)
            chunks.append((start // chunk_size, index, rows, path[start - 1] if start else -1))

    produced = sorted(
        {above for _, n, _, above in chunks if above >= 0 and above not in chains[n]}
        | set(requested)
    )
    slot_of_row = {row: num_external + i for i, row in enumerate(produced)}
    # A chain reads states of chains that begin in earlier chunks: one round for each first chunk.
    first_chunk = [depths[own[0]] // chunk_size for own in chains]
    order = sorted(range(len(chains)), key=lambda n: (first_chunk[n], n))
    in_order = [first_chunk[n] for n in order]
    round_ptr = [i for i, c in enumerate(in_order) if i == 0 or c > in_order[i - 1]]
    in_level_order = sorted(range(len(chunks)), key=lambda c: (chunks[c][0], chunks[c][1]))
    rank = {c: i for i, c in enumerate(in_level_order)}
    place = {
        (chunks[c][1], chunks[c][0], offset): rank[c] * chunk_size + offset
        for c in rank
        for offset in range(chunk_size)
    }

    source: list[int] = []
    is_own: list[bool] = []
    grid_row: list[int] = []
    cu_seqlens, chunk_offsets, init_slot, store_slot = [0], [0], [], []
    for n in order:
        own = set(chains[n])
        for row in packed_of_chain[n]:
            source.append(row)
            is_own.append(row in own)
            grid_row.append(place[n, depths[row] // chunk_size, depths[row] % chunk_size])
        mine = [c for c in chunks if c[1] == n]
        above = mine[0][3]
        root = path_to(parents, chains[n][0])[0]
        init_slot.append(external_of_root.get(root, -1) if above < 0 else slot_of_row[above])
        store_slot.append(-1)
        store_slot += [slot_of_row.get(c[2][-1], -1) if c[2][-1] in own else -1 for c in mine]
        cu_seqlens.append(len(source))
        chunk_offsets.append(chunk_offsets[-1] + len(mine))

    pool_of_row = {row: 1 + num_external + rank[c] for row, c in end_chunk_of_row.items()}
    start_state = []
    for c in in_level_order:
        _, _, rows, above = chunks[c]
        if above >= 0:
            start_state.append(pool_of_row[above])
        else:
            start_state.append(1 + external_of_root.get(path_to(parents, rows[0])[0], -1))
    levels = [chunks[c][0] for c in in_level_order]
    level_ptr = [next(i for i, x in enumerate(levels) if x == level) for level in sorted({*levels})]
    num_slots = num_external + len(produced)
    consumers = [[i for i, s in enumerate(init_slot) if s == slot] for slot in range(num_slots)]
    sizes = torch.tensor([0] + [len(x) for x in consumers])
    view = LinearView(
        chunk_size=chunk_size,
        packed=gather_from(source, is_own),
        cu_seqlens=torch.tensor(cu_seqlens),
        chunk_offsets=torch.tensor(chunk_offsets),
        chunk_indices=torch.tensor(
            [
                (n, i)
                for n, (low, high) in enumerate(pairwise(chunk_offsets))
                for i in range(high - low)
            ]
        ),
        round_ptr=(*round_ptr, len(chains)),
        init_slot=torch.tensor(init_slot, dtype=torch.int32),
        store_slot=torch.tensor(store_slot, dtype=torch.int32),
        num_slots=num_slots,
        num_external=num_external,
        consumer_ptr=sizes.cumsum(0),
        consumers=torch.tensor([n for ns in consumers for n in ns], dtype=torch.int64),
        grid_row=torch.tensor(grid_row),
        level_ptr=(*level_ptr, len(chunks)),
        start_state=torch.tensor(start_state),
        produced_state=torch.tensor([pool_of_row[row] for row in produced], dtype=torch.int64),
    )
    return Packed(view, produced)


# ---- recurrences ----


def recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One sequence: q, k (T, H, K), v (T, G, V), log_decay (T, G, D), beta (T, G), state (G, K, V).

    Returns outputs (T, G, V) with scale K ** -0.5 and the state after each row.
    """
    group = v.shape[1] // q.shape[1]
    outputs, states = [], []
    for t in range(q.shape[0]):
        q_t = q[t].repeat_interleave(group, 0) * q.shape[2] ** -0.5
        k_t = k[t].repeat_interleave(group, 0)
        state = log_decay[t].exp().unsqueeze(-1) * state
        error = v[t] - torch.einsum("gk,gkv->gv", k_t, state)
        state = state + beta[t][:, None, None] * k_t.unsqueeze(-1) * error.unsqueeze(-2)
        outputs.append(torch.einsum("gk,gkv->gv", q_t, state))
        states.append(state)
    return torch.stack(outputs), states


def expanded_recurrence(
    parents: list[int],
    inputs: list[torch.Tensor],
    *,
    external: torch.Tensor | None = None,
    external_of_root: dict[int, int] | None = None,
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Every trajectory alone, from the root. Output (C, G, V) and the state after every row.

    A row of several trajectories has the same output in all; the first one's is kept.
    """
    external_of_root = external_of_root or {}
    _, k, v, *_ = inputs
    outputs: dict[int, torch.Tensor] = {}
    states: dict[int, torch.Tensor] = {}
    for leaf in leaves_of(parents):
        path = path_to(parents, leaf)
        state = k.new_zeros(v.shape[1], k.shape[2], v.shape[2])
        if path[0] in external_of_root:
            assert external is not None, "an external slot without its state"
            state = external[external_of_root[path[0]]]
        rows = torch.tensor(path)
        output, after = recurrence(*(x[rows] for x in inputs), state)
        for t, row in enumerate(path):
            if row not in outputs:
                outputs[row], states[row] = output[t], after[t]
    return torch.stack([outputs[row] for row in range(len(parents))]), states


def expanded_conv(
    parents: list[int],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor:
    """Row by row from its own root-to-row path. (C, D)."""
    width = weight.shape[1]
    rows = []
    for row in range(len(parents)):
        y = torch.zeros_like(x[0]) if bias is None else bias
        for distance, above in enumerate(path_to(parents, row)[::-1][:width]):
            y = y + weight[:, width - 1 - distance] * x[above]
        rows.append(y * torch.sigmoid(y) if activation == "silu" else y)
    return torch.stack(rows)
