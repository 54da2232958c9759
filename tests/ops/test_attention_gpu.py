"""Tree attention on GPUs: block lists by brute force, kernels against float64."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import importlib
import math
import random
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.test_attention import CASES, caterpillar, chain_of, parents_in_preorder, view_of
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import harts
from harts.errors import ConfigError, HartsError
from harts.ops.attention import fa4, tree_attention
from harts.ops.attention.block_lists import (
    BlockList,
    QueuedLists,
    build_block_lists,
    classify_blocks,
    queue_blocks,
)
from harts.views.attention import AttentionView, ChainRows

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# ---- block lists: every pair of rows by hand ----


def visible_pairs(parents: list[int], padded_rows: int) -> torch.Tensor:
    """(P, P): the key row is an ancestor of the query row or the row itself."""
    visible = torch.eye(padded_rows, dtype=torch.bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            visible[row] |= visible[parent]
    return visible


def check_list(got: BlockList, chosen: torch.Tensor) -> None:
    assert got.counts.dtype == got.indices.dtype == torch.int32
    assert got.indices.is_contiguous() and got.indices.shape == chosen.shape
    for block, (count, indices) in enumerate(zip(got.counts, got.indices, strict=True)):
        listed = indices[:count].tolist()
        assert listed == chosen[block].nonzero().flatten().tolist(), f"block {block}"
        assert sorted(indices.tolist()) == list(range(chosen.shape[1]))


def check_block_lists(parents: list[int], query_block: int, key_block: int) -> None:
    end = view_of(parents).end if parents else torch.empty(0, dtype=torch.int32)
    lists = build_block_lists(end, query_block, key_block)
    padded_rows = lists.end.numel()
    assert padded_rows >= len(parents) and padded_rows >= 2 * max(query_block, key_block)
    assert padded_rows % query_block == 0 and padded_rows % key_block == 0
    row = torch.arange(padded_rows)
    visible = visible_pairs(parents, padded_rows)
    assert torch.equal((row <= row[:, None]) & (row[:, None] < lists.end), visible)
    blocks = visible.unflatten(1, (-1, key_block)).unflatten(0, (-1, query_block))
    some, full = blocks.any(dim=3).any(dim=1), blocks.all(dim=3).all(dim=1)
    check_list(lists.full_keys, full)
    check_list(lists.full_queries, full.T)
    check_list(lists.partial_keys, some & ~full)
    check_list(lists.partial_queries, (some & ~full).T)


@settings(max_examples=150, deadline=None)
@given(
    parents=parents_in_preorder(),
    query_block=st.sampled_from([1, 2, 3, 4, 8]),
    key_block=st.sampled_from([1, 2, 3, 4, 8]),
)
def test_listed_blocks_are_exactly_those_with_a_visible_pair(
    parents: list[int], query_block: int, key_block: int
) -> None:
    check_block_lists(parents, query_block, key_block)


@pytest.mark.parametrize("tree", list(CASES))
def test_named_trees_list_exactly_the_blocks_with_a_visible_pair(tree: str) -> None:
    check_block_lists(CASES[tree], 16, 8)


def visible_blocks(
    parents: list[int], query_block: int, key_block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(some, full), (M, N), of blocks that cover the rows; what lies past the rows is invisible."""
    num_rows = len(parents)
    num_queries, num_keys = -(-num_rows // query_block), -(-num_rows // key_block)
    visible = torch.zeros(num_queries * query_block, num_keys * key_block, dtype=torch.bool)
    visible[:num_rows, :num_rows] = visible_pairs(parents, num_rows)
    blocks = visible.unflatten(1, (-1, key_block)).unflatten(0, (-1, query_block))
    return blocks.any(dim=3).any(dim=1), blocks.all(dim=3).all(dim=1)


def check_queue(
    parents: list[int], query_block: int, key_block: int, max_moved: int | None
) -> None:
    end = view_of(parents).end
    some, full = visible_blocks(parents, query_block, key_block)
    partial_got, full_got = classify_blocks(end, query_block, key_block)
    assert torch.equal(partial_got, some & ~full)
    assert torch.equal(full_got, full)
    queue = queue_blocks(end, query_block, key_block, max_moved)
    assert (queue.full is None) == (queue.full_turns is None) == (max_moved is None)
    for key, visited in enumerate(some.T):
        is_short = max_moved is None or full[:, key].sum() <= max_moved
        masked = visited if is_short else visited & ~full[:, key]
        lists = [(queue.masked, queue.masked_turns, masked)]
        if queue.full is not None:
            assert queue.full_turns is not None
            lists.append((queue.full, queue.full_turns, visited & ~masked))
        for listed, turns, want in lists:
            count = listed.counts[key]
            queries = listed.indices[key, :count]
            assert queries.tolist() == want.nonzero().flatten().tolist(), f"key block {key}"
            later_keys = some[queries, key + 1 :].sum(dim=1)
            assert turns.dtype == torch.int32
            assert torch.equal(turns[key, :count].long(), later_keys), f"key block {key}"
    # What the kernel of BackwardInTurns computes: a full block, and the blocks of one list.
    start = query_block * torch.arange(len(full))[:, None]
    last_key = key_block * torch.arange(1, full.shape[1] + 1) - 1
    assert queue.whole_until.dtype == torch.int32
    known = (start >= last_key) & (start + query_block <= queue.whole_until)
    assert torch.equal(known, full)
    if max_moved is None:
        for key, (count, queries) in enumerate(
            zip(queue.masked.counts.tolist(), queue.masked.indices, strict=True)
        ):
            first = key * key_block // query_block
            assert count > 0 and queries[:count].tolist() == list(range(first, first + count))


@settings(max_examples=150, deadline=None)
@given(
    parents=parents_in_preorder(),
    query_block=st.sampled_from([1, 2, 3, 4, 8]),
    key_block=st.sampled_from([1, 2, 3, 4, 8]),
    max_moved=st.sampled_from([0, 1, 3, 100, None]),
)
def test_a_queue_lists_every_visible_block_once_with_its_turn(
    parents: list[int], query_block: int, key_block: int, max_moved: int | None
) -> None:
    check_queue(parents, query_block, key_block, max_moved)


def widths_by_blocks() -> dict[fa4.Blocks, tuple[tuple[int, int], int, int]]:
    """One compute capability and pair of widths for each pair of block sizes in use."""
    widths = [(64, 64), (128, 128), (192, 128), (192, 192), (256, 256)]
    kinds = [((9, 0), *pair) for pair in widths] + [((10, 0), 64, 64), ((10, 0), 192, 128)]
    return {fa4.block_sizes(*kind): kind for kind in kinds}


@pytest.mark.parametrize("blocks", list(widths_by_blocks()), ids=str)
def test_named_trees_queue_every_visible_block_of_the_sizes_in_use(blocks: fa4.Blocks) -> None:
    for tree in ("comb-with-long-teeth", "thousand-one-row-leaves", "whole-blocks"):
        for max_moved in (0, 2, 64, None):
            check_queue(FORESTS[tree], *blocks.backward, max_moved)


def run_in_turns(queue: QueuedLists, num_slots: int) -> tuple[list[int], int]:
    """Key blocks as they finish, and rounds, where num_slots run at once.

    The last key block starts first. In a round each adds to one query block if its turn has come.
    """
    lists = [(queue.masked, queue.masked_turns)]
    if queue.full is not None and queue.full_turns is not None:
        lists.append((queue.full, queue.full_turns))
    visits = [
        [
            visit
            for listed, turns in lists
            for visit in zip(
                listed.indices[key, : listed.counts[key]].tolist(),
                turns[key].tolist(),
                strict=False,
            )
        ][::-1]
        for key in range(len(queue.masked.counts))
    ]
    waiting, running, finished = list(range(len(visits))), [], []
    turn_of_query: dict[int, int] = {}
    rounds = 0
    while waiting or running:
        rounds += 1
        while waiting and len(running) < num_slots:
            running.append(waiting.pop())
        ready = [
            key for key in running if visits[key][-1][1] == turn_of_query.get(visits[key][-1][0], 0)
        ]
        assert ready, f"key blocks {running} wait for one another"
        for key in ready:
            query, turn = visits[key].pop()
            turn_of_query[query] = turn + 1
        finished += [key for key in running if not visits[key]]
        running = [key for key in running if visits[key]]
    return finished, rounds


@settings(max_examples=60, deadline=None)
@given(
    parents=parents_in_preorder(),
    num_slots=st.sampled_from([1, 2, 5, 100]),
    max_moved=st.sampled_from([0, 2, 100, None]),
)
def test_key_blocks_started_from_the_last_never_wait_for_ever(
    parents: list[int], num_slots: int, max_moved: int | None
) -> None:
    queue = queue_blocks(view_of(parents).end, 2, 3, max_moved)
    finished, _ = run_in_turns(queue, num_slots)
    assert sorted(finished) == list(range(len(queue.masked.counts)))


def rounds_without_turns(counts: list[int], num_slots: int) -> int:
    busy_until = [0] * num_slots
    for count in reversed(counts):
        heapq.heapreplace(busy_until, busy_until[0] + count)
    return max(busy_until)


@pytest.mark.parametrize("num_slots", [4, 10, 30])
@pytest.mark.parametrize("seed", range(2))
def test_key_blocks_that_visit_in_order_do_not_wait(seed: int, num_slots: int) -> None:
    end = ends_of(wide_tree(12_000, seed))
    in_order = queue_blocks(end, 64, 96, max_moved=None)
    masked_first = queue_blocks(end, 64, 96, max_moved=0)
    least = rounds_without_turns(in_order.masked.counts.tolist(), num_slots)
    assert run_in_turns(in_order, num_slots)[1] == least
    assert run_in_turns(masked_first, num_slots)[1] > 1.05 * least


def test_a_view_without_rows_lists_padding_alone() -> None:
    check_block_lists([], 4, 2)


def test_a_view_builds_what_its_layers_share_once() -> None:
    view, built = view_of([-1, 0, 1]), []

    def build(view: AttentionView) -> torch.Tensor:
        built.append(view.end + 1)
        return built[-1]

    with torch.inference_mode():
        first = view.once(build)
    assert view.once(build) is first and len(built) == 1
    assert not first.is_inference()
    assert dataclasses.replace(view).once(build) is not first


def test_flex_on_the_cpu_is_refused_in_one_line() -> None:
    q = torch.ones(3, 2, 16)
    with pytest.raises(ConfigError, match=r'"flex" needs CUDA tensors.*use impl="views"') as error:
        tree_attention(q, q, q, view=view_of([-1, 0, 1]), scale=1, impl="flex")
    assert "\n" not in str(error.value)


# ---- the kernels: error against float64, beside plain PyTorch of the same precision ----


@dataclasses.dataclass(frozen=True)
class Heads:
    dtype: torch.dtype
    query_heads: int
    key_heads: int
    key_width: int
    value_width: int


HEADS = {
    "bf16-128": Heads(torch.bfloat16, 4, 4, 128, 128),
    "bf16-grouped-64": Heads(torch.bfloat16, 6, 2, 64, 64),
    "bf16-latent-192-128": Heads(torch.bfloat16, 4, 4, 192, 128),
    "fp32-grouped-64-32": Heads(torch.float32, 4, 2, 64, 32),
    "fp32-latent-192-128": Heads(torch.float32, 2, 2, 192, 128),
}

FORESTS = CASES | {
    "thousand-one-row-leaves": [*chain_of(300), *[299] * 700, *[17] * 300],
    "whole-blocks": [*chain_of(512), 99, *range(512, 766), -1],
    "many-roots-of-a-block-and-one-row": [row - 1 if row % 129 else -1 for row in range(129 * 6)],
    "caterpillar-of-several-blocks": caterpillar(9, 150),
    "comb-with-long-teeth": [*chain_of(601), 300, *range(601, 900), 200, *range(901, 1111), 5],
}


def draw_inputs(heads: Heads, num_rows: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = (
        (heads.query_heads, heads.key_width),
        (heads.key_heads, heads.key_width),
        (heads.key_heads, heads.value_width),
        (heads.query_heads, heads.value_width),
    )
    return tuple(
        torch.randn(num_rows, *shape, generator=generator, device="cuda", dtype=heads.dtype)
        for shape in shapes
    )


def same_precision(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, view: AttentionView, scale: float
) -> torch.Tensor:
    """Dense attention whose products and probabilities have the precision of the inputs."""
    repeats = q.shape[1] // k.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    row = torch.arange(len(q), device=q.device)
    visible = (row <= row[:, None]) & (row[:, None] < view.end)
    scores = torch.einsum("qhd,khd->hqk", q, key) * scale
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def run(inputs: tuple[torch.Tensor, ...], attend: object, **options: object) -> list[torch.Tensor]:
    """Output and gradients of q, k, v."""
    *leaves, d_out = (x.detach().clone() for x in inputs)
    for leaf in leaves:
        leaf.requires_grad_()
    out = attend(*leaves, **options)  # type: ignore[operator]
    return [out, *torch.autograd.grad(out, leaves, d_out)]


def on_cuda(parents: list[int]) -> AttentionView:
    view = view_of(parents)
    return dataclasses.replace(view, end=view.end.cuda())


def rounding_bands(
    inputs: tuple[torch.Tensor, ...], want: list[torch.Tensor], scale: float, dtype: torch.dtype
) -> list[float]:
    """What one more rounding of each step may add to the errors of out, dq, dk and dv.

    The result in its dtype; in float32 the exponent of a probability, as large as the largest
    score to base 2; and for dq and dk each of the two sums whose difference dS may cancel.
    """
    q, k, _, d_out = inputs
    key = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    exponent = scale * math.log2(math.e) * torch.einsum("qhd,khd->hqk", q, key).abs().max().item()
    sums = 2 * scale * (d_out * want[0]).abs().sum(dim=-1).max().item()
    cancelling = (0.0, sums * k.abs().max().item(), sums * q.abs().max().item(), 0.0)
    eps, eps32 = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    sizes = [true.abs().max().item() for true in want]
    return [
        eps * size + eps32 * (exponent * size + terms)
        for size, terms in zip(sizes, cancelling, strict=True)
    ]


def check_against_float64(
    heads: Heads, parents: list[int], scale: float, impl: str = "flex", **options: object
) -> None:
    view, inputs = on_cuda(parents), draw_inputs(heads, len(parents))
    exact = tuple(x.double() for x in inputs)
    want = run(exact, tree_attention, view=view, scale=scale, impl="reference")
    plain = run(inputs, same_precision, view=view, scale=scale)
    got = run(inputs, tree_attention, view=view, scale=scale, impl=impl, **options)
    bands = rounding_bands(exact, want, scale, heads.dtype)
    names, problems = ("out", "dq", "dk", "dv"), []
    for name, ours, theirs, true, band in zip(names, got, plain, want, bands, strict=True):
        assert ours.dtype == heads.dtype and ours.shape == true.shape
        allowed = 2 * (theirs.double() - true).abs().max().item() + band
        error = (ours.double() - true).abs().max().item()
        if not error <= allowed:
            problems.append(f"{name}: error {error:.2e}, want at most {allowed:.2e}")
    assert not problems, "; ".join(problems)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("heads", list(HEADS))
@pytest.mark.parametrize("tree", list(FORESTS))
def test_flex_is_as_exact_as_plain_pytorch(tree: str, heads: str) -> None:
    check_against_float64(HEADS[heads], FORESTS[tree], HEADS[heads].key_width ** -0.5)


@pytest.mark.gpu
@on_gpu
def test_flex_uses_the_given_scale() -> None:
    for scale in (0.05, 0.3):
        check_against_float64(HEADS["bf16-grouped-64"], FORESTS["caterpillar-126-deep"], scale)


@pytest.mark.gpu
@on_gpu
def test_flex_repeats_its_bits() -> None:
    view = on_cuda(FORESTS["comb-with-long-teeth"])
    inputs = draw_inputs(HEADS["bf16-grouped-64"], view.end.numel())
    first, second = (
        run(inputs, tree_attention, view=view, scale=0.125, impl="flex") for _ in range(2)
    )
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


@pytest.mark.gpu
@on_gpu
def test_another_number_of_rows_compiles_nothing() -> None:
    heads = HEADS["bf16-grouped-64"]

    def step(num_rows: int) -> None:
        end = torch.full((num_rows,), num_rows, dtype=torch.int32, device="cuda")
        view = AttentionView(end, (ChainRows(0, num_rows, ()),))
        run(draw_inputs(heads, num_rows), tree_attention, view=view, scale=0.125, impl="flex")

    step(700)
    graphs = counters["stats"]["unique_graphs"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for num_rows in (0, 1, 100, 128, 129, 256, 640, 5000, 8192):
            step(num_rows)
    assert counters["stats"]["unique_graphs"] == graphs > 0


@pytest.mark.gpu
@on_gpu
def test_layers_share_one_set_of_lists_and_views_of_fused_projections_compile_nothing() -> None:
    heads, view = HEADS["bf16-grouped-64"], on_cuda(FORESTS["whole-blocks"])
    q, k, v, d_out = draw_inputs(heads, view.end.numel())
    want = run((q, k, v, d_out), tree_attention, view=view, scale=0.125, impl="flex")
    head_first = tuple(x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v))
    fused = torch.cat((q, k, v), dim=1).split((q.shape[1], k.shape[1], v.shape[1]), dim=1)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for layout in (head_first, fused):
            got = tree_attention(
                *(x.detach().requires_grad_() for x in layout), view=view, scale=0.125, impl="flex"
            )
            assert torch.equal(got, want[0])
    assert len(view._built) == 1


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    ("dtype", "width", "message"),
    [
        (torch.float64, 16, "computes bfloat16, float16 and float32, not torch.float64"),
        (torch.float32, 8, "needs heads of at least 16 columns, got 8"),
    ],
)
def test_what_triton_does_not_serve_is_refused_in_one_line(
    dtype: torch.dtype, width: int, message: str
) -> None:
    q = torch.ones(3, 2, width, device="cuda", dtype=dtype)
    with pytest.raises(HartsError) as error:
        tree_attention(q, q, q, view=on_cuda([-1, 0, 1]), scale=1, impl="flex")
    assert message in str(error.value) and "\n" not in str(error.value)


# ---- FlashAttention-4 ----


def runs_fa4() -> str:
    """Why this machine cannot run it; empty if it can."""
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0) and capability[0] != 10:
        return f"needs compute capability 9.0 or 10.x, has {capability}"
    try:
        importlib.import_module("harts.ops.attention.fa4_b36")
    except ConfigError as error:
        return str(error)
    return ""


