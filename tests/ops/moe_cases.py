"""Drawn layers and error measures for the tests of the mixture of experts."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import pytest
import torch

NAMES = ("output", "d_hidden", "d_weights", "d_gate_up_proj", "d_down_proj")


def _missing_for_gathered() -> str:
    """Why the gathered products cannot run here."""
    if importlib.util.find_spec("quack") is None:
        return "needs quack-kernels"
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    return "" if hopper else "needs compute capability 9"


needs_gathered = pytest.mark.skipif(bool(_missing_for_gathered()), reason=_missing_for_gathered())
implementations = pytest.mark.parametrize(
    "impl", ["grouped", pytest.param("gathered", marks=needs_gathered)]
)


@dataclass(frozen=True)
class Layer:
    """Inputs of `moe_experts`, in its order, and the gradient of its output."""

    hidden: torch.Tensor
    indices: torch.Tensor
    weights: torch.Tensor
    gate_up_proj: torch.Tensor
    down_proj: torch.Tensor
    d_output: torch.Tensor

    def to(self, **options: Any) -> Layer:
        """Moved or cast; indices keep their dtype."""
        device = {"device": options["device"]} if "device" in options else {}
        return Layer(
            **{
                name: x.to(**(device if name == "indices" else options))
                for name, x in vars(self).items()
            }
        )


def drawn_layer(
    routing: str,
    *,
    rows: int = 37,
    experts: int = 6,
    top_k: int = 3,
    width: int = 24,
    inner: int = 16,
    seed: int = 0,
) -> Layer:
    """float32. routing: "any" experts, "few" (only the last top_k have rows), or "one"."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=g) * scale

    top_k = 1 if routing == "one" else top_k
    order = torch.rand(rows, experts, generator=g).argsort(1)
    indices = order[:, :top_k]
    if routing == "few":
        indices = experts - top_k + order[:, :top_k].argsort(1)
    if routing == "one":
        indices = torch.full_like(indices, 2)
    return Layer(
        hidden=normal(rows, width),
        indices=indices.contiguous(),
        weights=torch.rand(rows, top_k, generator=g) + 0.1,
        gate_up_proj=normal(experts, 2 * inner, width, scale=width**-0.5),
        down_proj=normal(experts, width, inner, scale=inner**-0.5),
        d_output=normal(rows, width),
    )


def results(layer: Layer, call: Any, **options: Any) -> dict[str, torch.Tensor]:
    """Output of `call` and the gradients of all that takes one."""
    leaves = [
        x.detach().clone().requires_grad_()
        for x in (layer.hidden, layer.weights, layer.gate_up_proj, layer.down_proj)
    ]
    output = call(leaves[0], layer.indices, *leaves[1:], **options)
    gradients = torch.autograd.grad(output, leaves, layer.d_output)
    return dict(zip(NAMES, (output.detach(), *gradients), strict=True))


def error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest difference, relative to the largest entry."""
    scale = exact.double().abs().max().clamp(min=1e-30)
    return ((actual.double() - exact.double()).abs().max() / scale).item()


def rounded_right(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Share of the entries that are the exact ones rounded once.

    A relative error of 2^-16 before the rounding to bfloat16 flips some 2^-8 of them, one of 2^-9
    (a gradient of one term) a quarter.
    """
    return (actual == exact.to(actual.dtype)).double().mean().item()


def assert_errs_at_most_twice_as_much(
    actual: dict[str, torch.Tensor],
    other: dict[str, torch.Tensor],
    exact: dict[str, torch.Tensor],
    dtype: torch.dtype,
    roundings: int = 1,
) -> None:
    """Twice the error of the other side in the same precision, and roundings of the dtype."""
    for name, value in actual.items():
        got, plain = error(value, exact[name]), error(other[name], exact[name])
        print(f"{name:16} error {got:.2e}  plain {plain:.2e}")
        bound = 2 * plain + roundings * torch.finfo(dtype).eps
        assert got <= bound, f"{name}: {got:.2e} > {bound:.2e}"


def wide_integers(*shape: int, seed: int = 0) -> torch.Tensor:
    """float32 with all 24 bits in use, multiples of 2^-10 below 2^14: float16 terms hold them."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**24), 2**24, shape, generator=g).float() / 2**10


def assert_unit_rows_read_the_router_exactly(
    logits_of: Any, dtype: torch.dtype, device: str = "cpu"
) -> None:
    """Row i is the i-th unit vector: logits are the weight, its gradient is theirs, transposed."""
    hidden = torch.eye(48, dtype=dtype, device=device)
    weight = wide_integers(16, 48).to(device).requires_grad_()
    d_logits = wide_integers(48, 16, seed=1).to(device)
    logits = logits_of(hidden, weight)
    assert torch.equal(logits, weight.t())
    (d_weight,) = torch.autograd.grad(logits, weight, d_logits)
    assert torch.equal(d_weight, d_logits.t())
