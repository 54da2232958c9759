"""Code blocks of the documentation: found, run in order, and what they print compared.

    ```python    runs in one namespace a page        ```sh    runs in bash
    ```text      behind one of these: what it prints
    ```console, toml, json: shown only

A line of shown output must be printed, in order; `...` stands for anything, in a line or for lines.
A comment `<!-- varies: WORD, WORD -->` before the block names lines that differ from machine to
machine: of these only the words are compared.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"

_BLOCK = re.compile(
    r"^(?:<!-- varies: (?P<varies>[^>]*) -->\n)?```(?P<kind>\w+)[^\n]*\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block: its language, its text, its line in the page, words of lines that vary."""

    kind: str
    text: str
    line: int
    varies: tuple[str, ...] = ()


def blocks_of(page: str) -> list[Block]:
    """The fenced blocks of a page below docs/, in order."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return [
        Block(
            kind=found["kind"],
            text=found["text"],
            line=text.count("\n", 0, found.start("text")) + 1,
            varies=tuple(word.strip() for word in (found["varies"] or "").split(",") if word),
        )
        for found in _BLOCK.finditer(text)
    ]


class Session:
    """Runs the blocks of one page in a folder, the current one."""

    def __init__(self, page: str) -> None:
        self._page = page
        self._names: dict[str, Any] = {"__name__": "__main__"}
        self._printed = ""

    def run(self, block: Block) -> None:
        """Run a block, or compare a text block with what the last one printed."""
        place = f"{self._page}:{block.line}"
        if block.kind == "python":
            self._printed = self._python(block, place)
        elif block.kind == "sh":
            self._printed = _shell(block.text, place)
        elif block.kind == "text":
            problem = first_difference(block, self._printed)
            assert problem is None, f"{place}: {problem}; printed:\n{self._printed}"

    def _python(self, block: Block, place: str) -> str:
        code = compile("\n" * (block.line - 1) + block.text, str(DOCS / self._page), "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, self._names)
        return printed.getvalue()


def _shell(text: str, place: str) -> str:
    """The installed `harts` first in the path, one thread, stderr among what is printed."""
    bin_dir = str(Path(sys.executable).parent)
    environment = os.environ | {
        "PATH": bin_dir + os.pathsep + os.environ.get("PATH", ""),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, f"{place}: exit code {done.returncode}:\n{done.stdout}"
    return done.stdout


def first_difference(block: Block, printed: str) -> str | None:
    """What is shown but was not printed where it should be, or None."""
    lines = [line for line in printed.splitlines() if not line.startswith("[transformers]")]
    place, may_skip = 0, False
    for shown in block.text.splitlines():
        if shown == "...":
            may_skip = True
            continue
        pattern = _pattern(shown, block.varies)
        last = len(lines) if may_skip else place + 1
        found = next((n for n in range(place, last) if n < len(lines) and pattern(lines[n])), None)
        if found is None:
            return f"not printed here: {shown!r}"
        place, may_skip = found + 1, False
    return None if may_skip or place == len(lines) else f"also printed: {lines[place]!r}"


def _pattern(shown: str, varies: tuple[str, ...]) -> Callable[[str], object]:
    word = next((word for word in varies if shown.startswith(word)), None)
    if word is not None:
        return re.compile(re.escape(word)).match
    return re.compile(".*".join(map(re.escape, shown.split("...")))).fullmatch
