"""What a rollout file holds as a page: how well it compresses, and why not better."""

from __future__ import annotations

import os
from collections.abc import Sequence

from harts.data.trajectory import TrajectoryBatch
from harts.inspection.result import (
    BREAK_MEANINGS,
    BreakClass,
    Inspection,
    SegmentClass,
)
from harts.plan.microbatch import MicroBatch
from harts.report.bars import Bar, bar_drawing, column_drawing
from harts.report.boxes import boxes_of
from harts.report.markup import Markup, tag
from harts.report.page import facts, headline, page, section, table, write_page
from harts.report.tasks import shortened, tasks_of
from harts.report.text import count, counted, percent, short, times
from harts.report.tree import BOX_COLUMNS, MOST_IN_OVERVIEW, Tree, box_table, tree_drawing
from harts.tree.order import sort_trajectories

MOST_BOXES = 4_000
MOST_TASKS = 12
MOST_FAN_OUTS = 6
MOST_OVER_CAPACITY = 50


def write_inspect_report(
    inspection: Inspection,
    batch: TrajectoryBatch,
    path: str | os.PathLike[str],
    *,
    source: str = "a batch",
) -> None:
    """Write the page of an inspection; batch: what was inspected, source: its file.

    Raises ConfigError where `path` cannot be written. One sort, then O(S).
    """
    write_page(inspect_page(inspection, batch, source=source), path)


def inspect_page(inspection: Inspection, batch: TrajectoryBatch, *, source: str) -> str:
    """The HTML of `write_inspect_report`."""
    found = inspection.trajectories
    lead = f"{source}: {counted(found.count, 'trajectory', 'trajectories')}"
    if inspection.rollouts:
        lead += f" of {counted(inspection.rollouts, 'rollout')}"
    if inspection.task_field is not None:
        lead += f" in {counted(len(inspection.tasks), 'task')}"
    return page(
        "Rollout file",
        lead + ".",
        _headline(inspection),
        _compression(inspection),
        _tasks(inspection),
        _breaks(inspection),
        _forest_shape(inspection),
        _tree(inspection, batch),
        _trajectories(inspection),
        script=True,
    )


def _headline(inspection: Inspection) -> Markup:
    found, breaks = inspection.trajectories, inspection.breaks
    entries = [
        (
            "compression",
            times(inspection.compression),
            f"{short(found.raw_tokens)} raw tokens, {short(inspection.forest.rows)} unique",
        ),
        (
            "scored",
            percent(found.scored_tokens / found.raw_tokens),
            f"of the raw tokens; {percent(found.head_rows / inspection.forest.rows)} of the rows "
            "need logits",
        ),
        (
            "longest trajectory",
            count(found.longest.tokens),
            f"tokens; median {count(found.median_length)}, {len(found.over_capacity):,} over the "
            f"capacity {count(inspection.capacity)}",
        ),
    ]
    if breaks.rollout_field is not None:
        lost = percent(breaks.cost_rows / inspection.forest.rows)
        entries.append(
            ("broken prefixes", count(breaks.count), f"they cost {lost} of the unique tokens")
        )
    return headline(entries)


def _compression(inspection: Inspection) -> Markup:
    bars = compression_bars(inspection)
    rows = [[bar.name, count(bar.value), bar.text, bar.note] for bar in bars]
    return section(
        "What sharing saves",
        "A token that several trajectories share as part of the same prefix is computed once.",
        bar_drawing(bars),
        table("These numbers as a table", ("stage", "tokens", "shown as", "note"), rows),
    )


def compression_bars(inspection: Inspection) -> list[Bar]:
    """Raw tokens, unique in each task, unique in the file, and had no prefix broken."""
    raw, rows = inspection.trajectories.raw_tokens, inspection.forest.rows

    def stage(name: str, value: int, before: int, note: str) -> Bar:
        text = count(value) if value == raw else f"{count(value)} · {times(raw / value)}"
        return Bar(name=name, value=value, text=text, note=note, before=before)

    bars = [stage("Raw tokens", raw, 0, "every trajectory by itself")]
    if inspection.task_field is not None:
        note = f"−{count(raw - inspection.task_rows)} tokens"
        bars.append(stage("Unique in each task", inspection.task_rows, raw, note))
    before = int(bars[-1].value)
    bars.append(stage("Unique in the file", rows, before, f"−{count(before - rows)} tokens"))
    cost = inspection.breaks.cost_rows
    if cost:
        note = f"−{count(cost)} tokens, if no prefix had broken"
        bars.append(stage("Unique without breaks", rows - cost, rows, note))
    return bars


