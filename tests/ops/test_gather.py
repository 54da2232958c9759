"""The packed layout against plain indexing, and its backward against PyTorch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.linear_oracles import gather_from

from harts.errors import ConfigError, HartsError
from harts.ops.gather import gather_rows, own_rows
from harts.views.gather import RowGather


@st.composite
def gathers(draw: st.DrawFn) -> RowGather:
    """Every compact row once as its own, plus repeats and zero rows, in any order."""
    num_rows = draw(st.integers(1, 12))
    repeats = draw(st.lists(st.integers(-1, num_rows - 1), max_size=20))
    entries = [(row, True) for row in range(num_rows)] + [(row, False) for row in repeats]
    entries = draw(st.permutations(entries))
    return gather_from([row for row, _ in entries], [own for _, own in entries])


def plainly_gathered(x: torch.Tensor, gather: RowGather) -> torch.Tensor:
    with_zero_row = torch.cat([x, torch.zeros_like(x[:1])])
    return with_zero_row[gather.source]  # -1 is the last row


@settings(max_examples=60, deadline=None)
@given(gather=gathers(), trailing=st.sampled_from([(), (3,), (2, 3), (1, 2, 2)]))
def test_rows_and_gradients_equal_plain_indexing(
    gather: RowGather, trailing: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(len(gather.own), *trailing, dtype=torch.float64, generator=generator)
    x.requires_grad_()
    packed = gather_rows(x, gather)
    expected = plainly_gathered(x, gather)
    assert torch.equal(packed, expected)
    weight = torch.randn(packed.shape, dtype=torch.float64, generator=generator)
    (grad,) = torch.autograd.grad(packed, x, weight)
    (expected_grad,) = torch.autograd.grad(expected, x, weight)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-14)


def test_without_repeats_or_zero_rows_the_gradient_is_a_permutation() -> None:
    gather = gather_from([2, 0, 1], [True] * 3)
    x = torch.randn(3, 2, requires_grad=True)
    weight = torch.randn(3, 2)
    (grad,) = torch.autograd.grad(gather_rows(x, gather), x, weight)
    assert torch.equal(grad, weight[gather.own])


def test_repeats_are_added_in_packed_order_after_the_own_row() -> None:
    """1e8 + 1 rounds in float32, so only this order of additions gives these bits."""
    gather = gather_from([0, 0, 0, 0], [False, False, True, False])
    x = torch.zeros(1, 1, requires_grad=True)
    grad_packed = torch.tensor([[1e8], [1.0], [-1e8], [1.0]])
    (grad,) = torch.autograd.grad(gather_rows(x, gather), x, grad_packed)
    assert grad.item() == (-1e8 + 1e8) + 1.0 + 1.0


@pytest.mark.parametrize("trailing", [(), (4,)])
def test_many_repeats_of_a_bfloat16_row_are_summed_in_float32(trailing: tuple[int, ...]) -> None:
    gather = gather_from([0] * 512, [True] + [False] * 511)
    x = torch.zeros(1, *trailing, dtype=torch.bfloat16, requires_grad=True)
    (grad,) = torch.autograd.grad(gather_rows(x, gather).sum(), x)
    assert torch.equal(grad, torch.full_like(grad, 512.0))  # in bfloat16 256 + 1 is 256


def test_the_same_gradient_twice_has_the_same_bits() -> None:
    rows = torch.randint(0, 50, (4000,), generator=torch.Generator().manual_seed(0)).tolist()
    gather = gather_from([*range(50), *rows], [True] * 50 + [False] * 4000)
    x = torch.zeros(50, 33, requires_grad=True)
    weight = torch.randn(4050, 33)
    grads = [torch.autograd.grad(gather_rows(x, gather), x, weight)[0] for _ in range(3)]
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])


def test_a_wrong_number_of_rows_is_refused() -> None:
    with pytest.raises(HartsError, match=r"shape \(4, 2\).* 3 compact rows"):
        gather_rows(torch.zeros(4, 2), gather_from([0, 1, 2], [True] * 3))


@settings(max_examples=60, deadline=None)
@given(gather=gathers(), trailing=st.sampled_from([(), (3,)]))
def test_own_rows_undo_the_gather_and_give_the_others_no_gradient(
    gather: RowGather, trailing: tuple[int, ...]
) -> None:
    num_packed = len(gather.source)
    x = torch.randn(num_packed, *trailing, dtype=torch.float64, requires_grad=True)
    chosen = own_rows(x, gather)
    assert torch.equal(chosen, x[gather.own])
    weight = torch.randn(chosen.shape, dtype=torch.float64)
    (grad,) = torch.autograd.grad(chosen, x, weight)
    (expected,) = torch.autograd.grad(x[gather.own], x, weight)
    assert torch.equal(grad, expected)


def test_own_rows_of_a_wrong_number_of_rows_are_refused() -> None:
    with pytest.raises(HartsError, match=r"shape \(2, 2\).* 3 packed rows"):
        own_rows(torch.zeros(2, 2), gather_from([0, 1, 1], [True, True, False]))


@pytest.mark.parametrize("op", [gather_rows, own_rows])
def test_an_impl_that_cannot_run_is_refused_in_one_line(op: Any) -> None:
    gather = gather_from([0, 1], [True] * 2)
    for impl, message in (("fused", "'fused' needs CUDA tensors"), ("flat", "impl is 'flat'")):
        with pytest.raises(ConfigError, match=message) as error:
            op(torch.zeros(2, 2), gather, impl=impl)
        assert str(error.value).startswith(op.__name__) and "\n" not in str(error.value)
