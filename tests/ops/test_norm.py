"""RMS norms in plain PyTorch: what transformers computes, to the bit; and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from harts.errors import ConfigError, HartsError
from harts.ops.norm import gated_rms_norm, rms_norm

EPS = 1e-6


def drawn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


def worst_excess(
    fused: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: list[torch.Tensor],
    names: list[str],
    d_outputs: list[torch.Tensor],
) -> list[str]:
    """Results of `fused` whose error to float64 is too large, as sentences.

    Allowed: twice the error of `reference` in the same precision, and one rounding of a result.
    Outputs come first, then the gradients of the inputs that require one.
    """
    exact = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    want, plain, got = (
        outputs_and_gradients(call, leaves, d_outputs)
        for call, leaves in ((reference, exact), (reference, inputs), (fused, inputs))
    )
    problems = []
    for name, true, theirs, ours in zip(names, want, plain, got, strict=True):
        assert ours.shape == true.shape and ours.dtype == theirs.dtype, name
        assert bool(torch.isfinite(ours).all()), name
        band = torch.finfo(ours.dtype).eps * true.abs().max().item()
        allowed = 2 * (theirs.double() - true).abs().max().item() + band
        error = (ours.double() - true).abs().max().item()
        if not error <= allowed:
            problems.append(f"{name}: error {error:.2e}, want at most {allowed:.2e}")
    return problems


def outputs_and_gradients(
    call: Callable[..., Any], inputs: list[torch.Tensor], d_outputs: list[torch.Tensor]
) -> list[torch.Tensor]:
    outputs = call(*inputs)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    leaves = [x for x in inputs if x.requires_grad]
    gradients = [d.to(y.dtype) for d, y in zip(d_outputs, outputs, strict=True)]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, gradients)]


@pytest.mark.parametrize("scaling", ["rounded", "wide", "one_plus"])
def test_gradients_of_the_norm_are_those_of_finite_differences(scaling: Any) -> None:
    x, weight = drawn(3, 2, 5).requires_grad_(), drawn(5, seed=1).requires_grad_()
    torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, eps=EPS, scaling=scaling), (x, weight))


@pytest.mark.parametrize("activation", ["sigmoid", "silu"])
def test_the_gated_norm_is_the_norm_times_the_open_gate(activation: Any) -> None:
    x, gate, weight = drawn(7, 3, 16), drawn(7, 3, 16, seed=1), drawn(16, seed=2)
    y = gated_rms_norm(x, gate, weight, eps=EPS, activation=activation, scaling="wide")
    open_ = gate.sigmoid() if activation == "sigmoid" else gate * gate.sigmoid()
    want = rms_norm(x, weight, eps=EPS) * open_
    torch.testing.assert_close(y, want, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    ("scaling", "want"), [("rounded", torch.float32), ("wide", torch.bfloat16)]
)
def test_a_float32_weight_lifts_only_what_is_rounded_before_it(
    scaling: Any, want: torch.dtype
) -> None:
    x = drawn(4, 16, dtype=torch.bfloat16)
    assert rms_norm(x, torch.ones(16), eps=EPS, scaling=scaling).dtype == want


def test_what_does_not_fit_is_refused_in_one_line() -> None:
    x, weight = torch.ones(3, 16), torch.ones(16)
    refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (HartsError, "want one weight a column", lambda: rms_norm(x, weight[:8], eps=EPS)),
        (HartsError, "the same", lambda: rms_norm(x.half(), weight.bfloat16(), eps=EPS)),
        (ConfigError, "impl is 'fast'", lambda: rms_norm(x, weight, eps=EPS, impl="fast")),  # type: ignore[arg-type]
        (ConfigError, "scaling is 'none'", lambda: rms_norm(x, weight, eps=EPS, scaling="none")),  # type: ignore[arg-type]
        (
            ConfigError,
            "'fused' needs CUDA tensors",
            lambda: rms_norm(x, weight, eps=EPS, impl="fused"),
        ),
        (
            HartsError,
            "want the same shape",
            lambda: gated_rms_norm(x, x[:2], weight, eps=EPS, activation="silu", scaling="rounded"),
        ),
        (
            ConfigError,
            "activation is 'gelu'",
            lambda: gated_rms_norm(
                x,
                x,
                weight,
                eps=EPS,
                activation="gelu",  # type: ignore[arg-type]
                scaling="rounded",
            ),
        ),
    ]
    for kind, message, call in refused:
        with pytest.raises(kind) as error:
            call()
        assert message in str(error.value) and "\n" not in str(error.value)