def _tasks(inspection: Inspection) -> Markup:
    if inspection.task_field is None:
        return section(
            "Tasks", "The file has no field that tells tasks apart (group_id or an alias)."
        )
    tasks = inspection.tasks
    bars = [
        Bar(
            name=f"task {task.name}" if task.name.isdigit() else shortened(task.name),
            value=task.compression,
            text=times(task.compression),
            note=f"{counted(task.trajectories, 'trajectory', 'trajectories')}, "
            f"{short(task.raw_tokens)} raw tokens, {short(task.rows)} unique",
        )
        for task in tasks[:MOST_TASKS]
    ]
    explanation = f"Compression of each task by itself, by {inspection.task_field}; worst first."
    if len(tasks) > MOST_TASKS:
        explanation += f" {count(len(tasks) - MOST_TASKS)} more are in the table."
    columns = ("task", "compression", "rollouts", "trajectories", "raw tokens", "unique tokens")
    rows = [
        [
            shortened(task.name),
            times(task.compression),
            count(task.rollouts) if task.rollouts else "",
            count(task.trajectories),
            count(task.raw_tokens),
            count(task.rows),
            count(task.scored_tokens),
            count(task.longest),
        ]
        for task in tasks
    ]
    return section(
        "Tasks",
        explanation,
        bar_drawing(bars),
        table("Tasks as a table", (*columns, "scored tokens", "longest"), rows),
    )


def _breaks(inspection: Inspection) -> Markup:
    title, breaks = "Why prefixes break", inspection.breaks
    if breaks.rollout_field is None:
        return section(
            title, "The file has no field that tells rollouts apart (rollout_id or an alias)."
        )
    explanation = (
        f"Within a rollout, a trajectory should begin with all of an earlier one. "
        f"{count(breaks.extending)} of {count(breaks.pairs)} do."
    )
    if not breaks.classes:
        return section(title, explanation + " No prefix breaks.")
    explanation += (
        " The bars are the rows that each kind of break costs: rows computed again that would "
        "have been shared."
    )
    bars = [
        Bar(
            name=kind.kind,
            value=kind.cost_rows,
            text=f"{counted(kind.cost_rows, 'row')}, {counted(kind.count, 'break')}",
            note=BREAK_MEANINGS[kind.kind],
        )
        for kind in breaks.classes
    ]
    rows = [
        [kind.kind, count(kind.count), count(kind.cost_rows), BREAK_MEANINGS[kind.kind]]
        for kind in breaks.classes
    ]
    return section(
        title,
        explanation,
        bar_drawing(bars),
        table("Breaks as a table", ("kind", "breaks", "rows", "meaning"), rows),
        tag("div", *(_example(kind) for kind in breaks.classes), class_="examples"),
    )


def _example(kind: BreakClass) -> Markup:
    """One break with its text, or its token ids where no tokenizer is known."""
    example = kind.example
    where = (
        f"{example.previous.name}, then {example.following.name}, from token "
        f"{count(example.position)}: {counted(example.removed_tokens, 'token')} removed, "
        f"{count(example.inserted_tokens)} inserted, {count(example.found_again)} found again"
    )
    return tag(
        "figure",
        tag("h3", f"Example: {kind.kind}"),
        tag("figcaption", where),
        tag(
            "pre",
            _piece(example.before_text, example.before),
            tag("del", _piece(example.removed_text, example.removed), title="only before"),
            tag("ins", _piece(example.inserted_text, example.inserted), title="only after"),
        ),
    )


def _piece(text: str | None, ids: Sequence[int]) -> str:
    return (
        text if text is not None else " ".join(str(token) for token in ids) + (" " if ids else "")
    )


def _forest_shape(inspection: Inspection) -> Markup:
    forest, residues = inspection.forest, inspection.forest.fork_residues
    at_boundary = residues[0] / forest.forks if forest.forks else 0.0
    content = [
        facts(
            [
                ("trees", count(forest.roots)),
                ("segments", count(forest.segments)),
                ("forks", count(forest.forks)),
                ("most branches at a fork", count(forest.max_fan_out)),
                ("most forks on a path", count(forest.max_fork_depth)),
                ("chains of linear attention", count(forest.chains)),
                ("rounds", count(forest.rounds)),
                ("replay rows", count(forest.replay_rows)),
            ]
        )
    ]
    content += _depths(inspection.by_depth) + _fan_outs(inspection.by_fan_out)
    if forest.forks:
        content += [
            tag("h3", f"Forks by position modulo {inspection.chunk_size}"),
            column_drawing(
                f"Forks by position modulo {inspection.chunk_size}",
                f"{percent(at_boundary)} of the forks are at a chunk boundary, where nothing is "
                "replayed; even columns mean that positions are as good as random.",
                residues,
                f"position modulo {inspection.chunk_size}",
            ),
            table(
                "These forks as a table",
                ("position", "forks"),
                [[count(at), count(forks)] for at, forks in enumerate(residues)],
            ),
        ]
    return section("Shape of the forest", "", tag("div", *content, class_="stack"))


