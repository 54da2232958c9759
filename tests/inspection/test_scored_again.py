"""Tokens that several trajectories of one rollout score, against sets of prefixes; named cases."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harts.cli.main import main
from harts.data.trajectory import TrajectoryBatch
from harts.inspection.inspect import inspect_batch
from tests.strategies import token_trees

Step = tuple[list[int], list[int]]
"""Tokens and mask of one trajectory."""

FIRST: Step = ([1, 2, 3, 4], [0, 0, 1, 1])
BOTH_TURNS: Step = ([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1])
SECOND_TURN: Step = ([1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 1])
OTHER_PROMPT: Step = ([9, 2, 3, 4], [0, 0, 1, 1])


def rows_of(steps: list[Step], names: list[tuple[object, object]]) -> list[dict[str, object]]:
    return [
        {"input_ids": tokens, "loss_mask": mask, "group_id": group, "rollout_id": rollout}
        for (tokens, mask), (group, rollout) in zip(steps, names, strict=True)
    ]


SAME = ("t", 0)
CASES = {
    "two steps score the first turn": ([FIRST, BOTH_TURNS], [SAME, SAME], 2),
    "three score it, each token counts once": ([FIRST, BOTH_TURNS, FIRST], [SAME] * 3, 2),
    "a copy": ([BOTH_TURNS, BOTH_TURNS], [SAME, SAME], 3),
    "each step scores its own turn": ([FIRST, SECOND_TURN], [SAME, SAME], 0),
    "another rollout": ([FIRST, BOTH_TURNS], [SAME, ("t", 1)], 0),
    "the same rollout id of another task": ([FIRST, BOTH_TURNS], [SAME, ("u", 0)], 0),
    "the same tokens after another prompt": ([FIRST, OTHER_PROMPT], [SAME, SAME], 0),
    "one trajectory": ([BOTH_TURNS], [SAME], 0),
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_scored_again_are_counted_within_a_rollout(case: str) -> None:
    steps, names, expected = CASES[case]
    found = inspect_batch(TrajectoryBatch.from_rows(rows_of(steps, names)))
    assert found.scored_again == expected
    assert found.to_dict()["scored_again"] == expected


def test_without_rollout_ids_nothing_is_scored_again() -> None:
    rows = [{"input_ids": tokens, "loss_mask": mask} for tokens, mask in (FIRST, BOTH_TURNS)]
    assert inspect_batch(TrajectoryBatch.from_rows(rows)).scored_again == 0


@given(token_trees(), st.data())
def test_tokens_scored_again_are_prefixes_scored_by_several(
    paths: list[list[int]], data: st.DataObject
) -> None:
    masks = [[0, *(data.draw(st.integers(0, 1)) for _ in path[1:])] for path in paths]
    rollouts = [data.draw(st.integers(0, 1)) for _ in paths]
    rows = rows_of(list(zip(paths, masks, strict=True)), [("t", n) for n in rollouts])
    times = Counter(
        (rollout, tuple(path[: place + 1]))
        for path, mask, rollout in zip(paths, masks, rollouts, strict=True)
        for place, bit in enumerate(mask)
        if bit
    )
    found = inspect_batch(TrajectoryBatch.from_rows(rows))
    assert found.scored_again == sum(n > 1 for n in times.values())


@pytest.mark.parametrize(
    ("steps", "line"),
    [
        (
            [FIRST, BOTH_TURNS],
            "scored again       2 tokens are scored in several trajectories of the same rollout: "
            "each counts as often; mask them in all but one",
        ),
        ([FIRST, SECOND_TURN], None),
    ],
    ids=["twice", "once"],
)
def test_the_command_says_so_in_one_line_and_only_then(
    steps: list[Step],
    line: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of(steps, [SAME, SAME])))
    assert main(["inspect", str(path)]) == 0
    lines = [text for text in capsys.readouterr().out.splitlines() if "scored again" in text]
    assert lines == ([] if line is None else [line])
