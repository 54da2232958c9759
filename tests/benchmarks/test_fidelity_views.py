"""Rows of the fidelity benchmark: its tree, depths, expansions and the chains without replay."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import harts
from harts.models.load import load_model
from harts.ops.linear_attention import chunk_kda
from harts.plan.microbatch import MicroBatch
from harts.views.linear import LinearView
from harts.views.tree import TreeView, build_tree_view
from tests import oracles
from tests.families import KDA_MOE

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from fidelity_views import (
    depth_of_rows,
    expanded,
    forked_batch,
    piece_of,
    rows_of,
    whole_tree,
    without_replay,
)

VOCABULARY = 97
CPU = torch.device("cpu")


@cache
def _model() -> harts.TreeModel:
    hf_model = load_model(f"tiny:{KDA_MOE}", vocab_size=VOCABULARY, dtype="float64")
    return harts.attach(hf_model.train())


def _batch(*trajectories: list[int]) -> harts.TrajectoryBatch:
    return harts.TrajectoryBatch.from_rows(
        [{"input_ids": t, "loss_mask": [0] + [1] * (len(t) - 1)} for t in trajectories]
    )


def _three_levels() -> harts.TrajectoryBatch:
    """Forks at 70 and 150 with segments shorter and longer than a chunk, one of a single row."""
    token = np.random.default_rng(3).integers(10, VOCABULARY, 400).tolist()
    root, middle = token[:70], token[100:180]
    return _batch(
        [*root, *middle, 1, *token[200:330]],
        [*root, *middle, 2],
        [*root, *middle, 3, *token[340:360]],
        [*root, 4, *token[360:400]],
        [5, *token[:80]],
    )


def test_the_tree_has_the_rows_it_is_asked_for_and_five_handoffs_of_both_kinds() -> None:
    batch = forked_batch(16_384, 157_184)
    tree = whole_tree(batch)
    assert tree.num_rows == 16_384
    assert batch.loss_mask.sum() == len(batch.tokens) - len(batch)
    for of_row in depth_of_rows(tree).values():
        assert np.bincount(of_row).min() > 100
        assert of_row.max() == 5


def test_no_fork_of_the_tree_lies_on_a_chunk_boundary() -> None:
    forest = whole_tree(forked_batch(16_384, 157_184)).forest
    forks = np.unique(forest.parent[forest.parent >= 0])
    assert ((forest.start + forest.length)[forks] % 64 != 0).all()
    assert (forest.length < 64).any() and (forest.length > 128).any()


def test_the_same_seed_makes_the_same_tree_and_too_few_rows_are_refused() -> None:
    first, second = (forked_batch(900, VOCABULARY, depth=2, seed=7) for _ in range(2))
    assert np.array_equal(first.tokens, second.tokens)
    with pytest.raises(ValueError, match="rows is 100"):
        forked_batch(100, VOCABULARY, depth=2)


def test_depth_counts_forks_and_handed_over_states() -> None:
    tree = whole_tree(_three_levels())
    depth, layout = depth_of_rows(tree), tree.layout
    row_of = dict(enumerate(layout.semantic_to_compact.tolist()))
    ends = np.cumsum(tree.lengths) - 1
    assert [depth["fork"][row_of[e]] for e in ends.tolist()] == [2, 2, 2, 1, 0]
    # one branch of each fork goes on; 64 is handed to the fork at 70, 128 to those at 150
    last = [int(depth["chain"][row_of[e]]) for e in ends.tolist()]
    assert last == [0, 1, 1, 1, 0]


def test_chains_without_replay_show_every_row_once_and_start_from_their_parents_end() -> None:
    tree = whole_tree(forked_batch(900, VOCABULARY, depth=2))
    linear = _without_replay(tree, _model().view(tree)).linear
    num_chains, num_segments = len(linear.init_slot), len(tree.forest.parent)
    assert num_chains == num_segments
    source = linear.packed.source
    assert torch.equal(source.sort().values, torch.arange(tree.num_rows))
    first_row = source[linear.cu_seqlens[:-1]]
    segment = np.searchsorted(np.sort(tree.layout.first_row), first_row, side="right") - 1
    by_row = np.argsort(tree.layout.first_row)
    chain_of = {int(by_row[s]): chain for chain, s in enumerate(segment.tolist())}
    for child, parent in enumerate(tree.forest.parent.tolist()):
        slot = int(linear.init_slot[chain_of[child]])
        if parent < 0:
            assert slot == -1
            continue
        above = chain_of[parent]
        after_last_chunk = int(linear.chunk_offsets[above + 1]) + above
        assert slot == int(linear.store_slot[after_last_chunk]) >= 0


@pytest.mark.parametrize("tree", ["three-levels", "generated"])
def test_without_replay_log_probs_and_gradients_are_those_of_the_tree_in_float64(tree: str) -> None:
    batch = _three_levels() if tree == "three-levels" else forked_batch(900, VOCABULARY, depth=2)
    microbatch, model = whole_tree(batch), _model()
    weights = torch.randn(microbatch.num_scored, dtype=torch.float64)
    found = []
    with oracles.float64_throughout():
        view = model.view(microbatch)
        for each in (view, _without_replay(microbatch, view)):
            out = model.log_probs(microbatch, view=each)
            gradients = oracles.gradients(
                model.model, lambda out=out: (weights * out.log_probs).sum()
            )
            found.append((out.log_probs.detach(), gradients))
    (log_probs, gradients), (without, gradients_without) = found
    assert (without - log_probs).abs().max() < 1e-9
    assert not torch.equal(without, log_probs), "the chunks should differ"
    for name, gradient in gradients.items():
        scale = max(float(gradient.abs().max()), 1e-3)
        assert (gradients_without[name] - gradient).abs().max() < 1e-9 * scale, name


@pytest.mark.parametrize("capacity", [1, 400])
def test_expanded_microbatches_in_any_order_give_the_trees_log_probs(capacity: int) -> None:
    batch, model = _three_levels(), _model()
    order = np.array([3, 0, 4, 2, 1])
    by_position = np.zeros((2, len(batch.tokens)))
    microbatches = expanded(batch, order, capacity)
    assert sorted(i for mb in microbatches for i in mb.trajectory_ids) == list(range(5))
    assert sum(mb.num_rows for mb in microbatches) == len(batch.tokens)
    with oracles.float64_throughout(), torch.no_grad():
        for side, members in enumerate(([whole_tree(batch)], microbatches)):
            for mb in members:
                by_position[side, mb.batch_position[mb.scored]] = model.log_probs(mb).log_probs
    np.testing.assert_allclose(by_position[1], by_position[0], rtol=0, atol=1e-9)


def test_every_row_and_sample_of_the_tree_has_one_place_in_each_expansion() -> None:
    batch, model = _three_levels(), _model()
    tree = whole_tree(batch)
    rows = rows_of(tree, samples=20, seed=0)
    for members in ([tree], expanded(batch, np.arange(5), 400)):
        pieces = [piece_of(mb, model.view(mb), rows) for mb in members]
        first = torch.cat([piece.first_tree_row for piece in pieces])
        assert torch.equal(first.sort().values, torch.arange(tree.num_rows))
        sample = torch.cat([piece.sample for piece in pieces])
        assert torch.equal(sample.sort().values, torch.arange(len(rows.sampled)))
        for piece in pieces:
            shown = torch.from_numpy(tree.layout.tokens.astype(np.int64))[piece.tree_row]
            assert torch.equal(shown, piece.view.tokens)
            sampled = torch.from_numpy(rows.sampled)[piece.sample]
            assert torch.equal(piece.tree_row[piece.sample_row], sampled)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_scan_without_replay_is_as_exact_as_with_it() -> None:
    """Against float64, in bfloat16: states that end ragged chunks and their gradients."""
    device = torch.device("cuda")
    tree = whole_tree(forked_batch(2500, VOCABULARY, depth=3))
    with_replay = build_tree_view(tree, device=device)
    compact = _drawn(tree.num_rows, device)
    d_output = torch.randn(tree.num_rows, 2, 64, device=device)
    linear = (with_replay.linear, without_replay(tree, with_replay, device).linear)
    want = _core(linear[0], [x.double() for x in compact], d_output.double(), "reference")
    errors = []
    for view in linear:
        found = _core(view, compact, d_output.bfloat16(), "scan")
        assert all(bool(x.isfinite().all()) for x in found)
        errors.append([float((a - b).norm() / b.norm()) for a, b in zip(found, want, strict=True)])
    for replayed, without in zip(*errors, strict=True):
        assert without <= 2 * replayed + 2**-9


def _drawn(rows: int, device: torch.device) -> list[torch.Tensor]:
    """q, k, v, log_decay, beta over compact rows, two heads of 64, bfloat16."""
    torch.manual_seed(0)
    q, k, v, decay = torch.randn(4, rows, 2, 64, device=device)
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    inputs = (q, k, v, -0.05 * decay.abs(), torch.rand(rows, 2, device=device))
    return [x.bfloat16() for x in inputs]


def _core(
    view: LinearView, compact: list[torch.Tensor], d_output: torch.Tensor, impl: Any
) -> list[torch.Tensor]:
    """Output over compact rows and the gradients of the inputs."""
    leaves = [x.detach().requires_grad_() for x in compact]
    packed = [x[view.packed.source] for x in leaves]
    output, _ = chunk_kda(*packed, view=view, impl=impl, safe_gate=True)
    output = output[view.packed.own]
    return [output.detach().double(), *torch.autograd.grad(output, leaves, d_output)]


def _without_replay(tree: MicroBatch, view: TreeView) -> TreeView:
    return without_replay(tree, view, CPU)
