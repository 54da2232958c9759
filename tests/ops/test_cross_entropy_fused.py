"""The fused log-probabilities in Triton's interpreter, float32, against float64.

TRITON_INTERPRET=1 python -m pytest tests/ops/test_cross_entropy_fused.py
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from tests.ops.test_cross_entropy import (
    CASES,
    NUM_ROWS,
    VOCABULARY,
    Scored,
    dense_log_probs,
    draw_head,
    many_positions,
    outputs_and_gradients,
    scored_positions,
    view_of,
)

from harts.errors import ConfigError
from harts.ops.cross_entropy.reference import MappedLogProbs


def missing() -> str | None:
    if find_spec("triton") is None:
        return "needs Triton"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "needs TRITON_INTERPRET=1, set before Triton is imported"
    return None


REASON = missing()
pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
]

NAMES = ("log_probs", "entropy", "d_hidden", "d_weight", "d_bias")
ONE_ROW, EVERYTHING = 1, 1 << 30
# A row of two steps of the row kernel and two blocks of the gradient kernel, ragged.
LONG_ROW = 4096 + 37


def fused(
    inputs: list[torch.Tensor], scored: list[Scored], max_block_bytes: int, which: str
) -> list[torch.Tensor]:
    from harts.ops.cross_entropy.fused import fused_log_probs

    hidden, weight, bias = [*inputs, None][:3]
    outputs = fused_log_probs(hidden, weight, bias, view_of(scored), max_block_bytes)
    return outputs_and_gradients(*outputs, inputs, which)


def check(
    scored: list[Scored],
    inputs: list[torch.Tensor],
    *,
    max_block_bytes: int = EVERYTHING,
    which: str = "both",
) -> None:
    """At most twice the float32 reference's error against float64, and one rounding of each."""
    exact = [x.detach().double().requires_grad_() for x in inputs]
    hidden, weight, bias = [*inputs, None][:3]
    exact_hidden, exact_weight, exact_bias = [*exact, None][:3]
    dense = dense_log_probs(scored, exact_hidden, exact_weight, exact_bias)
    want = outputs_and_gradients(*dense, exact, which)
    plain = MappedLogProbs.apply(hidden, weight, bias, view_of(scored), EVERYTHING)
    theirs = outputs_and_gradients(*plain, inputs, which)
    ours = fused(inputs, scored, max_block_bytes, which)
    eps = torch.finfo(torch.float32).eps
    for name, got, beside, true in zip(NAMES, ours, theirs, want, strict=False):
        assert got.dtype == torch.float32 and got.shape == true.shape
        # An entropy is a difference of numbers as large as log V; so is a small log-probability.
        size = max(1.0, true.abs().max().item())
        allowed = 2 * (beside.double() - true).abs().max().item() + 8 * eps * size
        error = (got.double() - true).abs().max().item()
        assert error <= allowed, f"{name}: error {error:.2e}, want at most {allowed:.2e}"


@settings(max_examples=25, deadline=None)
@given(scored=scored_positions)
def test_any_positions_equal_the_dense_head(scored: list[Scored]) -> None:
    inputs = draw_head(NUM_ROWS, VOCABULARY, dtype=torch.float32)
    for max_block_bytes in (ONE_ROW, 2 * 8 * 4, EVERYTHING):
        check(scored, inputs, max_block_bytes=max_block_bytes)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("which", ["log_probs", "entropy", "both"])
@pytest.mark.parametrize("positions", list(CASES))
def test_named_positions_equal_the_dense_head(positions: str, which: str, with_bias: bool) -> None:
    inputs = draw_head(NUM_ROWS, VOCABULARY, dtype=torch.float32)[: 3 if with_bias else 2]
    check(CASES[positions], inputs, which=which)


@pytest.mark.parametrize("vocabulary", [1, 16, 2047, 4096, LONG_ROW])
def test_rows_of_any_length_equal_the_dense_head(vocabulary: int) -> None:
    check(
        many_positions(5, vocabulary, 20),
        draw_head(5, vocabulary, dtype=torch.float32),
        max_block_bytes=3 * (vocabulary + 8) * 4,
    )


def test_a_row_with_300_targets_adds_them_where_they_repeat() -> None:
    draw = np.random.default_rng(1)
    crowded = [Scored(2, int(target)) for target in draw.integers(0, 40, 300)]
    scored = [Scored(0, 5), *crowded, Scored(1, 3), *many_positions(4, LONG_ROW, 10)]
    check(scored, draw_head(4, LONG_ROW, dtype=torch.float32))


def test_a_row_of_many_temperatures_continues_across_blocks() -> None:
    scored = [Scored(1, k % 7, 0.5 + 0.25 * (k % 9)) for k in range(40)] + [Scored(4, 2)]
    inputs = draw_head(NUM_ROWS, VOCABULARY, dtype=torch.float32)
    for rows in (1, 2, 4, 100):
        check(scored, inputs, max_block_bytes=rows * 8 * 4)


def test_the_largest_logit_may_lie_anywhere_in_the_row() -> None:
    """Every lane rescales what it has when a larger logit comes, and all lanes at the end."""
    for place in (0, 1, 2047, 2048, 4095, 4096, LONG_ROW - 1):
        inputs = draw_head(3, LONG_ROW, dtype=torch.float32)
        with torch.no_grad():
            inputs[2][place] = 40.0
        check([Scored(0, place), Scored(1, 7), Scored(2, LONG_ROW - 1)], inputs)


