"""Small line charts of one value by step: the line, its range and its last value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harts.report.markup import Markup, number, share, tag
from harts.report.text import count, figure, ticks, with_unit

HEIGHT = 110
MOST_POINTS = 480
_WIDTH = 1000  # of the stretched drawing inside, whatever the page's width


@dataclass(frozen=True, kw_only=True)
class Curve:
    """values at steps, both (n,); values may be NaN or infinite. unit is written after values."""

    name: str
    unit: str
    steps: Sequence[int]
    values: Sequence[float]


def curve_drawing(curve: Curve) -> Markup:
    """One chart with its name and last value above it."""
    finite = [(s, v) for s, v in zip(curve.steps, curve.values, strict=True) if math.isfinite(v)]
    heading = tag(
        "header", tag("h3", curve.name), tag("span", with_unit(curve.values[-1], curve.unit))
    )
    if not finite:
        return tag("figure", heading, tag("figcaption", "no finite value"))
    low, high = min(v for _, v in finite), max(v for _, v in finite)
    low, high = (low, high) if high > low else (low - abs(low) - 1, high + abs(high) + 1)
    first, last = curve.steps[0], curve.steps[-1]
    summary = _summary(curve, finite)
    step, value = finite[-1]
    area = tag(
        "svg",
        tag("title", curve.name),
        tag("desc", summary),
        *_grid(low, high),
        tag(
            "svg",
            tag("path", class_="line", d=_path(curve, low, high)),
            width="100%",
            height=HEIGHT,
            viewBox=f"0 0 {_WIDTH} {HEIGHT}",
            preserveAspectRatio="none",
        ),
        tag(
            "circle",
            class_="dot",
            cx=share(step - first, last - first),
            cy=number(_y(value, low, high)),
            r=3,
        ),
        tag("g", *_step_axis(first, last), class_="axis"),
        class_="area",
        height=HEIGHT + 24,
        role="img",
    )
    gutter = tag(
        "svg",
        *_value_axis(low, high),
        class_="gutter axis",
        height=HEIGHT + 24,
        aria_hidden="true",
    )
    missing = len(curve.values) - len(finite)
    notes = [tag("figcaption", f"{count(missing)} values are not finite")] if missing else []
    return tag("figure", heading, tag("div", gutter, area, class_="plot"), *notes)


def thinned(values: Sequence[float], most: int) -> list[int]:
    """Places to draw, at most `most` and ascending: the least and the greatest of equal parts.

    So no spike is lost. The first and the last place are always there.
    """
    size = len(values)
    if size <= most:
        return list(range(size))
    parts = (most - 2) // 2
    kept = {0, size - 1}
    for part in range(parts):
        places = range(part * size // parts, (part + 1) * size // parts)
        finite = [i for i in places if math.isfinite(values[i])]
        if finite:
            kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
        else:
            kept.add(places[0])
    return sorted(kept)[:most]


def _path(curve: Curve, low: float, high: float) -> str:
    first, last = curve.steps[0], curve.steps[-1]
    pieces, pen_down = [], False
    for i in thinned(curve.values, MOST_POINTS):
        if not math.isfinite(curve.values[i]):
            pen_down = False
            continue
        x = _WIDTH * (curve.steps[i] - first) / max(1, last - first)
        pieces.append(
            f"{'L' if pen_down else 'M'}{x:.0f} {number(round(_y(curve.values[i], low, high), 1))}"
        )
        pen_down = True
    return "".join(pieces)


def _y(value: float, low: float, high: float) -> float:
    """Pixels from the top; a margin keeps the line off the edges."""
    return 6 + (HEIGHT - 12) * (high - value) / (high - low)


def _grid(low: float, high: float) -> list[Markup]:
    heights = [number(round(_y(at, low, high)) + 0.5) for at in ticks(low, high, 4)]
    return [tag("line", class_="grid", x1="0", x2="100%", y1=y, y2=y) for y in heights]


def _value_axis(low: float, high: float) -> list[Markup]:
    at = ticks(low, high, 4)
    step = at[1] - at[0] if len(at) > 1 else 0.0
    return [
        tag("text", _tick(v, step), x="100%", dx=-6, y=number(_y(v, low, high) + 4)) for v in at
    ]


def _tick(value: float, step: float) -> str:
    """With as many decimals as the step between ticks needs."""
    for factor, prefix in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= 10 * factor or (prefix != " k" and abs(value) >= factor):
            return f"{value / factor:.4g}{prefix}"
    if not step or step < 1e-6:
        return figure(value)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return f"{value:,.{decimals}f}".replace("-", "\N{MINUS SIGN}")


def _step_axis(first: int, last: int) -> list[Markup]:
    marks = [tag("text", f"step {count(first)}", x="0", y=HEIGHT + 18)]
    if last > first:
        marks.append(tag("text", count(last), x="100%", y=HEIGHT + 18, text_anchor="end"))
    return marks


def _summary(curve: Curve, finite: list[tuple[int, float]]) -> str:
    least, most = min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])
    return (
        f"From {with_unit(finite[0][1], curve.unit)} at step {count(finite[0][0])} to "
        f"{with_unit(finite[-1][1], curve.unit)} at step {count(finite[-1][0])}; least "
        f"{figure(least[1])} at step {count(least[0])}, most {figure(most[1])} at step "
        f"{count(most[0])}."
    )
