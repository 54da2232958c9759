"""The site is whole: strict build, nothing from outside, drawings for light and dark."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

import harts
from tests.docs.pages import DOCS

ROOT = DOCS.parent
DRAWINGS = sorted((DOCS / "assets").glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="the docs extra is not installed")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_pages_load_nothing_from_outside(site: Path) -> None:
    fetched = re.compile(
        r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//"""
        r"""|<link\b(?![^>]*rel=["']?canonical)[^>]*\bhref=["']?(?:https?:)?//"""
    )
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    assert [page.name for page in pages if fetched.search(page.read_text("utf-8"))] == []
    own_style = (site / "assets/site.css").read_text("utf-8")
    assert "http" not in own_style and "@import" not in own_style


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    anchors = set()
    for page in (site / "reference").rglob("*.html"):
        anchors |= set(re.findall(r'id="?([\w.]+)"?', page.read_text("utf-8")))
    names = [f"harts.{name}" for name in harts.__all__ if name not in ("__version__", "objectives")]
    names += [f"harts.objectives.{name}" for name in ("grpo", "dapo", "gspo", "ppo", "sft")]
    missing = [name for name in names if name not in anchors]
    assert [name for name in missing if f"harts.errors.{name.split('.')[-1]}" not in anchors] == []


@pytest.mark.parametrize("drawing", DRAWINGS, ids=lambda path: path.stem)
def test_a_drawing_has_a_text_alternative_and_no_fixed_colours(drawing: Path) -> None:
    svg = ElementTree.parse(drawing).getroot()
    title, description = svg.find(f"{SVG}title"), svg.find(f"{SVG}desc")
    assert title is not None and description is not None and description.text
    assert svg.get("aria-labelledby") == f"{title.get('id')} {description.get('id')}"
    text = drawing.read_text("utf-8")
    bare = re.findall(r"(?<!, )#[0-9a-f]{3,6}\b", text)
    assert bare == [], "colours are variables of the page, with a default"
    assert drawing.stat().st_size < 40_000


def test_fields_of_a_docstring_become_a_list() -> None:
    lists = _load(DOCS / "reference/field_lists.py", "griffe")
    text = (
        "Reads.\n\npath,\n  mode: what to open;\n  or not. size: bytes.\nother: prose. Raises it."
    )
    assert lists.with_lists(text, {"path", "mode", "size"}) == (
        "Reads.\n\n- `path`, `mode`: what to open; or not.\n- `size`: bytes. other: prose."
        "\n\nRaises it."
    )
    assert lists.with_lists(text, set()) == text
    assert lists.with_lists("tiny:<type> or `<type>`", set()) == "tiny:&lt;type> or `<type>`"


def _load(path: Path, needs: str) -> ModuleType:
    pytest.importorskip(needs, reason="the docs extra is not installed")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
