"""Rollout trees made from a seed: the shapes that agents leave behind, in any size.

A forest of segments is grown first; siblings differ in their first token, so the token trie of the
batch is exactly that forest. Trajectories are chains of segments from a root.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from harts.data.trajectory import TrajectoryBatch
from harts.errors import ConfigError

Shape = Literal["comb", "star", "caterpillar", "agent_steps", "agent_tree"]

_SHAPES: tuple[Shape, ...] = ("comb", "star", "caterpillar", "agent_steps", "agent_tree")


@dataclass(frozen=True, kw_only=True)
class SyntheticOptions:
    """What `generate` makes. Lengths are means in tokens; each is drawn, and at least 1.

    shape: comb: a spine of `turns` segments, one tooth leaving at each. star: `rollouts` leaves at
      one prompt. caterpillar: a spine of `turns` levels, at each a trajectory that ends there and
      `rollouts` legs of one token. agent_steps: one trajectory per turn, prompt = history, the turn
      scored. agent_tree: one trajectory per rollout, every generated token scored in one of them.
    seed: same options, same batch. vocabulary: token ids are below it.
    tasks: trees (comb, star, caterpillar) or tasks that share one system prompt (agents).
    rollouts: attempts a task. turns: turns a rollout has on average, levels of a spine.
    system_tokens: exact length of the system prompt or of each root.
    task_tokens: the task's own prompt. turn_tokens: one generated turn.
    observation_tokens: what the environment answers.
    fork_probability: chance that a rollout starts inside an earlier one of its task, after a turn.
    """

    shape: Shape = "agent_steps"
    seed: int = 0
    vocabulary: int = 512
    tasks: int = 2
    rollouts: int = 4
    turns: int = 6
    system_tokens: int = 64
    task_tokens: int = 32
    turn_tokens: int = 24
    observation_tokens: int = 32
    fork_probability: float = 0.25

    def __post_init__(self) -> None:
        if self.shape not in _SHAPES:
            raise ConfigError(f"shape is {self.shape!r}; use one of {', '.join(_SHAPES)}")
        least = {"seed": 0, "vocabulary": 2, "tasks": 1, "rollouts": 1, "turns": 1}
        least |= dict.fromkeys(_LENGTHS, 1)
        for name, smallest in least.items():
            value = getattr(self, name)
            if type(value) is not int or value < smallest:
                raise ConfigError(f"{name} is {value!r}; give a whole number from {smallest}")
        if not 0 <= self.fork_probability <= 1:
            problem = f"fork_probability is {self.fork_probability}"
            raise ConfigError(f"{problem}; give a number from 0 to 1")


_LENGTHS = ("system_tokens", "task_tokens", "turn_tokens", "observation_tokens")


def generate(options: SyntheticOptions) -> TrajectoryBatch:
    """Make the batch; O(its tokens), the same bits for the same options.

    Fields, all per trajectory: reward float64 (uniform in [0, 1), one draw a rollout), advantages
    float64 ((reward - mean) / (std + 1e-6) over the rollouts of its group, population std; every
    leaf of a comb, star or caterpillar is a rollout), group_id int64 (the task or tree), rollout_id
    int64 (from 0 in each group). Raises ConfigError when more segments meet at one fork than the
    vocabulary tells apart.
    """
    return _materialise(_grow(options), options)


def agent_batch(
    *,
    seed: int = 0,
    shape: Literal["agent_steps", "agent_tree"] = "agent_steps",
    compression: float = 5.6,
    vocabulary: int = 512,
    raw_tokens: int = 45_000,
) -> TrajectoryBatch:
    """An agent batch of about `raw_tokens` tokens whose raw / trie tokens is `compression`.

    Every generated token is scored once over the batch. At the defaults, any seed: compression
    within 0.02, raw tokens within 2 %, two tasks of six rollouts (steps) or five of four (tree).
    The tree is grown once to learn its size, then lengths are scaled and the shared system prompt
    is chosen: tokens and trie nodes are both linear in its length. Raises ConfigError for a
    compression that no prompt length reaches.
    """
    options = SyntheticOptions(
        shape=shape, seed=seed, vocabulary=vocabulary, **_AGENT_SIZES[shape], **_AGENT_LENGTHS
    )
    options = _with_compression(options, compression)
    factor = raw_tokens / _grow(options).num_raw_tokens()
    scaled = replace(
        options,
        task_tokens=max(1, round(options.task_tokens * factor)),
        turn_tokens=max(1, round(options.turn_tokens * factor)),
        observation_tokens=max(1, round(options.observation_tokens * factor)),
    )
    return generate(_with_compression(scaled, compression))


_AGENT_SIZES: dict[str, dict[str, int]] = {
    "agent_steps": {"tasks": 2, "rollouts": 6, "turns": 5},
    "agent_tree": {"tasks": 5, "rollouts": 4, "turns": 5},
}
_AGENT_LENGTHS = {"task_tokens": 4000, "turn_tokens": 3000, "observation_tokens": 4000}
"""Means before scaling, large so that rounding to whole tokens does not blur the factor."""


def _with_compression(options: SyntheticOptions, compression: float) -> SyntheticOptions:
    """The options with the system prompt that makes raw / trie tokens `compression`."""
    forest = _grow(replace(options, system_tokens=1))
    num_trajectories = len(forest.end_segment)
    raw, trie = forest.num_raw_tokens() - num_trajectories, forest.num_trie_tokens() - 1
    if raw >= compression * trie or compression >= num_trajectories:
        limits = f"between {raw / trie:.2f} and {num_trajectories}"
        raise ConfigError(f"compression is {compression}; give a number {limits} for this seed")
    system_tokens = round((compression * trie - raw) / (num_trajectories - compression))
    return replace(options, system_tokens=max(1, system_tokens))


@dataclass(kw_only=True)
class _Forest:
    """Segments (parents before children) and the trajectories that end at some of them.

    scored: for each trajectory, the segments it is trained on.
    """

    parent: list[int] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    end_segment: list[int] = field(default_factory=list)
    scored: list[set[int]] = field(default_factory=list)
    group: list[int] = field(default_factory=list)
    rollout: list[int] = field(default_factory=list)

    def add_segment(self, parent: int, length: int) -> int:
        self.parent.append(parent)
        self.length.append(length)
        return len(self.parent) - 1

    def add_trajectory(self, end: int, scored: set[int], group: int, rollout: int) -> None:
        self.end_segment.append(end)
        self.scored.append(scored)
        self.group.append(group)
        self.rollout.append(rollout)

    def chain(self, end: int) -> list[int]:
        """Segments from the root to `end`."""
        segments = []
        while end >= 0:
            segments.append(end)
            end = self.parent[end]
        return segments[::-1]

    def num_raw_tokens(self) -> int:
        return sum(self.length[s] for end in self.end_segment for s in self.chain(end))

    def num_trie_tokens(self) -> int:
        """Every segment lies on some trajectory."""
        return sum(self.length)


def _grow(options: SyntheticOptions) -> _Forest:
    rng = np.random.default_rng([options.seed, 0])
    forest = _Forest()
    if options.shape.startswith("agent"):
        system = forest.add_segment(-1, options.system_tokens)
        for task in range(options.tasks):
            _grow_task(forest, system, task, options, rng)
        return forest
    grow_tree = {"comb": _grow_comb, "star": _grow_star, "caterpillar": _grow_caterpillar}
    for tree in range(options.tasks):
        root = forest.add_segment(-1, options.system_tokens)
        grow_tree[options.shape](forest, root, tree, options, rng)
    return forest


def _grow_comb(
    forest: _Forest, root: int, tree: int, options: SyntheticOptions, rng: np.random.Generator
) -> None:
    spine = [root]
    for tooth in range(options.turns):
        spine.append(forest.add_segment(spine[-1], _draw(rng, options.turn_tokens)))
        leaf = forest.add_segment(spine[-1], _draw(rng, options.turn_tokens))
        forest.add_trajectory(leaf, {*spine[1:], leaf}, tree, tooth)


def _grow_star(
    forest: _Forest, root: int, tree: int, options: SyntheticOptions, rng: np.random.Generator
) -> None:
    for rollout in range(options.rollouts):
        leaf = forest.add_segment(root, _draw(rng, options.turn_tokens))
        forest.add_trajectory(leaf, {leaf}, tree, rollout)


def _grow_caterpillar(
    forest: _Forest, root: int, tree: int, options: SyntheticOptions, rng: np.random.Generator
) -> None:
    spine = [root]
    for level in range(options.turns):
        spine.append(forest.add_segment(spine[-1], _draw(rng, options.turn_tokens)))
        first_rollout = level * (options.rollouts + 1)
        forest.add_trajectory(spine[-1], set(spine[1:]), tree, first_rollout)
        for leg in range(options.rollouts):
            leaf = forest.add_segment(spine[-1], 1)
            forest.add_trajectory(leaf, {*spine[1:], leaf}, tree, first_rollout + 1 + leg)


def _grow_task(
    forest: _Forest, system: int, task: int, options: SyntheticOptions, rng: np.random.Generator
) -> None:
    """All rollouts of one task; (segment, turns before it) after each answer is a place to fork."""
    prompt = forest.add_segment(system, _draw(rng, options.task_tokens))
    places: list[tuple[int, int]] = []
    for rollout in range(options.rollouts):
        num_turns = int(rng.integers((options.turns + 1) // 2, options.turns * 3 // 2 + 1))
        node, turns_before = prompt, 0
        is_fork = bool(rng.random() < options.fork_probability)
        if is_fork and places:
            node, turns_before = places[int(rng.integers(len(places)))]
        own: set[int] = set()
        new_places = []
        for turn in range(turns_before, max(num_turns, turns_before + 1)):
            if own:
                node = forest.add_segment(node, _draw(rng, options.observation_tokens))
                new_places.append((node, turn))
            node = forest.add_segment(node, _draw(rng, options.turn_tokens))
            own.add(node)
            if options.shape == "agent_steps":
                forest.add_trajectory(node, {node}, task, rollout)
        if options.shape == "agent_tree":
            forest.add_trajectory(node, own, task, rollout)
        places += new_places


def _draw(rng: np.random.Generator, mean: int) -> int:
    """A length with a long tail, as turns and observations have."""
    return max(1, round(float(rng.gamma(2.0, mean / 2.0))))


def _materialise(forest: _Forest, options: SyntheticOptions) -> TrajectoryBatch:
    """Lay the tokens of all segments end to end once; every trajectory is a gather from there."""
    length = np.array(forest.length, np.int64)
    segment_start = np.cumsum(length) - length
    pool = _segment_tokens(forest, segment_start, options)
    chains = [forest.chain(end) for end in forest.end_segment]
    segments = np.concatenate([np.array(chain, np.int64) for chain in chains])
    is_scored = np.array(
        [s in scored for chain, scored in zip(chains, forest.scored, strict=True) for s in chain]
    )
    lengths = length[segments]
    begin = np.cumsum(lengths) - lengths
    pool_positions = np.arange(lengths.sum()) + np.repeat(segment_start[segments] - begin, lengths)
    chain_ends = np.cumsum([len(chain) for chain in chains]) - 1
    reward, advantages = _rewards(forest, options)
    return TrajectoryBatch(
        tokens=pool[pool_positions],
        offsets=np.concatenate([np.zeros(1, np.int64), (begin + lengths)[chain_ends]]),
        loss_mask=np.repeat(is_scored, lengths),
        trajectory_fields={
            "reward": reward,
            "advantages": advantages,
            "group_id": np.array(forest.group, np.int64),
            "rollout_id": np.array(forest.rollout, np.int64),
        },
    )


def _segment_tokens(
    forest: _Forest, segment_start: npt.NDArray[np.int64], options: SyntheticOptions
) -> npt.NDArray[np.int32]:
    """Random tokens; the first of a segment = its place among its siblings plus a random shift."""
    rng = np.random.default_rng([options.seed, 1])
    parent = np.array(forest.parent, np.int64)
    pool = rng.integers(0, options.vocabulary, sum(forest.length), dtype=np.int32)
    by_parent = np.argsort(parent, kind="stable")
    _, first, num_children = np.unique(parent[by_parent], return_index=True, return_counts=True)
    if num_children.max() > options.vocabulary:
        problem = (
            f"vocabulary is {options.vocabulary}, {num_children.max()} segments meet at a fork"
        )
        raise ConfigError(f"{problem}; raise vocabulary or lower rollouts or tasks")
    rank = np.arange(len(parent)) - np.repeat(first, num_children)
    shift = np.repeat(rng.integers(0, options.vocabulary, len(first)), num_children)
    pool[segment_start[by_parent]] = (shift + rank) % options.vocabulary
    return pool


def _rewards(
    forest: _Forest, options: SyntheticOptions
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Reward and advantage of each trajectory's rollout, float64 (N,) both."""
    rng = np.random.default_rng([options.seed, 2])
    group, rollout = np.array(forest.group), np.array(forest.rollout)
    num_rollouts = int(rollout.max()) + 1
    rewards = rng.random((options.tasks, num_rollouts))
    mean, std = rewards.mean(1, keepdims=True), rewards.std(1, keepdims=True)
    advantages = (rewards - mean) / (std + 1e-6)
    return rewards[group, rollout], advantages[group, rollout]
