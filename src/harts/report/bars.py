"""Labelled horizontal bars, and columns: text is the page's own, only the ink is SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harts.report.markup import Markup, number, share, tag
from harts.report.text import ticks

_COLUMN_HEIGHT = 150


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar. before: a pale bar up to this value, what was there before; hatched: the last
    part of `value` that is drawn hatched.
    """

    name: str
    value: float
    text: str
    note: str = ""
    before: float = 0.0
    hatched: float = 0.0


def bar_drawing(bars: Sequence[Bar]) -> Markup:
    """One line of text and one bar each, all to the same scale from zero."""
    whole = max(max(bar.value, bar.before) for bar in bars)
    return tag("ol", *(_row(bar, whole) for bar in bars), class_="bars")


def _row(bar: Bar, whole: float) -> Markup:
    ink = []
    if bar.before > bar.value:
        ink.append(_ink("before", bar.value, bar.before - bar.value, whole))
    ink.append(_ink("bar", 0, bar.value - bar.hatched, whole))
    if bar.hatched:
        ink.append(_ink("replay", bar.value - bar.hatched, bar.hatched, whole))
    return tag(
        "li",
        tag("span", bar.name, class_="name"),
        tag("span", bar.text, class_="value"),
        tag("span", bar.note, class_="note"),
        tag("svg", *ink, width="100%", height=12, aria_hidden="true"),
    )


def _ink(name: str, begin: float, length: float, whole: float) -> Markup:
    return tag(
        "rect", class_=name, x=share(begin, whole), width=share(length, whole), y=0, height=12
    )


def column_drawing(title: str, summary: str, values: Sequence[float], across: str) -> Markup:
    """One column for each value, numbered from 0; the tallest is labelled, the axis below."""
    tallest, size = max(values), len(values)
    marks = [
        tag(
            "rect",
            tag("title", f"{index}: {value:,.0f}"),
            class_="bar",
            x=share(index + 0.1, size),
            width=share(0.8, size),
            y=number(18 + _COLUMN_HEIGHT * (1 - value / tallest)),
            height=number(_COLUMN_HEIGHT * value / tallest),
        )
        for index, value in enumerate(values)
        if value
    ]
    peak = list(values).index(tallest)
    anchor = "start" if peak < size / 10 else "end" if peak > 0.9 * size else "middle"
    labels = [
        tag(
            "text",
            f"{tallest:,.0f}",
            x=share(peak + 0.5, size),
            y=12,
            text_anchor=anchor,
        )
    ]
    foot = 18 + _COLUMN_HEIGHT
    labels += [
        tag("text", f"{at:.0f}", x=share(at + 0.5, size), y=foot + 16, text_anchor="middle")
        for at in ticks(0, size - 1, 8)
        if float(at).is_integer()
    ]
    labels.append(tag("text", across, x="50%", y=foot + 34, text_anchor="middle"))
    base = tag("line", x1="0", x2="100%", y1=foot + 0.5, y2=foot + 0.5, class_="base")
    area = tag(
        "svg",
        tag("title", title),
        tag("desc", summary),
        *marks,
        base,
        tag("g", *labels, class_="axis"),
        class_="area",
        height=foot + 42,
        role="img",
    )
    return tag("figure", tag("div", area, class_="plot"), tag("figcaption", summary))