def _depths(classes: Sequence[SegmentClass]) -> list[Markup]:
    title, across = "Unique tokens by forks above them", "forks above"
    values = [0] * (1 + max(entry.number for entry in classes))
    for entry in classes:
        values[entry.number] = entry.rows
    most = max(values)
    deep = sum(number * rows for number, rows in enumerate(values)) / sum(values)
    summary = f"A unique token has {deep:.1f} forks above it on average."
    if most == values[0]:
        summary += f" {percent(most / sum(values))} have none."
    return [
        tag("h3", title),
        column_drawing(title, summary, values, across),
        _class_table(title, across, classes),
    ]


def _fan_outs(classes: Sequence[SegmentClass]) -> list[Markup]:
    title = "Segments by branches at their end"
    bars = [
        Bar(
            name="end of a trajectory" if not entry.number else f"{count(entry.number)} branches",
            value=entry.segments,
            text=counted(entry.segments, "segment"),
            note=f"{short(entry.rows)} unique tokens",
        )
        for entry in classes[:MOST_FAN_OUTS]
    ]
    if len(classes) > MOST_FAN_OUTS:
        rest = classes[MOST_FAN_OUTS:]
        bars.append(
            Bar(
                name=f"{count(rest[0].number)} to {count(rest[-1].number)} branches",
                value=sum(entry.segments for entry in rest),
                text=counted(sum(entry.segments for entry in rest), "segment"),
                note=f"{short(sum(entry.rows for entry in rest))} unique tokens",
            )
        )
    return [tag("h3", title), bar_drawing(bars), _class_table(title, "branches", classes)]


def _class_table(title: str, number: str, classes: Sequence[SegmentClass]) -> Markup:
    rows = [
        [
            count(entry.number),
            count(entry.segments),
            count(entry.rows),
            count(entry.raw_tokens),
            times(entry.compression),
        ]
        for entry in classes
    ]
    columns = (number, "segments", "unique tokens", "raw tokens", "compression")
    return table(f"{title} as a table", columns, rows)


def _tree(inspection: Inspection, batch: TrajectoryBatch) -> Markup:
    whole = MicroBatch(0, batch, sort_trajectories(batch), inspection.chunk_size)
    tasks = tasks_of(batch)
    overview, boxes = boxes_of(
        whole,
        MOST_IN_OVERVIEW,
        MOST_BOXES,
        task_of_trajectory=tasks.task_of_trajectory if tasks else None,
    )
    tree = Tree(name="the whole file", key=0, overview=overview, boxes=boxes)
    return section(
        "Rollout tree of the whole file",
        "Each box is a run of tokens without a fork; across are unique tokens, in the order that "
        "one microbatch of them all would have, down is the depth in the trajectory. Colour is "
        "the round in which linear attention would compute the chain. Click or press Enter to "
        "zoom in, click again or press Escape to zoom out.",
        tree_drawing([tree], tasks.names if tasks else ()),
        table("Boxes of the whole file", BOX_COLUMNS, box_table(overview)),
    )


def _trajectories(inspection: Inspection) -> Markup:
    found = inspection.trajectories
    longest = f"{found.longest.name}, {counted(found.longest.tokens, 'token')}"
    content = [
        facts(
            [
                ("longest", longest),
                ("median length", counted(round(found.median_length), "token")),
                ("equal to an earlier one", count(found.duplicates)),
                ("proper prefix of another", count(found.nested)),
                ("without a scored token", count(found.unscored)),
                (
                    f"over the capacity {count(inspection.capacity)}",
                    count(len(found.over_capacity)),
                ),
            ]
        )
    ]
    if found.over_capacity:
        rows = [[over.name, count(over.tokens)] for over in found.over_capacity]
        title = "Trajectories over the capacity"
        content.append(table(title, ("trajectory", "tokens"), rows, most=MOST_OVER_CAPACITY))
    return section("Trajectories", "", *content)
