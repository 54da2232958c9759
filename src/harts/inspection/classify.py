"""What kind of break it is: by the decoded text, or by what token ids alone can tell.

The first edit decides, since it is the one that broke the prefix. Without a tokenizer only what
the structure of the tokens shows is named; the rest is `unknown`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from harts.inspection.alignment import ANCHOR, Edit, Tokens
from harts.inspection.result import BreakKind

Decode = Callable[[Sequence[int]], str]
"""Token ids to text; never raises."""

REPEATED_PATTERN = 3
"""Breaks that must remove a run with the same first and last token to be called think blocks."""

OPENING = 4
"""Removed tokens among which a think block must open; line breaks may come first."""

SHORT_EDIT = 64
"""Tokens that a date or an id in the first prompt may take."""

COLLAPSED = 64
"""Tokens that must go, with little in their place, to be called a compaction."""

_DECODED = 400

_THINK = re.compile(r"</?think|\[/?THINK\]|</?reasoning|<\|channel\|>analysis|◁/?think▷", re.I)
_OPEN_THINK = re.compile(r"<think>\s*$|\[THINK\]\s*$|<\|channel\|>analysis\S*\s*$", re.I)
_TOOLS = re.compile(
    r"</?tools>|\"type\"\s*:\s*\"function\"|\"parameters\"\s*:|\"input_schema\"\s*:", re.I
)
_SUMMARY = re.compile(
    r"summar|compact|condens|truncat|omitted|collapsed|continued from a previous|old environment"
    r" output|clipped|elided",
    re.I,
)


@dataclass(frozen=True)
class Break:
    """One trajectory that does not begin with all of an earlier one of its rollout.

    previous, following: trajectories; old, new: their tokens. old_mask: loss mask of the
    previous. position: where they differ first. prompt: tokens before the first scored one of the
    rollout's first trajectory. edits: what happened to the old tokens from there on; empty where
    only identities differ.
    """

    previous: int
    following: int
    position: int
    old: Tokens
    new: Tokens
    old_mask: npt.NDArray[np.bool_]
    prompt: int
    edits: tuple[Edit, ...]

    def repeated_runs(self) -> list[tuple[int, int]]:
        """Runs [a, b) of the new tokens after the break that repeat old ones."""
        runs = []
        for place, edit in enumerate(self.edits):
            old_end = (
                self.edits[place + 1].old_begin if place + 1 < len(self.edits) else len(self.old)
            )
            if old_end > edit.old_end:
                runs.append((edit.new_end, edit.new_end + old_end - edit.old_end))
        return runs

    @cached_property
    def found_again(self) -> int:
        """New tokens after the break that repeat old ones."""
        return sum(b - a for a, b in self.repeated_runs())

    @property
    def changed(self) -> int:
        """Old tokens that are not found again."""
        return sum(edit.removed for edit in self.edits)


def classify(breaks: Sequence[Break], decode: Decode | None) -> list[BreakKind]:
    """The kind of each break, in order."""
    openings = _think_openings(breaks)
    return [_kind(found, openings, decode) for found in breaks]


def _kind(found: Break, openings: set[int], decode: Decode | None) -> BreakKind:
    if not found.edits:
        return "identity"
    edit = found.edits[0]
    if decode is None:
        return _kind_by_structure(found, edit, openings)
    return _kind_by_text(found, edit, decode)


def _kind_by_structure(found: Break, edit: Edit, openings: set[int]) -> BreakKind:
    if not openings.isdisjoint(found.old[edit.old_begin : edit.old_end][:OPENING].tolist()):
        return "think"
    if _is_lost(found):
        # a history that got shorter may have been summarised as well as rewound
        return "diverged" if len(found.new) >= len(found.old) else "unknown"
    if _is_short_change_of_prompt(found, edit):
        return "system prompt"
    if _is_collapsed(edit) and not _touches_scored(found, edit):
        return "compaction"
    return "unknown"


def _kind_by_text(found: Break, edit: Edit, decode: Decode) -> BreakKind:
    before = decode(found.old[max(0, edit.old_begin - 16) : edit.old_begin].tolist())
    removed = decode(_cut(found.old[edit.old_begin : edit.old_end]))
    inserted = decode(_cut(found.new[edit.new_begin : edit.new_end]))
    if _THINK.search(removed) or (edit.removed and _OPEN_THINK.search(before)):
        return "think"
    if _is_same_text(edit, removed, inserted):
        return "retokenised"
    is_in_prompt = edit.old_begin < found.prompt
    if is_in_prompt and (_TOOLS.search(removed) or _TOOLS.search(inserted)):
        return "tools"
    if _SUMMARY.search(inserted) and edit.removed > edit.inserted:
        return "compaction"
    if _is_lost(found):
        return "diverged"
    if _is_short_change_of_prompt(found, edit):
        return "system prompt"
    if _is_collapsed(edit):
        return "compaction"
    return "other"


def _is_same_text(edit: Edit, removed: str, inserted: str) -> bool:
    """Also where the last old tokens merged with what follows them, so that nothing closes."""
    if not (removed and inserted):
        return False
    if removed == inserted:
        return True
    return edit.removed <= SHORT_EDIT and not edit.closed and inserted.startswith(removed)


def _is_lost(found: Break) -> bool:
    """Whether next to nothing of many old tokens after the break is found again."""
    return found.changed > ANCHOR and found.found_again * 10 < found.changed


def _is_short_change_of_prompt(found: Break, edit: Edit) -> bool:
    """A few tokens before anything was generated, with most of the rest as it was."""
    return (
        edit.old_end <= found.prompt
        and max(edit.removed, edit.inserted) <= SHORT_EDIT
        and found.found_again >= found.changed
    )


def _is_collapsed(edit: Edit) -> bool:
    return edit.removed >= COLLAPSED and edit.removed >= 4 * edit.inserted


def _touches_scored(found: Break, edit: Edit) -> bool:
    return bool(found.old_mask[edit.old_begin : edit.old_end].any())


def _think_openings(breaks: Sequence[Break]) -> set[int]:
    """First tokens of the runs that break after break removes at generated turns.

    A template that strips think blocks takes out, with nothing in its place, a run between the
    same two tokens: generated itself, or right before generated tokens.
    """
    counts = Counter(signature for signature in map(_signature, breaks) if signature is not None)
    return {first for (first, _), count in counts.items() if count >= REPEATED_PATTERN}


def _signature(found: Break) -> tuple[int, int] | None:
    if not found.edits:
        return None
    edit = found.edits[0]
    if edit.inserted or not edit.removed or not edit.closed:
        return None
    if not found.old_mask[edit.old_begin : edit.old_end + 1].any():
        return None
    return int(found.old[edit.old_begin]), int(found.old[edit.old_end - 1])


def _cut(tokens: Tokens) -> list[int]:
    """Enough tokens to recognise a text; both ends of a long one."""
    if len(tokens) > 2 * _DECODED:
        tokens = np.concatenate([tokens[:_DECODED], tokens[-_DECODED:]])
    ids: list[int] = tokens.tolist()
    return ids
