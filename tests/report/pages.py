"""What tests ask of a report: parsed, it loads nothing and its drawings are well-formed."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

VOID = {"meta", "link", "br", "hr", "img", "input"}
LOADING = {"src", "href", "xlink:href", "action", "data", "poster", "srcset", "formaction"}


class Page(HTMLParser):
    """Elements with their attributes, the text outside scripts and styles, and unclosed tags."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.html = html
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.scripts: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == [], f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open[-1] == tag, f"</{tag}> closes {self._open[-1:]}"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        inside = self._open[-1] if self._open else ""
        if inside == "script":
            self.scripts.append(data)
        elif inside != "style":
            self.text.append(data)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def words(self) -> str:
        """All visible text, spaces normal and single."""
        return " ".join(" ".join(self.text).split())

    @property
    def tree_data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(next(s for s in self.scripts if s.startswith("{")))
        return found

    def drawings(self) -> list[ElementTree.Element]:
        """Every outermost svg element, parsed as XML."""
        found, depth, begin = [], 0, 0
        for match in re.finditer(r"<svg\b|</svg>", self.html):
            if match.group() == "</svg>":
                depth -= 1
                if depth == 0:
                    found.append(ElementTree.fromstring(self.html[begin : match.end()]))
            else:
                begin = match.start() if depth == 0 else begin
                depth += 1
        return found


def assert_self_contained(page: Page) -> None:
    for tag, attributes in page.elements:
        for name in LOADING & set(attributes):
            assert (attributes[name] or "").startswith(("data:", "#")), (tag, attributes)
        assert "http" not in (attributes.get("style") or "")
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
        assert tag not in {"iframe", "object", "embed", "base", "form"}
    code = page.html.replace('"http://www.w3.org/2000/svg"', "")  # a name, never loaded
    assert not re.search(r"(?:https?:)?//[\w-]+\.\w", code.split("<body>")[0])
    assert not re.search(r"fetch\(|XMLHttpRequest|import\(|@import|url\((?!#hatch)", code)


def assert_described(page: Page) -> None:
    """Every drawing has a name and a description, or is hidden from assistive technology."""
    for drawing in page.drawings():
        if drawing.get("aria-hidden") == "true":
            continue
        assert drawing.get("role") in {"img", "group"}
        for part in ("title", "desc"):
            text = drawing.findtext(part)
            assert text and text.strip(), ElementTree.tostring(drawing)[:200]
