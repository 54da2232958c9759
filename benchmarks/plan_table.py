"""docs/results/planning.md from a result file of benchmarks/plan.py, beside the paper's tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

Record = dict[str, Any]

PAPER_TABLE_2 = {  # HARTS compact, OR-Tools compact, planning time OR/HARTS
    1: (7_780_586, 8_058_974, 9.732),
    2: (7_670_675, 7_915_111, 7.899),
    3: (7_747_595, 8_361_767, 7.236),
    4: (5_659_215, 5_924_124, 7.403),
    5: (8_266_355, 8_556_470, 8.002),
    6: (9_671_964, 9_774_737, 8.993),
    7: (7_015_681, 7_233_955, 7.571),
    8: (7_504_249, 7_697_111, 8.164),
    9: (9_188_374, 9_256_559, 8.845),
    10: (7_077_264, 7_435_059, 9.213),
}
PAPER_TABLE_3 = {  # slots, within-slot P50 and P95, step P50 and largest (per cent)
    "4": {
        "HARTS": (301, 0.0247, 2.1379, 0.2607, 1.1050),
        "OR": (319, 0.2628, 34.641, 3.2079, 5.6756),
    },
    "2": {
        "HARTS": (599, 0.0069, 0.4963, 0.0343, 0.4667),
        "OR": (614, 0.0851, 16.1598, 0.7799, 3.8462),
    },
}


def render(records: list[Record], source: str) -> str:
    """The page as Markdown; records of one run."""
    rows = [r for r in records if r["case"].startswith("row ")]
    shapes = [r for r in records if r["case"].startswith("shape ")]
    small = next((r["samples"] for r in records if "small instances" in r["case"]), None)
    parts = [
        "# Planning",
        _setting(records[0], source),
        "## Targets",
        _targets(rows, small),
        "## Table 2: work and time",
        _TABLE_2_NOTE,
        _steps(rows),
        "## Table 3: balance over the ten steps",
        _balance(rows),
        "## Planners over the ten steps",
        _PLANNERS_NOTE,
        _planners(rows),
        "## Time and memory",
        _times(rows),
    ]
    if shapes:
        parts += ["## Shapes of real logs", _SHAPES_NOTE, _steps(shapes)]
    if small:
        parts += ["## At most nine trajectories", _small(small)]
    return "\n\n".join(parts) + "\n"


_TABLE_2_NOTE = """\
OR is OR-Tools + FFD: its work is that of its best run, its time that of its fastest run within
0.5 % of that work (seconds a tree in brackets). OR / harts above 1 is in favour of harts."""

_PLANNERS_NOTE = """\
"paper" is harts with everything that goes beyond section 3.2 of the paper switched off. The
variants of OR-Tools + FFD deal trees to replicas by raw tokens or by the number of partitions
instead of compact rows; "merged" joins partitions of one replica while unions fit, which the
paper's baseline does not. All at D = 4; seconds are summed over steps."""

_SHAPES_NOTE = """\
Tree shapes measured on public agent logs (tokens are random), a system prompt of 17,000 tokens in
front, 16 tasks a step drawn by seed, trajectories over the capacity left out."""


def _setting(record: Record, source: str) -> str:
    env = record["env"]
    measured = record["metrics"].get("measured", {}).get("date", "an earlier run")
    taken = f" (baselines taken from {env['baselines_from']}, {measured})"
    taken = taken if env["baselines_from"] else ""
    return (
        f"Written by `benchmarks/plan.py --table` from `benchmarks/results/{source}`: commit "
        f"{env['commit']}, {env['device']}, {env['cores']} cores, Python {env['python']}, numpy "
        f"{env['numpy']}, numba {env['numba']}, OR-Tools {env['ortools']}; load average "
        f"{env['load_at_start']:.1f} at the start. Planners run on one thread, CP-SAT on "
        f"{env['threads']['cp_sat']}. Capacity {record['config']['capacity']:,} rows. Times are "
        f"medians of {len(record['samples']['harts_seconds'])} warm calls with [smallest, "
        f"largest], from flat int32 tokens, sort included; OR-Tools ran once a limit{taken}."
    )


