"""Tree attention against softmax attention of every trajectory on its expanded tokens."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.errors import ConfigError, HartsError
from harts.ops.attention import fa4, tree_attention
from harts.ops.attention import views as views_module
from harts.ops.attention.block_lists import BlockList, QueuedLists
from harts.views.attention import AttentionView, ChainRows

IMPLEMENTATIONS = ["views", "reference"]

# ---- trees: a parent for each row, in DFS preorder; everything else by brute force ----


@st.composite
def parents_in_preorder(draw: st.DrawFn, max_rows: int = 40) -> list[int]:
    """parent[row] < row, -1 for a root; a row hangs below the row before it or an ancestor."""
    parents: list[int] = []
    for _ in range(draw(st.integers(1, 8))):
        path = path_to(parents, len(parents) - 1) if parents else []
        parents.append(draw(st.sampled_from([-1, *path])))
        for _ in range(draw(st.integers(0, 6))):
            parents.append(len(parents) - 1)
    return parents[:max_rows]


def path_to(parents: list[int], row: int) -> list[int]:
    """Ancestors of the row and itself, from the root."""
    path = []
    while row >= 0:
        path.append(row)
        row = parents[row]
    return path[::-1]


def runs_of(rows: list[int], longest: int) -> tuple[tuple[int, int], ...]:
    """Maximal runs of ascending rows, cut into pieces of at most `longest` rows."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and runs[-1][1] == row and row - runs[-1][0] < longest:
            runs[-1] = (runs[-1][0], row + 1)
        else:
            runs.append((row, row + 1))
    return tuple(runs)


def view_of(parents: list[int], longest_run: int = 10**9) -> AttentionView:
    num_rows = len(parents)
    paths = [path_to(parents, row) for row in range(num_rows)]
    end = [0] * num_rows
    for row, path in enumerate(paths):
        for ancestor in path:
            end[ancestor] = row + 1
    starts = [row for row in range(num_rows) if parents[row] != row - 1 or row == 0]
    chains = tuple(
        ChainRows(start, stop, runs_of(paths[start][:-1], longest_run))
        for start, stop in zip(starts, [*starts[1:], num_rows], strict=True)
    )
    return AttentionView(torch.tensor(end, dtype=torch.int32), chains)


def leaves_of(parents: list[int]) -> list[int]:
    return sorted(set(range(len(parents))) - set(parents))


def chain_of(length: int) -> list[int]:
    return list(range(-1, length - 1))


def caterpillar(depth: int, step: int) -> list[int]:
    """A path of `step` rows a level with a one-row side branch at each level, deepest first."""
    spine = chain_of(depth * step)
    return spine + [level * step - 1 for level in range(depth, 0, -1)]


CASES = {
    "single-trajectory": chain_of(30),
    "one-row": [-1],
    "several-roots-of-one-row": [-1, -1, -1],
    "fork-at-position-1": [-1, 0, 1, 0, 3, 0],
    "hundreds-of-one-row-leaves": chain_of(20) + [19] * 300,
    "caterpillar-126-deep": caterpillar(126, 2),
    "chain-of-several-blocks-with-branches": [*chain_of(601), 300, *range(601, 900), 250, 4],
    "two-trees-with-nested-forks": [-1, 0, 1, 2, 1, 4, 4, 0, 7, -1, 9, 10, 9],
}


# ---- oracle: each trajectory alone, shared rows receive the sum of their gradients ----


