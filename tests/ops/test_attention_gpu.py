"""Tree attention by FlexAttention: block lists by brute force, kernels against float64."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.test_attention import CASES, caterpillar, chain_of, parents_in_preorder, view_of
from torch._dynamo.utils import counters

from harts.errors import ConfigError, HartsError
from harts.ops.attention import tree_attention
from harts.ops.attention.block_lists import BlockList, build_block_lists
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


def check_against_float64(heads: Heads, parents: list[int], scale: float) -> None:
    view, inputs = on_cuda(parents), draw_inputs(heads, len(parents))
    exact = tuple(x.double() for x in inputs)
    want = run(exact, tree_attention, view=view, scale=scale, impl="reference")
    plain = run(inputs, same_precision, view=view, scale=scale)
    got = run(inputs, tree_attention, view=view, scale=scale, impl="flex")
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
