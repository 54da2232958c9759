"""How near a tree is to its expanded trajectories in bfloat16, beside how near two expansions are.

    python benchmarks/fidelity.py --write                 # 24 layers on one GPU
    python benchmarks/fidelity.py --model tiny:bailing_hybrid --device cpu --rows 900 --depth 2

The measures of the paper's section 5.4 by handoff depth: symmetric KL (Equation 25), |ΔNLL|
(Equation 26), cosine of the logits (Equation 27). Against a reference, the expanded trajectories,
stand: the same again ("rerun"), other packings of them ("reordered": other order and microbatches;
"alone": one trajectory a microbatch), "other attention" kernels for them, the tree, and the tree
without replay, where every segment continues from its parent's end state on a chunk grid of its
own. Deterministic kernels that treat a row alike in any packing leave little noise between the
expansions; then the other kernels show what rounding does.

Weights are random, with two consequences. The LM head is scaled so that distributions have about
3 nats of entropy, as a language model's; tokens of the random tree are then improbable, so |ΔNLL|
is of a token drawn from the reference's distribution. And a router's scores lie close together, so
that rounding noise flips routes: everything is measured with free routes, and again with the
routes of the free reference (of the first trajectory that holds a row) imposed on every run.

Legend: C compact rows of the tree, S tokens, n sampled rows, D hidden width, W vocabulary.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import harts
from harts.models.kernels import fast_kernels
from harts.models.load import load_model
from harts.models.tree_model import TreeModel
from harts.ops.cross_entropy import mapped_log_probs
from harts.plan.microbatch import MicroBatch

sys.path.insert(0, str(Path(__file__).parent))
from fidelity_table import MODES, markdown
from fidelity_views import (
    DEPTH,
    Piece,
    Rows,
    expanded,
    forked_batch,
    piece_of,
    rows_of,
    whole_tree,
    without_replay,
)
from gpu_environment import gpu_environment, limit_autotuning
from results_file import add_result_options, environment, keep_records, settings
from step_models import SHAPES, build_model

ENTROPY = 3.0  # nats, of the scaled LM head
TINY_VOCABULARY = 997
SKIPPABLE = ("reordered", "other attention", "alone", "no replay")
Routes = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Run:
    """log_probs, entropy: (S,), 0 where nothing is scored. hidden: (n, D), of the sampled rows.

    routes: router -> experts (C, k) that it chose, whatever was imposed. gradients: some.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor
    hidden: torch.Tensor
    routes: Routes
    gradients: dict[str, torch.Tensor]
    seconds: float

    def same_bits(self, other: Run) -> bool:
        """Log-probs, sampled hidden states, and gradients where both have them."""
        pairs = [(self.log_probs, other.log_probs), (self.hidden, other.hidden)]
        if other.gradients:
            pairs += [(g, other.gradients[name]) for name, g in self.gradients.items()]
        return all(torch.equal(a, b) for a, b in pairs)


def main() -> None:
    """Measure and print; write the JSON with --write or --out."""
    args = _arguments()
    vocabulary = SHAPES[args.model]["vocab_size"] if args.model in SHAPES else TINY_VOCABULARY
    started = time.perf_counter()
    if args.device == "cuda":
        limit_autotuning(args.configs)
        kernels = fast_kernels(torch.device("cuda"), deterministic=True)
        model = harts.attach(build_model(args.model), kernels=kernels)
    else:
        tiny = load_model(args.model, vocab_size=vocabulary, dtype=args.dtype)
        model = harts.attach(tiny.train())
    print(f"{args.model}: model in {time.perf_counter() - started:.1f} s", flush=True)
    batch = forked_batch(args.rows, vocabulary, depth=args.depth, seed=args.seed)
    metrics = measure(
        model,
        batch,
        capacity=args.rows,
        samples=args.samples,
        seed=args.seed,
        skip=args.skip,
    )
    record = {
        "bench": "fidelity",
        "case": f"{args.model} {args.rows} rows depth {args.depth}",
        "config": settings(args) | {"kernels": str(model.kernels), "entropy_wanted": ENTROPY},
        "env": gpu_environment() if args.device == "cuda" else environment(),
        "metrics": metrics,
    }
    print(markdown(record), flush=True)
    name = f"fidelity-{args.model.replace(':', '-')}"
    hardware = None if args.device == "cuda" else "cpu"
    keep_records(args, "fidelity", [record], name=name, hardware=hardware)


