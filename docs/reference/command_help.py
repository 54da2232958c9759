"""In a page, `<!-- help: plan -->` becomes the help text of `harts plan` (a hook of mkdocs.yml)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

_WIDTH = "92"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs with the text of each page."""
    return re.sub(r"<!-- help: ([a-z]+) -->", lambda found: _help_of(found[1]), markdown)


def _help_of(command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "harts.cli.main", command, "--help"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"COLUMNS": _WIDTH},
    )
    return f"```text\n{done.stdout}```"
