"""What GPU benchmarks keep of a run that fails or is cut short; no GPU is needed to tell."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import harts

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_tests
import results_file
import step


@pytest.mark.parametrize(
    ("line", "name", "outcome"),
    [
        (
            "[gw3] [ 12%] PASSED tests/a/test_b.py::test_c[x y] ",
            "tests/a/test_b.py::test_c[x y]",
            1,
        ),
        ("tests/a/test_b.py::test_c[1] PASSED     [ 5%]", "tests/a/test_b.py::test_c[1]", 1),
        ("tests/a/test_b.py::test_c SKIPPED (needs it) [ 5%]", "tests/a/test_b.py::test_c", 2),
        ("[gw0] [100%] FAILED tests/a/test_b.py::test_c ", "tests/a/test_b.py::test_c", 3),
        ("a warning[gw1] [ 5%] PASSED tests/a/test_b.py::test_c ", "tests/a/test_b.py::test_c", 1),
        ("ERROR tests/a/test_b.py - ImportError while importing test", "tests/a/test_b.py", 4),
        ("ERROR tests/a/test_b.py", "tests/a/test_b.py", 4),
        ("1.20s call     tests/a/test_b.py::test_c", "", 0),
        ("======= 3 passed, 1 error in 2.00s =======", "", 0),
    ],
)
def test_an_outcome_is_read_from_a_line_of_pytest(line: str, name: str, outcome: int) -> None:
    outcomes = ("", "PASSED", "SKIPPED", "FAILED", "ERROR")
    assert gpu_tests.read_outcome(line) == (name, outcomes[outcome])


def test_what_cannot_be_imported_failed_and_what_has_no_outcome_is_unfinished() -> None:
    names = ["tests/a.py::one", "tests/a.py::two", "tests/a.py::three"]
    outcomes = {names[0]: "PASSED", names[1]: "FAILED", "tests/b.py": "ERROR"}
    metrics = gpu_tests.metrics_of(names, outcomes)
    assert metrics["passed"] == 1 and metrics["failed"] == 2
    assert metrics["failures"] == [names[1], "tests/b.py"]
    assert metrics["unfinished"] == [names[2]]


class _KilledError(Exception):
    pass


@pytest.fixture
def run_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """step.py without a model: what it does around its measurements."""
    plan = SimpleNamespace(
        raw_tokens=100,
        compact_tokens=20,
        plan_seconds=0.1,
        batch=SimpleNamespace(loss_mask=np.ones(3, dtype=bool)),
    )
    calls = SimpleNamespace(replay_tokens=1, num_rounds=2)
    side = step.Side(plan, [(SimpleNamespace(calls=calls), None)], 0.05)  # type: ignore[arg-type,list-item]
    network = SimpleNamespace(zero_grad=lambda **_: None, parameters=list)
    model = SimpleNamespace(kernels=harts.Kernels(), model=network)
    stand_ins = {
        "_attached": lambda args: model,
        "_sides": lambda model, batch, args: dict.fromkeys(args.sides, side),
        "_set_recomputation": lambda model, setting: None,
        "_weights": lambda tree: torch.zeros(3),
        "_step": lambda *_: torch.zeros(3),
        "_some_gradients": lambda model: {"weight": torch.ones(2)},
        "_samples": lambda model, sides, *_: (
            {name: [1.0, 2.0, 3.0] for name in sides},
            dict.fromkeys(sides, 1.0),
        ),
        "ideal_metrics": lambda *_, **__: {"ideal": 0.9},
        "seconds_of": lambda run, samples: [2.0] * samples,
        "_repeats_its_bits": lambda *_: True,
        "prototype_batch": lambda: None,
        "limit_autotuning": lambda most: None,
        "gpu_environment": dict,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(step, name, stand_in)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)

    def run(*arguments: str) -> list[dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", ["step.py", "--out", str(tmp_path), *arguments])
        with suppress(_KilledError):
            step.main()
        records: list[dict[str, Any]] = json.loads((tmp_path / "step-ling-3-tiny.json").read_text())
        return records

    return run


def test_a_run_that_is_cut_short_keeps_its_samples(
    run_step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise _KilledError

    monkeypatch.setattr(step, "ideal_metrics", killed)
    (record,) = run_step()
    assert record["samples"] == {"tree": [1.0, 2.0, 3.0], "expanded": [1.0, 2.0, 3.0]}
    assert record["metrics"]["tree_seconds"] == 2.0 and "ideal" not in record["metrics"]


def test_variants_have_the_samples_of_the_step(run_step: Any) -> None:
    (record,) = run_step("--variants", "deterministic", "--samples", "4")
    assert record["samples"]["deterministic tree"] == [2.0] * 4
    assert record["metrics"]["deterministic_same_bits"] == 1.0
    assert record["metrics"]["conversion"] == pytest.approx(1 / 0.9)


def test_where_the_expanded_side_does_not_fit_the_tree_is_measured_alone(
    run_step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def samples(model: Any, sides: Any, *_: Any) -> Any:
        if len(sides) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return {"tree": [1.0]}, {"tree": 1.0}

    monkeypatch.setattr(step, "_samples", samples)
    none, full = run_step("--recompute", "none", "full")
    for record in (none, full):
        assert record["metrics"]["both_out_of_memory"] == 1.0
        assert record["samples"] == {"tree": [1.0]} and "speedup" not in record["metrics"]


def test_records_are_written_beside_and_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "a.json"
    results_file.write_records(path, [{"a": 1}])

    def fail(*_: Any) -> None:
        raise _KilledError

    monkeypatch.setattr(results_file.os, "replace", fail)
    with pytest.raises(_KilledError):
        results_file.write_records(path, [{"a": 2}])
    assert json.loads(path.read_text()) == [{"a": 1}]


def test_records_go_where_the_arguments_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results_file, "RESULTS", tmp_path / "results")
    parser = argparse.ArgumentParser()
    results_file.add_result_options(parser)
    args = parser.parse_args(["--write", "--out", str(tmp_path / "out")])
    for count, whole in enumerate((False, True), start=1):
        records = [{"a": 1}] * count
        results_file.keep_records(args, "ops", records, name="b", hardware="x1", whole=whole)
        assert json.loads((tmp_path / "out" / "b.json").read_text()) == records
        assert (tmp_path / "results").exists() == whole
    (written,) = (tmp_path / "results").iterdir()
    assert written.name.startswith("ops-x1-") and json.loads(written.read_text()) == records
    results_file.keep_records(parser.parse_args([]), "ops", records)
