"""Brute-force planners: tries as dictionaries of prefixes, rounds by trying every choice.

Nothing here is imported from harts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from itertools import product

Path = tuple[Hashable, ...]


def prefix_counts(trajectories: list[Path]) -> Counter[Path]:
    """How many trajectories pass through each non-empty prefix."""
    return Counter(path[: n + 1] for path in trajectories for n in range(len(path)))


def common_prefix(a: Path, b: Path) -> int:
    shared = 0
    while shared < min(len(a), len(b)) and a[shared] == b[shared]:
        shared += 1
    return shared


def brute_segments(trajectories: list[Path]) -> dict[Path, tuple[Path | None, int, int]]:
    """First prefix of each fork-free run -> (first prefix of its parent run, start, length)."""
    prefixes = sorted(prefix_counts(trajectories), key=len)
    children: Counter[Path] = Counter(prefix[:-1] for prefix in prefixes)
    run_of: dict[Path, Path] = {}
    segments: dict[Path, tuple[Path | None, int, int]] = {}
    for prefix in prefixes:
        above = prefix[:-1]
        if above and children[above] == 1:
            run_of[prefix] = run_of[above]
            parent, start, length = segments[run_of[above]]
            segments[run_of[above]] = (parent, start, length + 1)
        else:
            run_of[prefix] = prefix
            segments[prefix] = (run_of.get(above), len(above), 1)
    return segments


def starts_and_ends(parent: list[int], length: list[int]) -> tuple[list[int], list[int]]:
    starts: list[int] = []
    for above, _ in zip(parent, length, strict=True):
        starts.append(starts[above] + length[above] if above >= 0 else 0)
    return starts, [a + n for a, n in zip(starts, length, strict=True)]


def rounds_of_choice(
    parent: list[int], length: list[int], direct: list[int], chunk_size: int
) -> list[int]:
    """Earliest legal round of every segment, by where its start state comes from (section 3.3).

    A chain starts from the state at its chunk boundary a. The zero state is there before round 1.
    Any other is an output of the chain that computes the row at depth a - 1 of the same path, and
    can start another chain once that chain's call has returned.
    """
    starts, _ = starts_and_ends(parent, length)
    rounds: list[int] = []
    for segment, above in enumerate(parent):
        if above >= 0 and direct[above] == segment:
            rounds.append(rounds[above])
            continue
        boundary = starts[segment] - starts[segment] % chunk_size
        if boundary == 0:
            rounds.append(1)
            continue
        holder = above
        while starts[holder] > boundary - 1:
            holder = parent[holder]
        rounds.append(rounds[holder] + 1)
    return rounds


def direct_choices(parent: list[int]) -> Iterator[list[int]]:
    """Every way to let each segment be continued by one of its children or by none."""
    options: list[list[int]] = [[-1] for _ in parent]
    for segment, above in enumerate(parent):
        if above >= 0:
            options[above].append(segment)
    return (list(choice) for choice in product(*options))


def brute_minimum_rounds(parent: list[int], length: list[int], chunk_size: int) -> int:
    return min(
        max(rounds_of_choice(parent, length, direct, chunk_size))
        for direct in direct_choices(parent)
    )


def mandatory_replay(parent: list[int], length: list[int], chunk_size: int) -> int:
    """Equation 15."""
    _, ends = starts_and_ends(parent, length)
    return sum(
        (parent.count(segment) - 1) * (ends[segment] % chunk_size)
        for segment in range(len(parent))
        if segment in parent
    )


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """Every way to put items into non-empty groups."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for groups in partitions(rest):
        yield [[first], *groups]
        for k in range(len(groups)):
            yield [*groups[:k], [first, *groups[k]], *groups[k + 1 :]]


def feasible_counts(trajectories: list[Path], capacity: int) -> set[int]:
    """Numbers of microbatches that some partition within the capacity reaches."""
    return {
        len(groups)
        for groups in partitions(list(range(len(trajectories))))
        if all(len(prefix_counts([trajectories[i] for i in g])) <= capacity for g in groups)
    }
