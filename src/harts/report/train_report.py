"""A training run as a page: its curves, its last values, its configuration."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from harts.report.curves import Curve, curve_drawing
from harts.report.markup import Markup, join, tag
from harts.report.metrics import read_metrics
from harts.report.page import facts, headline, page, section, table, write_page
from harts.report.text import count, counted, figure, percent, seconds, short, with_unit

_UNITS = {
    "log_prob": "nats",
    "entropy": "nats",
    "old_kl": "nats",
    "ref_kl": "nats",
    "seconds": "s",
    "gradient_seconds": "s",
    "plan_seconds": "s",
    "raw_tokens_per_second": "tokens/s",
    "compact_tokens_per_second": "rows/s",
    "peak_memory_gib": "GiB",
    "rows_saved": "rows",
    "compact_tokens": "rows",
    "raw_tokens": "tokens",
}
_POLICY = ("loss", "policy_loss", "log_prob", "entropy", "old_kl", "ref_kl", "grad_norm")
_SPEED = (
    "seconds",
    "gradient_seconds",
    "plan_seconds",
    "raw_tokens_per_second",
    "compact_tokens_per_second",
    "peak_memory_gib",
)
_SIZES = (
    "rows_saved",
    "compact_tokens",
    "raw_tokens",
    "compression",
    "microbatches",
    "trajectories",
    "scored_tokens",
)
_NAMES = {
    "log_prob": "log-prob",
    "old_kl": "KL to the old policy",
    "ref_kl": "KL to the reference",
    "grad_norm": "gradient norm",
    "expert_load_max_over_mean": "busiest expert over mean",
    "seconds": "seconds a step",
    "gradient_seconds": "seconds for gradients",
    "plan_seconds": "seconds for planning",
    "raw_tokens_per_second": "throughput",
    "compact_tokens_per_second": "throughput, rows",
    "peak_memory_gib": "peak memory",
    "compact_tokens": "compact rows",
}


def write_train_report(
    metrics: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Write the page of a run from its metrics.jsonl, whether it ended or was interrupted.

    config: sections of the run's configuration, as nested mappings. Raises DataError for a file
    that holds no metrics and ConfigError where `path` cannot be written. O(steps).
    """
    write_page(train_page(read_metrics(Path(metrics)), config or {}), path)


def train_page(steps: list[dict[str, float]], config: Mapping[str, Any]) -> str:
    """The HTML of `write_train_report`."""
    last = int(steps[-1]["step"])
    asked = config.get("train", {}).get("steps", last)
    asked = max(asked, last)
    state = "finished" if last == asked else f"{count(asked - last)} to go"
    lead = f"{count(last)} of {counted(asked, 'step')}, {state}."
    objective, model = config.get("objective", {}), config.get("model", {})
    if objective and model:
        lead = f"{objective['name']} on {config['data']['path']}, model {model['path']}: {lead}"
    return page(
        "Training run",
        lead,
        _headline(steps),
        *_curve_sections(steps),
        _all_values(steps),
        _configuration(config),
    )


def _column(steps: list[dict[str, float]], name: str) -> list[float]:
    return [step.get(name, math.nan) for step in steps]


def _headline(steps: list[dict[str, float]]) -> Markup:
    last = steps[-1]
    entries = []
    if "loss" in last:
        entries.append(("loss", figure(last["loss"]), f"at step {count(last['step'])}"))
    if "raw_tokens_per_second" in last:
        speed = median(_column(steps, "raw_tokens_per_second"))
        entries.append(("tokens per second", short(speed), "raw tokens, median step"))
    if "rows_saved" in last and "raw_tokens" in last:
        saved, raw = sum(_column(steps, "rows_saved")), sum(_column(steps, "raw_tokens"))
        entries.append(("rows saved", percent(saved / raw), f"{short(saved)} of {short(raw)}"))
    if "seconds" in last:
        entries.append(
            (
                "time",
                seconds(sum(_column(steps, "seconds"))),
                f"{seconds(median(_column(steps, 'seconds')))} a step (median)",
            )
        )
    if "peak_memory_gib" in last:
        most = max(_column(steps, "peak_memory_gib"))
        entries.append(("peak memory", f"{most:.3g}\N{NO-BREAK SPACE}GiB", "largest of all steps"))
    return headline(entries)


def _curve_sections(steps: list[dict[str, float]]) -> list[Markup]:
    names = [name for name in _names(steps) if name != "step"]
    policy = [name for name in _POLICY if name in names]
    policy += [name for name in names if name not in (*_POLICY, *_SPEED, *_SIZES)]
    groups = [
        (
            "Objective and policy",
            "Losses, log-probs, entropy and KL are means over the scored tokens of a step.",
            policy,
        ),
        ("Speed and memory", "", [name for name in _SPEED if name in names]),
        ("Rows", "What each step held.", [name for name in _SIZES if name in names]),
    ]
    return [_curves(title, note, group, steps) for title, note, group in groups if group]


def _names(steps: list[dict[str, float]]) -> list[str]:
    """Names of all numbers, in the order in which they first appear."""
    return list(dict.fromkeys(name for step in steps for name in step))


def _curves(title: str, note: str, names: list[str], steps: list[dict[str, float]]) -> Markup:
    """A chart for each value that changes; the others are one line of facts."""
    numbers = [int(step["step"]) for step in steps]
    curves, constant = [], []
    for name in names:
        values = _column(steps, name)
        unit = _UNITS.get(name, "")
        if len(set(values)) == 1:
            constant.append((_readable(name), with_unit(values[0], unit)))
            continue
        curve = Curve(name=_readable(name), unit=unit, steps=numbers, values=values)
        curves.append(curve_drawing(curve))
    content = [tag("div", *curves, class_="curves")] if curves else []
    if constant:
        which = "The same in every step" if len(steps) > 1 else "The only step"
        text = "; ".join(f"{name} {value}" for name, value in constant)
        content.append(tag("p", f"{which}: {text}.", class_="constant"))
    return section(title, note, *content)


def _readable(name: str) -> str:
    return _NAMES.get(name, name.replace("_", " "))


def _all_values(steps: list[dict[str, float]]) -> Markup:
    names = _names(steps)
    rows = [
        [figure(step[name]) if name in step else "" for name in names] for step in reversed(steps)
    ]
    last = [
        (_readable(name), with_unit(steps[-1][name], _UNITS.get(name, "")))
        for name in names
        if name in steps[-1]
    ]
    return section(
        "Last values",
        "",
        facts(last),
        table("Values of all steps, newest first", [_readable(n) for n in names], rows, most=150),
    )


def _configuration(config: Mapping[str, Any]) -> Markup:
    if not config:
        return Markup("")
    content = [join(tag("h3", name), facts(_settings(entries))) for name, entries in config.items()]
    return section(
        "Configuration", "", tag("div", *(tag("div", c) for c in content), class_="config")
    )


def _settings(entries: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values; settings inside settings (an objective's own) are listed beside them."""
    rows = []
    for key, value in entries.items():
        rows += _settings(value) if isinstance(value, Mapping) else [(key, _value(value))]
    return rows


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
