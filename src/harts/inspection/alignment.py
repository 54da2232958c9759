"""Where two token runs that start apart agree again: a greedy diff over short anchors.

From a place where they differ, the closest pair of places that agree for ANCHOR tokens (or for
all that is left of the first run) is taken as the end of the edit. Greedy like the diff of
Heckel (1978) rather than minimal: edits of a few tokens to whole conversations are found in
about linear time, and text that does not come back in order counts as changed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
Hashes = npt.NDArray[np.uint64]

ANCHOR = 8
"""Equal tokens in a row that end an edit."""

MAX_EDITS = 256
"""Edits after which the rest counts as one; only unrelated texts need more."""

_WINDOWS = (64, 1024, 16384)
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Edit:
    """old[old_begin:old_end] was replaced by new[new_begin:new_end]; either may be empty.

    closed: the runs agree again after it, or the old one has ended.
    """

    old_begin: int
    old_end: int
    new_begin: int
    new_end: int
    closed: bool

    @property
    def removed(self) -> int:
        """Tokens of the old run that are gone."""
        return self.old_end - self.old_begin

    @property
    def inserted(self) -> int:
        """Tokens of the new run in their place."""
        return self.new_end - self.new_begin


def align(old: Tokens, new: Tokens, begin: int) -> list[Edit]:
    """Edits, in order, that turn old into a prefix of new; both agree before `begin`.

    old (A,), new (B,), different at `begin` (or old goes on where new ends). What new has beyond
    the last token of old is no edit. O((A + B) log(A + B)) for a few edits.
    """
    old_hashes, new_hashes = _hashes(old[begin:]), _hashes(new[begin:])
    edits: list[Edit] = []
    i = j = begin
    while i < len(old):
        agreed = _common(old, new, i, j)
        i, j = i + agreed, j + agreed
        if i == len(old):
            break
        found = None
        if len(edits) + 1 < MAX_EDITS:
            found = _next_agreement(
                old, new, i, j, old_hashes[i - begin :], new_hashes[j - begin :]
            )
        if found is None:
            edits.append(Edit(i, len(old), j, len(new), closed=j == len(new)))
            break
        edits.append(Edit(i, i + found[0], j, j + found[1], closed=True))
        i, j = i + found[0], j + found[1]
    return edits


def _next_agreement(
    old: Tokens, new: Tokens, i: int, j: int, old_hashes: Hashes, new_hashes: Hashes
) -> tuple[int, int] | None:
    """Least a + b such that old[i + a:] and new[j + b:] begin with the same anchor."""
    best = _agreement_with_last(old, new, i, j)
    for window in (*_WINDOWS, max(len(old_hashes), len(new_hashes))):
        _, a, b = np.intersect1d(old_hashes[:window], new_hashes[:window], return_indices=True)
        if len(a):
            least = int((a + b).argmin())
            found = int(a[least]), int(b[least])
            if (best is None or sum(found) < sum(best)) and _common(
                old, new, i + found[0], j + found[1]
            ) >= ANCHOR:
                best = found
        # a pair outside of the window is further away than any inside it
        if (best is not None and sum(best) <= window) or window >= max(
            len(old_hashes), len(new_hashes)
        ):
            break
    return best


def _agreement_with_last(old: Tokens, new: Tokens, i: int, j: int) -> tuple[int, int] | None:
    """The same for the last tokens of old, which are too few for an anchor."""
    best = None
    for left in range(min(ANCHOR - 1, len(old) - i), 0, -1):
        suffix = old[len(old) - left :]
        for b in range(min(ANCHOR, len(new) - j - left) + 1):
            cost = len(old) - left - i + b
            if (best is None or cost < sum(best)) and np.array_equal(
                new[j + b : j + b + left], suffix
            ):
                best = (len(old) - left - i, b)
    return best


def _common(old: Tokens, new: Tokens, i: int, j: int) -> int:
    """Leading tokens that old[i:] and new[j:] share; reads growing blocks."""
    shared, block = 0, 64
    most = min(len(old) - i, len(new) - j)
    while shared < most:
        step = min(block, most - shared)
        differs = old[i + shared : i + shared + step] != new[j + shared : j + shared + step]
        first = int(differs.argmax())
        if differs[first]:
            return shared + first
        shared, block = shared + step, 4 * block
    return most


def _hashes(tokens: Tokens) -> Hashes:
    """A number for each run of ANCHOR tokens (max(0, T - ANCHOR + 1),), equal for equal runs."""
    count = max(0, len(tokens) - ANCHOR + 1)
    words = tokens.astype(np.uint64)
    hashes = np.zeros(count, np.uint64)
    for place in range(ANCHOR):
        hashes = hashes * _MULTIPLIER + words[place : place + count]
    return hashes
