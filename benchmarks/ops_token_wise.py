"""Token-wise operators on one GPU: fused against eager transformers and the byte floor.

    python benchmarks/ops_token_wise.py          # C = 65,536 rows of the Ling-3.0-tiny shape
    python benchmarks/ops_token_wise.py --rows 8192 --only norm

Each operator, forward and backward apart, variants alternating in one process:
    eager      the module of transformers, or its lines where they stand inside a larger forward
    fused      harts
    library    torch.nn.functional.rms_norm, for the plain norms
    floor      bytes that must move, over the bandwidth of a copy measured in the same run
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers.models.bailing_hybrid import modeling_bailing_hybrid as hf

from harts.ops.activation import gate_heads, swiglu
from harts.ops.norm import gated_rms_norm, rms_norm
from harts.ops.rotary import assemble_keys_values, rotate_queries

sys.path.insert(0, str(Path(__file__).parent))
from gpu_environment import gpu_environment
from results_file import add_result_options, keep_records, settings

EPS = 1e-6
HEADS, PLAIN, ROTARY, VALUE = 16, 128, 64, 128
Call = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """inputs: leaves, in the order of every variant's arguments; constants follow them.

    elements: read and written by the forward and by the backward, two bytes each.
    """

    inputs: list[torch.Tensor]
    constants: tuple[torch.Tensor, ...]
    variants: dict[str, Call]
    elements: tuple[int, int]


def main() -> None:
    """Measure and print a table; write the JSON with --write."""
    args = _arguments()
    cases = {k: v for k, v in _cases(args.rows).items() if args.only is None or args.only in k}
    bandwidth = _copy_bandwidth(args)
    metrics: dict[str, Any] = {"copy_gb_per_s": round(bandwidth / 1e9, 1)}
    samples: dict[str, Any] = {}
    print(f"{'operator':22}{'variant':10}{'forward ms':>12}{'backward ms':>13}  of the floor")
    for name, make in cases.items():
        case = make()
        floors = [2 * count / bandwidth * 1e3 for count in case.elements]
        for variant, timed in _measure(case, args).items():
            medians = [statistics.median(phase) for phase in timed]
            for phase, median, floor, values in zip(
                ("forward", "backward"), medians, floors, timed, strict=True
            ):
                key = f"{name}_{variant}_{phase}"
                metrics[f"{key}_ms"] = round(median, 4)
                metrics[f"{key}_over_floor"] = round(median / floor, 3)
                samples[key] = [round(value, 4) for value in values]
            ratios = "  ".join(f"{m / f:6.2f}" for m, f in zip(medians, floors, strict=True))
            print(f"{name:22}{variant:10}{medians[0]:12.3f}{medians[1]:13.3f}  {ratios}")
        print(f"{name:22}{'floor':10}{floors[0]:12.3f}{floors[1]:13.3f}", flush=True)
        del case
    record = {
        "bench": "ops_token_wise",
        "case": {"rows": args.rows, "dtype": "bfloat16"},
        "config": settings(args),
        "env": gpu_environment(),
        "metrics": metrics,
        "samples": samples,
    }
    print(json.dumps(metrics, indent=1))
    keep_records(args, "ops_token_wise", [record])


def _cases(rows: int) -> dict[str, Callable[[], Case]]:
    return {
        "norm_1536": partial(_norm, rows, 1536),
        "norm_512": partial(_norm, rows, 512),
        "norm_heads_128": partial(_norm, rows, 128, HEADS),
        "gated_norm_heads_128": partial(_gated_norm, rows),
        "swiglu_512": partial(_swiglu, rows, 512),
        "swiglu_4608": partial(_swiglu, rows, 4608),
        "rotate_queries": partial(_rotate_queries, rows),
        "assemble_keys_values": partial(_assemble, rows),
        "gate_heads": partial(_gate_heads, rows),
    }


def _norm(rows: int, width: int, heads: int = 1) -> Case:
    x = _normal(1, rows, heads, width) if heads > 1 else _normal(1, rows, width)
    module = hf.BailingHybridRMSNorm(width, EPS).to("cuda", torch.bfloat16)
    return Case(
        [x, _normal(width)],
        (),
        {
            "eager": partial(_with_weight, module),
            "library": lambda x, w: F.rms_norm(x, (width,), w, EPS),
            "fused": partial(rms_norm, eps=EPS, impl="fused"),
        },
        (2 * x.numel(), 3 * x.numel()),
    )


def _gated_norm(rows: int) -> Case:
    x, gate = _normal(rows, HEADS, VALUE), _normal(rows, HEADS, VALUE)
    module = hf.BailingHybridRMSNormGated(VALUE, EPS).to("cuda", torch.bfloat16)
    return Case(
        [x, _normal(VALUE), gate],
        (),
        {
            "eager": partial(_with_weight, module),
            "fused": lambda x, w, g: gated_rms_norm(
                x, g, w, eps=EPS, activation="sigmoid", scaling="wide", impl="fused"
            ),
        },
        (3 * x.numel(), 5 * x.numel()),
    )


def _with_weight(
    module: torch.nn.Module, x: torch.Tensor, weight: torch.Tensor, *gate: torch.Tensor
) -> torch.Tensor:
    y: torch.Tensor = torch.func.functional_call(module, {"weight": weight}, (x, *gate))
    return y


def _swiglu(rows: int, width: int) -> Case:
    gate, up = _normal(rows, width), _normal(rows, width)
    return Case(
        [gate, up],
        (),
        {"eager": swiglu, "fused": partial(swiglu, impl="fused")},
        (3 * gate.numel(), 5 * gate.numel()),
    )


def _rotate_queries(rows: int) -> Case:
    q = _normal(rows, HEADS, PLAIN + ROTARY)

    def eager(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        plain, rotary = q[None].transpose(1, 2).split([PLAIN, ROTARY], dim=-1)
        rotated, _ = hf.apply_rotary_pos_emb_interleave(rotary, rotary[:, :0], cos[None], sin[None])
        return torch.cat((plain, rotated), dim=-1)

    fused = partial(rotate_queries, impl="fused")
    elements = 2 * q.numel() + rows * ROTARY
    return Case([q], _angles(rows), {"eager": eager, "fused": fused}, (elements, elements))


def _assemble(rows: int) -> Case:
    kv, k_rope = _normal(rows, HEADS, PLAIN + VALUE), _normal(rows, ROTARY)

    def eager(
        kv: torch.Tensor, k_rope: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shared = k_rope[None, None]
        _, shared = hf.apply_rotary_pos_emb_interleave(shared[:, :0], shared, cos[None], sin[None])
        plain, value = kv[None].transpose(1, 2).split([PLAIN, VALUE], dim=-1)
        key = kv.new_empty(*plain.shape[:-1], PLAIN + ROTARY)
        key[..., :PLAIN].copy_(plain)
        key[..., PLAIN:].copy_(shared.expand(-1, HEADS, -1, -1))
        return key, value

    fused = partial(assemble_keys_values, value_width=VALUE, impl="fused")
    elements = rows * (HEADS * (2 * PLAIN + 2 * VALUE + ROTARY) + 2 * ROTARY)
    variants = {"eager": eager, "fused": fused}
    return Case([kv, k_rope], _angles(rows), variants, (elements, elements))


def _gate_heads(rows: int) -> Case:
    x, logits = _normal(1, rows, HEADS, VALUE), _normal(1, rows, HEADS)
    variants = {"eager": gate_heads, "fused": partial(gate_heads, impl="fused")}
    return Case([x, logits], (), variants, (2 * x.numel(), 3 * x.numel()))


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()


def _angles(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    frequency = 10_000.0 ** (-torch.arange(0, ROTARY, 2, device="cuda") / ROTARY)
    angle = torch.arange(rows, device="cuda")[:, None] * frequency.repeat(2)
    return angle.cos().bfloat16(), angle.sin().bfloat16()


def _measure(case: Case, args: argparse.Namespace) -> dict[str, tuple[list[float], list[float]]]:
    """Milliseconds of every forward and backward; the first runs compile and are dropped."""
    timed: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in case.variants}
    for sample in range(args.warmup + args.samples):
        for name, variant in case.variants.items():
            forward, backward = _timed(case, variant, args.repeats)
            if sample >= args.warmup:
                timed[name][0].append(forward)
                timed[name][1].append(backward)
    return timed


def _timed(case: Case, variant: Call, repeats: int) -> tuple[float, float]:
    """One forward and one backward, each the mean of several back to back.

    Enqueued behind a kernel that keeps the GPU busy, so that host time is hidden.
    """
    graphs = []
    forward = _elapsed(lambda: graphs.append(_outputs(case, variant)), repeats)
    d_outputs = [torch.ones_like(y) for y in graphs[0]]
    backward = _elapsed(lambda: torch.autograd.grad(graphs.pop(), case.inputs, d_outputs), repeats)
    return forward, backward


def _outputs(case: Case, variant: Call) -> list[torch.Tensor]:
    outputs = variant(*case.inputs, *case.constants)
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


def _elapsed(call: Callable[[], Any], repeats: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(10_000_000)
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    elapsed: float = begin.elapsed_time(end) / repeats
    return elapsed


def _copy_bandwidth(args: argparse.Namespace) -> float:
    """Bytes a second of a copy of (65,536, 1536) bfloat16, read and written."""
    source = torch.randn(65_536, 1536, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    times = [
        _elapsed(lambda: target.copy_(source), args.repeats)
        for _ in range(args.warmup + args.samples)
    ]
    return 2 * 2 * source.numel() / statistics.median(times[args.warmup :]) * 1e3


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=65_536)
    parser.add_argument("--only", help="operators whose name contains this")
    parser.add_argument("--samples", type=int, default=11)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=4, help="calls of one sample")
    add_result_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
