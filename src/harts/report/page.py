"""The frame of every report: one file that loads nothing, in light and dark, written in one go."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path

import harts
from harts.errors import ConfigError
from harts.report.markup import Markup, tag

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"

Cells = Sequence[str]


def page(title: str, lead: str, *sections: Markup, script: bool = False) -> str:
    """A whole HTML document. lead: one sentence under the title. script: add the tree's zoom."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        # belt and braces: even hostile markup could not load anything
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("link", rel="icon", href="data:,"),
        tag("title", f"{title} · harts"),
        tag("style", Markup(_asset("page.css"))),
    )
    body = tag(
        "body",
        tag("header", tag("h1", title), tag("p", lead, class_="lead")),
        tag("main", *sections),
        tag("footer", f"harts {harts.__version__}. This page is one file and loads nothing."),
        tag("script", Markup(_asset("tree.js"))) if script else "",
    )
    return "<!doctype html>\n" + tag("html", head, body, lang="en") + "\n"


def section(title: str, explanation: str, *content: Markup) -> Markup:
    """A heading, what the drawing shows and how to read it, and the drawing."""
    text = [tag("p", explanation, class_="explain")] if explanation else []
    return tag("section", tag("h2", title), *text, *content)


def headline(entries: Iterable[tuple[str, str, str]]) -> Markup:
    """The numbers to remember, as (name, value, note)."""
    return tag(
        "dl",
        *(
            tag("div", tag("dt", name), tag("dd", value), tag("dd", note, class_="note"))
            for name, value, note in entries
        ),
        class_="headline",
    )


def table(title: str, columns: Cells, rows: Sequence[Cells], *, most: int = 300) -> Markup:
    """A drawing's numbers, folded away; the first column names the row, the others hold numbers.

    Beyond `most` rows evenly spaced ones are kept, the first and the last among them.
    """
    shown = rows
    if len(rows) > most:
        shown = [rows[i * (len(rows) - 1) // (most - 1)] for i in range(most)]
        title += f" ({len(shown):,} of {len(rows):,} rows)"
    head = tag("tr", *(tag("th", name, scope="col") for name in columns))
    body = (
        tag("tr", tag("th", cells[0], scope="row"), *(tag("td", cell) for cell in cells[1:]))
        for cells in shown
    )
    inner = tag("table", tag("thead", head), tag("tbody", *body))
    return tag("details", tag("summary", title), tag("div", inner, class_="scroll", tabindex="0"))


def facts(rows: Iterable[tuple[str, str]]) -> Markup:
    """Names and values in two columns."""
    pairs = (tag("div", tag("dt", name), tag("dd", value)) for name, value in rows)
    return tag("dl", *pairs, class_="facts")


def check_destination(
    path: str | os.PathLike[str], *, made_from: str | os.PathLike[str] | None = None
) -> Path:
    """The path of a report, or ConfigError in one line; worth asking before long work.

    made_from: the file that is read, which a report must not replace.
    """
    file = Path(path)
    if file.is_dir():
        raise ConfigError(f"{file}: is a directory; give the name of a file, such as report.html")
    if not file.parent.is_dir():
        raise ConfigError(f"{file}: there is no folder {file.parent}; make it first")
    if made_from is not None and file.resolve() == Path(made_from).resolve():
        raise ConfigError(f"{file}: is the file to read; give the report another name")
    return file


def write_page(document: str, path: str | os.PathLike[str]) -> None:
    """Write beside `path` and rename, so that a reader never sees half a page."""
    file = check_destination(path)
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        try:
            part.write_text(document, encoding="utf-8")
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        problem = f"{file}: cannot be written ({error.strerror or error})"
        raise ConfigError(f"{problem}; check the folder and its free space") from None


def _asset(name: str) -> str:
    return files("harts.report").joinpath(name).read_text(encoding="utf-8")
