"""The plan of a step as a page: what it saves, how even it is, and what its trees look like."""

from __future__ import annotations

import os

import numpy as np

from harts.plan.step_plan import StepPlan
from harts.report.bars import Bar, bar_drawing
from harts.report.boxes import boxes_of
from harts.report.markup import Markup
from harts.report.page import headline, page, section, table, write_page
from harts.report.slots import SLOT_COLUMNS, slot_table, slots_drawing
from harts.report.tasks import Tasks, tasks_of
from harts.report.text import count, counted, percent, seconds, short, times
from harts.report.tree import BOX_COLUMNS, MOST_IN_OVERVIEW, Tree, box_table, tree_drawing

MOST_TREES = 256
MOST_BOXES = 6_000
"""Over all trees of a page: each is about 40 bytes of it."""


def write_plan_report(
    plan: StepPlan, path: str | os.PathLike[str], *, source: str = "a batch"
) -> None:
    """Write the page of a plan. source: the file it was made from.

    Raises ConfigError where `path` cannot be written. O(C + V log C).
    """
    write_page(plan_page(plan, source=source), path)


def plan_page(plan: StepPlan, *, source: str) -> str:
    """The HTML of `write_plan_report`."""
    summary, tasks = plan.summary(), tasks_of(plan.batch)
    lead = (
        f"{source}: {counted(len(plan.batch), 'trajectory', 'trajectories')}"
        + (f" of {counted(len(tasks.names), 'task')}" if tasks else "")
        + f", capacity {count(plan.capacity)} rows, {counted(plan.replicas, 'replica')}, "
        f"chunks of {count(plan.chunk_size)}, planned in {seconds(plan.plan_seconds)}."
    )
    if len(plan.dropped):
        were = "trajectory was" if len(plan.dropped) == 1 else "trajectories were"
        lead += f" {count(len(plan.dropped))} {were} dropped: longer than the capacity."
    return page(
        "Plan of one step",
        lead,
        _headline(plan, summary["rounds"]["max"], summary["replay_tokens"]),
        _compression(plan, tasks, summary["replay_tokens"]),
        _microbatches(plan),
        _trees(plan, tasks),
        script=True,
    )


def _headline(plan: StepPlan, most_rounds: int, replay: int) -> Markup:
    slot = plan.slot_imbalance
    imbalance = (
        "imbalance of slots",
        percent(slot["p50"]),
        f"median; {percent(slot['p95'])} at the 95th percentile, "
        f"{percent(plan.step_imbalance)} over the step",
    )
    return headline(
        [
            (
                "compression",
                times(plan.compression),
                f"{short(plan.raw_tokens)} raw tokens in {short(plan.compact_tokens)} rows",
            ),
            (
                "microbatches",
                count(plan.num_microbatches),
                f"{counted(plan.num_slots, 'slot')} × {counted(plan.replicas, 'replica')}",
            ),
            *([imbalance] if plan.replicas > 1 else []),
            ("rounds", count(most_rounds), "at most, of linear attention in one microbatch"),
            (
                "replay",
                count(replay),
                f"rows, {percent(replay / plan.compact_tokens)} on top, in linear attention only",
            ),
        ]
    )


def _compression(plan: StepPlan, tasks: Tasks | None, replay: int) -> Markup:
    bars = compression_bars(plan, tasks, replay)
    rows = [[bar.name, bar.text, count(bar.value), bar.note] for bar in bars]
    return section(
        "From raw tokens to rows",
        "A token that several trajectories share as part of the same prefix is one row. Rows are "
        "lost again where one prefix is needed in several microbatches. Every layer computes the "
        "rows in microbatches; linear-attention layers start from the last chunk boundary above "
        "a fork, and take the rows between the two once more (replay).",
        bar_drawing(bars),
        table("These numbers as a table", ("stage", "shown as", "tokens or rows", "note"), rows),
    )


def compression_bars(plan: StepPlan, tasks: Tasks | None, replay: int) -> list[Bar]:
    """The stages raw, per task, whole step, microbatches, each beside the one before; then what
    replay adds in linear-attention layers.
    """
    raw, trie, compact = plan.raw_tokens, plan.trie_tokens, plan.compact_tokens

    def stage(name: str, value: int, before: int, note: str) -> Bar:
        text = count(value) if value == raw else f"{count(value)} · {times(raw / value)}"
        return Bar(name=name, value=value, text=text, note=note, before=before)

    bars = [stage("Raw tokens", raw, 0, "every trajectory by itself")]
    before = raw
    if tasks:
        per_task = tasks.rows(plan.order)
        bars.append(
            stage("Unique in each task", per_task, before, _change(per_task, before, "tokens"))
        )
        before = per_task
    note = _change(trie, before, "rows") + "; the least possible, if one microbatch held all"
    bars.append(stage("Unique in the step", trie, before, note))
    note = _change(compact, trie, "rows")
    note += ": prefixes that several microbatches need" if compact > trie else ": nothing twice"
    bars.append(stage("In microbatches", compact, trie, note))
    in_linear = compact + replay
    note = _change(in_linear, compact, "rows") + ": replay (hatched), which other layers do not see"
    bars.append(
        Bar(  # without a ratio: the compression of a step is that of the bar above
            name="Rows in linear-attention layers",
            value=in_linear,
            text=count(in_linear),
            note=note,
            before=compact,
            hatched=replay,
        )
    )
    return bars


