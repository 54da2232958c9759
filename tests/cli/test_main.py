"""The command line as a whole: usage errors, exit codes, what is imported when."""

import subprocess
import sys
from pathlib import Path

import pytest

import harts
from harts.cli.main import main
from tests.cli.conftest import Run, assert_refused


def test_a_missing_command_is_one_line(run_harts: Run) -> None:
    assert_refused(run_harts(), "COMMAND", "see harts --help")


def test_an_unknown_command_lists_the_known_ones(run_harts: Run) -> None:
    assert_refused(run_harts("plam", "rollouts.jsonl"), "plam", "plan", "verify", "train", "doctor")


def test_help_and_version_go_to_stdout_with_code_zero(capsys: pytest.CaptureFixture[str]) -> None:
    for words, part in [
        (["--version"], harts.__version__),
        (["plan", "--help"], "--chunk-size"),
        (["verify", "--help"], "float64"),
        (["train", "--help"], "section.key=value"),
        (["doctor", "--help"], "--model"),
    ]:
        with pytest.raises(SystemExit) as stop:
            main(words)
        captured = capsys.readouterr()
        assert (stop.value.code, captured.err) == (0, "")
        assert part in captured.out


def test_an_interrupted_command_exits_with_130(
    run_harts: Run, rollouts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(path: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("harts.cli.plan.read_rollouts", interrupt)
    outcome = run_harts("plan", rollouts)
    assert (outcome.code, outcome.stdout) == (130, "")


def test_a_bug_keeps_its_traceback(
    run_harts: Run, rollouts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stumble(path: str) -> None:
        raise RuntimeError("not a user's error")

    monkeypatch.setattr("harts.cli.plan.read_rollouts", stumble)
    with pytest.raises(RuntimeError, match="not a user's error"):
        run_harts("plan", rollouts)


def test_a_missing_package_is_named_with_its_extra(
    run_harts: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def need_pydantic(args: object) -> int:
        raise ModuleNotFoundError("No module named 'pydantic'", name="pydantic")

    monkeypatch.setattr("harts.cli.doctor.run", need_pydantic)
    assert_refused(run_harts("doctor"), "pydantic", "pip install 'harts[cli]'")


def test_training_settings_may_stand_on_both_sides_of_an_option(
    run_harts: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr("harts.cli.train.run", lambda args: seen.append(args) or 0)
    words = ["train", "run.toml", "train.steps=3", "--resume", "plan.capacity=64", "--json"]
    assert run_harts(*words).code == 0
    assert seen[0].config == "run.toml"
    assert seen[0].overrides == ["train.steps=3", "plan.capacity=64"]
    assert seen[0].resume
    assert seen[0].json
    assert_refused(run_harts("train", "run.toml", "--restart"), "--restart", "harts train --help")


def test_the_installed_command_reports_errors_by_exit_code(tmp_path: Path) -> None:
    command = Path(sys.executable).with_name("harts")
    if not command.exists():
        pytest.skip("harts is not installed beside this python")
    done = subprocess.run(
        [command, "plan", tmp_path / "absent.jsonl", "--json"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("harts: error: ")
    assert done.stderr.count("\n") == 1


def test_planning_as_a_module_never_loads_torch(rollouts: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "harts.cli.main", "plan", rollouts, "--json"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith('{"trajectories": 6')
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "numpy" in imported
    assert not imported & {"torch", "transformers"}
