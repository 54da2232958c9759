"""The how-to pages with code that runs, and the formats they show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import harts
from harts.data.aliases import (
    FIELD_ALIASES,
    PROMPT_NAMES,
    RESPONSE_MASK_NAMES,
    RESPONSE_NAMES,
    TOKEN_NAMES,
)
from harts.data.read import FORMATS, detect
from tests.docs.pages import DOCS, Block, Session, blocks_of

pytest.importorskip("transformers")

PAGES = [f"how-to/{name}.md" for name in ("pytorch", "lora", "objective", "frameworks", "formats")]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_how_to_page_runs_and_prints_what_it_shows(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if page.endswith("lora.md"):
        pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    session = Session(page)
    for block in blocks_of(page):
        session.run(block)


class Bytes:
    """A tokenizer for the examples that hold text."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def examples() -> list[tuple[str, Block]]:
    """(section, block) of every JSON example of the page on formats, before the last section."""
    page = (DOCS / "how-to/formats.md").read_text(encoding="utf-8").splitlines()
    found = []
    for block in blocks_of("how-to/formats.md"):
        headings = [line for line in page[: block.line] if line.startswith("## ")]
        if block.kind in ("json", "jsonl") and headings[-1][3:] in FORMATS:
            found.append((headings[-1][3:], block))
    return found


@pytest.mark.parametrize(
    ("format", "block"), [pytest.param(f, b, id=f"{f}-line{b.line}") for f, b in examples()]
)
def test_every_example_of_a_format_is_recognised_and_read(
    format: str, block: Block, tmp_path: Path
) -> None:
    path = tmp_path / "example.jsonl"
    one_line = json.dumps(json.loads(block.text)) if block.kind == "json" else block.text
    path.write_text(one_line, encoding="utf-8")
    assert detect(path) == format
    options = {"tokenizer": Bytes(), "chat_template": "chatml"} if format == "chat" else {}
    batch = harts.read(path, **options)
    assert batch.loss_mask.any()


def test_every_format_has_a_section() -> None:
    page = (DOCS / "how-to/formats.md").read_text(encoding="utf-8")
    assert [name for name in FORMATS if f"\n## {name}\n" not in page] == []


def test_the_names_of_fields_on_the_page_are_those_that_are_read() -> None:
    page = (DOCS / "how-to/formats.md").read_text(encoding="utf-8")
    names = {*TOKEN_NAMES, *PROMPT_NAMES, *RESPONSE_NAMES, *RESPONSE_MASK_NAMES}
    for field in ("advantages", "reward", "old_log_probs", "ref_log_probs", "group_id"):
        names |= set(FIELD_ALIASES[field])
    assert sorted(name for name in names if f"`{name}`" not in page) == []
