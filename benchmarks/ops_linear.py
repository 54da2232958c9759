"""KDA over an agent tree on one GPU: the scan against packed fla calls of the same rows.

    python benchmarks/ops_linear.py                      # C = 65,536 rows, 16 heads x 128, bf16
    python benchmarks/ops_linear.py --sweep              # also launch shapes of the two scans
    python benchmarks/ops_linear.py --per-head --heads 32 --key-heads 16    # Gated DeltaNet

Variants, forward and backward, alternating in one process:
    plain          fla's chunk_kda over the compact rows, one sequence a chain, no states: no tree
    plain_packed   the same over the packed rows, replay included
    scan           harts over the packed rows
    scan_gathered  the same from compact rows to own rows, each of its inputs gathered
    rows_in_and_out   the gather into the packed layout and back at the width of the model, once as
                   in a layer: all that a tree adds to a packed layer beside the scan
    rounds         fla's chunk_kda round by round
    nodes          fla's chunk_kda once for each fork-free segment, from its parent's end state
    expanded       fla's chunk_kda over all trajectories, nothing shared

With --per-head: plain and plain_packed are fla's chunk_gated_delta_rule, forward alone where fla
refuses its backward; scan and scan_gathered as above; widened is the scan with each decay repeated
over the key width, which takes KDA's kernels.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
import triton

from harts.data.synthetic import agent_batch
from harts.ops.gather import gather_rows, own_rows
from harts.ops.linear_attention import chunk_kda
from harts.plan.microbatch import MicroBatch
from harts.plan.planner import plan_step
from harts.views.linear import LinearView
from harts.views.tree import build_tree_view

sys.path.insert(0, str(Path(__file__).parent))
from baselines import node_by_node
from gpu_environment import gpu_environment, limit_autotuning
from results_file import add_result_options, keep_records, settings

DEVICE = torch.device("cuda")
Inputs = list[torch.Tensor]
Run = Callable[[], tuple[torch.Tensor, Inputs]]


def main() -> None:
    """Measure and print; write the JSON with --out."""
    args = _arguments()
    limit_autotuning(args.configs)
    microbatch, view, lengths, rows, case = _agent_view(args)
    variants = _variants(args, microbatch, view, lengths, rows)
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in variants}
    for name, run in variants.items():
        for _ in range(args.warmup):
            _timed(run)
        print(f"warm: {name}", flush=True)
    for _ in range(args.samples):
        for name, run in variants.items():
            for phase, milliseconds in _timed(run).items():
                samples[name].setdefault(phase, []).append(milliseconds)
    record = {
        "bench": "ops_linear",
        "case": case,
        "config": settings(args),
        "env": gpu_environment(),
        "metrics": _metrics(samples),
        "samples": samples,
    }
    print(json.dumps(record["metrics"], indent=1), flush=True)
    name = "ops_linear-per-head" if args.per_head else "ops_linear"
    keep_records(args, "ops_linear", [record], name=name, whole=not args.sweep)
    if args.sweep:
        record["sweep"] = _sweep(args, view)
        keep_records(args, "ops_linear", [record], name=name)


def _agent_view(
    args: argparse.Namespace,
) -> tuple[MicroBatch, LinearView, list[int], torch.Tensor, Any]:
    """Microbatch, view, trajectory lengths, compact row of every expanded token, facts."""
    batch = agent_batch(
        seed=args.seed,
        shape="agent_tree",
        compression=args.compression,
        raw_tokens=round(args.rows * args.compression),
    )
    plan = plan_step(batch, capacity=int(batch.lengths.sum()))
    (microbatch,) = plan._all
    view = build_tree_view(microbatch, device=DEVICE).linear
    layout = microbatch.layout
    facts = {
        "compact_rows": microbatch.num_rows,
        "packed_rows": len(view.grid_row),
        "raw_tokens": microbatch.num_tokens,
        "trajectories": len(batch),
        "chains": len(view.init_slot),
        "rounds": [b - a for a, b in pairwise(view.round_ptr)],
        "slots": view.num_slots,
        "longest_chain": int(view.cu_seqlens.diff().max()),
    }
    print(facts, flush=True)
    rows = torch.from_numpy(layout.semantic_to_compact).to(DEVICE)
    facts["segments"] = len(microbatch.forest.length)
    return microbatch, view, batch.lengths[microbatch.trajectory_ids].tolist(), rows, facts


def _variants(
    args: argparse.Namespace,
    microbatch: MicroBatch,
    view: LinearView,
    lengths: list[int],
    rows: torch.Tensor,
) -> dict[str, Run]:
    compact = _inputs(view.packed.own.shape[0], args)
    if args.per_head:
        return _per_head_variants(view, compact)
    packed = [gather_rows(x.detach(), view.packed).requires_grad_() for x in compact]
    own_lengths = _own_lengths(view)

    def plain(inputs: Inputs, cu_seqlens: torch.Tensor) -> Run:
        from fla.ops.kda import chunk_kda as fla_chunk_kda

        cu_seqlens_cpu = cu_seqlens.cpu()

        def run() -> tuple[torch.Tensor, Inputs]:
            q, k, v, log_decay, beta = (x.unsqueeze(0) for x in inputs)
            output, _ = fla_chunk_kda(
                q,
                k,
                v,
                log_decay,
                beta,
                safe_gate=args.safe_gate,
                cu_seqlens=cu_seqlens,
                cu_seqlens_cpu=cu_seqlens_cpu,
            )
            return output[0], inputs

        return run

    def tree(impl: Any) -> Run:
        def run() -> tuple[torch.Tensor, Inputs]:
            output, _ = chunk_kda(*packed, view=view, impl=impl, safe_gate=args.safe_gate)
            return output, packed

        return run

    def gathered() -> tuple[torch.Tensor, Inputs]:
        rows_of_chains = (gather_rows(x, view.packed, impl="fused") for x in compact)
        output, _ = chunk_kda(*rows_of_chains, view=view, impl="scan", safe_gate=args.safe_gate)
        return output.index_select(0, view.packed.own), compact

    def nodes() -> tuple[torch.Tensor, Inputs]:
        output, _ = node_by_node(
            *packed, microbatch=microbatch, view=view, safe_gate=args.safe_gate
        )
        return output, packed

    shape = (len(compact[0]), args.hidden)
    hidden = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)

    def moved() -> tuple[torch.Tensor, Inputs]:
        """What the tree adds to a packed layer: rows into the packed layout and out of it."""
        packed = gather_rows(hidden, view.packed, impl="fused")
        return own_rows(packed, view.packed, impl="fused"), [hidden]

    variants: dict[str, Run] = {
        "plain": plain(compact, _offsets(own_lengths)),
        "plain_packed": plain(packed, view.cu_seqlens),
        "scan": tree("scan"),
        "scan_gathered": gathered,
        "rows_in_and_out": moved,
        "rounds": tree("rounds"),
        "nodes": nodes,
    }
    if args.expanded:
        expanded = [x.detach().index_select(0, rows).requires_grad_() for x in compact]
        variants["expanded"] = plain(expanded, _offsets(lengths))
    return variants


def _per_head_variants(view: LinearView, compact: Inputs) -> dict[str, Run]:
    from harts.ops.linear_attention.fla06 import chunk_gated_delta_rule_packed

    packed = [gather_rows(x.detach(), view.packed).requires_grad_() for x in compact]

    def plain(inputs: Inputs, lengths: list[int]) -> Run:
        def run() -> tuple[torch.Tensor, Inputs]:
            q, k, v, log_decay, beta = (x.unsqueeze(0) for x in inputs)
            output, _ = chunk_gated_delta_rule_packed(
                q,
                k,
                v,
                log_decay.squeeze(-1),
                beta,
                scale=q.shape[-1] ** -0.5,
                initial_states=None,
                lengths=lengths,
            )
            return output[0], inputs if _fla_has_per_head_backward() else []

        return run

    def scan(inputs: Inputs, gathered: bool = False, widened: bool = False) -> Run:
        def run() -> tuple[torch.Tensor, Inputs]:
            rows = list(inputs)
            if gathered:
                rows = [gather_rows(x, view.packed, impl="fused") for x in inputs]
            if widened:
                rows[3] = rows[3].expand(-1, -1, rows[0].shape[2])
            output, _ = chunk_kda(*rows, view=view, impl="scan")
            return output.index_select(0, view.packed.own) if gathered else output, inputs

        return run

    return {
        "plain": plain(compact, _own_lengths(view)),
        "plain_packed": plain(packed, view.cu_seqlens.diff().tolist()),
        "scan": scan(packed),
        "scan_gathered": scan(compact, gathered=True),
        "widened": scan(packed, widened=True),
    }


def _fla_has_per_head_backward() -> bool:
    """Whether fla runs it here: Triton before 3.7.1 miscompiles it on Hopper."""
    version = tuple(int(part) for part in triton.__version__.split("+")[0].split("."))
    return torch.cuda.get_device_capability()[0] != 9 or not (3, 4) <= version < (3, 7, 1)


def _inputs(num_rows: int, args: argparse.Namespace) -> Inputs:
    """Random q, k of unit length, v, log decay in (-4, 0) mostly near zero, beta in (0, 1)."""
    generator = torch.Generator(DEVICE).manual_seed(args.seed)

    def normal(heads: int, *shape: int) -> torch.Tensor:
        return torch.randn(num_rows, heads, *shape, device=DEVICE, generator=generator)

    heads, key_heads, width = args.heads, args.key_heads or args.heads, args.width
    q, k = (torch.nn.functional.normalize(normal(key_heads, width), dim=-1) for _ in range(2))
    log_decay = -4 * torch.sigmoid(normal(heads, 1 if args.per_head else width) - 3)
    values = [q.bfloat16(), k.bfloat16(), normal(heads, width).bfloat16(), log_decay]
    return [x.requires_grad_() for x in [*values, torch.sigmoid(normal(heads)).bfloat16()]]


def _own_lengths(view: LinearView) -> list[int]:
    """Rows of each chain without its replay."""
    own = torch.zeros(len(view.grid_row), dtype=torch.int64, device=DEVICE)
    own[view.packed.own] = 1
    before = torch.nn.functional.pad(own.cumsum(0), (1, 0))
    return before[view.cu_seqlens].diff().tolist()


def _offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0)


def _timed(run: Run) -> dict[str, float]:
    """Milliseconds of the forward and of both, by device events; gradients of random weights."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    events[0].record()
    output, leaves = run()
    events[1].record()
    if leaves:
        torch.autograd.grad(output, leaves, output.detach())
    events[2].record()
    torch.cuda.synchronize()
    forward = {"forward": events[0].elapsed_time(events[1])}
    return forward | ({"both": events[0].elapsed_time(events[2])} if leaves else {})


