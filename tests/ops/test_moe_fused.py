"""The Triton kernels of the mixture of experts in Triton's interpreter, on CPU.

    TRITON_INTERPRET=1 python -m pytest tests/ops/test_moe_fused.py

The interpreter knows no bfloat16: float32, with float16 for what narrows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from tests.ops.moe_cases import (
    assert_errs_at_most_twice_as_much,
    assert_unit_rows_read_the_router_exactly,
    drawn_layer,
    error,
    results,
    rounded_right,
    wide_integers,
)
from tests.ops.triton_device import interpreted

from harts.ops.moe import reference

if not interpreted():
    pytest.skip("needs Triton with TRITON_INTERPRET=1", allow_module_level=True)

from harts.ops.moe import (
    copied_rows,
    experts,
    permutation,
    router,
    router_kernels,
    swiglu_kernels,
)

EPS = torch.finfo(torch.float32).eps
pytestmark = pytest.mark.triton


def moe_experts(*inputs: torch.Tensor) -> torch.Tensor:
    return experts.moe_experts(*inputs, copied_rows)


def drawn_logits(rows: int, num_experts: int, seed: int = 0) -> torch.Tensor:
    """Rounded to eighths, so that ties are common; plus nothing that float32 would round."""
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, num_experts, generator=g) * 16).round() / 8


@pytest.mark.parametrize(
    ("num_experts", "num_groups", "kept_groups", "top_k"),
    [(8, 1, 1, 2), (24, 3, 2, 5), (20, 4, 4, 3), (128, 8, 4, 8), (512, 1, 1, 10), (6, 3, 1, 1)],
)
@pytest.mark.parametrize("normalise", [True, False])
def test_the_choice_by_sigmoid_and_its_gradient_are_those_of_the_reference(
    num_experts: int, num_groups: int, kept_groups: int, top_k: int, normalise: bool
) -> None:
    logits = drawn_logits(37, num_experts).requires_grad_()
    bias = torch.randn(num_experts, generator=torch.Generator().manual_seed(1)).round() / 4
    options: dict[str, Any] = dict(
        top_k=top_k,
        num_groups=num_groups,
        kept_groups=kept_groups,
        normalise=normalise,
        scaling=2.5,
    )
    weights, indices = router.sigmoid_top_k(logits, bias, **options)
    exact, expected = reference.sigmoid_top_k(logits.double(), bias.double(), **options)
    plain, plain_expected = reference.sigmoid_top_k(logits, bias, **options)
    # equal logits tie exactly in either precision; different ones differ by an eighth
    assert torch.equal(expected, plain_expected)
    assert torch.equal(indices, expected), (indices != expected).nonzero()[0]
    compare_choice(logits, weights, plain, exact)


@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (24, 5), (512, 10), (3, 3)])
@pytest.mark.parametrize("normalise", [True, False])
def test_the_choice_by_softmax_and_its_gradient_are_those_of_the_reference(
    num_experts: int, top_k: int, normalise: bool
) -> None:
    logits = drawn_logits(37, num_experts).requires_grad_()
    options: dict[str, Any] = dict(top_k=top_k, normalise=normalise)
    weights, indices = router.softmax_top_k(logits, **options)
    exact, expected = reference.softmax_top_k(logits.double(), **options)
    plain, _ = reference.softmax_top_k(logits, **options)
    assert torch.equal(indices, expected), (indices != expected).nonzero()[0]
    compare_choice(logits, weights, plain, exact)


def compare_choice(
    logits: torch.Tensor, weights: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor
) -> None:
    d_weights = torch.randn(weights.shape, generator=torch.Generator().manual_seed(2))
    sides = [
        dict(weights=w.detach(), d_logits=torch.autograd.grad(w, logits, d_weights.to(w.dtype))[0])
        for w in (weights, plain, exact)
    ]
    assert_errs_at_most_twice_as_much(sides[0], sides[1], sides[2], torch.float32)


def test_softmax_weights_keep_the_dtype_of_half_precision_logits() -> None:
    logits = drawn_logits(5, 16).half().requires_grad_()
    weights, _ = router.softmax_top_k(logits, top_k=3, normalise=True)
    plain, _ = reference.softmax_top_k(logits, top_k=3, normalise=True)
    assert weights.dtype == torch.float16
    assert error(weights, plain) <= torch.finfo(torch.float16).eps
    (gradient,) = torch.autograd.grad(weights, logits, torch.ones_like(weights))
    assert gradient.dtype == torch.float16


def test_three_terms_are_a_float32_exactly() -> None:
    x = wide_integers(7, 70)
    for mid_place in (1, 2):
        terms = torch.full((7, 4 * 70), float("nan"), dtype=torch.float16)
        router_kernels.split_terms(x, terms, term_stride=70, row_stride=4 * 70, mid_place=mid_place)
        low, a, b, high = terms.float().split(70, dim=1)
        mid = a if mid_place == 1 else b
        assert torch.equal(low + mid + high, x)
        assert torch.equal(b if mid_place == 1 else a, high) and torch.equal(high, x.half().float())


def test_logits_of_half_precision_rows_have_the_products_of_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """float16 stands for bfloat16, and a float32 product on CPU for the one of the device."""
    monkeypatch.setattr(router, "_mm_float32", lambda a, b: a.float() @ b.float())
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(70, 40, generator=g).half().requires_grad_()
    weight = torch.randn(12, 40, generator=g).requires_grad_()
    d_logits = torch.randn(70, 12, generator=g)
    sides = []
    for function, dtype in (
        (router._ExactLogits.apply, None),
        (reference.router_logits, None),
        (reference.router_logits, torch.float64),
    ):
        leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in (hidden, weight)]
        logits = function(*leaves)
        gradients = torch.autograd.grad(logits, leaves, d_logits.to(logits.dtype))
        sides.append(dict(logits=logits.detach(), d_weight=gradients[1], d_hidden=gradients[0]))
    actual, plain, exact = sides
    d_hidden = [side.pop("d_hidden") for side in sides]
    assert_errs_at_most_twice_as_much(actual, plain, exact, torch.float32)
    assert rounded_right(d_hidden[0], d_hidden[2]) > 0.98


def test_logits_and_the_gradient_of_the_router_lose_no_bit_of_a_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router, "_mm_float32", lambda a, b: a.float() @ b.float())
    assert_unit_rows_read_the_router_exactly(router._ExactLogits.apply, torch.float16)


@pytest.mark.parametrize("num_experts", [6, 256, 300])
def test_a_plan_orders_pairs_by_expert_and_then_by_number(num_experts: int) -> None:
    g = torch.Generator().manual_seed(0)
    indices = torch.rand(40, num_experts, generator=g).argsort(1)[:, :3]
    plan = permutation.plan_pairs(indices, num_experts)
    expert_of_pair = indices.flatten().tolist()
    expected = sorted(range(120), key=lambda pair: (expert_of_pair[pair], pair))
    assert plan.pair_of_position.tolist() == expected
    assert [plan.position_of_pair[pair].item() for pair in expected] == list(range(120))
    counts = torch.bincount(indices.flatten(), minlength=num_experts)
    assert plan.expert_ends.tolist() == counts.cumsum(0).tolist()
    assert plan.expert_bounds.tolist() == [0, *plan.expert_ends.tolist()]
    assert plan.row_of_position.tolist() == [pair // 3 for pair in expected]
    assert {x.dtype for x in plan[1:]} == {torch.int32} and plan.num_pairs == 120


@pytest.mark.parametrize("width", [8, 24, 520])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_are_spread_bit_for_bit_and_combined_in_the_order_of_slots(
    width: int, dtype: torch.dtype
) -> None:
    layer = drawn_layer("any", width=width)
    plan = permutation.plan_pairs(layer.indices, 6)
    rows = layer.hidden.to(dtype)
    spread = permutation.spread_rows(rows, plan.position_of_pair)
    assert torch.equal(spread, rows[plan.pair_of_position // 3])
    pairs = torch.randn(111, width, generator=torch.Generator().manual_seed(3)).to(dtype)
    combined = permutation.combine_rows(pairs, plan.position_of_pair, 3)
    a, b, c = pairs[plan.position_of_pair.view(37, 3).long()].float().unbind(1)
    assert torch.equal(combined, ((a + b) + c).to(dtype))


@pytest.mark.parametrize("inner", [8, 24, 520])
def test_weighted_swiglu_and_its_gradients_are_those_of_autograd(inner: int) -> None:
    g = torch.Generator().manual_seed(0)
    gate_up = torch.randn(111, 2 * inner, generator=g) * 2
    weights = torch.rand(37, 3, generator=g)
    pair = torch.randperm(111, generator=g)
    d_output = torch.randn(111, inner, generator=g)

    def plain(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (gate_up, weights)]
        gate, up = leaves[0].chunk(2, dim=1)
        output = torch.nn.functional.silu(gate) * up * leaves[1].flatten()[pair][:, None]
        gradients = torch.autograd.grad(output, leaves, d_output.to(dtype))
        return dict(output=output.detach(), d_gate_up=gradients[0], d_weights=gradients[1])

    d_gate_up, d_weights, again = swiglu_kernels.weighted_swiglu_gradients(
        gate_up, weights, pair, d_output
    )
    output = swiglu_kernels.weighted_swiglu(gate_up, weights, pair)
    assert torch.equal(output, again)
    actual = dict(output=output, d_gate_up=d_gate_up, d_weights=d_weights)
    assert_errs_at_most_twice_as_much(
        actual, plain(torch.float32), plain(torch.float64), torch.float32
    )


@pytest.mark.parametrize("routing", ["any", "few", "one"])
def test_the_experts_and_their_gradients_are_those_of_the_reference(routing: str) -> None:
    layer = drawn_layer(routing)
    actual = results(layer, moe_experts)
    plain = results(layer, reference.moe_experts)
    exact = results(layer.to(dtype=torch.float64), reference.moe_experts)
    assert_errs_at_most_twice_as_much(actual, plain, exact, torch.float32)
    for name, again in results(layer, moe_experts).items():
        assert torch.equal(actual[name], again), name


def test_frozen_projections_get_no_gradient_and_the_others_keep_their_bits() -> None:
    layer = drawn_layer("any")
    full = results(layer, moe_experts)
    hidden = layer.hidden.clone().requires_grad_()
    output = moe_experts(hidden, layer.indices, layer.weights, layer.gate_up_proj, layer.down_proj)
    (d_hidden,) = torch.autograd.grad(output, hidden, layer.d_output)
    assert torch.equal(d_hidden, full["d_hidden"])


def test_no_rows_give_no_rows() -> None:
    layer = drawn_layer("any", rows=0)
    output = moe_experts(
        layer.hidden, layer.indices, layer.weights, layer.gate_up_proj, layer.down_proj
    )
    assert output.shape == (0, 24)


def test_recomputation_stops_before_the_second_half(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = drawn_layer("any")
    calls = {"swiglu": 0, "spread": 0}

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            calls[name] += 1
            return function(*args)

        return call

    monkeypatch.setattr(experts, "weighted_swiglu", counted("swiglu", experts.weighted_swiglu))
    monkeypatch.setattr(copied_rows, "spread_rows", counted("spread", permutation.spread_rows))

    def checkpointed(*args: torch.Tensor) -> torch.Tensor:
        def block(*inner: torch.Tensor) -> torch.Tensor:
            return moe_experts(*inner) + inner[0]

        return torch.utils.checkpoint.checkpoint(block, *args, use_reentrant=False)

    actual = results(layer, checkpointed)
    assert calls == {"swiglu": 1, "spread": 4}  # forward, again, and twice in backward
    expected = results(layer, lambda *args: moe_experts(*args) + args[0])
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name
