"""Why prefixes break: rollouts broken on purpose are told apart, counted and priced."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from harts.data.read import read
from harts.data.trajectory import TrajectoryBatch
from harts.inspection.inspect import inspect_batch
from harts.inspection.result import BREAK_MEANINGS, BreakKind, Breaks

FOLDER = Path(__file__).parents[3] / "shared" / "rollouts" / "tokens"

needs_real_files = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="no real rollouts beside this checkout"
)

# one letter a token, so that text and ids are easy to compare; two ids spell the same "ab"
AB, THINK, END_THINK = 300, 301, 302
WORDS = {AB: "ab", THINK: "<think>", END_THINK: "</think>"}


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def decode(tokens: Sequence[int]) -> str:
    return "".join(WORDS.get(token) or chr(token) for token in tokens)


def words(seed: int, count: int = 200) -> list[int]:
    """Text in which no eight letters repeat."""
    return [97 + int(n) for n in np.random.default_rng(seed).integers(0, 26, count)]


Turn = tuple[list[int], list[int]]
"""Prompt and generated tokens of one step."""


def breaks_of(rollouts: Sequence[Sequence[Turn]], *, with_text: bool) -> Breaks:
    rows = [
        {
            "input_ids": prompt + reply,
            "loss_mask": [0] * len(prompt) + [1] * len(reply),
            "group_id": "task",
            "rollout_id": number,
        }
        for number, steps in enumerate(rollouts)
        for prompt, reply in steps
    ]
    batch = TrajectoryBatch.from_rows(rows)
    return inspect_batch(batch, decode=decode if with_text else None).breaks


SYSTEM, USER = words(0, 90), words(1, 60)


def appended() -> list[Turn]:
    first = SYSTEM + USER
    second = first + words(2) + words(3)
    return [(first, words(2)), (second, words(4)), (second + words(4) + words(5), words(6))]


def think_stripped() -> list[Turn]:
    """Every reply opens with a think block that the next prompt leaves out."""
    prompt, steps = SYSTEM + USER, []
    for turn in range(4):
        thought = [THINK, *words(50 + turn, 9), END_THINK]
        steps.append((prompt, thought + words(60 + turn, 40)))
        prompt = prompt + words(60 + turn, 40) + words(70 + turn, 30)
    return steps


def retokenised() -> list[Turn]:
    """The reply has one token for `ab`, the next prompt two."""
    reply = [*words(7, 20), AB, *words(8, 50)]
    again = words(7, 20) + ids("ab") + words(8, 50)
    return [(SYSTEM + USER, reply), (SYSTEM + USER + again + words(9), words(10))]


def merged_at_the_end() -> list[Turn]:
    """The last token of the reply and the first of what follows become one."""
    reply = words(7, 20) + ids("a")
    return [
        (SYSTEM + USER, reply),
        (SYSTEM + USER + words(7, 20) + [AB] + words(9), words(10)),
    ]


def dated() -> list[Turn]:
    """The first message holds a clock."""
    prompts = [SYSTEM[:40] + ids(f"12:0{n}") + SYSTEM[40:] + USER for n in range(3)]
    history = words(11)
    return [
        (prompts[0], history),
        (prompts[1] + history + words(12), words(13)),
        (prompts[2] + history + words(12) + words(13), words(14)),
    ]


def tools_changed() -> list[Turn]:
    tool = ids('{"type": "function", "name": "extra", "parameters": {}}')
    first, second = SYSTEM[:50] + SYSTEM[50:] + USER, SYSTEM[:50] + tool + SYSTEM[50:] + USER
    return [(first, words(15)), (second + words(15) + words(16), words(17))]


def compacted() -> list[Turn]:
    """A long history makes way for a summary; the last messages stay."""
    history, recent = words(18, 600), words(19, 80)
    summary = ids("summary of it")
    return [
        (SYSTEM + USER + history + recent, words(20, 30)),
        (SYSTEM + USER + summary + recent + words(20, 30) + words(21), words(22)),
    ]


def rewound() -> list[Turn]:
    return [
        (SYSTEM + USER + words(23), words(24)),
        (SYSTEM + USER + words(25, 500), words(26)),
    ]


def edited() -> list[Turn]:
    """A tool result of the history reads otherwise: none of the known causes."""
    history = words(27, 100)
    changed = history[:50] + words(28, 30) + history[60:]
    first = SYSTEM + USER
    return [
        (first, words(29)),
        (first + words(29) + history, words(30)),
        (first + words(29) + changed + words(30) + words(31), words(32)),
    ]


CASES: list[tuple[Callable[[], list[Turn]], BreakKind, BreakKind]] = [
    (think_stripped, "think", "think"),
    (retokenised, "retokenised", "unknown"),
    (merged_at_the_end, "retokenised", "unknown"),
    (dated, "system prompt", "system prompt"),
    (tools_changed, "tools", "system prompt"),
    (compacted, "compaction", "compaction"),
    (rewound, "diverged", "diverged"),
    (edited, "other", "unknown"),
]


@pytest.mark.parametrize(
    ("make", "with_text", "without"), CASES, ids=lambda v: getattr(v, "__name__", v)
)
def test_each_cause_is_told_by_its_text_and_by_its_structure(
    make: Callable[[], list[Turn]], with_text: BreakKind, without: BreakKind
) -> None:
    for kind, has_text in ((with_text, True), (without, False)):
        found = breaks_of([make()], with_text=has_text)
        assert [entry.kind for entry in found.classes] == [kind]
        assert kind in BREAK_MEANINGS


def test_generated_tokens_that_go_once_are_not_taken_for_the_first_prompt() -> None:
    """One thought goes together with the last token of the prompt; ids alone cannot tell."""
    prompt = SYSTEM + USER
    steps = [
        ([*prompt, 10], [THINK, *words(51, 9), END_THINK, *words(52, 60)]),
        (prompt + words(52, 60) + words(53), words(54)),
    ]
    found = breaks_of([steps], with_text=False)
    assert [(entry.kind, entry.cost_rows) for entry in found.classes] == [("unknown", 60)]


def test_steps_that_extend_the_one_before_do_not_break() -> None:
    found = breaks_of([appended(), appended()[::-1]], with_text=True)
    assert (found.pairs, found.extending, found.count) == (4, 4, 0)
    assert found.cost_rows == 0


def test_an_interleaved_subagent_does_not_break_its_rollout() -> None:
    def elsewhere(part: list[int]) -> list[int]:
        return [token + 400 for token in part]

    main, other = appended(), [(elsewhere(p), elsewhere(r)) for p, r in appended()]
    steps = [step for pair in zip(main, other, strict=True) for step in pair]
    found = breaks_of([steps], with_text=True)
    assert [(entry.kind, entry.count) for entry in found.classes] == [("diverged", 1)]


def test_rollouts_are_never_compared_with_each_other() -> None:
    found = breaks_of([rewound()[:1], rewound()[1:]], with_text=True)
    assert found.pairs == 0


def test_stripped_thoughts_cost_the_replies_that_are_computed_again() -> None:
    found = breaks_of([think_stripped()], with_text=False)
    assert (found.pairs, found.count) == (3, 3)
    assert found.cost_rows == 3 * 40


def test_a_clock_costs_the_rest_of_every_prompt() -> None:
    found = breaks_of([dated()], with_text=True)
    after = len(SYSTEM) - 40 + len(USER) + 200  # the system prompt's rest, the user, one reply
    assert found.count == 2
    assert found.cost_rows == after + (after + 2 * 200)


def test_rows_that_two_rollouts_lose_together_count_once() -> None:
    one = breaks_of([dated()], with_text=True)
    two = breaks_of([dated(), dated()], with_text=True)
    assert two.count == 2 * one.count
    assert two.cost_rows == one.cost_rows


def test_an_example_shows_both_sides() -> None:
    example = breaks_of([retokenised()], with_text=True).classes[0].example
    assert (example.removed, example.removed_text) == ((AB,), "ab")
    assert (example.inserted, example.inserted_text) == (tuple(ids("ab")), "ab")
    assert example.position == len(SYSTEM) + len(USER) + 20
    assert example.before == tuple((SYSTEM + USER + words(7, 20))[-24:])
    assert example.found_again == 50
    assert (example.previous.index, example.following.index) == (0, 1)
    assert breaks_of([retokenised()], with_text=False).classes[0].example.removed_text is None


def test_other_identities_are_a_break_of_their_own() -> None:
    rows = [
        {"input_ids": [1, 2, 3, *tail], "loss_mask": [0] * (3 + len(tail)), "rollout_id": 0}
        | {"identity": [0, mark, mark, *[mark] * len(tail)]}
        for mark, tail in ((0, []), (5, [4]))
    ]
    found = inspect_batch(TrajectoryBatch.from_rows(rows)).breaks
    assert [(entry.kind, entry.cost_rows) for entry in found.classes] == [("identity", 2)]


@needs_real_files
def test_what_stripped_thoughts_cost_is_what_the_plain_template_saves() -> None:
    """The same conversations without think blocks need exactly the lost rows less."""
    plain, stripped = (
        inspect_batch(read(FOLDER / f"tau_airline_step_{name}.jsonl.xz"))
        for name in ("plain", "qwen3")
    )
    assert plain.breaks.count == 0
    assert plain.breaks.extending == plain.breaks.pairs == 205
    assert [(e.kind, e.count) for e in stripped.breaks.classes] == [("think", 205)]
    thoughts = stripped.trajectories.scored_tokens - plain.trajectories.scored_tokens
    assert stripped.breaks.cost_rows == stripped.forest.rows - plain.forest.rows - thoughts


@needs_real_files
def test_thoughts_of_the_real_sessions_are_recognised_without_a_tokenizer() -> None:
    found = inspect_batch(read(FOLDER / "claude_code_step_qwen3.jsonl.xz")).breaks
    assert [(entry.kind, entry.count) for entry in found.classes] == [("think", 56)]