def draw_inputs(
    num_rows: int, heads: tuple[int, int] = (4, 2), widths: tuple[int, int] = (5, 3), seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads[0], widths[0]), (heads[1], widths[0]), (heads[1], widths[1])]
    q, k, v = (
        torch.randn(num_rows, *shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    )
    return q, k, v


def softmax_attention_of_one_trajectory(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    heads_per_key = q.shape[1] // k.shape[1]
    outputs = []
    for head in range(q.shape[1]):
        key, value = k[:, head // heads_per_key], v[:, head // heads_per_key]
        scores = scale * q[:, head] @ key.T
        future = torch.ones_like(scores).triu(1).bool()
        outputs.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ value)
    return torch.stack(outputs, dim=1)


def expanded_run(
    parents: list[int], inputs: tuple[torch.Tensor, ...], scale: float
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    """Outputs by row, the gradient that all trajectories send to each, and gradients of q, k, v."""
    generator = torch.Generator().manual_seed(1)
    num_rows, heads, width = len(parents), inputs[0].shape[1], inputs[2].shape[2]
    out = torch.full((num_rows, heads, width), torch.nan, dtype=torch.float64)
    d_out = torch.zeros_like(out)
    loss = torch.zeros((), dtype=torch.float64)
    for leaf in leaves_of(parents):
        path = torch.tensor(path_to(parents, leaf))
        expanded = softmax_attention_of_one_trajectory(*(x[path] for x in inputs), scale)
        d_expanded = torch.randn(expanded.shape, generator=generator, dtype=torch.float64)
        loss = loss + (expanded * d_expanded).sum()
        out[path] = expanded.detach()
        d_out[path] += d_expanded
    return out, d_out, torch.autograd.grad(loss, inputs)


def assert_close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-10) -> None:
    assert got.shape == want.shape
    size = want.abs().max().clamp_min(0.1)  # a lone row has no gradient by q and k at all
    error = ((got - want).abs().max() / size).item()
    assert error <= tolerance, f"relative error {error:.2e}, want at most {tolerance:.0e}"


@contextlib.contextmanager
def block_rules(max_rows: int, pairs: int) -> Iterator[None]:
    """Tiny blocks, so that small trees meet every way of cutting and joining chains."""
    rules = {"MIN_BLOCK_ROWS": 1, "MAX_BLOCK_ROWS": max_rows, "PAIRS_PER_BLOCK": pairs}
    with mock.patch.multiple(views_module, CPU_SCORE_BYTES=1 << 10, **rules):
        yield


def check_against_expanded_run(
    parents: list[int],
    impl: str,
    heads: tuple[int, int] = (4, 2),
    widths: tuple[int, int] = (5, 3),
    longest_run: int = 10**9,
) -> None:
    inputs = draw_inputs(len(parents), heads, widths)
    want_out, d_out, want_grads = expanded_run(parents, inputs, 0.4)
    out = tree_attention(*inputs, view=view_of(parents, longest_run), scale=0.4, impl=impl)
    assert_close(out, want_out)
    for got, want in zip(torch.autograd.grad(out, inputs, d_out), want_grads, strict=True):
        assert_close(got, want)


# ---- tests ----


@settings(max_examples=60, deadline=None)
@given(
    parents=parents_in_preorder(),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1), (2, 2)]),
    widths=st.sampled_from([(5, 3), (2, 4), (3, 3)]),
    max_rows=st.sampled_from([1, 3, 8, 256]),
    pairs=st.sampled_from([0, 10, 10**6]),
    longest_run=st.sampled_from([1, 4, 10**9]),
)
def test_a_tree_equals_its_trajectories(
    parents: list[int],
    heads: tuple[int, int],
    widths: tuple[int, int],
    max_rows: int,
    pairs: int,
    longest_run: int,
) -> None:
    with block_rules(max_rows, pairs):
        check_against_expanded_run(parents, "views", heads, widths, longest_run)


@settings(max_examples=15, deadline=None)
@given(parents=parents_in_preorder(), heads=st.sampled_from([(1, 1), (4, 2)]))
def test_the_dense_reference_equals_the_trajectories(
    parents: list[int], heads: tuple[int, int]
) -> None:
    check_against_expanded_run(parents, "reference", heads)


@pytest.mark.parametrize("tree", [name for name in CASES if len(CASES[name]) < 400])
def test_named_trees_equal_their_trajectories(tree: str) -> None:
    check_against_expanded_run(CASES[tree], "views")


@pytest.mark.parametrize("tree", list(CASES))
def test_views_equal_the_dense_reference(tree: str) -> None:
    view, inputs = view_of(CASES[tree]), draw_inputs(len(CASES[tree]))
    results = []
    for impl in IMPLEMENTATIONS:
        out = tree_attention(*inputs, view=view, scale=0.4, impl=impl)
        results.append([out, *torch.autograd.grad(out.sin().sum(), inputs)])
    for got, want in zip(*results, strict=True):
        assert_close(got, want)