def _change(now: int, before: int, unit: str) -> str:
    sign = "−" if now < before else "+"
    return f"{sign}{count(abs(now - before))} {unit}"


def _microbatches(plan: StepPlan) -> Markup:
    return section(
        "Microbatches by slot and replica",
        "Replicas work side by side, one lane each; the width of a bar is its compact rows. A "
        "slot is over when its heaviest microbatch is; orange is idle time. Click a bar to see "
        "its tree below.",
        slots_drawing(plan),
        table("Slots as a table", SLOT_COLUMNS, slot_table(plan)),
        table("Microbatches as a table", _COLUMNS, microbatch_table(plan)),
    )


_COLUMNS = (
    "microbatch",
    "slot",
    "replica",
    "rows",
    "of capacity",
    "trajectories",
    "segments",
    "chains",
    "rounds",
    "replay rows",
)


def microbatch_table(plan: StepPlan) -> list[list[str]]:
    """One row a microbatch in slot order, the columns of _COLUMNS."""
    parts = {mb.index: mb for r in range(plan.replicas) for mb in plan.microbatches(r)}
    rows = []
    for k in slot_order(plan):
        part = parts[k]
        rows.append(
            [
                count(k),
                count(int(plan.slot_of_microbatch[k])),
                count(int(plan.replica_of_microbatch[k])),
                count(part.num_rows),
                percent(part.num_rows / plan.capacity),
                count(len(part.trajectory_ids)),
                count(len(part.forest.parent)),
                count(len(part.calls.sequences)),
                count(part.calls.num_rounds),
                count(part.calls.replay_tokens),
            ]
        )
    return rows


def slot_order(plan: StepPlan) -> list[int]:
    """Microbatch ids by slot, then replica."""
    order: list[int] = np.lexsort((plan.replica_of_microbatch, plan.slot_of_microbatch)).tolist()
    return order


def _trees(plan: StepPlan, tasks: Tasks | None) -> Markup:
    trees = plan_trees(plan, tasks)
    explanation = (
        "Each box is a run of tokens without a fork. Across: compact rows in the order of "
        "memory, so a box spans every row that continues it. Down: depth in the trajectory. "
        "Colour is the round in which linear attention computes the chain, in two shades to "
        "tell neighbouring chains apart; hatched rows above a fork are replayed by its layers. "
        "Click or press Enter to zoom in, click again or press Escape to zoom out."
    )
    if len(trees) < plan.num_microbatches:
        explanation += f" The first {count(len(trees))} microbatches in slot order are here."
    return section(
        "Rollout tree of a microbatch",
        explanation,
        tree_drawing(trees, tasks.names if tasks else ()),
        table(f"Boxes of {trees[0].name}", BOX_COLUMNS, box_table(trees[0].overview)),
    )


def plan_trees(plan: StepPlan, tasks: Tasks | None) -> list[Tree]:
    """The trees of the first MOST_TREES microbatches in slot order."""
    shown = slot_order(plan)[:MOST_TREES]
    parts = {mb.index: mb for r in range(plan.replicas) for mb in plan.microbatches(r)}
    limit = _limit([len(parts[k].forest.parent) for k in shown], MOST_BOXES)
    trees = []
    for k in shown:
        overview, boxes = boxes_of(
            parts[k],
            min(limit, MOST_IN_OVERVIEW),
            limit,
            task_of_trajectory=tasks.task_of_trajectory if tasks else None,
        )
        name = (
            f"slot {plan.slot_of_microbatch[k]}, replica {plan.replica_of_microbatch[k]}: "
            f"{count(boxes.num_rows)} rows, "
            f"{counted(len(parts[k].trajectory_ids), 'trajectory', 'trajectories')}"
        )
        trees.append(Tree(name=name, key=k, overview=overview, boxes=boxes))
    return trees


def _limit(sizes: list[int], whole: int) -> int:
    """The largest bound on each size (at least 1) with which all together stay below `whole`."""
    left, ascending = whole, sorted(sizes)
    for place, size in enumerate(ascending):
        others = len(ascending) - place
        if size * others > left:
            return max(1, left // others)
        left -= size
    return max(ascending)
