"""Docstrings name parameters and fields as `name: what it is` in running text; show them as a list.

Loaded by mkdocstrings (mkdocs.yml). A name begins an entry only if the object has a parameter or
member of that name, at the start of a line or sentence.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_AFTER = re.compile(r"(?<=[.)]) (?=Raises |Returns |[A-Z][A-Za-z]+Error: |Differentiable)")
"""Where the last entry of a list is over and the running text goes on."""


class FieldLists(griffe.Extension):
    """Rewrites the docstrings of a package once it is loaded."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Walk every module, class and function of the package."""
        pending: list[Any] = [pkg]
        while pending:
            found = pending.pop()
            pending += [member for member in found.members.values() if not member.is_alias]
            if found.docstring is not None:
                found.docstring.value = with_lists(found.docstring.value, _names_of(found))


def with_lists(text: str, names: set[str]) -> str:
    """The docstring with each `name: ...` of `names` as an entry of a Markdown list."""
    paragraphs = re.split(r"\n\s*\n", text)
    return "\n\n".join(_paragraph(_without_tags(p), names) for p in paragraphs)


def _names_of(found: Any) -> set[str]:
    names = {parameter.name for parameter in getattr(found, "parameters", [])}
    return names | (set(found.members) if found.is_class else set())


def _without_tags(text: str) -> str:
    """`<word>` outside of code is meant to be read, not to be a tag of HTML."""
    if text.startswith("    "):
        return text
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(p if p.startswith("`") else re.sub(r"<(?=\w)", "&lt;", p) for p in parts)


def _paragraph(text: str, names: set[str]) -> str:
    if not names or text.startswith("    "):
        return text
    known = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    begin = r"(?:^|(?<=\n)|(?<=[.;)] )|(?<=[.;)]\n)) *"
    entry = re.compile(rf"{begin}((?:{known})(?:,\s+(?:{known}))*): ")
    parts = entry.split(text)
    if len(parts) == 1:
        return text
    lead, rest = parts[0].strip(), parts[1:]
    entries = [
        f"- {_as_code(name)}: {' '.join(meaning.split()).rstrip(';')}"
        for name, meaning in zip(rest[::2], rest[1::2], strict=True)
    ]
    entries[-1], *after = _AFTER.split(entries[-1], maxsplit=1)
    return "\n\n".join([*([lead] if lead else []), "\n".join(entries), *after])


def _as_code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in re.split(r",\s+", names))