def _metrics(samples: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    for name, phases in samples.items():
        for phase, values in phases.items():
            metrics[f"{name}_{phase}_ms"] = round(statistics.median(values), 3)
            metrics[f"{name}_{phase}_spread_ms"] = round(max(values) - min(values), 3)
    if "rows_in_and_out" in samples:
        layer = metrics["scan_both_ms"] + metrics["rows_in_and_out_both_ms"]
        metrics["layer_over_plain"] = round(layer / metrics["plain_both_ms"], 4)
    for name, phases in samples.items():
        for base in ("plain", "plain_packed"):
            phase = "both" if "both" in samples[base].keys() & phases.keys() else "forward"
            ratio = metrics[f"{name}_{phase}_ms"] / metrics[f"{base}_{phase}_ms"]
            metrics[f"{name}_over_{base}"] = round(ratio, 4)
    metrics["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return metrics


def _sweep(args: argparse.Namespace, view: LinearView) -> list[dict[str, Any]]:
    """Milliseconds of both scans for each launch shape, on random rows."""
    from harts.ops.linear_attention.scan_kernels import (
        ScanLaunch,
        scan_state_gradients,
        scan_states,
    )

    def rows(size: float, heads: int = args.heads) -> torch.Tensor:
        """Small keys, or states would grow without bound along a chain."""
        shape = (len(view.grid_row), heads, args.width)
        return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) * size

    key_heads = args.key_heads or args.heads
    if not args.per_head:  # KDA's kernels bring q and k into the layout of the value heads
        key_heads = args.heads
    k, q = rows(0.02, key_heads), rows(0.02, key_heads)
    w, u, d_output = rows(0.02), rows(1), rows(1)
    gate = -rows(1).float().abs()
    if args.per_head:
        gate = gate[..., 0].contiguous()
    pool = torch.zeros(view.num_slots, args.heads, args.width, args.width, device=DEVICE)
    table = []
    for block_v, num_warps, num_stages in product((32, 64), (4, 8), (1, 2, 3)):
        launch = ScanLaunch(block_v=block_v, num_warps=num_warps, num_stages=num_stages)
        calls = {
            "fill": partial(scan_states, k, w, u, gate, pool, view, fill_pool=True),
            "once": partial(scan_states, k, w, u, gate, pool, view, fill_pool=False),
            "reverse": partial(
                scan_state_gradients, q, k, w, gate, d_output, u, None, view, scale=0.1
            ),
        }
        entry: dict[str, Any] = dict(block_v=block_v, num_warps=num_warps, num_stages=num_stages)
        for name, call in calls.items():
            try:
                entry[name] = round(_median_ms(partial(call, launch=launch)), 3)
            except triton.runtime.errors.OutOfResources:
                entry[name] = None
        print(entry, flush=True)
        table.append(entry)
    return table


def _median_ms(call: Callable[[], Any]) -> float:
    median: float = triton.testing.do_bench(call, warmup=5, rep=20, return_mode="median")
    return median


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=65536, help="compact rows, about")
    parser.add_argument("--compression", type=float, default=5.6)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--key-heads", type=int, help="heads of queries and keys, --heads if not")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--per-head", action="store_true", help="one decay a head")
    parser.add_argument("--hidden", type=int, default=1536, help="width of the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=11)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--configs", type=int, default=6, help="autotune choices of a fla kernel")
    parser.add_argument("--no-safe-gate", dest="safe_gate", action="store_false")
    parser.add_argument("--no-expanded", dest="expanded", action="store_false")
    parser.add_argument("--sweep", action="store_true")
    add_result_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
