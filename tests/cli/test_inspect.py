"""`harts inspect`: one JSON object, text that fits a terminal, and refusals in one line."""

import base64
import json
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run, assert_refused, write_rows


def test_json_is_one_object_with_the_totals(run_harts: Run, rollouts: Path) -> None:
    outcome = run_harts("inspect", rollouts, "--json")
    assert outcome.code == 0
    found = outcome.json
    assert found["file"] == str(rollouts)
    assert found["trajectories"]["count"] == 6
    assert found["trajectories"]["raw_tokens"] == 118
    assert found["forest"]["rows"] == 52
    assert found["compression"] == pytest.approx(118 / 52)
    assert found["trajectories"]["duplicates"] == 1
    assert found["trajectories"]["nested"] == 1
    assert found["trajectories"]["unscored"] == 1
    assert found["task_field"] is None


def test_text_says_what_it_does_not_know(run_harts: Run, rollouts: Path) -> None:
    text = run_harts("inspect", rollouts, "--capacity", 21).stdout
    lines = {line[:17].strip(): line[17:].strip() for line in text.splitlines()}
    assert lines["trajectories"] == "6 of unknown tasks (no group_id)"
    assert lines["unique rows"] == "52 in one trie of the file: 2.27x"
    assert lines["prefix breaks"].startswith("unknown: without rollout_id")
    assert "1 trajectory longer than 21 tokens: trajectory 0" in lines["over capacity"]


def many_tasks(folder: Path) -> Path:
    """Forty tasks of a rollout of three steps that lose their think block, and a deep fork."""
    rows = []
    for task in range(40):
        prompt = [1, 2, 3, task]
        for _ in range(3):
            rows.append(
                {
                    "input_ids": [*prompt, 90, 91, 92, 50, 51, 52, 53, 54, 55, 56, 57],
                    "loss_mask": [0] * len(prompt) + [1] * 11,
                    "group_id": f"task-{task}",
                    "rollout_id": 0,
                }
            )
            prompt = [*prompt, 50, 51, 52, 53, 54, 55, 56, 57, 7, 8, 9]
    return write_rows(folder / "steps.jsonl", rows)


def test_tables_stay_short_and_name_the_worst_task_first(run_harts: Run, tmp_path: Path) -> None:
    paragraphs = run_harts("inspect", many_tasks(tmp_path)).stdout.split("\n\n")
    for paragraph in paragraphs:
        assert len(paragraph.splitlines()) <= 21
    tasks = next(p for p in paragraphs if p.startswith("task, worst first"))
    assert "... 21 more" in tasks
    assert tasks.splitlines()[1].startswith("task-")
    breaks = next(p for p in paragraphs if p.startswith("break "))
    assert breaks.splitlines()[1].split()[:3] == ["think", "80", "640"]


def test_examples_show_ids_or_text(run_harts: Run, tmp_path: Path) -> None:
    file = many_tasks(tmp_path)
    plain = run_harts("inspect", file).stdout
    assert "  removed        90 91 92\n" in plain
    tokenizer = tmp_path / "bytes.tiktoken"
    spelled = {90: b"<think>", 92: b"</think>\n"}
    lines = [f"{base64.b64encode(spelled.get(n, b'%d ' % n)).decode()} {n}" for n in range(100)]
    tokenizer.write_text("\n".join(lines))
    text = run_harts("inspect", file, "--tokenizer", tokenizer).stdout
    assert "  removed        '<think>91 </think>\\n'\n" in text
    example = run_harts("inspect", file, "--tokenizer", tokenizer, "--json").json["breaks"]
    assert example["classes"][0]["example"]["removed_text"] == "<think>91 </think>\n"


def test_bad_input_is_one_line(run_harts: Run, rollouts: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"input_ids": [1]}\n')
    assert_refused(run_harts("inspect", bad, "--json"), "bad.jsonl:1", "loss_mask")
    assert_refused(run_harts("inspect", rollouts, "--tokenizer", "absent"), "no such file")
    assert_refused(run_harts("inspect", rollouts, "--chunk-size", "0"), "--chunk-size")


def test_neither_torch_nor_transformers_is_needed(
    run_harts: Run, rollouts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert json.loads(run_harts("inspect", rollouts, "--json").stdout)["forest"]["rows"] == 52