on_fa4 = pytest.mark.skipif(bool(runs_fa4()), reason=runs_fa4() or "runs")

FA4_HEADS = {
    "bf16-64": Heads(torch.bfloat16, 2, 2, 64, 64),
    "bf16-grouped-64": Heads(torch.bfloat16, 6, 2, 64, 64),
    "bf16-128": Heads(torch.bfloat16, 4, 4, 128, 128),
    "bf16-grouped-128": Heads(torch.bfloat16, 8, 2, 128, 128),
    "fp16-grouped-128": Heads(torch.float16, 4, 2, 128, 128),
    "bf16-latent-192-128": Heads(torch.bfloat16, 4, 4, 192, 128),
}
HOPPER_HEADS = {
    "bf16-one-head-32": Heads(torch.bfloat16, 1, 1, 32, 32),
    "bf16-160-64": Heads(torch.bfloat16, 2, 2, 160, 64),
    "bf16-grouped-96": Heads(torch.bfloat16, 4, 2, 96, 96),
    "bf16-192": Heads(torch.bfloat16, 2, 2, 192, 192),
    "bf16-grouped-256": Heads(torch.bfloat16, 4, 2, 256, 256),
}


def wide_tree(num_rows: int, seed: int = 0) -> list[int]:
    """Runs of up to 300 rows, each below a row of the path to the run before it."""
    draw = random.Random(seed)
    parents = chain_of(min(num_rows, 900))
    path = list(range(len(parents)))
    while len(parents) < num_rows:
        depth = draw.choice([len(path), draw.randrange(len(path)) + 1, len(path) // 2 + 1])
        del path[depth:]
        for _ in range(draw.randint(1, 300)):
            parents.append(path[-1])
            path.append(len(parents) - 1)
    return parents[:num_rows]


@pytest.mark.gpu
@on_fa4
@pytest.mark.parametrize("heads", list(FA4_HEADS))
@pytest.mark.parametrize("tree", list(FORESTS))
def test_fa4_is_as_exact_as_plain_pytorch(tree: str, heads: str) -> None:
    wanted = FA4_HEADS[heads]
    check_against_float64(wanted, FORESTS[tree], wanted.key_width**-0.5, "fa4")


@pytest.mark.gpu
@on_fa4
@pytest.mark.parametrize("heads", list(HOPPER_HEADS))
def test_fa4_is_as_exact_at_other_widths(heads: str) -> None:
    wanted = HOPPER_HEADS[heads]
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("widths that compute capability 9.0 alone runs")
    for tree in ("one-row", "comb-with-long-teeth"):
        check_against_float64(wanted, FORESTS[tree], wanted.key_width**-0.5, "fa4")


@pytest.mark.gpu
@on_fa4
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("heads", list(FA4_HEADS))
def test_fa4_is_as_exact_on_trees_of_many_full_blocks(heads: str, deterministic: bool) -> None:
    for seed in range(2):
        tree = wide_tree(3001, seed)
        check_against_float64(FA4_HEADS[heads], tree, 0.1, "fa4", deterministic=deterministic)


@pytest.mark.gpu
@on_fa4
@pytest.mark.parametrize("max_masked", [0, 3, 10**6])
@pytest.mark.parametrize("heads", ["bf16-grouped-64", "bf16-latent-192-128"])
def test_fa4_is_as_exact_whichever_full_blocks_are_masked(heads: str, max_masked: int) -> None:
    if torch.cuda.get_device_capability() == (9, 0):
        pytest.skip("compute capability 9.0 visits every list in order")
    with mock.patch.object(fa4, "MAX_FULL_BLOCKS_MASKED", max_masked):
        for seed in range(2):
            check_against_float64(FA4_HEADS[heads], wide_tree(3001, seed), 0.1, "fa4")


@pytest.mark.gpu
@on_fa4
def test_fa4_uses_the_given_scale() -> None:
    for scale in (0.05, 0.3):
        check_against_float64(
            FA4_HEADS["bf16-grouped-64"], FORESTS["caterpillar-126-deep"], scale, "fa4"
        )


@pytest.mark.gpu
@on_fa4
@pytest.mark.parametrize("heads", list(FA4_HEADS))
def test_fa4_repeats_its_bits_and_sums_the_same_in_any_order(heads: str) -> None:
    view = on_cuda_by_ends(wide_tree(30_011))
    inputs = draw_inputs(FA4_HEADS[heads], view.end.numel())
    options = {"view": view, "scale": 0.1, "impl": "fa4"}
    first, *others = (run(inputs, tree_attention, **options) for _ in range(5))
    any_order = run(inputs, tree_attention, **options, deterministic=False)
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))
    for one, two in zip(first, any_order, strict=True):
        rounding = torch.finfo(one.dtype).eps * one.abs().max()
        assert (one.float() - two.float()).abs().max() <= rounding


