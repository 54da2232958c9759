"""Mixture of experts on CPU: the plain twins against row-by-row oracles, and what is refused."""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import PackageNotFoundError
from typing import Any
from unittest import mock

import pytest
import torch
from tests.ops.moe_cases import drawn_layer, error, results

from harts.errors import ConfigError, HartsError
from harts.ops.moe import moe_experts, router_logits, sigmoid_top_k, softmax_top_k


def experts_row_by_row(
    hidden: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
) -> torch.Tensor:
    inner = down_proj.shape[2]
    rows = []
    for c, row in enumerate(hidden):
        total = torch.zeros_like(row)
        for slot, e in enumerate(indices[c].tolist()):
            gate, up = gate_up_proj[e, :inner] @ row, gate_up_proj[e, inner:] @ row
            total = total + weights[c, slot] * (down_proj[e] @ (gate * torch.sigmoid(gate) * up))
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("routing", ["any", "few", "one"])
def test_the_reference_is_the_sum_over_the_experts_of_each_row(routing: str) -> None:
    layer = drawn_layer(routing).to(dtype=torch.float64)
    actual = results(layer, moe_experts)
    for name, exact in results(layer, experts_row_by_row).items():
        assert error(actual[name], exact) < 1e-14, name


@pytest.mark.parametrize(("num_groups", "kept_groups"), [(1, 1), (4, 2), (3, 1)])
def test_the_choice_by_sigmoid_takes_the_best_of_the_best_groups(
    num_groups: int, kept_groups: int
) -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 24, generator=g, dtype=torch.float64)
    bias = torch.randn(24, generator=g, dtype=torch.float64)
    weights, indices = sigmoid_top_k(
        logits,
        bias,
        top_k=4,
        num_groups=num_groups,
        kept_groups=kept_groups,
        normalise=True,
        scaling=2.5,
    )
    size = 24 // num_groups
    for row in range(50):
        score = torch.sigmoid(logits[row])
        biased = (score + bias).tolist()
        groups = [range(i * size, (i + 1) * size) for i in range(num_groups)]
        groups.sort(key=lambda group: -sum(sorted(biased[e] for e in group)[-2:]))
        open_experts = [e for group in groups[:kept_groups] for e in group]
        expected = sorted(open_experts, key=lambda e: -biased[e])[:4]
        assert indices[row].tolist() == expected, f"row {row}"
        want = 2.5 * score[expected] / score[expected].sum()
        assert torch.allclose(weights[row], want, rtol=1e-14)


@pytest.mark.parametrize("normalise", [True, False])
def test_the_choice_by_softmax_takes_the_largest_probabilities(normalise: bool) -> None:
    logits = torch.randn(50, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights, indices = softmax_top_k(logits, top_k=4, normalise=normalise)
    best = logits.softmax(-1).topk(4)
    assert torch.equal(indices, best.indices)
    total = best.values.sum(-1, keepdim=True) if normalise else 1.0
    assert torch.allclose(weights, best.values / total, rtol=1e-14)


def test_the_lowest_index_wins_a_tie() -> None:
    logits = torch.zeros(3, 8)
    options: dict[str, Any] = dict(
        top_k=2, num_groups=4, kept_groups=2, normalise=True, scaling=1.0
    )
    for _, indices in (
        sigmoid_top_k(logits, torch.zeros(8), **options),
        softmax_top_k(logits, top_k=2, normalise=True),
    ):
        assert indices.tolist() == [[0, 1]] * 3


def test_the_logits_of_half_precision_rows_are_products_in_float32() -> None:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(9, 16, generator=g).bfloat16(), torch.randn(5, 16, generator=g)
    logits = router_logits(hidden, weight)
    assert logits.dtype == torch.float32
    assert error(logits, hidden.double() @ weight.double().t()) < 1e-6


def test_tensors_on_the_cpu_are_refused_by_the_fused_operators_in_one_line() -> None:
    layer = drawn_layer("any")
    logits = torch.zeros(2, 8)
    options: dict[str, Any] = dict(
        top_k=2, num_groups=1, kept_groups=1, normalise=True, scaling=1.0, impl="fused"
    )
    calls: list[Any] = [
        lambda: results(layer, moe_experts, impl="grouped"),
        lambda: results(layer, moe_experts, impl="gathered"),
        lambda: router_logits(logits, logits, impl="fused"),
        lambda: sigmoid_top_k(logits, torch.zeros(8), **options),
        lambda: softmax_top_k(logits, top_k=2, normalise=True, impl="fused"),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="needs CUDA tensors, got them on cpu") as caught:
            call()
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="impl is 'fast', want one of reference, fused"):
        router_logits(logits, logits, impl="fast")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="impl is 'fused', want one of reference, grouped, ga"):
        results(layer, moe_experts, impl="fused")


@pytest.mark.parametrize("installed", ["0.5.3", None])
def test_gathered_products_want_the_release_they_were_written_for(installed: str | None) -> None:
    module = "harts.ops.moe.quack065"
    answer: Any = (
        {"return_value": installed} if installed else {"side_effect": PackageNotFoundError}
    )
    with (
        mock.patch("importlib.metadata.version", **answer),
        mock.patch.dict(sys.modules),
        pytest.raises(ConfigError, match=r"needs quack-kernels 0\.6\.5, found .*; pip") as caught,
    ):
        sys.modules.pop(module, None)
        importlib.import_module(module)
    assert f"found {installed or 'none'}; pip install quack-kernels==0.6.5" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_shapes_that_do_not_fit_are_refused_in_one_line() -> None:
    layer = drawn_layer("any")
    good = [layer.hidden, layer.indices, layer.weights, layer.gate_up_proj, layer.down_proj]
    for place, wrong in ((0, layer.hidden[:5]), (2, layer.weights[:, :2]), (4, layer.hidden)):
        with pytest.raises(HartsError, match=r"moe_experts: .*; want") as caught:
            moe_experts(*(wrong if i == place else x for i, x in enumerate(good)))
        assert "\n" not in str(caught.value)
    logits, options = torch.zeros(2, 8), dict(normalise=True, scaling=1.0)
    for more, message in (
        (dict(top_k=9, num_groups=1, kept_groups=1), "at most that many experts"),
        (dict(top_k=2, num_groups=3, kept_groups=1), "equal groups"),
        (dict(top_k=3, num_groups=4, kept_groups=1), "must hold the 3 experts"),
        (dict(top_k=3, num_groups=4, kept_groups=5), "5 of 4 groups"),
    ):
        with pytest.raises(HartsError, match=message):
            sigmoid_top_k(logits, torch.zeros(8), **options, **more)  # type: ignore[arg-type]
    with pytest.raises(HartsError, match="bias has shape"):
        sigmoid_top_k(
            logits,
            torch.zeros(7),
            top_k=2,
            num_groups=1,
            kept_groups=1,
            **options,  # type: ignore[arg-type]
        )
    with pytest.raises(HartsError, match=r"want \(rows, width\)"):
        router_logits(logits, torch.zeros(4, 7))
