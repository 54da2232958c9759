"""The packed rows of the linear-attention layers: chains by round, each with its replay in front.

Legend: N chains, P packed rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harts.plan.microbatch import MicroBatch
from harts.views.chains import Chain, Ints


@dataclass(frozen=True)
class ChainPacking:
    """Where each chain and each row lies; everything on the host.

    by_round: (N,), the chain (in the order of the call plan) at each place. place_of_chain: its
    inverse. cu_seqlens: (N+1,), packed rows of place n are [cu[n], cu[n+1]).
    anchor: (N,), depth of the first packed row of each place, a multiple of the chunk size.
    source: (P,), compact row that each packed row shows. is_own: bool (P,), False for replay.
    """

    by_round: Ints
    place_of_chain: Ints
    cu_seqlens: Ints
    anchor: Ints
    source: Ints
    is_own: npt.NDArray[np.bool_]


def pack_chains(microbatch: MicroBatch, chains: list[Chain]) -> ChainPacking:
    """Lay the chains of a microbatch one after another, by round. O(P + N)."""
    sequences = microbatch.calls.sequences
    by_round = np.argsort([s.round for s in sequences], kind="stable")
    place_of_chain = np.empty(len(sequences), np.int64)
    place_of_chain[by_round] = np.arange(len(sequences))
    rows = np.array([c.stop - c.start for c in chains])[by_round]
    replay = np.array([s.replay for s in sequences])[by_round]
    anchor = np.array([s.anchor for s in sequences], np.int64)[by_round]
    cu_seqlens = np.concatenate([[0], np.cumsum(rows + replay)])
    source = np.empty(cu_seqlens[-1], np.int64)
    is_own = np.ones(cu_seqlens[-1], bool)
    for place, index in enumerate(by_round.tolist()):
        chain, begin = chains[index], cu_seqlens[place]
        own_begin = begin + replay[place]
        source[begin:own_begin] = chain.ancestors_from(int(anchor[place]))
        is_own[begin:own_begin] = False
        source[own_begin : cu_seqlens[place + 1]] = np.arange(chain.start, chain.stop)
    return ChainPacking(by_round, place_of_chain, cu_seqlens, anchor, source, is_own)
