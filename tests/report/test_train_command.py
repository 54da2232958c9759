"""`harts train` leaves report.html beside its metrics, however the run ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Run, assert_refused
from tests.report.pages import Page, assert_self_contained


@pytest.fixture
def config(tmp_path: Path, rollouts: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(
        f"""
[data]
path = "{rollouts}"
[plan]
capacity = 100
[model]
path = "tiny:llama"
[objective]
name = "sft"
[train]
steps = 3
[output]
dir = "{tmp_path / "run"}"
checkpoint_every = 1
"""
    )
    return path


def report(tmp_path: Path) -> str:
    parsed = Page((tmp_path / "run" / "report.html").read_text(encoding="utf-8"))
    assert_self_contained(parsed)
    return parsed.words


def test_a_run_and_its_resumption_are_reported(
    run_harts: Run, config: Path, tmp_path: Path
) -> None:
    outcome = run_harts("train", config)
    assert outcome.code == 0
    assert "report.html" in outcome.stdout
    assert "3 of 3 steps, finished" in report(tmp_path)
    run_harts("train", config, "train.steps=4", "--resume")
    assert "4 of 4 steps, finished" in report(tmp_path)


def test_an_interrupted_run_is_reported(
    run_harts: Run, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from harts.train import trainer

    save = trainer.save_checkpoint

    def interrupt(run_dir: Path, step: int, *others: object, **options: object) -> None:
        save(run_dir, step, *others, **options)  # type: ignore[arg-type]
        if step == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "save_checkpoint", interrupt)
    assert run_harts("train", config).code == 130
    assert "2 of 3 steps, 1 to go" in report(tmp_path)


def test_a_refused_run_leaves_the_report_alone(
    run_harts: Run, config: Path, tmp_path: Path
) -> None:
    run_harts("train", config)
    path = tmp_path / "run" / "report.html"
    path.write_text("as it was")
    assert_refused(run_harts("train", config), "holds a run of 3 steps")
    assert path.read_text() == "as it was"


def test_a_report_that_cannot_be_written_does_not_lose_the_run(
    run_harts: Run, config: Path, tmp_path: Path
) -> None:
    (tmp_path / "run" / "report.html").mkdir(parents=True)
    outcome = run_harts("train", config, "--json")
    assert outcome.code == 0
    assert outcome.json["step"] == 3
    assert "harts: no report: " in outcome.stderr
    assert "is a directory" in outcome.stderr