def test_extreme_logits_stay_finite_and_exact() -> None:
    from harts.ops.cross_entropy.fused import fused_log_probs

    hidden = torch.tensor([[300.0], [-300.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [-1.0]], requires_grad=True)
    view = view_of([Scored(0, 0), Scored(0, 2), Scored(1, 0)])
    log_probs, entropy = fused_log_probs(hidden, weight, None, view, EVERYTHING)
    assert log_probs.tolist() == [0.0, -600.0, -600.0]
    assert entropy.tolist() == [0.0, 0.0, 0.0]
    (log_probs + entropy).sum().backward()
    assert hidden.grad is not None and hidden.grad.isfinite().all()


def test_logits_that_are_not_a_number_are_not_hidden() -> None:
    from harts.ops.cross_entropy.fused import fused_log_probs

    hidden, weight, _ = draw_head(3, LONG_ROW, dtype=torch.float32)
    with torch.no_grad():
        hidden[1] = torch.nan
    view = view_of([Scored(0, 1), Scored(1, 1), Scored(2, 1)])
    for values in fused_log_probs(hidden, weight, None, view, EVERYTHING):
        assert values.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("trained", ["hidden", "weight", "bias", "hidden-bias"])
def test_frozen_parts_receive_no_gradient_and_change_no_bit_of_the_others(trained: str) -> None:
    from harts.ops.cross_entropy.fused import fused_log_probs

    scored, names = CASES["one-row-at-several-temperatures"], ("hidden", "weight", "bias")
    full = draw_head(NUM_ROWS, VOCABULARY, dtype=torch.float32)
    some = [x.detach().requires_grad_(name in trained) for name, x in zip(names, full, strict=True)]
    for hidden, weight, bias in (full, some):
        outputs = fused_log_probs(hidden, weight, bias, view_of(scored), EVERYTHING)
        torch.stack(outputs).sum().backward()
    for name, want, got in zip(names, full, some, strict=True):
        assert (got.grad is None) == (name not in trained)
        assert got.grad is None or torch.equal(got.grad, want.grad)


def test_rows_that_nothing_scores_have_zero_gradients() -> None:
    _, _, d_hidden, *_ = fused(
        draw_head(NUM_ROWS, VOCABULARY, dtype=torch.float32), [Scored(2, 3)], EVERYTHING, "both"
    )
    assert d_hidden.any(dim=1).tolist() == [row == 2 for row in range(NUM_ROWS)]


def test_no_scored_position_gives_empty_outputs_with_zero_gradients() -> None:
    from harts.ops.cross_entropy.fused import fused_log_probs

    inputs = draw_head(6, 7, dtype=torch.float32)
    log_probs, entropy = fused_log_probs(*inputs, view_of([]), EVERYTHING)
    assert log_probs.shape == entropy.shape == (0,)
    (log_probs.sum() + entropy.sum()).backward()
    for x in inputs:
        assert x.grad is not None and torch.equal(x.grad, torch.zeros_like(x))


def test_the_same_inputs_give_the_same_bits_and_backward_repeats_on_a_retained_graph() -> None:
    from harts.ops.cross_entropy.fused import fused_log_probs

    view, inputs = view_of(many_positions(9, 50, 80)), draw_head(9, 50, dtype=torch.float32)
    results = []
    for _ in range(2):
        outputs = fused_log_probs(*inputs, view, 1000)
        loss = torch.stack(outputs).sum()
        results.append([*outputs, *torch.autograd.grad(loss, inputs, retain_graph=True)])
        results.append([*outputs, *torch.autograd.grad(loss, inputs)])
    for repeated in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], repeated, strict=True))


def test_inputs_may_have_any_strides() -> None:
    inputs = [x.detach() for x in draw_head(NUM_ROWS, VOCABULARY, dtype=torch.float32)]
    gapped = [torch.stack((x, x), dim=-1)[..., 0] for x in inputs]
    transposed = [x.t().contiguous().t() for x in inputs]
    for strided in (gapped, transposed):
        check(CASES["one-row-at-several-temperatures"], [x.requires_grad_() for x in strided])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_are_refused_in_one_line(dtype: torch.dtype) -> None:
    from harts.ops.cross_entropy.fused import fused_log_probs

    with pytest.raises(ConfigError, match=f"bfloat16 and float32, hidden is {dtype}") as error:
        fused_log_probs(*draw_head(6, 7, dtype=dtype), view_of([Scored(0, 3)]), EVERYTHING)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("num_rows", "most", "want"),
    [
        (65_536, 5_632, 5_504),  # 12 blocks of 43 tiles, the last of 39
        (65_536, 100_000, 65_536),
        (1_000, 300, 256),
        (1_000, 270, 256),
        (1_000, 255, 250),
        (5, 1, 1),
        (5, 0, 1),
        (3, 100, 3),
        (0, 10, 0),
    ],
)
def test_blocks_are_even_and_of_whole_tiles_where_they_fit(
    num_rows: int, most: int, want: int
) -> None:
    from harts.ops.cross_entropy.fused import rows_of_block

    assert rows_of_block(num_rows, most) == want
