"""Hypothesis strategies for rollout trees; every property of the project draws from these.

A tree grows as rollouts do: each trajectory copies a prefix of an earlier one (nothing, a part or
all of it) and goes on with tokens of its own, perhaps none. So forks at any position, duplicates,
trajectories that end inside another, one-token leaves and unrelated trees all occur, and a small
vocabulary adds prefixes shared by chance.
"""

import numpy as np
from hypothesis import strategies as st

from harts.data.trajectory import TrajectoryBatch


@st.composite
def token_trees(
    draw: st.DrawFn,
    *,
    max_trajectories: int = 8,
    max_new_tokens: int = 12,
    vocabulary: int = 4,
) -> list[list[int]]:
    """1 to max_trajectories non-empty token lists; shrinks to few, short, unrelated lists."""
    token = st.integers(0, vocabulary - 1)
    trajectories: list[list[int]] = []
    for _ in range(draw(st.integers(1, max_trajectories))):
        prefix = _draw_prefix(draw, trajectories, cuts=())
        suffix = draw(st.lists(token, min_size=0 if prefix else 1, max_size=max_new_tokens))
        trajectories.append(prefix + suffix)
    return trajectories


@st.composite
def long_token_trees(
    draw: st.DrawFn,
    *,
    chunk_size: int,
    max_trajectories: int = 6,
    max_new_chunks: int = 3,
    vocabulary: int = 512,
) -> list[list[int]]:
    """Token lists of several chunks whose forks favour 1 and chunk_size * k - 1, + 0, + 1.

    Tokens come from a drawn seed, so that long examples are cheap; they do not shrink.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    cuts = tuple(chunk_size * k + d for k in range(1, 3) for d in (-1, 0, 1))
    trajectories: list[list[int]] = []
    for _ in range(draw(st.integers(1, max_trajectories))):
        prefix = _draw_prefix(draw, trajectories, cuts=(1, *cuts))
        num_new = draw(
            st.integers(0 if prefix else 1, max_new_chunks * chunk_size)
            | st.sampled_from(
                [
                    0 if prefix else 1,
                    1,
                    *(cut for cut in cuts if 0 < cut <= max_new_chunks * chunk_size),
                ]
            )
        )
        trajectories.append(prefix + rng.integers(0, vocabulary, num_new).tolist())
    return trajectories


def _draw_prefix(
    draw: st.DrawFn, trajectories: list[list[int]], cuts: tuple[int, ...]
) -> list[int]:
    if not trajectories:
        return []
    earlier = draw(st.sampled_from(trajectories))
    lengths = st.integers(0, len(earlier))
    favoured = [cut for cut in (*cuts, len(earlier)) if cut <= len(earlier)]
    return earlier[: draw(lengths | st.sampled_from(favoured))]


@st.composite
def loss_masks(draw: st.DrawFn, length: int) -> list[int]:
    """0/1 a token, the first 0: nothing, everything, the end or any positions scored."""
    kind = draw(st.sampled_from(["end", "all", "none", "any"]))
    if kind == "any":
        return [0, *draw(st.lists(st.integers(0, 1), min_size=length - 1, max_size=length - 1))]
    start = {"all": 1, "none": length, "end": draw(st.integers(1, length))}[kind]
    return [int(position >= start) for position in range(length)]


@st.composite
def trajectory_batches(
    draw: st.DrawFn,
    *,
    trees: st.SearchStrategy[list[list[int]]] | None = None,
    with_identity: bool = False,
) -> TrajectoryBatch:
    """A batch over drawn trees with what objectives need.

    Position field old_log_probs float64 (<= 0), trajectory fields advantages float64, reward
    float64, group_id and rollout_id int64; with_identity adds identity int64 in {0, 1}, constant
    over each trajectory.
    """
    trajectories = draw(token_trees() if trees is None else trees)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = []
    for index, tokens in enumerate(trajectories):
        row = {
            "input_ids": tokens,
            "loss_mask": draw(loss_masks(len(tokens))),
            "old_log_probs": -rng.exponential(1.0, len(tokens)),
            "advantages": float(rng.normal()),
            "reward": float(rng.random()),
            "group_id": int(rng.integers(0, 3)),
            "rollout_id": index,
        }
        if with_identity:
            row["identity"] = draw(st.integers(0, 1))
        rows.append(row)
    return TrajectoryBatch.from_rows(rows)
