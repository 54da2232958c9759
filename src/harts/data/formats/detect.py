"""Which format a file has, by its first bytes: magic numbers, then names in the first object."""

import re
from collections.abc import Sequence

from harts.data.aliases import PROMPT_NAMES, TOKEN_NAMES

HEAD_BYTES = 1 << 20
"""How much of a (decompressed) file is looked at."""

PARQUET_MAGIC = b"PAR1"
ZIP_MAGIC = b"PK\x03\x04"
LEGACY_TORCH_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."

_PARTS = re.compile(rb'"((?:[^"\\]|\\.)*)"(\s*:)?|[{}\[\]]')

_SIGNS: Sequence[tuple[str, Sequence[frozenset[str]]]] = (
    ("jsonl", [frozenset({name}) for name in (*TOKEN_NAMES, *PROMPT_NAMES)]),
    ("verifiers", [frozenset({"traces"}), frozenset({"nodes"})]),
    ("atif", [frozenset({"steps", "agent"}), frozenset({"steps", "schema_version"})]),
    ("agent-lightning", [frozenset({"event_type"})]),
    ("chat", [frozenset({"messages"}), frozenset({"messages_and_choices"})]),
    ("chat", [frozenset({"trajectories"})]),
    ("shapes", [frozenset({"seg", "traj"})]),
)
"""Format -> sets of names of which one is wholly there; the first that fits wins."""


def is_torch(head: bytes) -> bool:
    """Whether the bytes begin a file of torch.save, new (a zip) or legacy."""
    return head.startswith((ZIP_MAGIC, LEGACY_TORCH_MAGIC))


def json_format(head: bytes) -> str | None:
    """The format of JSON text by the names in its first object, or None when nothing tells."""
    names = names_of_first_object(head)
    for name, signs in _SIGNS:
        if any(sign <= names for sign in signs):
            return name
    return None


def names_of_first_object(head: bytes) -> frozenset[str]:
    """The keys of the first object (also the first of an array) as far as `head` shows them."""
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    outermost = 2 if text.startswith(b"[") else 1
    if not text.startswith((b"{", b"[")):
        return frozenset()
    names, depth = set(), 0
    for part in _PARTS.finditer(text):
        symbol = part[0]
        if symbol in b"{[":
            depth += 1
        elif symbol in b"}]":
            depth -= 1
            if depth < outermost:
                break
        elif part[2] and depth == outermost:
            names.add(part[1].decode("utf-8", "replace"))
    return frozenset(names)