@settings(max_examples=30, deadline=None)
@given(
    parents=parents_in_preorder(),
    impl=st.sampled_from(IMPLEMENTATIONS),
    max_rows=st.sampled_from([3, 256]),
    data=st.data(),
)
def test_a_changed_row_moves_no_bit_outside_its_subtree(
    parents: list[int], impl: str, max_rows: int, data: st.DataObject
) -> None:
    changed = data.draw(st.integers(0, len(parents) - 1))
    view = view_of(parents)
    inputs = [x.detach().float() for x in draw_inputs(len(parents))]
    with block_rules(max_rows, pairs=100):
        before = tree_attention(*inputs, view=view, scale=0.4, impl=impl)
        for x in inputs:
            x[changed] = 3 * x[changed] + 1
        after = tree_attention(*inputs, view=view, scale=0.4, impl=impl)
    moved = (before != after).flatten(1).any(dim=1).nonzero().flatten().tolist()
    subtree = [row for row in range(len(parents)) if changed in path_to(parents, row)]
    assert set(moved) <= set(subtree), f"row {changed} moved rows {set(moved) - set(subtree)}"
    assert changed in moved


@pytest.mark.parametrize("tree", ["caterpillar-126-deep", "chain-of-several-blocks-with-branches"])
def test_the_same_inputs_give_the_same_bits(tree: str) -> None:
    view = view_of(CASES[tree])
    runs = []
    for _ in range(2):
        inputs = [x.detach().float().requires_grad_() for x in draw_inputs(len(CASES[tree]))]
        out = tree_attention(*inputs, view=view, scale=0.4)
        runs.append([out, *torch.autograd.grad(out.sin().sum(), inputs)])
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_are_computed_in_float32(dtype: torch.dtype, impl: str) -> None:
    parents = CASES["two-trees-with-nested-forks"]
    inputs = [x.detach().to(dtype).requires_grad_() for x in draw_inputs(len(parents))]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    d_out = torch.randn(len(parents), 4, 3, generator=torch.Generator().manual_seed(2)).to(dtype)
    out = tree_attention(*inputs, view=view_of(parents), scale=0.4, impl=impl)
    want = tree_attention(*exact, view=view_of(parents), scale=0.4, impl="reference")
    assert out.dtype == dtype
    one_rounding = torch.finfo(dtype).eps
    assert_close(out.double(), want, one_rounding)
    got_grads = torch.autograd.grad(out, inputs, d_out)
    want_grads = torch.autograd.grad(want, exact, d_out.double())
    for got, want_grad in zip(got_grads, want_grads, strict=True):
        # The rounded output enters dS = P (dP - sum(dO O)), the gradient is rounded once more.
        assert_close(got.double(), want_grad, 2 * one_rounding)


def peak_bytes(profile: torch.profiler.profile) -> int:
    """Largest sum of live allocations since the profile began."""
    assert profile.profiler is not None
    events = profile.profiler.kineto_results.events()
    memory = [event for event in events if event.name() == "[memory]"]
    memory.sort(key=lambda event: event.start_ns())
    return int(np.cumsum([event.nbytes() for event in memory]).max())


def test_one_block_of_scores_exists_at_a_time() -> None:
    num_rows, heads = 6000, 2
    end = torch.full((num_rows,), num_rows, dtype=torch.int32)
    view = AttentionView(end, (ChainRows(0, num_rows, ()),))
    inputs = [torch.randn(num_rows, heads, width, requires_grad=True) for width in (6, 6, 4)]
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as forward:
        out = tree_attention(*inputs, view=view, scale=0.4)
    with torch.profiler.profile(activities=activities, profile_memory=True) as backward:
        out.sum().backward()
    block = views_module.CPU_SCORE_BYTES
    assert block / 2 < peak_bytes(forward) < 1.5 * block
    assert block < peak_bytes(backward) < 2.5 * block  # scores and their gradient
    assert 2.5 * block < heads * num_rows * num_rows * 4 / 10


def test_short_chains_in_row_order_share_blocks() -> None:
    leaves = view_of(CASES["hundreds-of-one-row-leaves"])
    assert len(leaves.chains) == 300
    assert len(views_module.group_chains(leaves.chains)) <= 3
    # A leaf at the root right after a long path reads the root alone.
    far = (ChainRows(0, 9000, ()), ChainRows(9000, 9100, ((0, 10),)))
    assert len(views_module.group_chains(far)) == 2