def best_ortools(metrics: Record, replicas: str = "4") -> tuple[str, str]:
    """Names of the run of least work, and of the fastest run within 0.5 % of it."""
    runs = [name for name in metrics if name.startswith("ortools_")]
    work = {name: metrics[name]["quality"][replicas]["compact_tokens"] for name in runs}
    best = min(runs, key=lambda name: work[name])
    close = [name for name in runs if work[name] <= 1.005 * work[best]]
    return best, min(close, key=lambda name: metrics[name]["seconds"][0])


def _ratios(record: Record) -> tuple[float, float]:
    """OR / harts of compact tokens and of time."""
    metrics = record["metrics"]
    best, fast = best_ortools(metrics)
    harts = metrics["harts"]
    work = metrics[best]["quality"]["4"]["compact_tokens"]
    compact = work / harts["quality"]["4"]["compact_tokens"]
    return compact, metrics[fast]["seconds"][0] / statistics.median(harts["seconds"])


def _total(rows: list[Record], *keys: str) -> int:
    """Compact tokens at D = 4 summed over records; keys lead to the qualities."""
    total = 0
    for record in rows:
        found = record["metrics"]
        for key in keys:
            found = found[key]
        total += found["4"]["compact_tokens"]
    return total


def _best_total(rows: list[Record]) -> int:
    return sum(
        r["metrics"][best_ortools(r["metrics"])[0]]["quality"]["4"]["compact_tokens"] for r in rows
    )


def _steps(records: list[Record]) -> str:
    paper = all(r["case"].startswith("row ") for r in records)
    head = ["step", "paths", "raw tokens", "trie", "harts compact", "OR compact", "next-fit", "DTA"]
    head += ["OR / harts", "harts s", "OR s", "time OR / harts"]
    head += ["paper: harts", "paper: OR", "paper: OR / harts", "paper: time"] if paper else []
    lines = []
    for record in records:
        metrics, (compact, time) = record["metrics"], _ratios(record)
        best, fast = best_ortools(metrics)
        batch, harts = metrics["harts"]["batch"], metrics["harts"]
        line = [
            record["case"].removeprefix("row ").removeprefix("shape "),
            f"{batch['trajectories']:,}",
            f"{batch['raw_tokens']:,}",
            f"{batch['trie_tokens']:,}",
            *(
                f"{metrics[name]['quality']['4']['compact_tokens']:,}"
                for name in ("harts", best, "next_fit", "dta")
            ),
            f"{compact:.4f}",
            _spread(harts["seconds"]),
            f"{metrics[fast]['seconds'][0]:.2f} ({fast.removeprefix('ortools_')})",
            f"{time:.1f}",
        ]
        if paper:
            ours, theirs, speed = PAPER_TABLE_2[int(line[0])]
            line += [f"{ours:,}", f"{theirs:,}", f"{theirs / ours:.4f}", f"{speed:.2f}"]
        lines.append(line)
    totals = [_total(records, name, "quality") for name in ("harts", "next_fit", "dta")]
    best_total = _best_total(records)
    raw, trie = (
        sum(r["metrics"]["harts"]["batch"][key] for r in records)
        for key in ("raw_tokens", "trie_tokens")
    )
    last = ["sum", "", f"{raw:,}", f"{trie:,}", f"{totals[0]:,}", f"{best_total:,}"]
    last += [f"{totals[1]:,}", f"{totals[2]:,}", f"{best_total / totals[0]:.4f}", "", "", ""]
    if paper:
        ours, theirs = (sum(PAPER_TABLE_2[int(line[0])][i] for line in lines) for i in (0, 1))
        last += [f"{ours:,}", f"{theirs:,}", f"{theirs / ours:.4f}", ""]
    return _table(head, [*lines, last])


def balance(qualities: Sequence[Record]) -> tuple[int, float, float, float, float]:
    """Slots, within-slot P50 and P95 over all slots, step P50 and largest, as in Table 3."""
    slots = np.concatenate([q["slot_imbalance_percent"] for q in qualities])
    steps = [q["step_imbalance_percent"] for q in qualities]
    p50, p95 = np.quantile(slots, [0.5, 0.95])
    return len(slots), float(p50), float(p95), float(np.median(steps)), max(steps)


