"""Writing a page: beside and renamed, and refused in one line where it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from harts.errors import ConfigError
from harts.report.markup import tag
from harts.report.page import page, table, write_page
from tests.report.pages import Page, assert_self_contained

IMAGES = Path(__file__).parents[2] / "docs" / "images"


def test_a_page_is_whole_and_loads_nothing() -> None:
    parsed = Page(page("A & B", "lead", tag("p", "text"), script=True))
    assert_self_contained(parsed)
    assert "A & B · harts" in parsed.words
    assert parsed.of("html") == [{"lang": "en"}]
    policy = next(m for m in parsed.of("meta") if m.get("http-equiv"))
    assert "default-src 'none'" in (policy["content"] or "")


def test_the_file_is_replaced_only_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    write_page("first", path)

    def fail(self: Path, target: Path) -> None:
        assert self.parent == target.parent
        assert self.read_text() == "second"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(ConfigError, match=r"report\.html: cannot be written \(No space left"):
        write_page("second", path)
    assert path.read_text() == "first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a directory; give the name of a file"):
        write_page("", tmp_path)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no folder .*absent; make it first"):
        write_page("", tmp_path / "absent" / "report.html")


def test_a_long_table_keeps_its_first_and_last_row_and_says_so() -> None:
    rows = [[str(i)] for i in range(1_000)]
    parsed = Page(table("numbers", ["n"], rows, most=10))
    assert "(10 of 1,000 rows)" in parsed.words
    cells = parsed.words.split("rows)")[1].split()
    assert cells[:2] == ["n", "0"]
    assert cells[-1] == "999"
    assert len(cells) == 11


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", ["plan", "inspect", "train"])
def test_the_screenshots_in_the_documents_are_small(name: str, theme: str) -> None:
    picture = IMAGES / f"report-{name}-{theme}.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size < 200_000