@pytest.mark.gpu
@on_fa4
def test_fa4_runs_once_where_its_result_is_kept_over_recomputation() -> None:
    view = on_cuda_by_ends(wide_tree(3001))
    inputs = draw_inputs(FA4_HEADS["bf16-latent-192-128"], view.end.numel())

    def recomputed(*rows: torch.Tensor, **options: Any) -> torch.Tensor:
        attend = functools.partial(tree_attention, **options)
        output: torch.Tensor = checkpoint(
            attend, *rows, use_reentrant=False, context_fn=harts.keep_attention
        )
        return output

    library = fa4._library()
    options = {"view": view, "scale": 0.1, "impl": "fa4"}
    want = run(inputs, tree_attention, **options)
    with mock.patch.object(library, "forward", wraps=library.forward) as forward:
        got = run(inputs, recomputed, **options)
    assert forward.call_count == 1
    assert all(torch.equal(one, two) for one, two in zip(got, want, strict=True))


def ends_of(parents: list[int]) -> torch.Tensor:
    """The ends of view_of, in time linear in rows."""
    end = list(range(1, len(parents) + 1))
    for row in range(len(parents) - 1, 0, -1):
        if parents[row] >= 0:
            end[parents[row]] = max(end[parents[row]], end[row])
    return torch.tensor(end, dtype=torch.int32)


