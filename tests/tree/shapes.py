"""Named trees that every planner and view must take, as lists of token lists."""

from __future__ import annotations

from harts.data.trajectory import TrajectoryBatch

LARGEST_TOKEN = 2**31 - 1


def batch_of(trajectories, **fields):
    """A batch that scores every token but the first; fields are (S,) identity lists."""
    rows = [{"input_ids": t, "loss_mask": [0] + [1] * (len(t) - 1)} for t in trajectories]
    for name, values in fields.items():
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    return TrajectoryBatch.from_rows(rows)


def caterpillar(depth, *, step=1):
    """A spine with a one-token leaf after every `step` tokens."""
    spine = [7] * (depth * step)
    return [*([*spine[: step * (k + 1)], 1 + k % 3] for k in range(depth)), spine]


def fork_at(position, *, branch=3, branches=2):
    return [[5] * position + [k] * branch for k in range(branches)]


def named_shapes(chunk_size):
    b = chunk_size
    return {
        "a single trajectory": [[3, 1, 2]],
        "a single token": [[0]],
        "nested prefixes": [[1, 2], [1], [1, 2, 3, 4], [1, 2, 3]],
        "exact duplicates": [[4, 4, 4], [4, 4, 4], [4, 4, 4]],
        "a fork at position 1": fork_at(1),
        "no shared token at all": [[k] * 3 for k in range(4)],
        "a fork at chunk size - 1": fork_at(b - 1, branch=b + 1),
        "a fork at chunk size": fork_at(b, branch=b + 1),
        "a fork at chunk size + 1": fork_at(b + 1, branch=b + 1),
        "a fork at twice the chunk size": fork_at(2 * b, branch=2),
        "forks around a boundary on one path": [
            [5] * n + [k] for k, n in enumerate([b - 1, b, b + 1, 2 * b])
        ],
        "one-token leaves": [[9] * (b + 2) + [k] for k in range(4)],
        "three levels": [[1] * b + [i] * b + [j] * 3 for i in range(2) for j in range(3)],
        "a short prefix shared by unrelated contexts": [[1, 2, 3, 4, k] * 4 for k in range(5)],
        "a fan-out of hundreds": [[8] * (b + 3) + [k, k] for k in range(300)],
        "a caterpillar 126 levels deep": caterpillar(126),
        "a caterpillar of whole chunks": caterpillar(12, step=b),
        "the largest token ids": [
            [LARGEST_TOKEN, 0, LARGEST_TOKEN],
            [LARGEST_TOKEN, LARGEST_TOKEN - 1],
        ],
    }
