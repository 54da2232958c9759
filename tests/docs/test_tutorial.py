"""The tutorial runs, block after block, as it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import Block, Session, blocks_of, first_difference

pytest.importorskip("transformers")


def test_every_block_of_the_tutorial_runs_and_prints_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    session = Session("tutorial.md")
    for block in blocks_of("tutorial.md"):
        session.run(block)


@pytest.mark.parametrize(
    ("shown", "varies", "differs"),
    [
        ("a 1\nb 2 and 3\nc\nd\n", (), False),
        ("b 2 and 3\na 1\nc\nd\n", (), True),
        ("a 1\n...\nd\n", (), False),
        ("a 1\nd\n", (), True),
        ("a 1\nb 2 and 3\n", (), True),
        ("a 1\n...\n", (), False),
        ("...\na 1\nc\n...\n", (), True),
        ("a 2\n...\n", (), True),
        ("a 2\n...\n", ("a",), False),
        ("...\nb ... 3\n...\n", (), False),
        ("...\nb ... 4\n...\n", (), True),
    ],
)
def test_shown_output_is_compared_line_by_line(
    shown: str, varies: tuple[str, ...], differs: bool
) -> None:
    block = Block(kind="text", text=shown, line=1, varies=varies)
    assert (first_difference(block, "a 1\nb 2 and 3\nc\nd\n") is not None) == differs
