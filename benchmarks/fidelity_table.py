"""The results of benchmarks/fidelity.py as tables, printed and for docs/results/gpu.md."""

from __future__ import annotations

from itertools import product
from typing import Any

MODES = {"free": "free routes", "forced": "routes imposed"}
OF_ROWS = {
    "sym_kl": "Mean symmetric KL, nats (Equation 25)",
    "delta_nll": "Mean |ΔNLL| of a token drawn from the reference, nats (Equation 26)",
    "cosine": "Mean cosine of full-vocabulary logits (Equation 27)",
}
OF_TOKENS = {
    "mean_log_prob": "Mean |Δ log-prob| of the tree's own tokens, nats",
    "max_log_prob": "Max |Δ log-prob| of the tree's own tokens, nats",
}
_FORMATS = {"cosine": "{:.8f}"}


def markdown(record: dict[str, Any]) -> str:
    """One record as markdown: for each mode one table a metric, then losses, gradients and bits."""
    metrics = record["metrics"]
    lines = [
        f"{record['case']}: {metrics['trajectories']} trajectories, {metrics['raw_tokens']:,} "
        f"tokens in {metrics['compact_tokens']:,} rows, {metrics['rounds']} rounds, "
        f"{metrics['replay_tokens']:,} rows of replay; logits of {metrics['sampled_rows']:,} rows. "
        "Depth counts the forks above a row's segment (the paper's handoff depth), chain depth the "
        "states that the plan hands over on the way to the row.",
    ]
    for mode, title in MODES.items():
        found = metrics[mode]
        lines += ["", f"### {title.capitalize()} (entropy {found['entropy']:.2f} nats)"]
        for metric, meaning in (OF_ROWS | OF_TOKENS).items():
            lines += ["", f"{meaning}:", "", *_by_depth(metrics, found["runs"], metric)]
        lines += ["", "Whole tree:", "", *_whole(found)]
        lines += ["", *_bits(found)]
    return "\n".join(lines) + "\n"


def _by_depth(metrics: dict[str, Any], runs: dict[str, Any], metric: str) -> list[str]:
    """Runs down, depths across: forks first, then chains."""
    columns = [(way, d) for way, counts in metrics["counts"].items() for d in range(len(counts))]
    names = [f"depth {d}" if way == "fork" else f"chain depth {d}" for way, d in columns]
    if metric in OF_ROWS:
        sizes = [metrics["sampled"][way][d] for way, d in columns]
    else:
        sizes = [metrics["counts"][way][d]["tokens"] for way, d in columns]
    values = {
        name: [run["all"][metric], *(run[way][d][metric] for way, d in columns)]
        for name, run in runs.items()
    }
    form = _FORMATS.get(metric, "{:.3e}").format
    table = [["run", "all", *names], ["---"] * (len(names) + 2)]
    table.append(["rows" if metric in OF_ROWS else "tokens", "", *(f"{n:,}" for n in sizes)])
    table += [[name, *map(form, of_run)] for name, of_run in values.items()]
    if metric in ("sym_kl", "delta_nll"):
        table += _excess(values)
    return [_row(cells) for cells in table]


def _excess(values: dict[str, list[float]]) -> list[list[str]]:
    """How much more the tree runs err than two expansions do, the dashed line of Figure 4."""
    rows = []
    for name, base in product(("no replay", "tree"), ("reordered", "other attention")):
        if {name, base} <= values.keys() and any(values[base]):
            pairs = zip(values[name], values[base], strict=True)
            cells = [f"{ours / noise - 1:+.1%}" if noise else "" for ours, noise in pairs]
            rows.append([f"{name} over {base}", *cells])
    return rows


def _whole(found: dict[str, Any]) -> list[str]:
    heads = ["run", "loss difference", "changed routes"]
    heads += ["gradient: median parameter", "worst parameter", "all as one vector"]
    lines = [_row(heads), _row(["---"] * len(heads))]
    runs, gradients = found["runs"], found["steps"]["gradients"]
    for name in dict.fromkeys([*runs, *gradients]):
        cells = ["", ""]
        if name in runs:
            run = runs[name]
            cells = [f"{run['loss_difference']:.2e}", f"{run['changed_routes']:.3%}"]
        of_step = gradients.get(name, {})
        cells += [
            f"{of_step[key]:.2e}" if key in of_step else "" for key in ("median", "max", "all")
        ]
        lines.append(_row([name, *cells]))
    return lines


def _bits(found: dict[str, Any]) -> list[str]:
    equal = {"reference, rerun without gradients": found["rerun_has_same_bits"]}
    equal |= found["steps"]["same_bits"]
    words = {True: "the same bits", False: "**other bits**"}
    return [f"- {what}: {words[same]}" for what, same in equal.items()]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