def _balance(rows: list[Record]) -> str:
    head = ["D", "planner", "slots", "within-slot P50 %", "P95 %", "step P50 %", "largest %"]
    lines = []
    for replicas in ("4", "2"):
        found = {
            "harts": _qualities(rows, "harts", replicas),
            "OR-Tools + FFD": _best_qualities(rows, replicas),
            "next-fit": _qualities(rows, "next_fit", replicas),
            "DTA": _qualities(rows, "dta", replicas),
        }
        measured = [(name, balance(qualities)) for name, qualities in found.items()]
        paper = [(f"paper: {name}", v) for name, v in PAPER_TABLE_3[replicas].items()]
        for name, (slots, *imbalances) in [*measured, *paper]:
            lines.append([replicas, name, str(slots), *(f"{x:.4f}" for x in imbalances)])
    return _table(head, lines)


def _qualities(rows: list[Record], planner: str, replicas: str) -> list[Record]:
    return [r["metrics"][planner]["quality"][replicas] for r in rows]


def _best_qualities(rows: list[Record], replicas: str) -> list[Record]:
    found = []
    for record in rows:
        best, _ = best_ortools(record["metrics"], replicas)
        found.append(record["metrics"][best]["quality"][replicas])
    return found


def _planners(rows: list[Record]) -> str:
    """Sums over the steps of every planner and variant, with the ratio to harts."""
    harts = _total(rows, "harts", "quality")
    first = rows[0]["metrics"]
    entries: list[tuple[str, int, int, float | None]] = []

    def add(name: str, qualities: list[Record], seconds: float | None) -> None:
        work = sum(q["compact_tokens"] for q in qualities)
        entries.append((name, work, sum(q["slots"] for q in qualities), seconds))

    def seconds_of(name: str) -> float:
        return sum(statistics.median(r["metrics"][name]["seconds"]) for r in rows)

    add("harts", _qualities(rows, "harts", "4"), seconds_of("harts"))
    if "paper_quality" in first["harts"]:
        qualities = [r["metrics"]["harts"]["paper_quality"]["4"] for r in rows]
        add("paper", qualities, sum(r["metrics"]["harts"]["paper_seconds"] for r in rows))
    add("next-fit", _qualities(rows, "next_fit", "4"), seconds_of("next_fit"))
    add("DTA", _qualities(rows, "dta", "4"), seconds_of("dta"))
    for name in (key for key in first if key.startswith("ortools_")):
        label = f"OR-Tools + FFD, {name.removeprefix('ortools_')} s a tree"
        add(label, _qualities(rows, name, "4"), seconds_of(name))
        for variant in first[name]["variants"]:
            qualities = [r["metrics"][name]["variants"][variant]["4"] for r in rows]
            add(f"{label}, {variant.replace('_', ' ')}", qualities, None)
    add("OR-Tools + FFD, best limit of each step", _best_qualities(rows, "4"), None)
    every = "OR-Tools + FFD, best limit and variant of each step"
    add(every, [min(_all_ortools(r), key=lambda q: q["compact_tokens"]) for r in rows], None)
    head = ["planner", "compact tokens", "/ harts", "slots", "seconds"]
    lines = [
        [name, f"{work:,}", f"{work / harts:.4f}", str(slots), f"{s:.2f}" if s else ""]
        for name, work, slots, s in entries
    ]
    return _table(head, lines)


def _all_ortools(record: Record) -> list[Record]:
    runs = [run for name, run in record["metrics"].items() if name.startswith("ortools_")]
    return [found["4"] for run in runs for found in (run["quality"], *run["variants"].values())]


def _times(rows: list[Record]) -> str:
    head = ["step", "harts s", "first call s", "without numba s", "first call", "D = 2 s"]
    head += ["peak MiB beyond tokens", "same plan without numba"]
    lines = []
    for record in rows:
        harts = record["metrics"]["harts"]
        lines.append(
            [
                record["case"].removeprefix("row "),
                _spread(harts["seconds"]),
                f"{harts['first_call_seconds']:.2f}",
                _spread(harts["seconds_without_numba"]),
                f"{harts['first_call_seconds_without_numba']:.2f}",
                f"{harts['seconds_at_2_replicas']:.3f}",
                f"{harts['peak_bytes_beyond_tokens'] / 2**20:,.0f}",
                "yes" if harts["same_without_numba"] else "NO",
            ]
        )
    return _table(head, lines)