def measure(
    model: TreeModel,
    batch: harts.TrajectoryBatch,
    *,
    capacity: int,
    samples: int,
    seed: int = 0,
    skip: Collection[str] = (),
) -> dict[str, Any]:
    """All runs of a batch that is one tree; scales the LM head of the model.

    capacity: rows of an expanded microbatch. samples: rows a depth whose logits are compared.
    skip: runs to leave out, of SKIPPABLE.
    Returns the "metrics" of the record, plain numbers and truth values.
    """
    _scale_head(model)
    tree = whole_tree(batch)
    rows = rows_of(tree, samples, seed)
    sides = _sides(model, batch, tree, rows, capacity, seed)
    sides = {name: side for name, side in sides.items() if name not in skip}
    metrics: dict[str, Any] = _sizes(batch, tree, rows)
    imposed: Routes | None = None
    for mode in MODES:
        runs = {}
        for name, side in sides.items():
            with _attention(model, other=name == "other attention"):
                runs[name] = _run(model, side, rows, imposed)
        for name, run in runs.items():
            print(f"{mode:8}{name:24}     {run.seconds:8.2f} s", flush=True)
        reference = runs.pop("reference")
        compare = partial(_compare, reference=reference, rows=rows, batch=batch)
        compare = partial(compare, targets=_drawn(model, reference, seed), weight=_head(model))
        metrics[mode] = {
            "entropy": float(_scored(reference.entropy, batch).mean()),
            "runs": {name: compare(run) for name, run in runs.items()},
            "rerun_has_same_bits": reference.same_bits(runs["rerun"]),
            "steps": _steps(model, sides, rows, imposed, seed),
        }
        imposed = imposed or reference.routes
    return metrics


def _scale_head(model: TreeModel) -> None:
    """Normal logits of deviation s have entropy log W - s^2 / 2; hidden states have unit rows."""
    with torch.no_grad():
        weight = model._causal_lm.get_output_embeddings().weight
        deviation = math.sqrt(2 * (math.log(weight.shape[0]) - ENTROPY))
        weight *= deviation / (weight.float().std().item() * math.sqrt(weight.shape[1]))


