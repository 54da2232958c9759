"""What `inspect_batch` finds: plain numbers, strings and tuples, for text, JSON and reports.

Everywhere: raw tokens are those of all trajectories; rows are unique token prefixes; compression
is raw tokens over rows.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

BreakKind = Literal[
    "think",
    "retokenised",
    "compaction",
    "system prompt",
    "tools",
    "identity",
    "diverged",
    "other",
    "unknown",
]

BREAK_MEANINGS: dict[BreakKind, str] = {
    "think": "the template strips think blocks from earlier turns",
    "retokenised": "the same text has other tokens (render again only what is new)",
    "compaction": "the history was cut, collapsed or summarised",
    "system prompt": "a few tokens of the first prompt differ (a date, an id or the like)",
    "tools": "the list of tools differs",
    "identity": "equal tokens, but another identity (image, adapter, expert routes)",
    "diverged": "nothing after the fork is found again (retry, rewind or subagent)",
    "other": "the text differs otherwise",
    "unknown": "cannot be told from token ids; give --tokenizer",
}
"""What each kind of break means, in a few words."""


@dataclass(frozen=True, kw_only=True)
class NamedTrajectory:
    """index: in the batch. name: as messages call it. tokens: its length."""

    index: int
    name: str
    tokens: int


@dataclass(frozen=True, kw_only=True)
class TaskStats:
    """One task (group), with a trie of its own. name: its group id as text.

    rollouts: 0 where the file has no rollout id. rows: of the task's own trie.
    """

    name: str
    rollouts: int
    trajectories: int
    raw_tokens: int
    rows: int
    scored_tokens: int
    longest: int
    compression: float


@dataclass(frozen=True, kw_only=True)
class SegmentClass:
    """Segments (fork-free runs of rows) that have one number in common.

    number: forks above them in `Inspection.by_depth`; segments that branch off at their end (0: a
    leaf) in `Inspection.by_fan_out`. rows, raw_tokens: of these segments, so that raw_tokens is
    the sum over their rows of the trajectories that pass.
    """

    number: int
    segments: int
    rows: int
    raw_tokens: int
    compression: float


@dataclass(frozen=True, kw_only=True)
class Trajectories:
    """Sizes and repetitions.

    scored_tokens: positions with loss mask 1. head_rows: rows whose logits some scored position
    needs. duplicates: trajectories equal to an earlier one. nested: trajectories that are a
    proper prefix of another one. over_capacity: those longer than the capacity, longest first.
    """

    count: int
    raw_tokens: int
    scored_tokens: int
    head_rows: int
    unscored: int
    longest: NamedTrajectory
    median_length: float
    duplicates: int
    nested: int
    over_capacity: tuple[NamedTrajectory, ...]


@dataclass(frozen=True, kw_only=True)
class Forest:
    """The trie of the whole file as one forest of segments, and its linear-attention calls.

    rows: unique prefixes C. roots: trees. forks: rows with more than one next row.
    max_fork_depth: most forks on a path. fork_residues: (chunk_size,), forks by the position of
    their first differing token modulo the chunk size; a fork at 0 replays nothing.
    rounds, replay_rows, chains: of one call plan over the whole forest.
    """

    rows: int
    roots: int
    segments: int
    forks: int
    max_fan_out: int
    max_fork_depth: int
    fork_residues: tuple[int, ...]
    chains: int
    rounds: int
    replay_rows: int


@dataclass(frozen=True, kw_only=True)
class BreakExample:
    """One break: `following` should have begun with all of `previous`, but differs at `position`.

    before, removed, inserted: token ids around the place: the last ones both share, then what
    only the previous and only the following trajectory has there, each cut to a few dozen.
    *_text: the same decoded (None without a tokenizer). removed_tokens, inserted_tokens: how
    many there are before the two agree again. found_again: tokens of the following trajectory
    after the break that repeat the previous one.
    """

    previous: NamedTrajectory
    following: NamedTrajectory
    position: int
    removed_tokens: int
    inserted_tokens: int
    found_again: int
    before: tuple[int, ...]
    removed: tuple[int, ...]
    inserted: tuple[int, ...]
    before_text: str | None
    removed_text: str | None
    inserted_text: str | None


@dataclass(frozen=True, kw_only=True)
class BreakClass:
    """Breaks of one kind. cost_rows: unique rows that repeat what came before a break, and would
    be shared had the prefix not broken; each row counts once, for one class only."""

    kind: BreakKind
    count: int
    cost_rows: int
    example: BreakExample


@dataclass(frozen=True, kw_only=True)
class Breaks:
    """Why prefixes break within rollouts.

    rollout_field: the field that tells rollouts, or None: then nothing could be compared.
    pairs: trajectories that have an earlier one in their rollout. extending: those that begin
    with all of it. classes: the rest by kind, the most expensive first.
    """

    rollout_field: str | None
    pairs: int
    extending: int
    classes: tuple[BreakClass, ...]

    @property
    def count(self) -> int:
        """All breaks."""
        return sum(kind.count for kind in self.classes)

    @property
    def cost_rows(self) -> int:
        """Rows lost to all breaks together."""
        return sum(kind.cost_rows for kind in self.classes)


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """All findings on one batch.

    task_field: the field that tells tasks apart, or None: then the file counts as one task.
    scored_again: tokens that several trajectories of one rollout score (0 without rollout ids).
    tasks: the worst compression first. task_rows: sum of the tasks' own tries.
    by_depth, by_fan_out: segments of the forest by their number of forks above, and of branches
    at their end.
    """

    capacity: int
    chunk_size: int
    task_field: str | None
    rollouts: int
    scored_again: int
    trajectories: Trajectories
    forest: Forest
    tasks: tuple[TaskStats, ...]
    by_depth: tuple[SegmentClass, ...]
    by_fan_out: tuple[SegmentClass, ...]
    breaks: Breaks

    @property
    def task_rows(self) -> int:
        """Rows if every task had a trie of its own."""
        return sum(task.rows for task in self.tasks)

    @property
    def compression(self) -> float:
        """Raw tokens over the rows of the whole file's trie."""
        return self.trajectories.raw_tokens / self.forest.rows

    @property
    def task_compression(self) -> float:
        """Raw tokens over the rows of the tasks' own tries."""
        return self.trajectories.raw_tokens / self.task_rows

    @property
    def unbroken_compression(self) -> float:
        """What the compression would be had no prefix broken within its rollout."""
        return self.trajectories.raw_tokens / (self.forest.rows - self.breaks.cost_rows)

    def to_dict(self) -> dict[str, Any]:
        """Everything as nested dicts and lists, sums and ratios included, for JSON."""
        found = asdict(self)
        found["compression"] = self.compression
        found["task_rows"] = self.task_rows
        found["task_compression"] = self.task_compression
        found["unbroken_compression"] = self.unbroken_compression
        found["breaks"]["count"] = self.breaks.count
        found["breaks"]["cost_rows"] = self.breaks.cost_rows
        return found
