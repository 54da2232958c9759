"""Chains of a microbatch in compact rows: what every per-chain view starts from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harts.plan.microbatch import MicroBatch

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Chain:
    """Own rows [start, stop), the first one at depth `depth`; runs of ancestor rows, ascending."""

    start: int
    stop: int
    depth: int
    ancestors: tuple[tuple[int, int], ...]

    def ancestors_from(self, depth: int) -> Ints:
        """Rows of the ancestors at depths [depth, self.depth), int64."""
        skip, pieces = depth, []
        for start, stop in self.ancestors:
            if skip < stop - start:
                pieces.append(np.arange(start + skip, stop))
            skip = max(0, skip - (stop - start))
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


def chains_of(microbatch: MicroBatch) -> list[Chain]:
    """One chain for each sequence of the call plan, in its order. O(V * depth in chains)."""
    layout, forest, calls = microbatch.layout, microbatch.forest, microbatch.calls
    first_row, length = layout.first_row.tolist(), forest.length.tolist()
    parent = forest.parent.tolist()
    owner = np.empty(len(parent), np.int64)
    for index, sequence in enumerate(calls.sequences):
        owner[list(sequence.segments)] = index
    chains: list[Chain] = []
    for sequence in calls.sequences:  # the chain of a parent comes first
        head, tail = sequence.segments[0], sequence.segments[-1]
        above = parent[head]
        ancestors: tuple[tuple[int, int], ...] = ()
        if above >= 0:
            upper = chains[owner[above]]
            ancestors = (*upper.ancestors, (upper.start, first_row[above] + length[above]))
        chains.append(
            Chain(first_row[head], first_row[tail] + length[tail], sequence.start, ancestors)
        )
    return chains