def on_cuda_by_ends(parents: list[int]) -> AttentionView:
    """As on_cuda, in time linear in rows, without chains."""
    return AttentionView(ends_of(parents).cuda(), ())


@pytest.mark.gpu
@on_fa4
@pytest.mark.parametrize("heads", ["bf16-grouped-64", "bf16-128", "bf16-latent-192-128"])
@pytest.mark.parametrize("deterministic", [True, False])
def test_fa4_compiles_nothing_for_other_rows_layouts_or_evaluation(
    heads: str, deterministic: bool
) -> None:
    from harts.ops.attention import fa4_b36

    wanted = FA4_HEADS[heads]

    def step(num_rows: int) -> None:
        view = on_cuda_by_ends(wide_tree(num_rows))
        options = {"view": view, "impl": "fa4", "deterministic": deterministic}
        inputs = draw_inputs(wanted, num_rows)
        run(inputs, tree_attention, scale=0.1, **options)
        q, k, v, _ = inputs
        head_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
        tree_attention(*head_first, scale=0.2, **options)
        leaves = [x.requires_grad_() for x in head_first]
        tree_attention(*leaves, scale=0.2, **options).sum().backward()

    step(700)
    compiled = fa4_b36.num_compilations()
    for num_rows in (0, 1, 63, 100, 128, 129, 255, 256, 257, 640, 5000, 8192):
        step(num_rows)
    assert fa4_b36.num_compilations() == compiled > 0


