"""Projections of the same rows, against calling each of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode

from harts.ops.projections import project


def layers(*widths: int, dtype: torch.dtype = torch.float64) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(6, width, bias=False, dtype=dtype) for width in widths]


def rows_of(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def gradients(
    outputs: Any, leaves: list[torch.Tensor], used: list[int] | None = None
) -> list[torch.Tensor | None]:
    used = list(range(len(outputs))) if used is None else used
    seeds = [rows_of(*outputs[i].shape, dtype=outputs[i].dtype) for i in used]
    chosen = [outputs[i] for i in used]
    return list(torch.autograd.grad(chosen, leaves, seeds, allow_unused=True))


class Counted(TorchDispatchMode):
    """Matrix products."""

    products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += "mm" in str(func)
        return func(*args, **(kwargs or {}))


def merged(outputs: Any) -> int:
    """How many outputs share their node of the graph with another."""
    nodes = [output.grad_fn for output in outputs]
    return sum(nodes.count(node) > 1 for node in nodes)


@pytest.mark.parametrize("shape", [(5, 6), (1, 5, 6), (0, 6)])
@pytest.mark.parametrize("used", [[0, 1, 2], [2], [0, 2]])
def test_results_and_gradients_are_those_of_the_calls(
    shape: tuple[int, ...], used: list[int]
) -> None:
    projections, rows = layers(4, 1, 7), rows_of(*shape).requires_grad_()
    leaves = [rows, *(p.weight for p in projections)]
    outputs, called = project(rows, *projections), [p(rows) for p in projections]
    for output, expected in zip(outputs, called, strict=True):
        assert torch.equal(output, expected)
    assert merged(outputs) == 3 and merged(called) == 0
    actual, wanted = gradients(outputs, leaves, used), gradients(called, leaves, used)
    for got, want in zip(actual, wanted, strict=True):
        assert (got is None) == (want is None)
        if got is not None and want is not None:
            assert got.shape == want.shape
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_what_is_frozen_gets_no_gradient_and_the_rest_keeps_its_own() -> None:
    projections, rows = layers(4, 3), rows_of(5, 6).requires_grad_()
    projections[1].weight.requires_grad_(False)
    expected = gradients([p(rows) for p in projections], [rows, projections[0].weight])
    actual = gradients(project(rows, *projections), [rows, projections[0].weight])
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    with Counted() as counted:
        gradients(project(rows, *projections), [rows, projections[0].weight])
    assert counted.products == 2 + 3  # forward; rows twice, one weight
    outputs = project(rows.detach(), *projections)
    assert outputs[0].requires_grad and not project(rows.detach(), projections[1])[0].requires_grad


def test_in_half_precision_the_sum_over_projections_is_rounded_once_each() -> None:
    projections = layers(*[32] * 6, dtype=torch.bfloat16)
    rows = rows_of(40, 6, dtype=torch.bfloat16).requires_grad_()
    (exact,) = gradients([rows.double() @ p.weight.double().t() for p in projections], [rows])
    outputs = project(rows, *projections)
    (got,) = gradients(outputs, [rows])
    (called,) = gradients([p(rows) for p in projections], [rows])
    assert got is not None and called is not None and exact is not None
    assert (got - exact).norm() <= (called - exact).norm() * 1.1
    seeds = [rows_of(*y.shape, dtype=torch.bfloat16) for y in outputs]
    expected = seeds[0].mm(projections[0].weight)
    for seed, projection in zip(seeds[1:], projections[1:], strict=True):
        expected = expected.addmm(seed, projection.weight)
    assert torch.equal(got, expected)


class Opaque(torch.Tensor):
    """A weight of a kind of its own."""


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    "case",
    ["subclass", "bias", "hook", "backward hook", "own forward", "other weight", "other module"],
)
def test_what_is_more_than_a_linear_map_is_called(case: str) -> None:
    projections: list[nn.Module] = list(layers(4, 3, 2))
    seen: list[str] = []
    if case == "subclass":
        projections[1] = Doubled(6, 3, bias=False, dtype=torch.float64)
    if case == "bias":
        projections[1] = nn.Linear(6, 3, dtype=torch.float64)
    if case == "hook":
        projections[1].register_forward_pre_hook(lambda *_: seen.append("forward"))
    if case == "backward hook":
        projections[1].register_full_backward_hook(lambda *_: seen.append("backward"))
    if case == "own forward":  # as accelerate's hooks
        inner: Any = projections[1].forward
        projections[1].forward = lambda x: -inner(x)  # type: ignore[method-assign]
    if case == "other weight":  # as torchao's quantised ones, which know no product in place
        projections[1].weight = nn.Parameter(projections[1].weight.detach().as_subclass(Opaque))
    if case == "other module":
        projections[1] = nn.Sequential(*layers(3))
    rows = rows_of(5, 6).requires_grad_()
    leaves = [rows, *(x for p in projections for x in p.parameters())]
    outputs, called = project(rows, *projections), [p(rows) for p in projections]
    for output, expected in zip(outputs, called, strict=True):
        assert torch.equal(output, expected)
    assert outputs[0].grad_fn is outputs[2].grad_fn is not outputs[1].grad_fn
    seen.clear()
    actual = gradients(project(rows, *projections), leaves)
    assert bool(seen) == ("hook" in case)
    for got, want in zip(actual, gradients(called, leaves), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_a_hook_on_all_modules_sees_every_projection() -> None:
    projections, seen = layers(4, 3), []
    handle = register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        project(rows_of(5, 6), *projections)
    finally:
        handle.remove()
    assert seen == projections


def test_devices_without_autocast_are_fine() -> None:
    projections = [p.to("meta") for p in layers(4, 3)]
    assert [y.shape for y in project(torch.empty(5, 6, device="meta"), *projections)] == [
        (5, 4),
        (5, 3),
    ]


def test_autocast_casts_as_in_the_calls() -> None:
    projections = layers(4, 3, dtype=torch.float32)
    rows = rows_of(5, 6, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs, called = project(rows, *projections), [p(rows) for p in projections]
    for output, expected in zip(outputs, called, strict=True):
        assert output.dtype == torch.bfloat16 and torch.equal(output, expected)
    for got in gradients(outputs, [rows, *(p.weight for p in projections)]):
        assert got is not None and got.dtype == torch.float32