def test_an_empty_view_gives_an_empty_output_with_gradients() -> None:
    inputs = draw_inputs(0)
    out = tree_attention(
        *inputs, view=AttentionView(torch.empty(0, dtype=torch.int32), ()), scale=1
    )
    out.sum().backward()
    assert out.shape == (0, 4, 3)
    assert all(x.grad is not None and x.grad.shape == x.shape for x in inputs)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(3, 4, 5), (3, 2, 5), (2, 2, 3)], "the view has 3 rows, pass as many"),
        ([(3, 4, 5), (3, 3, 5), (3, 3, 3)], "must divide the number of query heads"),
        ([(3, 4, 5), (3, 2, 5), (3, 4, 3)], "k and v must have the same number of heads"),
        ([(3, 4, 5), (3, 2, 6), (3, 2, 3)], "q and k must have the same width"),
        ([(3, 20), (3, 2, 5), (3, 2, 3)], "want three (rows, heads, width) tensors"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_in_one_line(
    shapes: list[tuple[int, ...]], message: str
) -> None:
    with pytest.raises(HartsError) as error:
        tree_attention(*(torch.ones(shape) for shape in shapes), view=view_of([-1, 0, 1]), scale=1)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_an_unknown_implementation_and_mixed_dtypes_are_refused() -> None:
    q, k, v = draw_inputs(3)
    view = view_of([-1, 0, 1])
    with pytest.raises(ConfigError, match="impl is 'fast', want one of views, reference"):
        tree_attention(q, k, v, view=view, scale=1, impl="fast")  # type: ignore[arg-type]
    with pytest.raises(HartsError, match="want one floating dtype for all three"):
        tree_attention(q, k.float(), v, view=view, scale=1)


def test_fa4_on_the_cpu_is_refused_in_one_line() -> None:
    q = torch.ones(3, 2, 16)
    with pytest.raises(ConfigError, match=r'"fa4" needs CUDA tensors.*use impl="views"') as error:
        tree_attention(q, q, q, view=view_of([-1, 0, 1]), scale=1, impl="fa4")
    assert "\n" not in str(error.value)


def test_fa4_wants_the_release_it_was_written_for() -> None:
    module = "harts.ops.attention.fa4_b36"
    with (
        mock.patch("importlib.metadata.version", return_value="4.0.0b20"),
        mock.patch.dict(sys.modules),
        pytest.raises(
            ConfigError, match=r"needs flash-attn-4 4\.0\.0b36, found 4\.0\.0b20"
        ) as error,
    ):
        sys.modules.pop(module, None)
        importlib.import_module(module)
    assert "pip install flash-attn-4==4.0.0b36" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3)])
def test_fa4_names_what_it_cannot_train(capability: tuple[int, int]) -> None:
    for widths in ((64, 64), (128, 128), (192, 128), (32, 32)):
        assert not fa4.width_problem(capability, *widths, grouped=False)
    for width in (64, 128):
        assert not fa4.width_problem(capability, width, width, grouped=True)
    for widths in ((16, 16), (80, 80), (64, 24), (264, 128), (512, 512)):
        assert fa4.width_problem(capability, *widths, grouped=False)


@pytest.mark.parametrize(
    ("capability", "deterministic", "want"),
    [
        ((9, 0), True, None),
        ((10, 0), True, fa4.MAX_FULL_BLOCKS_MASKED),
        ((9, 0), False, 0),
        ((10, 0), False, 0),
    ],
)
def test_fa4_lists_blocks_as_the_kernel_of_the_device_visits_them(
    capability: tuple[int, int], deterministic: bool, want: int | None
) -> None:
    with mock.patch("torch.cuda.get_device_capability", return_value=capability):
        assert fa4._max_full_blocks_masked(torch.device("cuda"), deterministic) == want


def test_fa4_on_hopper_shares_keys_between_heads_only_at_equal_widths() -> None:
    assert "as wide as" in fa4.width_problem((9, 0), 192, 128, grouped=True)
    assert "no more than" in fa4.width_problem((9, 0), 64, 128, grouped=False)
    assert not fa4.width_problem((9, 0), 256, 256, grouped=True)
    assert fa4.width_problem((10, 0), 256, 256, grouped=False)


# ---- FlashAttention-4 without a GPU: its kernels' contract over dense scores ----


