"""The MoE block on one GPU: fused, with either kind of experts, beside transformers' own.

    python benchmarks/ops_moe.py                 # 65,536 rows, 8 of 128 experts, bfloat16, table
    python benchmarks/ops_moe.py --write         # and the JSON in benchmarks/results

All sides are one block of the same weights: router, experts and shared expert. "gathered" and
"grouped" are the implementations of the experts; "original" runs transformers' grouped_mm experts.
"both" is forward and backward, "recomputed" the same under non-reentrant checkpointing. Samples of
all sides alternate in one process and are timed by CUDA events. "gemm" is the products of the
experts alone; "part" is one kernel or step around them.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.models.bailing_hybrid import modeling_bailing_hybrid as hf
from transformers.models.bailing_hybrid.configuration_bailing_hybrid import BailingHybridConfig

from harts.models.fused.moe import expert_adapters, fused_moe

sys.path.insert(0, str(Path(__file__).parent))
from gpu_environment import gpu_environment
from gpu_timing import alternate
from results_file import add_result_options, keep_records, settings

Side = Callable[[], object]
IMPLEMENTATIONS = ("gathered", "grouped")


def main() -> None:
    """Measure and print; write the JSON with --write."""
    args = _arguments()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/ops_moe.py measures on a GPU, and torch finds none")
    torch.manual_seed(args.seed)
    original = _block(args)
    blocks = {name: _adapted(original, name) for name in IMPLEMENTATIONS} | {"original": original}
    hidden, d_output = (
        torch.randn(1, args.rows, args.width, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    hidden.requires_grad_()
    metrics = _first_calls(blocks, hidden, d_output)
    sides: dict[str, Side] = {}
    for name, block in blocks.items():
        sides |= _block_sides(name, block, hidden, d_output)
    samples = alternate(sides, args.samples)
    parts = _part_sides(blocks["grouped"], hidden[0].detach(), d_output[0])
    samples |= alternate(parts, args.samples)
    for name, milliseconds in samples.items():
        metrics[f"{name}_ms"] = statistics.median(milliseconds)
        metrics[f"{name}_ms_spread"] = max(milliseconds) - min(milliseconds)
    flops = 6 * args.rows * args.top_k * args.width * args.inner
    for name in IMPLEMENTATIONS:
        for phase, times in (("forward", 1), ("backward", 2)):
            tflops = times * flops / metrics[f"gemm_{name}_{phase}_ms"] / 1e9
            metrics[f"gemm_{name}_{phase}_tflops"] = tflops
        for phase in ("forward", "both", "recomputed"):
            ratio = metrics[f"original_{phase}_ms"] / metrics[f"{name}_{phase}_ms"]
            metrics[f"original_over_{name}_{phase}"] = ratio
    for name, value in metrics.items():
        print(f"  {name:34} {value:.5g}")
    record = {
        "bench": "ops_moe",
        "case": f"rows{args.rows}-top{args.top_k}of{args.experts}-{args.width}x{args.inner}",
        "config": settings(args) | {"dtype": "bf16"},
        "env": gpu_environment(),
        "metrics": metrics,
        "samples": samples,
    }
    keep_records(args, "ops_moe", [record])


def _block(args: argparse.Namespace) -> nn.Module:
    """bfloat16 with a float32 router, weights of the usual size."""
    config = BailingHybridConfig(
        hidden_size=args.width,
        moe_intermediate_size=args.inner,
        num_local_experts=args.experts,
        num_experts_per_tok=args.top_k,
        n_shared_experts=1,
        n_group=args.groups,
        topk_group=args.kept_groups,
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("cuda"):
        block = hf.BailingHybridMoE(config)
    router = copy.deepcopy(block.gate)
    block = block.bfloat16()
    block.gate = router
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)
    return block


def _adapted(block: nn.Module, experts: str) -> nn.Module:
    """The same parameters under the adapters."""
    table = fused_moe(hf) | expert_adapters(hf, experts)
    fused = copy.deepcopy(block, {id(p): p for p in block.parameters()})
    for module in fused.modules():
        module.__class__ = table.get(type(module), type(module))
    return fused


def _first_calls(
    blocks: dict[str, nn.Module], hidden: torch.Tensor, d_output: torch.Tensor
) -> dict[str, float]:
    """Seconds of the first call, peak memory above what was held, and how far outputs differ."""
    metrics, outputs = {}, {}
    for name, block in blocks.items():
        started = time.perf_counter()
        _both(block, hidden, d_output)
        torch.cuda.synchronize()
        metrics[f"{name}_first_call_seconds"] = time.perf_counter() - started
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        _both(block, hidden, d_output)
        metrics[f"{name}_peak_gib"] = (torch.cuda.max_memory_allocated() - held) / 2**30
        outputs[name] = block(hidden).detach().float()
    for name in IMPLEMENTATIONS:
        difference = (outputs[name] - outputs["original"]).norm() / outputs["original"].norm()
        metrics[f"{name}_relative_difference"] = difference.item()
    return metrics


def _both(block: nn.Module, hidden: torch.Tensor, d_output: torch.Tensor) -> object:
    return torch.autograd.grad(block(hidden), [hidden, *block.parameters()], d_output)


def _block_sides(
    name: str, block: nn.Module, hidden: torch.Tensor, d_output: torch.Tensor
) -> dict[str, Side]:
    def recomputed() -> object:
        output = checkpoint(block, hidden, use_reentrant=False)
        return torch.autograd.grad(output, [hidden, *block.parameters()], d_output)

    return {
        f"{name}_forward": lambda: block(hidden),
        f"{name}_both": lambda: _both(block, hidden, d_output),
        f"{name}_recomputed": recomputed,
    }


def _part_sides(block: Any, hidden: torch.Tensor, d_output: torch.Tensor) -> dict[str, Side]:
    """The products of both kinds, and each step around them, on the routing of the block."""
    from harts.ops.moe import permutation, router, router_kernels, swiglu_kernels
    from harts.ops.moe.experts import products_of

    gate, experts = block.gate, block.experts
    with torch.no_grad():
        logits, weights, indices = gate(hidden)
        gate_up_proj, down_proj = experts.gate_up_proj.detach(), experts.down_proj.detach()
        plan = permutation.plan_pairs(indices, len(gate_up_proj))
        pair, position = plan.pair_of_position, plan.position_of_pair
    leaves = (hidden.clone().requires_grad_(), gate.weight)
    exact_logits = router.router_logits(*leaves)
    sides: dict[str, Side] = {}
    for name in IMPLEMENTATIONS:
        products = products_of(name)
        rows, d_rows = (products.rows_of_pairs(x, plan) for x in (hidden, d_output))
        gate_up = products.times(rows, gate_up_proj.mT, plan)
        act = swiglu_kernels.weighted_swiglu(gate_up, weights, pair)
        sides |= {
            f"gemm_{name}_gate_up": partial(products.times, rows, gate_up_proj.mT, plan),
            f"gemm_{name}_down": partial(products.times, act, down_proj.mT, plan),
            f"gemm_{name}_d_act": partial(products.times, d_rows, down_proj, plan),
            f"gemm_{name}_d_down": partial(products.outer, d_rows, act, plan),
            f"gemm_{name}_d_gate_up": partial(products.transposed_outer, rows, gate_up, plan),
            f"gemm_{name}_d_rows": partial(products.times, gate_up, gate_up_proj, plan),
        }
        sides[f"gemm_{name}_forward"] = _all(sides, name, "gate_up", "down")
        sides[f"gemm_{name}_backward"] = _all(sides, name, "d_act", "d_down", "d_gate_up", "d_rows")
    d_rows = permutation.spread_rows(d_output, position)

    options = dict(
        top_k=gate.top_k,
        num_groups=gate.num_group,
        kept_groups=gate.topk_group,
        normalise=gate.norm_topk_prob,
        scaling=gate.routed_scaling_factor,
    )
    bias = gate.e_score_correction_bias
    backward_options = dict(softmax=False, normalise=True, scaling=gate.routed_scaling_factor)
    return sides | {
        "part_logits": lambda: router.router_logits(hidden, gate.weight.detach()),
        "part_logits_backward": lambda: torch.autograd.grad(
            exact_logits, leaves, logits, retain_graph=True
        ),
        "part_choice": lambda: router_kernels.choose_by_sigmoid(logits, bias, **options),
        "part_choice_backward": lambda: router_kernels.choice_gradient(
            logits, indices, weights, **backward_options
        ),
        "part_plan": lambda: permutation.plan_pairs(indices, len(gate_up_proj)),
        "part_spread": lambda: permutation.spread_rows(hidden, position),
        "part_combine": lambda: permutation.combine_rows(d_rows, position, gate.top_k),
        "part_swiglu": lambda: swiglu_kernels.weighted_swiglu(gate_up, weights, pair),
        "part_swiglu_backward": lambda: swiglu_kernels.weighted_swiglu_gradients(
            gate_up, weights, pair, act
        ),
    }


def _all(sides: dict[str, Side], name: str, *products: str) -> Side:
    def run() -> None:
        for product in products:
            sides[f"gemm_{name}_{product}"]()

    return run


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=65536)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--inner", type=int, default=512)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--kept-groups", type=int, default=4)
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    add_result_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
