"""HTML and SVG as strings that are escaped unless they are markup already.

Text reaches a page only through `tag`, so no name from a file can become an element.
"""

from __future__ import annotations

import re
from html import escape

_NO_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
_EMPTY = frozenset({"line", "rect", "circle", "path", "polyline", "meta", "link"})


class Markup(str):
    """A string that is markup: `tag` puts it into the page as it is."""

    __slots__ = ()


def tag(element: str, /, *children: str, **attributes: str | float | None) -> Markup:
    """One element. Children that are not Markup are escaped, and so are all attributes.

    `class_` is written `class`, `aria_label` is written `aria-label`; None leaves an attribute
    out. Numbers lose trailing zeros.
    """
    head = element
    for key, value in attributes.items():
        if value is not None:
            text = value if isinstance(value, str) else number(value)
            head += f' {key.rstrip("_").replace("_", "-")}="{_escaped(text)}"'
    if element in _EMPTY:
        return Markup(f"<{head}/>")
    return Markup(f"<{head}>{join(*children)}</{element}>")


def join(*children: str) -> Markup:
    """Children side by side, escaped where they are not Markup."""
    return Markup("".join(c if isinstance(c, Markup) else _escaped(c) for c in children))


def _escaped(text: str) -> str:
    """Text that no HTML or XML parser takes for anything else; what neither may hold as �."""
    return escape(_NO_TEXT.sub("\N{REPLACEMENT CHARACTER}", text))


def number(value: float) -> str:
    """A coordinate: at most three decimals, none for whole numbers."""
    text = f"{value:.3f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def share(part: float, whole: float) -> str:
    """A coordinate as a percentage of the drawing's width: drawings have no fixed width."""
    return f"{number(100 * part / whole if whole else 0)}%"
