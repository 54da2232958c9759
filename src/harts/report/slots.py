"""Microbatches over slots and replicas: one lane a replica, time (work) from left to right.

A slot ends when its heaviest microbatch does; what a lighter one leaves is idle time.
"""

from __future__ import annotations

import numpy as np

from harts.plan.step_plan import StepPlan
from harts.report.markup import Markup, share, tag
from harts.report.text import count, counted, percent, short
from harts.tree.order import Ints

MOST_DRAWN = 1_200
_LABEL_SHARE = 0.06  # of the width that a slot needs for its label


def slots_drawing(plan: StepPlan) -> Markup:
    """Lanes of work bars; at most MOST_DRAWN microbatches, from the first slot on."""
    work = work_of(plan)
    drawn = max(1, min(len(work), MOST_DRAWN // plan.replicas))
    lane = max(8, min(26, 400 // plan.replicas))
    ends = np.cumsum(work.max(axis=1)[:drawn])
    total = int(ends[-1])
    marks = []
    for slot in range(drawn):
        begin, heaviest = int(ends[slot] - work[slot].max()), int(work[slot].max())
        for replica in range(plan.replicas):
            marks += _bar(plan, work, slot, replica, begin, heaviest, total, lane)
    height = plan.replicas * lane
    area = tag(
        "svg",
        tag("title", "Microbatches by slot and replica"),
        tag("desc", _summary(plan, drawn)),
        *marks,
        *_slot_labels(work[:drawn], ends, total, height),
        class_="area slots",
        height=height + 40,
        role="img",
    )
    gutter = tag(
        "svg",
        *_replica_labels(plan.replicas, lane),
        class_="gutter axis",
        height=height + 40,
        aria_hidden="true",
    )
    return tag("figure", tag("div", gutter, area, class_="plot"), _caption(plan, drawn))


def work_of(plan: StepPlan) -> Ints:
    """Compact rows by slot and replica, int64 (slots, replicas)."""
    work = np.zeros((plan.num_slots, plan.replicas), np.int64)
    work[plan.slot_of_microbatch, plan.replica_of_microbatch] = plan.compact_tokens_of_microbatch
    return work


SLOT_COLUMNS = ("slot", "heaviest, rows", "mean, rows", "idle, rows", "imbalance")


def slot_table(plan: StepPlan) -> list[list[str]]:
    """One row a slot, the columns of SLOT_COLUMNS."""
    rows = []
    for slot, work in enumerate(work_of(plan)):
        heaviest, mean = int(work.max()), float(work.mean())
        idle = heaviest * len(work) - int(work.sum())
        rows.append(
            [count(slot), count(heaviest), count(mean), count(idle), percent(heaviest / mean - 1)]
        )
    return rows


def _bar(
    plan: StepPlan,
    work: Ints,
    slot: int,
    replica: int,
    begin: int,
    heaviest: int,
    total: int,
    lane: int,
) -> list[Markup]:
    rows, y = int(work[slot, replica]), replica * lane + 1
    here = (plan.slot_of_microbatch == slot) & (plan.replica_of_microbatch == replica)
    microbatch = int(np.flatnonzero(here)[0])
    title = f"slot {slot}, replica {replica}: {count(rows)} rows"
    bar = tag(
        "rect",
        tag("title", title),
        class_="bar",
        x=share(begin, total),
        width=share(rows, total),
        y=y,
        height=lane - 2,
        data_tree=str(microbatch),
    )
    if rows == heaviest:
        return [bar]
    idle = tag(
        "rect",
        class_="idle",
        x=share(begin + rows, total),
        width=share(heaviest - rows, total),
        y=y,
        height=lane - 2,
    )
    return [bar, idle]


def _slot_labels(work: Ints, ends: Ints, total: int, height: int) -> list[Markup]:
    """Slot and imbalance under every slot that is wide enough."""
    labels = []
    last = -1.0
    for slot, end in enumerate(ends.tolist()):
        heaviest = int(work[slot].max())
        middle = (end - heaviest / 2) / total
        if middle - last < 2 * _LABEL_SHARE and slot:
            continue
        last = middle
        imbalance = percent(heaviest / float(work[slot].mean()) - 1)
        x = share(middle, 1)
        labels.append(tag("text", f"slot {slot}", x=x, y=height + 16, text_anchor="middle"))
        if work.shape[1] > 1:
            labels.append(tag("text", imbalance, x=x, y=height + 32, text_anchor="middle"))
    return [tag("g", *labels, class_="axis")]


def _replica_labels(replicas: int, lane: int) -> list[Markup]:
    every = -(-14 // lane)
    return [
        tag("text", f"rep. {r}", x="100%", dx=-6, y=r * lane + lane / 2 + 4)
        for r in range(0, replicas, every)
    ]


def _summary(plan: StepPlan, drawn: int) -> str:
    text = (
        f"{counted(plan.num_microbatches, 'microbatch', 'microbatches')} in "
        f"{counted(plan.num_slots, 'slot')} on {counted(plan.replicas, 'replica')}"
    )
    if plan.replicas == 1:
        text += ": nothing waits for another replica."
    else:
        slot = plan.slot_imbalance
        text += (
            f"; the heaviest replica of a slot is {percent(slot['p50'])} over the slot's mean in "
            f"the median slot and {percent(slot['p95'])} at the 95th percentile; over the whole "
            f"step {percent(plan.step_imbalance)}."
        )
    if drawn < plan.num_slots:
        text += f" The first {counted(drawn, 'slot')} are drawn."
    return text


def _caption(plan: StepPlan, drawn: int) -> Markup:
    totals = work_of(plan).sum(axis=0)
    spread = (
        f" Replica totals run from {short(int(totals.min()))} to {short(int(totals.max()))} rows."
    )
    return tag("figcaption", _summary(plan, drawn) + (spread if plan.replicas > 1 else ""))
