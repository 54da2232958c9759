"""Gates in plain PyTorch: definition, gradients, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ops.test_norm import drawn

from harts.errors import ConfigError, HartsError
from harts.ops.activation import gate_heads, swiglu


def test_swiglu_is_gate_times_its_sigmoid_times_up() -> None:
    gate, up = drawn(7, 12), drawn(7, 12, seed=1)
    torch.testing.assert_close(swiglu(gate, up), gate * gate.sigmoid() * up, rtol=1e-14, atol=1e-14)


def test_every_head_is_scaled_by_its_own_sigmoid() -> None:
    x, logits = drawn(3, 4, 8), drawn(3, 4, seed=1)
    y = gate_heads(x, logits)
    for row in range(3):
        for head in range(4):
            assert torch.equal(y[row, head], x[row, head] * logits[row, head].sigmoid())


def test_gradients_are_those_of_finite_differences() -> None:
    gate, up = (drawn(3, 5, seed=s).requires_grad_() for s in range(2))
    torch.autograd.gradcheck(swiglu, (gate, up))
    x, logits = drawn(3, 2, 5).requires_grad_(), drawn(3, 2, seed=1).requires_grad_()
    torch.autograd.gradcheck(gate_heads, (x, logits))


def test_what_does_not_fit_is_refused_in_one_line() -> None:
    x = torch.ones(3, 4, 8)
    refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (HartsError, "want one shape and one floating dtype", lambda: swiglu(x, x[:2])),
        (HartsError, "want one shape and one floating dtype", lambda: swiglu(x, x.half())),
        (HartsError, "want one logit a row", lambda: gate_heads(x, x)),
        (ConfigError, "impl is 'fast'", lambda: swiglu(x, x, impl="fast")),  # type: ignore[arg-type]
        (ConfigError, "'fused' needs CUDA tensors", lambda: swiglu(x, x, impl="fused")),
        (
            ConfigError,
            "'fused' needs CUDA tensors",
            lambda: gate_heads(x, x[..., 0], impl="fused"),
        ),
    ]
    for kind, message, call in refused:
        with pytest.raises(kind) as error:
            call()
        assert message in str(error.value) and "\n" not in str(error.value)