def listed_pairs(
    end: torch.Tensor, masked: BlockList, full: BlockList, blocks: tuple[int, int], by_key: bool
) -> torch.Tensor:
    """(P, P), queries by keys, of what the lists make a kernel compute: no block twice."""
    row = torch.arange(end.numel())
    visible = (row <= row[:, None]) & (row[:, None] < end)
    pairs = torch.zeros_like(visible)
    for listed, mask in ((masked, visible), (full, torch.ones_like(visible))):
        for owner, (count, indices) in enumerate(zip(listed.counts, listed.indices, strict=True)):
            for other in indices[:count].tolist():
                query, key = (other, owner) if by_key else (owner, other)
                block = (
                    slice(query * blocks[0], (query + 1) * blocks[0]),
                    slice(key * blocks[1], (key + 1) * blocks[1]),
                )
                assert not pairs[block].any(), "a block is listed twice"
                pairs[block] = mask[block]
    return pairs


def repeat_heads(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    return x.repeat_interleave(num_heads // x.shape[1], dim=1)


class DenseLibrary:
    """forward and backward of fa4_b36 in plain PyTorch, true to what the lists say."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        end: torch.Tensor,
        partial: BlockList,
        full: BlockList,
        *,
        blocks: tuple[int, int],
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = (repeat_heads(x, q.shape[1]) for x in (k, v))
        pairs = listed_pairs(end, partial, full, blocks, by_key=False)
        scores = torch.einsum("qhd,khd->hqk", q, key) * scale
        scores = scores.masked_fill(~pairs, -torch.inf)
        return torch.einsum("hqk,khv->qhv", scores.softmax(-1), value), scores.logsumexp(-1)

    def backward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        d_out: torch.Tensor,
        lse: torch.Tensor,
        end: torch.Tensor,
        queue: QueuedLists,
        *,
        blocks: tuple[int, int],
        scale: float,
        deterministic: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert deterministic and 0 not in d_out.stride()
        repeats = q.shape[1] // k.shape[1]
        key, value = (repeat_heads(x, q.shape[1]) for x in (k, v))
        none = BlockList(torch.zeros_like(queue.masked.counts), queue.masked.indices)
        pairs = listed_pairs(end, queue.masked, queue.full or none, blocks, by_key=True)
        scores = torch.einsum("qhd,khd->hqk", q, key) * scale - lse[..., None]
        weights = scores.masked_fill(~pairs, -torch.inf).exp()
        d_weights = torch.einsum("qhv,khv->hqk", d_out, value)
        d_scores = weights * (d_weights - (out * d_out).sum(-1).T[..., None]) * scale
        d_k, d_v = (
            torch.einsum("hqk,qhw->khw", matrix, x).unflatten(1, (-1, repeats)).sum(2)
            for matrix, x in ((d_scores, q), (weights, d_out))
        )
        return torch.einsum("hqk,khd->qhd", d_scores, key), d_k, d_v


@settings(max_examples=60, deadline=None)
@given(
    parents=parents_in_preorder(),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    blocks=st.sampled_from(
        [fa4.Blocks((4, 4), (2, 3)), fa4.Blocks((8, 5), (4, 4)), fa4.Blocks((2, 2), (2, 6))]
    ),
    max_moved=st.sampled_from([0, 2, 100, None]),
)
def test_fa4_around_its_kernels_equals_the_trajectories(
    parents: list[int], heads: tuple[int, int], blocks: fa4.Blocks, max_moved: int | None
) -> None:
    with mock.patch.multiple(
        fa4,
        _library=DenseLibrary,
        _checked_blocks=lambda q, k, v: blocks,
        _max_full_blocks_masked=lambda device, deterministic: max_moved,
    ):
        check_against_expanded_run(parents, "fa4", heads)
        no_rows = AttentionView(torch.empty(0, dtype=torch.int32), ())
        out = tree_attention(*draw_inputs(0), view=no_rows, scale=1, impl="fa4")
    assert out.shape == (0, 4, 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("tree", list(CASES))
def test_cuda_equals_the_cpu_and_repeats_its_bits(tree: str, impl: str) -> None:
    view = view_of(CASES[tree])
    results = []
    for device in ("cuda", "cuda", "cpu"):
        inputs = [x.detach().to(device).requires_grad_() for x in draw_inputs(len(CASES[tree]))]
        here = dataclasses.replace(view, end=view.end.to(device))
        out = tree_attention(*inputs, view=here, scale=0.4, impl=impl)
        results.append([out, *torch.autograd.grad(out.sin().sum(), inputs)])
    for first, second, on_cpu in zip(*results, strict=True):
        assert impl == "reference" or torch.equal(first, second)
        assert_close(first.cpu(), on_cpu)