def _sides(
    model: TreeModel,
    batch: harts.TrajectoryBatch,
    tree: MicroBatch,
    rows: Rows,
    capacity: int,
    seed: int,
) -> dict[str, list[Piece]]:
    """What each run computes, the reference first."""
    given = np.arange(len(batch))
    reordered = np.random.default_rng(seed).permutation(len(batch))
    view = model.view(tree)
    reference = [piece_of(mb, model.view(mb), rows) for mb in expanded(batch, given, capacity)]
    other = expanded(batch, reordered, capacity * 3 // 4)
    alone = expanded(batch, given, 1)
    return {
        "reference": reference,
        "rerun": reference,
        "reordered": [piece_of(mb, model.view(mb), rows) for mb in other],
        "other attention": reference,
        "alone": [piece_of(mb, model.view(mb), rows) for mb in alone],
        "tree": [piece_of(tree, view, rows)],
        "no replay": [piece_of(tree, without_replay(tree, view, model.device), rows)],
    }


def _run(
    model: TreeModel,
    side: list[Piece],
    rows: Rows,
    imposed: Routes | None,
    loss_weights: torch.Tensor | None = None,
) -> Run:
    """Forward of all pieces; with loss_weights (S,) also the gradients of their sum."""
    device, started = model.device, time.perf_counter()
    head = model._causal_lm.get_output_embeddings()
    log_probs, entropy = torch.zeros(2, len(rows.of_position), device=device, dtype=torch.float64)
    hidden_samples = head.weight.new_empty(len(rows.sampled), head.weight.shape[1])
    routes: Routes = {}
    model.model.zero_grad(set_to_none=True)
    for piece in side:
        with (
            _routed(model, imposed, piece) as seen,
            torch.set_grad_enabled(loss_weights is not None),
        ):
            hidden = model._backbone(piece.view)
            values, spread = mapped_log_probs(
                hidden, head.weight, view=piece.view.logprobs, impl=model.kernels.log_probs
            )
            if loss_weights is not None:
                (-(values * loss_weights[piece.scored]).sum()).backward()
        log_probs[piece.scored] = values.detach().double()
        entropy[piece.scored] = spread.detach().double()
        hidden_samples[piece.sample] = hidden.detach()[piece.sample_row]
        for name, indices in seen.items():
            shape = (len(rows.first_position), indices.shape[1])
            of_rows = routes.setdefault(name, indices.new_empty(shape))
            of_rows[piece.first_tree_row] = indices[piece.first_row]
    gradients = _some_gradients(model.model) if loss_weights is not None else {}
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    return Run(log_probs, entropy, hidden_samples, routes, gradients, seconds)


@contextmanager
def _attention(model: TreeModel, *, other: bool) -> Iterator[None]:
    """Inside, where `other`, attention runs in blocks of torch's matmuls (or its plain twin)."""
    kernels = model.kernels
    if other:
        name: Any = "views" if kernels.attention != "views" else "reference"
        model.kernels = replace(kernels, attention=name)
    try:
        yield
    finally:
        model.kernels = kernels


@contextmanager
def _routed(model: TreeModel, imposed: Routes | None, piece: Piece) -> Iterator[Routes]:
    """Note what routers choose and replace it by imposed routes (C, k), in backward too."""
    seen: Routes = {}

    def hook(name: str, router: Any, args: Any, output: tuple[torch.Tensor, ...]) -> Any:
        logits, _, indices = output
        seen[name] = indices.detach()
        if imposed is None:
            return None
        indices = imposed[name][piece.tree_row]
        return logits, _sigmoid_weights(router, logits, indices), indices

    for name, router in model.routers.items():
        if model.family.routers[model.family.kind_of(router)] != "sigmoid":
            raise harts.ConfigError(f"{name} is no sigmoid router; take a model that has them")
    handles = [
        router.register_forward_hook(partial(hook, name)) for name, router in model.routers.items()
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _sigmoid_weights(router: Any, logits: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """What a sigmoid router of transformers gives the experts that it chose, (C, k)."""
    weights = logits.sigmoid().gather(1, indices)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * router.routed_scaling_factor


def _some_gradients(
    module: nn.Module, wanted: int = 24, most: int = 1 << 23
) -> dict[str, torch.Tensor]:
    """Copies of some parameters' gradients from all depths, their first `most` elements."""
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    names = list(gradients)[:: max(1, len(gradients) // wanted)]
    return {name: gradients[name].flatten()[:most].clone() for name in names}


def _head(model: TreeModel) -> torch.Tensor:
    """The LM head's weight (W, D), float32 at least."""
    weight = model._causal_lm.get_output_embeddings().weight.detach()
    return weight.to(torch.promote_types(weight.dtype, torch.float32))


def _drawn(model: TreeModel, reference: Run, seed: int) -> torch.Tensor:
    """One token (n,) for each sampled row, from the reference's distribution."""
    weight, generator = _head(model), torch.Generator(model.device).manual_seed(seed)
    tokens = [
        torch.multinomial(torch.softmax(rows.to(weight) @ weight.T, -1), 1, generator=generator)
        for rows in reference.hidden.split(256)
    ]
    return torch.cat(tokens)[:, 0]


def distances(
    hidden: torch.Tensor, reference: torch.Tensor, targets: torch.Tensor, weight: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Equations 25 to 27 for each row: hidden, reference (n, D), targets (n,), weight (W, D).

    Logits are products in weight's dtype, everything after them float64. Returns "sym_kl",
    "delta_nll" and "cosine", (n,) float64 each. The KL is a sum of terms of one sign, so that
    nothing cancels. O(n W D) time, O(W) memory.
    """
    found: dict[str, list[torch.Tensor]] = {"sym_kl": [], "delta_nll": [], "cosine": []}
    blocks = zip(hidden.split(128), reference.split(128), targets.split(128), strict=True)
    for ours, theirs, target in blocks:
        logits, wanted = ((h.to(weight) @ weight.T).double() for h in (ours, theirs))
        log_p, log_q = logits.log_softmax(-1), wanted.log_softmax(-1)
        difference = log_p - log_q
        found["sym_kl"].append(((log_p.exp() - log_q.exp()) * difference).sum(-1) / 2)
        found["delta_nll"].append(difference.gather(1, target[:, None])[:, 0].abs())
        found["cosine"].append(torch.cosine_similarity(logits, wanted, dim=-1))
    return {name: torch.cat(blocks) for name, blocks in found.items()}


def _compare(
    run: Run,
    *,
    reference: Run,
    rows: Rows,
    batch: harts.TrajectoryBatch,
    targets: torch.Tensor,
    weight: torch.Tensor,
) -> dict[str, Any]:
    """Every metric of a run over all rows, and by depth for both ways of counting."""
    by_row = distances(run.hidden, reference.hidden, targets, weight)
    by_row = {name: values.cpu().numpy() for name, values in by_row.items()}
    difference = (run.log_probs - reference.log_probs).abs().cpu().numpy()
    scored = np.flatnonzero(batch.loss_mask)
    predicting = rows.of_position[scored - 1]
    loss = _scored(run.log_probs, batch).mean() - _scored(reference.log_probs, batch).mean()
    result: dict[str, Any] = {
        "all": _summary(difference[scored], by_row),
        "loss_difference": abs(float(loss)),
        "changed_routes": _changed_routes(run.routes, reference.routes),
        "seconds": run.seconds,
    }
    for way, of_row in rows.depth.items():
        result[way] = [
            _summary(difference[scored[of_row[predicting] == d]], by_row, at)
            for d, at in enumerate(rows.chosen[way])
        ]
    return result


def _summary(
    log_prob: np.ndarray, by_row: dict[str, np.ndarray], at: Any = slice(None)
) -> dict[str, float]:
    means = {name: float(values[at].mean()) for name, values in by_row.items()}
    return means | {
        "mean_log_prob": float(log_prob.mean()),
        "max_log_prob": float(log_prob.max()),
    }


def _changed_routes(ours: Routes, theirs: Routes) -> float:
    """Share of (router, row) pairs that chose another set of experts."""
    changed = [
        (indices.sort(-1).values != theirs[name].sort(-1).values).any(-1).double().mean().item()
        for name, indices in ours.items()
    ]
    return statistics.fmean(changed) if changed else 0.0


def _steps(
    model: TreeModel,
    sides: dict[str, list[Piece]],
    rows: Rows,
    imposed: Routes | None,
    seed: int,
) -> dict[str, Any]:
    """Forward and backward with layers recomputed or kept: gradients and bits."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(len(rows.of_position), generator=generator).to(model.device) * 1e-3
    step = partial(_run, model, rows=rows, imposed=imposed, loss_weights=weights)
    steps: dict[str, Run] = {}
    model.model.gradient_checkpointing_enable({"use_reentrant": False})
    for name, side in sides.items():
        if name not in ("alone", "other attention"):
            steps[name] = step(side)
    steps["tree again"] = step(sides["tree"])
    model.model.gradient_checkpointing_disable()
    for name in ("reference", "tree"):
        steps[f"{name}, layers kept"] = step(sides[name])
    model.model.zero_grad(set_to_none=True)
    tree, reference = steps["tree"], steps["reference"]
    for name, run in steps.items():
        print(f"{'':8}step {name:24}{run.seconds:8.2f} s", flush=True)
    return {
        "gradients": {
            name: _gradient_difference(run.gradients, reference.gradients)
            for name, run in steps.items()
            if name != "reference"
        },
        "same_bits": {
            "reference, rerun": reference.same_bits(steps["rerun"]),
            "tree, again": tree.same_bits(steps["tree again"]),
            "reference, layers kept": reference.same_bits(steps["reference, layers kept"]),
            "tree, layers kept": tree.same_bits(steps["tree, layers kept"]),
        },
    }


def _gradient_difference(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]
) -> dict[str, float]:
    """||a - b|| / ||b||: of the median and the worst parameter, and of all as one vector."""
    squares = [
        tuple(x.double().square().sum().item() for x in (g.double() - theirs[name], theirs[name]))
        for name, g in ours.items()
    ]
    relative = [math.sqrt(d / max(norm, 1e-300)) for d, norm in squares]
    total = sum(d for d, _ in squares) / max(sum(norm for _, norm in squares), 1e-300)
    return {"median": statistics.median(relative), "max": max(relative), "all": math.sqrt(total)}


def _scored(values: torch.Tensor, batch: harts.TrajectoryBatch) -> torch.Tensor:
    return values[torch.from_numpy(batch.loss_mask).to(values.device)]


def _sizes(batch: harts.TrajectoryBatch, tree: MicroBatch, rows: Rows) -> dict[str, Any]:
    tokens = rows.of_position[np.flatnonzero(batch.loss_mask) - 1]
    counts = {
        way: [
            {"rows": int((of_row == d).sum()), "tokens": int((of_row[tokens] == d).sum())}
            for d in range(int(of_row.max()) + 1)
        ]
        for way, of_row in rows.depth.items()
    }
    return {
        "trajectories": len(batch),
        "raw_tokens": len(batch.tokens),
        "compact_tokens": tree.num_rows,
        "replay_tokens": tree.calls.replay_tokens,
        "rounds": tree.calls.num_rounds,
        "counts": counts,
        "sampled_rows": len(rows.sampled),
        "sampled": {way: [len(at) for at in chosen] for way, chosen in rows.chosen.items()},
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="ling-3-tiny", help="a shape, or tiny:bailing_hybrid")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="float32", help="of a tiny model, on the CPU")
    parser.add_argument("--rows", type=int, default=16_384)
    parser.add_argument("--depth", type=int, default=DEPTH)
    parser.add_argument("--samples", type=int, default=512, help="rows a depth for logits")
    parser.add_argument("--configs", type=int, default=6, help="autotune choices of a fla kernel")
    parser.add_argument("--skip", nargs="*", default=[], choices=SKIPPABLE)
    parser.add_argument("--seed", type=int, default=0)
    add_result_options(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
