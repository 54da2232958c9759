"""Rollout files, small and real, and a way to run the command line in process."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harts.cli.main import main

TOKEN_FILES = Path(__file__).parents[3] / "shared" / "rollouts" / "tokens"


@dataclass(frozen=True)
class Outcome:
    """What one run of the command line left behind."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        assert self.stdout.count("\n") == 1, f"not one line: {self.stdout!r}"
        return json.loads(self.stdout)


Run = Callable[..., Outcome]


@pytest.fixture
def run_harts(capsys: pytest.CaptureFixture[str]) -> Run:
    """`run_harts("plan", path, "--json")`, in this process."""

    def run(*words: object) -> Outcome:
        capsys.readouterr()
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


def assert_refused(outcome: Outcome, *parts: object) -> None:
    """Exit code 2, nothing on stdout, one line on stderr that holds every part."""
    assert outcome.code == 2
    assert outcome.stdout == ""
    assert outcome.stderr.startswith("harts: error: ")
    assert outcome.stderr.count("\n") == 1, f"not one line: {outcome.stderr!r}"
    for part in parts:
        assert str(part) in outcome.stderr, f"{part!r} is not in {outcome.stderr!r}"


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def rollouts(tmp_path: Path) -> Path:
    """Six trajectories over 24 token ids: forks, a nested prefix, a duplicate, a
    trajectory without scored positions."""
    trunk = [(7 * i) % 23 for i in range(17)]
    paths = [
        [*trunk, 1, 2, 3, 4, 5],
        [*trunk, 1, 2, 9, 23],
        trunk,
        trunk[:9] + list(range(10, 22)),
        trunk[:9] + list(range(10, 22)),
        [5, 6, 5, 6, 5, 6, 5, 6, 5, 6, 5, 6, 5, 6, 5, 6],
    ]
    masks = [[0] * 9 + [1] * (len(path) - 9) for path in paths]
    masks[2] = [0] * 17
    rows = [
        {"input_ids": path, "loss_mask": mask, "reward": 1.0}
        for path, mask in zip(paths, masks, strict=True)
    ]
    return write_rows(tmp_path / "rollouts.jsonl", rows)


@pytest.fixture
def tiny_tau() -> Path:
    path = TOKEN_FILES / "tiny_tau.jsonl.xz"
    if not path.exists():
        pytest.skip("the rollout files are not beside this checkout (../shared/rollouts)")
    return path
