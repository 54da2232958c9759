"""The rollout tree as an icicle: compact rows across, depth in tokens down.

Python draws one microbatch as it stands; the page's script draws any of them from the same
numbers, zoomed in. Widths are percentages, so the drawing fits any page.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from harts.report.boxes import Box, Boxes
from harts.report.markup import Markup, number, share, tag
from harts.report.text import count, counted, ticks

MOST_IN_OVERVIEW = 400
HEIGHT = 420
_AXIS = 40
_LEAST_REPLAY = 3  # pixels: replay is below one chunk, too little to see beside whole prompts
_COLOURED_ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class Tree:
    """One microbatch. name: as the list calls it; key: its microbatch id.

    overview: fewer boxes, drawn without a script and in the table. boxes: what zoom shows.
    """

    name: str
    key: int
    overview: Boxes
    boxes: Boxes


def tree_drawing(trees: Sequence[Tree], tasks: Sequence[str], *, start: int = 0) -> Markup:
    """The chooser, the drawing of trees[start], its key and the numbers for the script.

    tasks: names that `Box.task` points to.
    """
    first = trees[start]
    return tag(
        "div",
        _controls(trees, start),
        _plot(first),
        tag("p", _summary(first.overview), id="tree-note", aria_live="polite"),
        tag("noscript", tag("p", "Zoom and the choice of microbatches need scripts.")),
        _key(trees),
        tag("script", _data(trees, tasks, start), type="application/json", id="tree-data"),
        class_="tree",
        id="tree",
    )


def box_table(boxes: Boxes) -> list[list[str]]:
    """The boxes of a drawing as rows of numbers, the columns of BOX_COLUMNS."""
    return [
        [
            counted(box.segments, "segment") if box.segments > 1 else f"segment at {box.first:,}",
            count(box.depth),
            count(box.length),
            count(box.rows),
            count(box.trajectories),
            "several" if box.chain < 0 else count(box.chain),
            "several" if box.round < 1 else count(box.round),
            count(box.replay),
        ]
        for box in boxes.boxes
    ]


BOX_COLUMNS = (
    "box",
    "from token",
    "tokens deep",
    "rows with all below",
    "trajectories",
    "chain",
    "round",
    "replay rows",
)


def _controls(trees: Sequence[Tree], start: int) -> Markup:
    options = (
        tag("option", tree.name, value=str(i), selected="selected" if i == start else None)
        for i, tree in enumerate(trees)
    )
    chooser = tag("select", *options, id="tree-choice")
    label = tag("label", "Show ", chooser, hidden="hidden" if len(trees) == 1 else None)
    out = tag("button", "Zoom out", type="button", id="tree-out", disabled="disabled")
    # without a script neither could do anything
    return tag("div", label, out, class_="controls", id="tree-controls", hidden="hidden")


def _plot(tree: Tree) -> Markup:
    boxes = tree.overview
    marks = [_box_mark(box, boxes) for box in boxes.boxes]
    marks += [_replay_mark(box, boxes) for box in boxes.boxes if box.replay and box.segments == 1]
    labels = [_label(box, boxes) for box in boxes.boxes if _has_room(box, boxes)]
    area = tag(
        "svg",
        tag("title", f"Rollout tree of {tree.name}"),
        tag("desc", _summary(boxes)),
        _hatch(),
        tag("svg", *marks, *labels, width="100%", height=HEIGHT, id="tree-boxes"),
        tag("g", *_row_axis(boxes.num_rows), id="tree-row-axis", class_="axis"),
        class_="area",
        height=HEIGHT + _AXIS,
        tabindex="0",
        role="group",
        aria_label="Rollout tree. Arrow keys choose a box, Enter zooms in, Escape zooms out.",
        id="tree-area",
    )
    gutter = tag(
        "svg",
        *_depth_axis(boxes.deepest),
        class_="gutter axis",
        height=HEIGHT + _AXIS,
        aria_hidden="true",
        id="tree-depth-axis",
    )
    return tag("div", gutter, area, class_="plot")


def _hatch() -> Markup:
    line = tag("path", d="M-1 1L1 -1M0 6L6 0M5 7L7 5")
    pattern = tag(
        "pattern",
        line,
        id="hatch",
        width=6,
        height=6,
        patternUnits="userSpaceOnUse",
        class_="hatch",
    )
    return tag("defs", pattern)


def _box_mark(box: Box, boxes: Boxes) -> Markup:
    return tag(
        "rect",
        class_=class_of(box, wide=box.rows / boxes.num_rows > 0.004),
        x=share(box.first, boxes.num_rows),
        width=share(box.rows, boxes.num_rows),
        y=number(HEIGHT * box.depth / boxes.deepest),
        height=number(HEIGHT * box.length / boxes.deepest),
    )


def _replay_mark(box: Box, boxes: Boxes) -> Markup:
    height = max(_LEAST_REPLAY, HEIGHT * box.replay / boxes.deepest)
    return tag(
        "rect",
        class_="replay",
        x=share(box.first, boxes.num_rows),
        width=share(box.rows, boxes.num_rows),
        y=number(HEIGHT * box.depth / boxes.deepest - height),
        height=number(height),
    )


def class_of(box: Box, *, wide: bool) -> str:
    """The colour of a box: its round, and two shades so that neighbouring chains differ."""
    if box.round < 1:
        name = "many"
    else:
        name = f"r{min(box.round, _COLOURED_ROUNDS)}" + (" alt" if box.shade else "")
    return name + (" wide" if wide else "")


def _has_room(box: Box, boxes: Boxes) -> bool:
    """Whether a label fits even on a narrow page."""
    return box.rows > boxes.num_rows / 3 and HEIGHT * box.length > 40 * boxes.deepest


def _label(box: Box, boxes: Boxes) -> Markup:
    x, y = share(box.first + box.rows / 2, boxes.num_rows), HEIGHT * box.depth / boxes.deepest
    return tag(
        "text",
        f"{count(box.length)} tokens",
        x=x,
        y=number(y + 20),
        class_="in-box" + (" in-many" if box.round < 1 else ""),
    )


def _depth_axis(deepest: int) -> list[Markup]:
    marks = []
    for at in ticks(0, deepest, 6):
        y = max(10, HEIGHT * at / deepest + 4)  # the first one stays inside
        marks.append(tag("text", count(at), x="100%", dx=-6, y=number(y)))
    return [*marks, tag("text", "depth ↓", x="100%", dx=-6, y=HEIGHT + 34)]


def _row_axis(num_rows: int) -> list[Markup]:
    marks = []
    for at in ticks(0, num_rows, 4):
        anchor = "start" if not at else "end" if at > 0.95 * num_rows else "middle"
        marks.append(
            tag("text", count(at), x=share(at, num_rows), y=HEIGHT + 16, text_anchor=anchor)
        )
    return [*marks, tag("text", "compact rows →", x="50%", y=HEIGHT + 34, text_anchor="middle")]


def _summary(boxes: Boxes) -> str:
    segments = sum(box.segments for box in boxes.boxes)
    replay = sum(box.replay for box in boxes.boxes)
    text = (
        f"{counted(boxes.num_rows, 'compact row')} in {counted(segments, 'segment')}, "
        f"up to {count(boxes.deepest)} tokens deep; {counted(replay, 'replay row')}."
    )
    if boxes.together > 1:
        text += f" Neighbouring branches of fewer than {count(boxes.together)} rows are one box."
    return text


def _key(trees: Sequence[Tree]) -> Markup:
    drawn = [box for tree in trees for box in tree.boxes.boxes]
    most = max(box.round for tree in trees for box in (*tree.overview.boxes, *tree.boxes.boxes))
    entries = [
        _key_entry(f"r{k}", f"round {k}" + (" and later" if k == _COLOURED_ROUNDS < most else ""))
        for k in range(1, min(most, _COLOURED_ROUNDS) + 1)
    ]
    if any(box.replay for box in drawn):
        entries.append(_key_entry("replay", f"replay, drawn at least {_LEAST_REPLAY} pixels tall"))
    if any(box.round < 1 for tree in trees for box in tree.overview.boxes):
        entries.append(_key_entry("many", "several segments drawn together", "tree-many"))
    return tag("ul", *entries, class_="key")


def _key_entry(name: str, text: str, id_: str | None = None) -> Markup:
    swatch = tag("rect", width=14, height=14, class_=name)
    return tag("li", tag("svg", swatch, width=14, height=14, aria_hidden="true"), text, id=id_)


def _data(trees: Sequence[Tree], tasks: Sequence[str], start: int) -> Markup:
    """The numbers as JSON; no `<` in it, so that no name can end the element it stands in."""
    data = {
        "height": HEIGHT,
        "leastReplay": _LEAST_REPLAY,
        "rounds": _COLOURED_ROUNDS,
        "start": start,
        "tasks": list(tasks),
        "trees": [
            {
                "key": tree.key,
                "name": tree.name,
                "rows": tree.boxes.num_rows,
                "deepest": tree.boxes.deepest,
                "summary": _summary(tree.boxes),
                "boxes": [list(asdict(box).values()) for box in tree.boxes.boxes],
            }
            for tree in trees
        ],
    }
    return Markup(json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))
