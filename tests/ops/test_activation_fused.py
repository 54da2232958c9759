"""The fused gates against float64: on a GPU, or tiny in Triton's interpreter."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tests.ops.test_norm import drawn, outputs_and_gradients, worst_excess
from tests.ops.test_norm_fused import DTYPES, on_device, on_gpu
from tests.ops.triton_device import needs_triton, triton_device

from harts.ops.activation import gate_heads, swiglu


def fused_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    from harts.ops.activation.fused import swiglu_fused

    return swiglu_fused(gate, up)


def fused_gate_heads(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    from harts.ops.activation.fused import gate_heads_fused

    return gate_heads_fused(x, logits)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (5, 48), (1, 3, 1536), (0, 16)], ids=str)
def test_swiglu_is_as_exact_as_plain_pytorch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gate, up = on_device(*shape, dtype=dtype), on_device(*shape, dtype=dtype, seed=1)
    if not gate.numel():
        assert [x.shape for x in outputs_and_gradients(fused_swiglu, [gate, up], [gate])] == [
            gate.shape
        ] * 3
        return
    problems = worst_excess(
        fused_swiglu,
        swiglu,
        [gate, up],
        ["y", "dgate", "dup"],
        [drawn(*shape, seed=2).to(triton_device())],
    )
    assert not problems, "; ".join(problems)


@needs_triton
def test_closed_and_open_gates_stay_finite() -> None:
    gate = torch.tensor([-200.0, -20.0, 0.0, 20.0, 200.0], device=triton_device()).requires_grad_()
    up = torch.ones_like(gate).requires_grad_()
    for got, want in zip(
        outputs_and_gradients(fused_swiglu, [gate, up], [up]),
        outputs_and_gradients(swiglu, [gate, up], [up]),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 16), (1, 21, 3, 128), (9, 2, 24)], ids=str)
def test_the_head_gate_is_as_exact_as_plain_pytorch(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, logits = on_device(*shape, dtype=dtype), on_device(*shape[:-1], dtype=dtype, seed=1)
    problems = worst_excess(
        fused_gate_heads,
        gate_heads,
        [x, logits],
        ["y", "dx", "dlogits"],
        [drawn(*shape, seed=2).to(triton_device())],
    )
    assert not problems, "; ".join(problems)


@needs_triton
def test_inputs_that_are_not_contiguous_give_the_same_bits() -> None:
    x = drawn(6, 3, 32, dtype=torch.float32).to(triton_device())
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(fused_gate_heads(turned, x[..., 0]), fused_gate_heads(x, x[..., 0]))
    gate, up = x.chunk(2, dim=-1)
    assert torch.equal(fused_swiglu(gate, up), fused_swiglu(gate.contiguous(), up.contiguous()))


@pytest.mark.gpu
@on_gpu
def test_large_inputs_are_exact_repeat_their_bits_and_never_wait_for_the_host() -> None:
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        x = torch.randn(shape, device="cuda", generator=generator, dtype=torch.bfloat16)
        return x.requires_grad_()

    heads, logits = normal(1, 65_537, 16, 128), normal(1, 65_537, 16)
    gate, up = normal(65_537, 512), normal(65_537, 512)
    calls: list[tuple[Any, list[torch.Tensor], list[str]]] = [
        (swiglu, [gate, up], ["y", "dgate", "dup"]),
        (gate_heads, [heads, logits], ["y", "dx", "dlogits"]),
    ]
    for call, inputs, names in calls:
        fused, d_output = partial(call, impl="fused"), [normal(*inputs[0].shape).detach()]
        problems = worst_excess(fused, call, inputs, names, d_output)
        assert not problems, "; ".join(problems)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            first, second = (outputs_and_gradients(fused, inputs, d_output) for _ in range(2))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
