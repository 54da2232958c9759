"""Causal convolution against a sum over each row's own ancestors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.linear_oracles import conv_view, expanded_conv, forest_of, forests, path_to

from harts.errors import ConfigError, HartsError
from harts.ops.conv import causal_conv
from harts.views.conv import ConvView

Inputs = list[torch.Tensor]

FORKED = forest_of([(-1, 9), (0, 3), (0, 1), (2, 5), (2, 1), (-1, 2), (5, 4), (5, 1)])


def drawn_inputs(
    num_rows: int, width: int, channels: int = 5, dtype: torch.dtype = torch.float64
) -> Inputs:
    """x, weight, bias."""
    generator = torch.Generator().manual_seed(num_rows)
    shapes = [(num_rows, channels), (channels, width), (channels,)]
    drawn = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    return [x.to(dtype).requires_grad_() for x in drawn]


def run(inputs: Inputs, view: ConvView, activation: str | None = "silu") -> torch.Tensor:
    x, weight, bias = inputs
    return causal_conv(x, weight, bias, view=view, activation=activation)  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None)
@given(
    parents=forests(chunk_size=4),
    width=st.integers(1, 5),
    activation=st.sampled_from(["silu", None]),
    with_bias=st.booleans(),
)
def test_a_forest_equals_its_trajectories(
    parents: list[int], width: int, activation: str | None, with_bias: bool
) -> None:
    x, weight, bias = drawn_inputs(len(parents), width)
    used = [x, weight, bias] if with_bias else [x, weight]
    view = conv_view(parents, width)
    y = causal_conv(
        x,
        weight,
        bias if with_bias else None,
        view=view,
        activation=activation,  # type: ignore[arg-type]
    )
    expected = expanded_conv(parents, x, weight, bias if with_bias else None, activation)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    cotangent = torch.randn_like(y)
    grads = torch.autograd.grad(y, used, cotangent)
    expected_grads = torch.autograd.grad(expected, used, cotangent)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_single_sequence_equals_transformers(dtype: torch.dtype) -> None:
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    x, weight, bias = drawn_inputs(70, 4, channels=16, dtype=dtype)
    y = run([x, weight, bias], conv_view(list(range(-1, 69)), 4))
    fallback = getattr(qwen.causal_conv1d_fn, "__wrapped__", qwen.causal_conv1d_fn)
    expected = fallback(x.t().unsqueeze(0), weight, bias, "silu")[0].t()
    # Five terms of the same sums in another order, then silu (slope below 1.1).
    sums = x.abs().max() * weight.abs().sum(1).max() + bias.abs().max()
    bound = 2 * 5 * torch.finfo(dtype).eps * sums.item()
    assert (y - expected).abs().max().item() <= bound


def test_low_precision_is_computed_in_float32_and_rounded_once() -> None:
    wide = drawn_inputs(len(FORKED), 4, dtype=torch.float32)
    narrow = [x.detach().bfloat16().requires_grad_() for x in wide]
    view = conv_view(FORKED, 4)
    y = run(narrow, view)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, run([x.float() for x in narrow], view).bfloat16())
    grads = torch.autograd.grad(y.sum(), narrow)
    assert all(grad.dtype == torch.bfloat16 for grad in grads)


@pytest.mark.parametrize("changed", [0, 4, 8, 9, 12, 13, len(FORKED) - 1])
def test_changing_a_row_changes_no_bit_of_rows_that_do_not_descend_from_it(changed: int) -> None:
    inputs = [x.detach() for x in drawn_inputs(len(FORKED), 4, dtype=torch.float32)]
    view = conv_view(FORKED, 4)
    before = run(inputs, view)
    inputs[0][changed] += 1.0
    after = run(inputs, view)
    for row in range(len(FORKED)):
        near = path_to(FORKED, row)[-4:]
        assert torch.equal(before[row], after[row]) == (changed not in near), f"row {row}"


def test_the_same_inputs_twice_give_the_same_bits() -> None:
    view = conv_view(FORKED, 4)
    results = []
    for _ in range(2):
        inputs = drawn_inputs(len(FORKED), 4, channels=32, dtype=torch.float32)
        y = run(inputs, view)
        results.append([y, *torch.autograd.grad(y.square().sum(), inputs)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_frozen_weights_get_no_gradient_and_x_the_same_one() -> None:
    view = conv_view(FORKED, 4)
    x, weight, bias = drawn_inputs(len(FORKED), 4)
    (expected,) = torch.autograd.grad(run([x, weight, bias], view).sum(), x)
    y = run([x, weight.detach(), bias.detach()], view)
    y.sum().backward()
    assert torch.equal(x.grad, expected) and weight.grad is None and bias.grad is None


@pytest.mark.parametrize("field", ["own", "extra_packed", "extra_compact"])
def test_the_comparison_notices_a_wrong_index(field: str) -> None:
    """Guards the tests above: their inputs must be able to tell a wrong view."""
    inputs = drawn_inputs(len(FORKED), 4)
    view = conv_view(FORKED, 4)
    wrong = getattr(view.extended, field).clone()
    wrong[-1], wrong[-2] = wrong[-2].item(), wrong[-1].item()
    mutated = replace(view, extended=replace(view.extended, **{field: wrong}))
    results = []
    for used in (view, mutated):
        y = run(inputs, used)
        results.append([y, *torch.autograd.grad(y.square().sum(), inputs)])
    assert not all(torch.allclose(a, b) for a, b in zip(*results, strict=True))


def test_wrong_shapes_and_activations_are_refused() -> None:
    x, weight, bias = drawn_inputs(len(FORKED), 4)
    view = conv_view(FORKED, 4)
    with pytest.raises(ConfigError, match="activation is 'gelu', want 'silu' or None"):
        run([x, weight, bias], view, activation="gelu")
    with pytest.raises(HartsError, match=r"want weight of \(5 channels, width 4\)"):
        run([x, weight[:, 1:], bias], view)
    with pytest.raises(HartsError, match="packed rows, channels"):
        run([x[1:], weight, bias], view)
    with pytest.raises(HartsError, match="one a channel"):
        run([x, weight, bias[1:]], view)
