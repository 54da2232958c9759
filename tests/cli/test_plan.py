"""`harts plan`: its numbers, its keys, its refusals."""

import sys
from pathlib import Path

import pytest

from harts.errors import PlanError
from tests.cli.conftest import Run, assert_refused, write_rows

KEYS = {
    "trajectories",
    "raw_tokens",
    "trie_tokens",
    "compact_tokens",
    "compression",
    "microbatches",
    "slots",
    "replicas",
    "slot_imbalance",
    "step_imbalance",
    "plan_seconds",
    "rounds",
    "replay_tokens",
}
UNIQUE = 17 + 5 + 2 + 12 + 16


def test_json_has_exactly_the_promised_keys(run_harts: Run, rollouts: Path) -> None:
    outcome = run_harts("plan", rollouts, "--json")
    assert outcome.code == 0
    assert set(outcome.json) == KEYS
    assert set(outcome.json["slot_imbalance"]) == {"p50", "p95"}
    assert set(outcome.json["rounds"]) == {"max", "mean"}
    assert outcome.stderr == ""


def test_one_microbatch_costs_the_trie(run_harts: Run, rollouts: Path) -> None:
    plan = run_harts("plan", rollouts, "--json").json
    raw = 22 + 21 + 17 + 21 + 21 + 16
    assert (plan["trajectories"], plan["raw_tokens"], plan["microbatches"]) == (6, raw, 1)
    assert plan["trie_tokens"] == plan["compact_tokens"] == UNIQUE
    assert plan["compression"] == pytest.approx(raw / UNIQUE)


def test_options_reach_the_plan(run_harts: Run, rollouts: Path) -> None:
    plan = run_harts(
        "plan", rollouts, "--capacity", 24, "--replicas", 2, "--chunk-size", 4, "--json"
    ).json
    assert plan["replicas"] == 2
    assert plan["microbatches"] == 2 * plan["slots"]
    assert plan["microbatches"] >= UNIQUE / 24
    assert plan["replay_tokens"] <= 3 * 6


def test_text_says_the_same_in_aligned_lines(run_harts: Run, rollouts: Path) -> None:
    outcome = run_harts("plan", rollouts)
    lines = outcome.stdout.splitlines()
    values = {line[:15].strip(): line[15:].strip() for line in lines}
    assert values["raw tokens"] == "118"
    assert values["compact rows"].startswith(f"{UNIQUE} ")
    assert values["compression"].startswith("2.27x")
    assert values["microbatches"] == "1 (1 slot x 1 replica)"


def test_the_plan_is_checked_independently(
    run_harts: Run, rollouts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(plan: object) -> None:
        raise PlanError("illegal plan: coverage: want one microbatch a trajectory")

    monkeypatch.setattr("harts.cli.plan.verify_plan", refuse)
    assert_refused(run_harts("plan", rollouts), "illegal plan")


def test_a_missing_file_is_named(run_harts: Run, tmp_path: Path) -> None:
    path = tmp_path / "absent.jsonl"
    assert_refused(run_harts("plan", path, "--json"), path, "no such file")


def test_a_directory_is_refused(run_harts: Run, tmp_path: Path) -> None:
    assert_refused(run_harts("plan", tmp_path), tmp_path, "directory")


def test_an_empty_file_is_refused(run_harts: Run, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "empty.jsonl", [])
    assert_refused(run_harts("plan", path, "--json"), path, "empty")


def test_broken_json_is_named_by_file_and_line(run_harts: Run, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"input_ids": [1, 2], "loss_mask": [0, 1]}\n{"input_ids": [1,\n')
    assert_refused(run_harts("plan", path, "--json"), "bad.jsonl:2", "broken JSON")


def test_a_mask_of_another_length_is_named_by_trajectory_and_line(
    run_harts: Run, tmp_path: Path
) -> None:
    good = {"input_ids": [1, 2], "loss_mask": [0, 1]}
    bad = {"input_ids": [1, 2, 3, 4, 5, 6], "loss_mask": [0, 1, 1, 1, 1]}
    path = write_rows(tmp_path / "bad.jsonl", [good, good, bad])
    assert_refused(
        run_harts("plan", path),
        "trajectory 2 (bad.jsonl:3): loss_mask has 5 entries, input_ids 6; "
        "they must be equally long",
    )


def test_a_trajectory_over_the_capacity_is_named(run_harts: Run, rollouts: Path) -> None:
    outcome = run_harts("plan", rollouts, "--capacity", 21, "--json")
    assert_refused(outcome, "trajectory 0 (rollouts.jsonl:1)", "22", "21", "--capacity")


def test_more_replicas_than_trajectories_are_refused(run_harts: Run, rollouts: Path) -> None:
    assert_refused(run_harts("plan", rollouts, "--replicas", 7, "--json"), "6 trajectories", "7")


def test_parquet_without_pyarrow_names_the_extra(
    run_harts: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert_refused(run_harts("plan", path), "pyarrow", "pip install 'harts[data]'")


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--capacity", "0"], "'0' is not a whole number of at least 1"),
        (["--capacity", "many"], "--capacity"),
        (["--replicas", "1.5"], "--replicas"),
        (["--chunk-size", "-64"], "--chunk-size"),
        (["--capacity"], "expected one argument"),
        (["--batch", "3"], "--batch"),
        (["--cap", "30"], "--cap"),
        (["other.jsonl"], "other.jsonl"),
    ],
    ids=" ".join,
)
def test_a_wrong_option_is_one_line(
    run_harts: Run, rollouts: Path, options: list[str], part: str
) -> None:
    assert_refused(run_harts("plan", rollouts, *options), part, "see harts plan --help")


def test_real_rollouts_compress_as_measured(run_harts: Run, tiny_tau: Path) -> None:
    plan = run_harts("plan", tiny_tau, "--json").json
    assert (plan["raw_tokens"], plan["trie_tokens"]) == (15625, 4142)


@pytest.mark.parametrize("planner", ["harts", "next-fit", "dta", "ortools"])
def test_every_planner_plans_the_same_batch(run_harts: Run, rollouts: Path, planner: str) -> None:
    if planner == "ortools":
        pytest.importorskip("ortools", reason="the bench extra is not installed")
    outcome = run_harts("plan", rollouts, "--capacity", 24, "--planner", planner, "--json")
    assert outcome.code == 0
    assert outcome.json["trajectories"] == 6
    assert outcome.json["compact_tokens"] >= UNIQUE


def test_long_trajectories_are_dropped_and_listed_when_asked(
    run_harts: Run, tmp_path: Path
) -> None:
    path = write_rows(
        tmp_path / "long.jsonl",
        [{"input_ids": list(range(n)), "loss_mask": [0] * n} for n in (3, 9, 4)],
    )
    assert_refused(
        run_harts("plan", path, "--capacity", 5),
        "trajectory 1 (long.jsonl:2) has 9 tokens, more than the capacity 5; raise the capacity",
    )
    outcome = run_harts("plan", path, "--capacity", 5, "--over-capacity", "drop", "--json")
    assert outcome.json["dropped"] == ["trajectory 1 (long.jsonl:2)"]
    assert outcome.json["trajectories"] == 2


def test_an_unknown_planner_is_refused(run_harts: Run, rollouts: Path) -> None:
    assert_refused(run_harts("plan", rollouts, "--planner", "best"), "--planner", "best")
