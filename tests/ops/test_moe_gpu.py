"""The mixture of experts on GPU in bfloat16, against float64 of the same values.

"plain" is the composition of transformers in the same precision: products, silu and rows in
bfloat16, routing weights and sums over a row's experts in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.ops.moe_cases import (
    Layer,
    assert_errs_at_most_twice_as_much,
    assert_unit_rows_read_the_router_exactly,
    drawn_layer,
    error,
    implementations,
    needs_gathered,
    results,
    rounded_right,
)

from harts.errors import ConfigError
from harts.ops.moe import moe_experts, router_logits, sigmoid_top_k, softmax_top_k

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LING: dict[str, Any] = dict(rows=4099, experts=128, top_k=8, width=1536, inner=512)
SMALL: dict[str, Any] = dict(rows=301, experts=6, top_k=3, width=24, inner=40)
SIGMOID: dict[str, Any] = dict(top_k=8, num_groups=8, kept_groups=4, normalise=True, scaling=2.5)


def on_gpu(routing: str, **sizes: Any) -> Layer:
    """bfloat16, but for float32 routing weights."""
    drawn = drawn_layer(routing, **sizes)
    half = drawn.to(dtype=torch.bfloat16)
    return Layer(**(vars(half) | dict(weights=drawn.weights))).to(device="cuda")


def plain_experts(
    hidden: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
) -> torch.Tensor:
    total = hidden.new_zeros(hidden.shape, dtype=torch.float32)
    for expert in range(len(gate_up_proj)):
        rows, slots = torch.where(indices == expert)
        gate, up = F.linear(hidden[rows], gate_up_proj[expert]).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * up, down_proj[expert])
        total = total.index_add(0, rows, y * weights[rows, slots, None])
    return total.to(hidden.dtype)


@contextmanager
def no_host_wait() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def poison_free_memory() -> None:
    """What the allocator hands out next holds NaN."""
    blocks = [torch.full((1 << 26,), float("nan"), device="cuda") for _ in range(8)]
    blocks += [torch.full((1 << n,), float("nan"), device="cuda") for n in range(8, 25)]
    del blocks


@implementations
@pytest.mark.parametrize("routing", ["any", "few", "one"])
@pytest.mark.parametrize("sizes", [LING, SMALL], ids=["ling", "small"])
def test_the_experts_err_at_most_twice_as_much_as_the_plain_composition(
    routing: str, sizes: dict[str, Any], impl: str
) -> None:
    layer = on_gpu(routing, **sizes)
    plain = results(layer, plain_experts)
    exact = results(layer.to(dtype=torch.float64), moe_experts)
    poison_free_memory()
    actual = results(layer, moe_experts, impl=impl)
    assert_errs_at_most_twice_as_much(actual, plain, exact, torch.bfloat16)
    dtypes = {name: value.dtype for name, value in actual.items()}
    assert dtypes == {name: value.dtype for name, value in plain.items()}


@needs_gathered
def test_gathered_products_have_the_bits_of_grouped_ones_and_compile_once() -> None:
    """Both add the products of a row in the same order, in float32."""
    from harts.ops.moe import quack065

    counts = []
    for rows in (4099, 1, 2048, 777):
        layer = on_gpu("any", **(LING | dict(rows=rows)))
        expected = results(layer, moe_experts, impl="grouped")
        actual = results(layer, moe_experts, impl="gathered")
        for name, value in expected.items():
            assert torch.equal(actual[name], value), f"{name} with {rows} rows"
        counts.append(quack065.num_compilations())
    assert counts[0] > 0 and len(set(counts)) == 1


@implementations
def test_no_rows_give_no_rows_and_zero_gradients(impl: str) -> None:
    layer = on_gpu("any", **(SMALL | dict(rows=0)))
    actual = results(layer, moe_experts, impl=impl)
    assert actual["output"].shape == (0, 24)
    assert not actual["d_gate_up_proj"].any() and not actual["d_down_proj"].any()


@implementations
def test_experts_without_rows_get_exactly_zero_gradients(impl: str) -> None:
    layer = on_gpu("few", **LING)
    results(layer, moe_experts, impl=impl)
    poison_free_memory()
    actual = results(layer, moe_experts, impl=impl)
    assert not actual["d_gate_up_proj"][:120].any()
    assert not actual["d_down_proj"][:120].any()


@implementations
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
def test_the_experts_give_the_same_bits_twice_without_waiting_for_the_device(
    weights_dtype: torch.dtype, impl: str
) -> None:
    layer = on_gpu("any", **(LING | dict(rows=16384)))
    layer = Layer(**(vars(layer) | dict(weights=layer.weights.to(weights_dtype))))
    first = results(layer, moe_experts, impl=impl)
    torch.cuda.synchronize()
    with no_host_wait():
        again = results(layer, moe_experts, impl=impl)
    for name, value in first.items():
        assert torch.equal(again[name], value), name
    assert first["d_weights"].dtype == weights_dtype


@implementations
def test_recomputation_with_early_stop_keeps_the_bits_and_skips_the_second_half(
    monkeypatch: pytest.MonkeyPatch, impl: str
) -> None:
    import torch.utils.checkpoint

    from harts.ops.moe import experts

    calls = []
    swiglu = experts.weighted_swiglu
    monkeypatch.setattr(experts, "weighted_swiglu", lambda *a: calls.append(1) or swiglu(*a))

    def recomputed(*args: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(  # type: ignore[no-any-return]
            lambda *a: moe_experts(*a, impl=impl) + a[0], *args, use_reentrant=False
        )

    layer = on_gpu("any", **LING)
    expected = results(layer, lambda *a: moe_experts(*a, impl=impl) + a[0])
    calls.clear()
    for name, value in results(layer, recomputed).items():
        assert torch.equal(value, expected[name]), name
    assert len(calls) == 1


def test_router_logits_err_at_most_twice_as_much_as_a_float32_product() -> None:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(20011, 1536, generator=g).bfloat16().cuda()
    weight = (torch.randn(128, 1536, generator=g) * 0.02).cuda()
    d_logits = torch.randn(20011, 128, generator=g).cuda()

    def side(function: Any, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        leaves = [x.to(dtype or x.dtype).detach().requires_grad_() for x in (hidden, weight)]
        logits = function(*leaves)
        gradients = torch.autograd.grad(logits, leaves, d_logits.to(logits.dtype))
        return dict(logits=logits.detach(), d_hidden=gradients[0], d_weight=gradients[1])

    def fused(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return router_logits(h, w, impl="fused")

    first = side(fused)
    with no_host_wait():
        actual = side(fused)
    for name, value in first.items():
        assert torch.equal(actual[name], value), name
    plain, exact = side(router_logits), side(router_logits, torch.float64)
    assert actual["logits"].dtype == torch.float32
    assert rounded_right(actual["d_hidden"], exact["d_hidden"]) > 0.98
    # Tensor cores add in float32 but may truncate: one rounding a product step of 16, of terms
    # whose absolute values sum to at most sqrt(D) times the largest entry's size.
    for name, steps in dict(logits=1536 / 16, d_weight=20011 / 16).items():
        got, other = error(actual[name], exact[name]), error(plain[name], exact[name])
        print(f"{name:10} error {got:.2e}  float32 {other:.2e}")
        assert got <= 2 * other + steps * torch.finfo(torch.float32).eps, name


def test_logits_and_the_gradient_of_the_router_lose_no_bit_of_a_product() -> None:
    def fused(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return router_logits(hidden, weight, impl="fused")

    assert_unit_rows_read_the_router_exactly(fused, torch.bfloat16, "cuda")


def gap(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """Smallest difference between neighbours of the top_k + 1 largest, for each row."""
    best = scores.sort(-1, descending=True).values[:, : top_k + 1]
    return -best.diff(dim=-1).amax(-1)


@pytest.mark.parametrize("num_experts", [128, 512])
def test_the_choice_by_sigmoid_is_that_of_the_reference_where_scores_are_apart(
    num_experts: int,
) -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(20011, num_experts, generator=g).cuda().requires_grad_()
    bias = (torch.randn(num_experts, generator=g) / 8).cuda()
    weights, indices = sigmoid_top_k(logits, bias, **SIGMOID, impl="fused")
    plain, _ = sigmoid_top_k(logits, bias, **SIGMOID)
    exact, expected = sigmoid_top_k(logits.double(), bias.double(), **SIGMOID)
    biased = logits.double().sigmoid() + bias
    groups = biased.unflatten(1, (8, -1)).topk(2, dim=-1).values.sum(-1)
    kept = torch.zeros_like(groups, dtype=torch.bool).scatter_(1, groups.topk(4).indices, True)
    open_scores = biased.unflatten(1, (8, -1)).masked_fill(~kept[..., None], -9.0).flatten(1)
    clear = (gap(open_scores, 8) > 1e-6) & (gap(groups, 8 - 1) > 1e-6)
    assert clear.float().mean() > 0.95
    assert torch.equal(indices[clear], expected[clear])
    compare_choice(logits, clear, weights, plain, exact)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (512, 10)])
def test_the_choice_by_softmax_is_that_of_the_reference_where_scores_are_apart(
    num_experts: int, top_k: int, normalise: bool
) -> None:
    g = torch.Generator().manual_seed(0)
    logits = (torch.randn(20011, num_experts, generator=g) * 2).cuda().requires_grad_()
    options: dict[str, Any] = dict(top_k=top_k, normalise=normalise)
    weights, indices = softmax_top_k(logits, **options, impl="fused")
    plain, _ = softmax_top_k(logits, **options)
    exact, expected = softmax_top_k(logits.double(), **options)
    exact_scores = logits.detach().double().softmax(-1)
    clear = gap(exact_scores, top_k) > 1e-6
    assert clear.float().mean() > 0.95
    assert torch.equal(indices[clear], expected[clear])
    compare_choice(logits, clear, weights, plain, exact)


def compare_choice(
    logits: torch.Tensor,
    clear: torch.Tensor,
    weights: torch.Tensor,
    plain: torch.Tensor,
    exact: torch.Tensor,
) -> None:
    generator = torch.Generator().manual_seed(2)
    d_weights = torch.randn(weights.shape, generator=generator).cuda() * clear[:, None]
    sides = []
    for w in (weights, plain, exact):
        (d_logits,) = torch.autograd.grad(w, logits, d_weights.to(w.dtype))
        sides.append(dict(weights=w.detach()[clear], d_logits=d_logits))
    # exp2 is approximate to 2 ulp, a division likewise, and the argument of exp2 is rounded: a
    # relative 2^-24 |logit|
    assert_errs_at_most_twice_as_much(sides[0], sides[1], sides[2], torch.float32, roundings=8)


def test_the_choice_gives_the_same_bits_twice_without_waiting_for_the_device() -> None:
    logits = torch.randn(20011, 128, device="cuda").requires_grad_()
    bias = torch.zeros(128, device="cuda")

    def once() -> tuple[torch.Tensor, ...]:
        weights, indices = sigmoid_top_k(logits, bias, **SIGMOID, impl="fused")
        return weights, indices, *torch.autograd.grad(weights, logits, weights.detach())

    first = once()
    with no_host_wait():
        again = once()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_what_the_fused_experts_cannot_run_is_refused_in_one_line() -> None:
    wrong = [
        (drawn_layer("any").to(device="cuda"), "takes bfloat16, hidden is torch.float32"),
        (on_gpu("any", width=20), "multiples of 8 .*, got 20, 16 and 6"),
        (on_gpu("any", inner=12), "multiples of 8 .*, got 24, 12 and 6"),
    ]
    for layer, message in wrong:
        with pytest.raises(ConfigError, match=message) as caught:
            results(layer, moe_experts, impl="grouped")
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"or float32, hidden is torch\.float16"):
        router_logits(torch.zeros(2, 8).half().cuda(), torch.zeros(4, 8).cuda(), impl="fused")
