"""The page of a run: drawn from metrics.jsonl alone, whole or cut short."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harts.errors import DataError
from harts.report.curves import MOST_POINTS, Curve, curve_drawing, thinned
from harts.report.metrics import read_metrics
from harts.report.train_report import train_page, write_train_report
from tests.report.conftest import HOSTILE
from tests.report.pages import Page, assert_described, assert_self_contained

NUMBERS = st.floats(allow_nan=True, allow_infinity=True, width=32)
CONFIG = {
    "data": {"path": "rollouts.jsonl"},
    "model": {"path": "tiny:llama"},
    "objective": {"name": "grpo", "options": {"clip_low": 0.2}},
    "train": {"steps": 10, "betas": [0.9, 0.95]},
}


def step(number: int, **others: Any) -> dict[str, Any]:
    return {
        "step": number,
        "loss": 1 / number,
        "log_prob": -6.5 + 0.01 * number,
        "grad_norm": 2.0,
        "raw_tokens": 19_968,
        "compact_tokens": 3_565,
        "rows_saved": 16_403,
        "seconds": 1.5,
        "raw_tokens_per_second": 13_312.0,
        "peak_memory_gib": 0.5 + number / 100,
        **others,
    }


def write_metrics(path: Path, steps: list[dict[str, Any]], tail: str = "") -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in steps) + tail)
    return path


def test_the_page_is_one_self_contained_file_with_text_for_every_drawing() -> None:
    parsed = Page(train_page([step(k) for k in range(1, 11)], CONFIG))
    assert_self_contained(parsed)
    assert_described(parsed)
    names = [d.findtext("title") for d in parsed.drawings() if d.get("role") == "img"]
    assert names == ["loss", "log-prob", "peak memory"]
    assert "The same in every step: gradient norm 2" in parsed.words


def test_the_numbers_are_the_metrics() -> None:
    words = Page(train_page([step(k) for k in range(1, 11)], CONFIG)).words
    assert "10 of 10 steps, finished" in words
    assert "loss 0.1 at step 10" in words
    assert "82.1 % 164 k of 200 k" in words
    assert "15 s 1.5 s a step (median)" in words
    assert "0.6 GiB largest of all steps" in words
    assert "grpo on rollouts.jsonl, model tiny:llama" in words
    assert "clip_low 0.2" in words


def test_an_interrupted_run_says_how_far_it_came(tmp_path: Path) -> None:
    metrics = write_metrics(tmp_path / "metrics.jsonl", [step(1), step(2)], tail='{"step": 3, "lo')
    write_train_report(metrics, tmp_path / "report.html", config=CONFIG)
    words = Page((tmp_path / "report.html").read_text()).words
    assert "2 of 10 steps, 8 to go" in words
    assert "loss 0.5 at step 2" in words


def test_values_that_are_not_finite_are_gaps_and_counted() -> None:
    steps = [step(k, loss=math.nan if k in (3, 4) else 1.0 / k) for k in range(1, 9)]
    parsed = Page(train_page(steps, {}))
    loss = next(d for d in parsed.drawings() if d.findtext("title") == "loss")
    path = next(node.get("d") for node in loss.iter("path")) or ""
    assert path.count("M") == 2
    assert "nan" not in path
    assert "2 values are not finite" in parsed.words


def test_a_value_that_starts_late_is_drawn_where_it_is() -> None:
    steps = [step(1), step(2, old_kl=0.1), step(3, old_kl=0.2)]
    assert "KL to the old policy" in Page(train_page(steps, {})).words


def test_one_step_is_a_page(tmp_path: Path) -> None:
    parsed = Page(train_page([step(1)], {}))
    assert_self_contained(parsed)
    assert "1 of 1 step, finished" in parsed.words


def test_a_run_of_100_000_steps_stays_below_the_limit() -> None:
    steps = [step(k, grad_norm=math.sin(k), entropy=math.cos(k)) for k in range(1, 100_001)]
    page = train_page(steps, CONFIG)
    assert len(page) < 500_000
    assert "(150 of 100,000 rows)" in Page(page).words


def test_hostile_names_are_only_text() -> None:
    config = {"data": {"path": HOSTILE}, "model": {"path": HOSTILE}, "objective": {"name": HOSTILE}}
    parsed = Page(train_page([step(1, **{HOSTILE: 1.0}), step(2, **{HOSTILE: 2.0})], config))
    assert_self_contained(parsed)
    assert parsed.scripts == []
    assert parsed.of("img") == []
    parsed.html.encode()


@given(st.lists(NUMBERS, min_size=1, max_size=400), st.integers(4, 50))
def test_thinning_keeps_the_ends_and_the_extremes(values: list[float], most: int) -> None:
    kept = thinned(values, most)
    assert len(kept) <= most or len(values) <= most
    assert kept == sorted(set(kept))
    assert {0, len(values) - 1} <= set(kept)
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        assert {min(finite), max(finite)} <= {values[i] for i in kept}


@given(st.lists(NUMBERS, min_size=1, max_size=40))
def test_any_values_are_drawn_inside_the_chart(values: list[float]) -> None:
    curve = Curve(name="x", unit="", steps=range(1, len(values) + 1), values=values)
    parsed = Page(curve_drawing(curve))
    for attributes in parsed.of("path"):
        points = (attributes["d"] or "").replace("M", " ").replace("L", " ").split()
        assert all(0 <= float(x) <= 1_000 for x in points[::2])
        assert all(0 <= float(y) <= 110 for y in points[1::2])
        assert len(points) // 2 <= MOST_POINTS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no complete step"),
        ('{"step": 1}', "holds no complete step"),
        ('{"step": 1}\n{"step": \n', r"metrics\.jsonl:2: broken JSON"),
        ("[1]\n", r"metrics\.jsonl:1: no whole number named step"),
        ('{"step": true}\n', r"metrics\.jsonl:1: no whole number named step"),
        ('{"step": 2}\n{"step": 2}\n', r"metrics\.jsonl:2: step 2 follows step 2"),
    ],
)
def test_a_file_that_holds_no_metrics_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_metrics(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"metrics\.jsonl: cannot be read \(No such file"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_the_config_of_a_run_is_shown_whole() -> None:
    from harts.train.options import DataOptions, ModelOptions, RunOptions

    options = RunOptions(data=DataOptions(path="a.jsonl"), model=ModelOptions(path="tiny:llama"))
    config = dataclasses.asdict(options)
    words = Page(train_page([step(1)], config)).words
    for section in config:
        assert section in words
    assert "recompute_layers null" in words