def _small(small: Record) -> str:
    head = ["instances", "number", "optimal", "share", "worst", "no plan found"]
    lines = []
    for name in ("agent", "random", "next_fit"):
        ratios = [r for r in small[name] if r is not None]
        optimal = sum(r == 1 for r in ratios)
        label = {"next_fit": "next-fit, on both"}.get(name, f"harts, {name}")
        share = f"{100 * optimal / max(1, len(small[name])):.1f} %"
        worst = f"+{100 * (max(ratios, default=1) - 1):.2f} %"
        missing = str(len(small[name]) - len(ratios))
        lines.append([label, str(len(small[name])), str(optimal), share, worst, missing])
    note = (
        "Total work against the least over all capacity-feasible partitions; "
        f"{small['without_plan']} further instances have no legal plan."
    )
    return note + "\n\n" + _table(head, lines)


def _targets(rows: list[Record], small: Record | None) -> str:
    medians = {r["case"]: statistics.median(r["metrics"]["harts"]["seconds"]) for r in rows}
    plain = max(statistics.median(r["metrics"]["harts"]["seconds_without_numba"]) for r in rows)
    ratios = [_ratios(r) for r in rows]
    total = _best_total(rows) / _total(rows, "harts", "quality")
    checks: list[tuple[str, str, str, bool]] = []

    def at_most(what: str, value: float, limit: float, form: str) -> None:
        checks.append((what, "<= " + form.format(limit), form.format(value), value <= limit))

    def at_least(what: str, value: float, limit: float, form: str) -> None:
        checks.append((what, ">= " + form.format(limit), form.format(value), value >= limit))

    at_most("planning time, slowest step (median)", max(medians.values()), 0.5, "{:.3f} s")
    at_most("the same without numba", plain, 3, "{:.3f} s")
    at_least("OR / harts time, least over steps", min(r[1] for r in ratios), 7.3, "{:.1f}")
    at_least("OR / harts compact tokens, summed", total, 1.033, "{:.4f}")
    for replicas in ("4", "2"):
        ours, theirs = (
            balance(q)[0]
            for q in (_qualities(rows, "harts", replicas), _best_qualities(rows, replicas))
        )
        at_most(f"slots, D = {replicas}, against OR", ours, theirs, "{:.0f}")
    _, p50, p95, step, largest = balance(_qualities(rows, "harts", "4"))
    at_most("within-slot imbalance P50, D = 4", p50, 0.025, "{:.4f} %")
    at_most("within-slot imbalance P95, D = 4", p95, 2.1, "{:.4f} %")
    at_most("step imbalance P50, D = 4", step, 0.26, "{:.4f} %")
    at_most("step imbalance, largest, D = 4", largest, 1.1, "{:.4f} %")
    peak = max(r["metrics"]["harts"]["peak_bytes_beyond_tokens"] for r in rows) / 2**30
    at_most("peak memory beyond the tokens, largest", peak, 2, "{:.2f} GiB")
    if small:
        found = [*small["agent"], *small["random"]]
        ratios_found = [r for r in found if r is not None]
        share = 100 * sum(r == 1 for r in ratios_found) / len(found)
        at_least("small instances: optimal", share, 95, "{:.1f} %")
        at_most("small instances: worst", 100 * (max(ratios_found) - 1), 3, "{:.2f} % above")
    lines = [[*check[:3], "met" if check[3] else "**missed**"] for check in checks]
    return _table(["what", "target", "measured", ""], lines)


def _spread(seconds: list[float]) -> str:
    median = statistics.median(seconds)
    return f"{median:.3f} [{min(seconds):.3f}, {max(seconds):.3f}]"


def _table(head: list[str], lines: list[list[str]]) -> str:
    rule = ["---"] * len(head)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rule, *lines])
