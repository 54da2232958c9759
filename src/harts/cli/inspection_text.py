"""An `Inspection` as text for a terminal: a summary, then the breaks, then tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harts.cli.output import Rows, aligned, percent
from harts.data.values import some_of
from harts.inspection.result import (
    BREAK_MEANINGS,
    BreakClass,
    BreakExample,
    Inspection,
    SegmentClass,
    TaskStats,
)
from harts.report.text import counted

MAX_LINES = 20
"""Lines of a table; what does not fit is left out or merged."""

_SHOWN_LETTERS = 60


def inspection_text(found: Inspection) -> str:
    """Several paragraphs, the summary first."""
    paragraphs = [aligned(_summary(found))]
    if found.breaks.classes:
        paragraphs.append(_breaks_text(found))
    if len(found.tasks) > 1:
        paragraphs.append(_tasks_text(found))
    paragraphs.append(_segments_text("forks above", found.by_depth))
    paragraphs.append(_segments_text("branches at the end", found.by_fan_out))
    if found.scored_again:
        paragraphs.append(f"scored again       {_scored_again(found.scored_again)}")
    return "\n\n".join(paragraphs)


def _summary(found: Inspection) -> Rows:
    sizes, forest = found.trajectories, found.forest
    longest = f"{sizes.longest.tokens:,} tokens, {sizes.longest.name}"
    return [
        ("trajectories", _counts(found)),
        ("raw tokens", f"{sizes.raw_tokens:,}"),
        ("length", f"median {sizes.median_length:,.0f} tokens; longest {longest}"),
        ("over capacity", _over_capacity(found)),
        ("repeats", _repeats(found)),
        ("unique rows", f"{forest.rows:,} in one trie of the file: {found.compression:.2f}x"),
        *_task_tries(found),
        (
            "scored",
            f"{counted(sizes.scored_tokens, 'token')} "
            f"({percent(sizes.scored_tokens / sizes.raw_tokens)} of the raw tokens); "
            f"{counted(sizes.head_rows, 'row')} with logits "
            f"({percent(sizes.head_rows / forest.rows)} of the unique rows)",
        ),
        (
            "forest",
            f"{counted(forest.roots, 'tree')}, {counted(forest.forks, 'fork')} with up to "
            f"{counted(forest.max_fan_out, 'branch', 'branches')}, at most "
            f"{counted(forest.max_fork_depth, 'fork')} on a path",
        ),
        ("fork positions", f"modulo {found.chunk_size}: {_residues(forest.fork_residues)}"),
        (
            "linear attention",
            f"{counted(forest.rounds, 'round')} of {counted(forest.chains, 'chain')} over the "
            f"whole forest; {forest.replay_rows:,} replay rows "
            f"({percent(forest.replay_rows / forest.rows)} of the unique rows)",
        ),
        ("prefix breaks", _breaks_summary(found)),
    ]


def _counts(found: Inspection) -> str:
    parts = [f"{found.trajectories.count:,}"]
    if found.breaks.rollout_field is not None:
        parts.append(f"in {counted(found.rollouts, 'rollout')} ({found.breaks.rollout_field})")
    if found.task_field is None:
        parts.append("of unknown tasks (no group_id)")
    else:
        parts.append(f"of {counted(len(found.tasks), 'task')} ({found.task_field})")
    return " ".join(parts)


def _scored_again(tokens: int) -> str:
    are = "is" if tokens == 1 else "are"
    return (
        f"{counted(tokens, 'token')} {are} scored in several trajectories of the same rollout: "
        "each counts as often; mask them in all but one"
    )


def _over_capacity(found: Inspection) -> str:
    over = found.trajectories.over_capacity
    if not over:
        return f"none (--capacity {found.capacity:,})"
    names = some_of([f"{entry.name} with {entry.tokens:,}" for entry in over], 3)
    return (
        f"{counted(len(over), 'trajectory', 'trajectories')} longer than {found.capacity:,} "
        f"tokens: {names}"
    )


def _repeats(found: Inspection) -> str:
    sizes = found.trajectories
    parts = [
        f"{counted(sizes.duplicates, 'copy', 'copies')} of an earlier trajectory",
        f"{counted(sizes.nested, 'prefix', 'prefixes')} of a longer one",
    ]
    if sizes.unscored:
        parts.append(f"{sizes.unscored:,} without a scored token")
    return "; ".join(parts)


def _task_tries(found: Inspection) -> Rows:
    if found.task_field is None:
        return []
    between = found.task_rows - found.forest.rows
    return [
        (
            "",
            f"{found.task_rows:,} in tries of the tasks: {found.task_compression:.2f}x "
            f"({between:,} rows are shared between tasks)",
        )
    ]


def _residues(counts: Sequence[int]) -> str:
    """Forks in at most eight equal ranges of positions; those at 0 replay nothing."""
    width = -(-len(counts) // 8)
    ranges = []
    for begin in range(0, len(counts), width):
        end = min(begin + width, len(counts))
        label = f"{begin}-{end - 1}" if end - begin > 1 else str(begin)
        ranges.append(f"{label}: {sum(counts[begin:end]):,}")
    return f"{counted(counts[0], 'fork')} at 0 (no replay); {', '.join(ranges)}"


def _breaks_summary(found: Inspection) -> str:
    breaks = found.breaks
    if breaks.rollout_field is None:
        return "unknown: without rollout_id nothing says which trajectories are steps of one run"
    if not breaks.pairs:
        return "none: every rollout has one trajectory"
    if not breaks.count:
        return f"none: all {breaks.pairs:,} later steps begin with all of an earlier one"
    return (
        f"{breaks.count:,} of {counted(breaks.pairs, 'later step')}; they cost "
        f"{breaks.cost_rows:,} rows ({percent(breaks.cost_rows / found.forest.rows)}); without "
        f"them the file would compress {found.unbroken_compression:.2f}x"
    )


def _breaks_text(found: Inspection) -> str:
    lines = [
        (
            entry.kind,
            f"{entry.count:,}",
            f"{entry.cost_rows:,}",
            BREAK_MEANINGS[entry.kind],
        )
        for entry in found.breaks.classes
    ]
    table = _table(("break", "count", "cost in rows", "what it is"), lines, left=(0, 3))
    return "\n\n".join([table, *(_example_text(entry) for entry in found.breaks.classes)])


def _example_text(entry: BreakClass) -> str:
    example = entry.example
    rows = [
        (f"{entry.kind}, such as", f"{example.following.name} after {example.previous.name}"),
        (
            "",
            f"at position {example.position:,}: {example.removed_tokens:,} tokens removed, "
            f"{example.inserted_tokens:,} inserted, then {example.found_again:,} found again",
        ),
        *_sides(example),
    ]
    return aligned(rows)


def _sides(example: BreakExample) -> Iterator[tuple[str, str]]:
    """What both have before, then what each has there: as text, or as ids."""
    if example.before_text is None:
        yield "  before", _ids(example.before[-8:], more_before=True)
        yield "  removed", _ids(example.removed, more=example.removed_tokens)
        yield "  inserted", _ids(example.inserted, more=example.inserted_tokens)
        return
    before = example.before_text
    shown = before if len(before) <= _SHOWN_LETTERS else "..." + before[-_SHOWN_LETTERS:]
    yield "  before", repr(shown)
    yield "  removed", _quoted(example.removed_text or "")
    yield "  inserted", _quoted(example.inserted_text or "")


def _quoted(text: str) -> str:
    if not text:
        return "(nothing)"
    most = 3 * _SHOWN_LETTERS
    return repr(text if len(text) <= most else text[:most] + "...")


def _ids(ids: Sequence[int], *, more: int = 0, more_before: bool = False) -> str:
    if not ids:
        return "(nothing)"
    text = " ".join(map(str, ids))
    return f"{'... ' if more_before else ''}{text}{' ...' if more > len(ids) else ''}"


def _tasks_text(found: Inspection) -> str:
    """Worst compression first; of many tasks the worst and the best."""
    tasks = found.tasks
    lines = [_task_line(task) for task in tasks]
    if len(lines) > MAX_LINES:
        half = MAX_LINES // 2
        left_out = f"... {len(lines) - 2 * half + 1:,} more"
        lines = [*lines[:half], (left_out,) + ("",) * 6, *lines[len(lines) - half + 1 :]]
    titles = (
        "task, worst first",
        "rollouts",
        "trajectories",
        "raw tokens",
        "rows",
        "scored",
        "compression",
    )
    return _table(titles, lines, left=(0,))


def _task_line(task: TaskStats) -> tuple[str, ...]:
    name = task.name if len(task.name) <= _SHOWN_LETTERS else task.name[:_SHOWN_LETTERS] + "..."
    return (
        name,
        f"{task.rollouts:,}" if task.rollouts else "?",
        f"{task.trajectories:,}",
        f"{task.raw_tokens:,}",
        f"{task.rows:,}",
        f"{task.scored_tokens:,}",
        f"{task.compression:,.2f}",
    )


def _segments_text(title: str, classes: Sequence[SegmentClass]) -> str:
    lines = []
    for first, last, members in _ranges(classes):
        rows = sum(entry.rows for entry in members)
        raw = sum(entry.raw_tokens for entry in members)
        lines.append(
            (
                str(first) if first == last else f"{first} to {last}",
                f"{sum(entry.segments for entry in members):,}",
                f"{rows:,}",
                f"{raw:,}",
                f"{raw / rows:,.2f}",
            )
        )
    return _table((title, "segments", "rows", "raw tokens", "compression"), lines, left=(0,))


def _ranges(classes: Sequence[SegmentClass]) -> Iterator[tuple[int, int, list[SegmentClass]]]:
    """Each number alone, or where there are too many in ranges that double from 8 on."""
    ranges: dict[int, list[SegmentClass]] = {}
    for entry in classes:
        is_wide = len(classes) > MAX_LINES - 4 and entry.number >= 8
        key = 8 + entry.number.bit_length() if is_wide else entry.number
        ranges.setdefault(key, []).append(entry)
    for members in ranges.values():
        yield members[0].number, members[-1].number, members


def _table(titles: Sequence[str], lines: Sequence[Sequence[str]], *, left: Sequence[int]) -> str:
    widths = [max(map(len, column)) for column in zip(titles, *lines, strict=True)]
    return "\n".join(
        "   ".join(
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (titles, *lines)
    )