@pytest.mark.gpu
@on_fa4
def test_fa4_takes_views_of_fused_and_transposed_projections_without_a_copy() -> None:
    heads, view = FA4_HEADS["bf16-128"], on_cuda_by_ends(wide_tree(4096))
    q, k, v, d_out = draw_inputs(heads, 4096)
    want = run((q, k, v, d_out), tree_attention, view=view, scale=0.1, impl="fa4")
    fused = torch.cat((q, k, v), dim=1).split(q.shape[1], dim=1)
    head_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    for layout in (fused, head_first):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            got = tree_attention(*layout, view=view, scale=0.1, impl="fa4")
        assert torch.equal(got, want[0])
        lse_and_slack = 4 * q.shape[0] * q.shape[1] + 2**21  # half of what a copy would take
        assert torch.cuda.max_memory_allocated() - before <= 2 * got.numel() + lse_and_slack
        leaves = [x.detach().requires_grad_() for x in layout]
        out = tree_attention(*leaves, view=view, scale=0.1, impl="fa4")
        for one, two in zip(torch.autograd.grad(out, leaves, d_out), want[1:], strict=True):
            assert torch.equal(one, two)


@pytest.mark.gpu
@on_fa4
def test_fa4_never_waits_for_the_device_and_layers_share_one_set_of_lists() -> None:
    heads, parents = FA4_HEADS["bf16-latent-192-128"], wide_tree(3000)
    inputs = draw_inputs(heads, len(parents))
    run(inputs, tree_attention, view=on_cuda_by_ends(parents), scale=0.1, impl="fa4")
    view = on_cuda_by_ends(parents)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            run(inputs, tree_attention, view=view, scale=0.1, impl="fa4")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(view._built) == 1


@pytest.mark.gpu
@on_fa4
@pytest.mark.parametrize(
    ("dtype", "heads", "widths", "message"),
    [
        (torch.float32, (2, 2), (64, 64), "computes bfloat16 and float16, not torch.float32"),
        (torch.bfloat16, (2, 2), (80, 80), "they must be multiples of 32"),
        (torch.bfloat16, (2, 2), (264, 128), "264 (keys) and 128 (values)"),
    ],
)
def test_what_fa4_does_not_serve_is_refused_in_one_line(
    dtype: torch.dtype, heads: tuple[int, int], widths: tuple[int, int], message: str
) -> None:
    q = torch.ones(3, heads[0], widths[0], device="cuda", dtype=dtype)
    k, v = (torch.ones(3, heads[1], width, device="cuda", dtype=dtype) for width in widths)
    with pytest.raises(ConfigError) as error:
        tree_attention(q, k, v, view=on_cuda([-1, 0, 1]), scale=1, impl="fa4")
    assert message in str(error.value) and 'impl="flex"' in str(error.value)
    assert "\n" not in str(error.value)
