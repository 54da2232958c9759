"""Named rollout trees that every exactness test must survive, for chunks of 64 rows."""

from __future__ import annotations

import numpy as np

VOCABULARY = 61


def _tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, count).tolist()


def _fork_at(*positions: int, tail: int = 9) -> list[list[int]]:
    """A trunk to just past the last fork, and a branch at every position."""
    trunk = _tokens(1, max(positions) + tail)
    branches = []
    for seed, position in enumerate(positions):
        other = (trunk[position] + 1 + seed) % VOCABULARY
        branches.append([*trunk[:position], other, *_tokens(100 + seed, tail - 1)])
    return [trunk, *branches]


def _caterpillar(levels: int) -> list[list[int]]:
    """A leaf of one token at every depth of a spine."""
    spine = _tokens(2, levels + 1)
    return [[*spine[:d], (spine[d] + 1) % VOCABULARY] for d in range(1, levels)] + [spine]


def _fan_out(children: int, prompt: int) -> list[list[int]]:
    """Children that differ in their first two tokens, under one prompt."""
    head = _tokens(3, prompt)
    return [[*head, c % VOCABULARY, c // VOCABULARY, *_tokens(c, c % 3)] for c in range(children)]


def _three_levels() -> list[list[int]]:
    root = _tokens(4, 70)
    middle = [root + _tokens(10 + i, 30 + 20 * i) for i in range(3)]
    return [m + _tokens(20 + 3 * i + j, 5 + 40 * j) for i, m in enumerate(middle) for j in range(3)]


def _chance_prefixes() -> list[list[int]]:
    """Unrelated contexts that happen to share 4 to 10 tokens."""
    head = _tokens(5, 10)
    return [head[:n] + _tokens(30 + n, 40 + n) for n in range(4, 11)]


SHAPES: dict[str, list[list[int]]] = {
    "one-trajectory": [_tokens(0, 150)],
    "one-token": [[7], [7, 8]],
    "nested-prefixes": [_tokens(6, n) for n in (5, 64, 65, 128, 140)],
    "duplicates": [_tokens(7, 90)] * 3 + [_tokens(7, 90)[:40]] * 2,
    "fork-at-1": _fork_at(1, tail=70),
    "forks-at-63-64-65": _fork_at(63, 64, 65),
    "fork-at-128": _fork_at(128),
    "one-token-leaves": [[*_tokens(8, 66), token] for token in range(6)],
    "three-levels": _three_levels(),
    "chance-prefixes": _chance_prefixes(),
}
LARGE_SHAPES: dict[str, list[list[int]]] = {
    "fan-out-200": _fan_out(200, prompt=66),
    "caterpillar-126": _caterpillar(126),
}
