"""The fused norms against float64: on a GPU, or tiny in Triton's interpreter."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tests.ops.test_norm import EPS, drawn, outputs_and_gradients, worst_excess
from tests.ops.triton_device import interpreted, needs_triton, triton_device

from harts.errors import HartsError
from harts.ops.norm import gated_rms_norm, rms_norm

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# bfloat16 means nothing in the interpreter.
DTYPES = [torch.float32, torch.float16] + ([] if interpreted() else [torch.bfloat16])
SCALINGS = ["rounded", "wide", "one_plus"]
GATES = [("sigmoid", "wide"), ("silu", "rounded")]


def fused_norm(x: torch.Tensor, weight: torch.Tensor, scaling: str = "rounded") -> torch.Tensor:
    from harts.ops.norm.fused import rms_norm_fused

    return rms_norm_fused(x, weight, EPS, scaling)


def fused_gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, activation: str, scaling: str
) -> torch.Tensor:
    from harts.ops.norm.fused import gated_rms_norm_fused

    return gated_rms_norm_fused(x, gate, weight, EPS, activation, scaling)


def on_device(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return drawn(*shape, dtype=dtype, seed=seed).to(triton_device()).requires_grad_()


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(
    "shape", [(1, 16), (5, 48), (1, 3, 1536), (70, 2, 128), (2, 3, 5, 24), (2, 8192)], ids=str
)
def test_the_norm_is_as_exact_as_plain_pytorch(
    shape: tuple[int, ...], scaling: Any, dtype: torch.dtype
) -> None:
    x, weight = on_device(*shape, dtype=dtype), on_device(shape[-1], dtype=dtype, seed=1)
    problems = worst_excess(
        partial(fused_norm, scaling=scaling),
        partial(rms_norm, eps=EPS, scaling=scaling),
        [x, weight],
        ["y", "dx", "dweight"],
        [drawn(*shape, seed=2).to(triton_device())],
    )
    assert not problems, "; ".join(problems)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("activation", "scaling"), GATES)
@pytest.mark.parametrize("shape", [(1, 16), (37, 3, 128), (1, 9, 2, 24)], ids=str)
def test_the_gated_norm_is_as_exact_as_plain_pytorch(
    shape: tuple[int, ...], activation: Any, scaling: Any, dtype: torch.dtype
) -> None:
    x, gate = on_device(*shape, dtype=dtype), on_device(*shape, dtype=dtype, seed=3)
    weight = on_device(shape[-1], dtype=dtype, seed=1)
    problems = worst_excess(
        partial(fused_gated_norm, activation=activation, scaling=scaling),
        partial(gated_rms_norm, eps=EPS, activation=activation, scaling=scaling),
        [x, gate, weight],
        ["y", "dx", "dgate", "dweight"],
        [drawn(*shape, seed=2).to(triton_device())],
    )
    assert not problems, "; ".join(problems)


@needs_triton
def test_rows_of_slices_are_read_where_they_lie() -> None:
    device = triton_device()
    wide = drawn(1, 21, 4, 64, dtype=torch.float32).to(device)
    weight, head_weight = (drawn(w, dtype=torch.float32, seed=1).to(device) for w in (128, 32))
    flat = wide.flatten(2)[..., 32:160]
    heads = wide[..., 16:48]
    swapped = wide.transpose(2, 3)
    for x, w in ((flat, weight), (heads, head_weight), (swapped, weight[:4])):
        assert not x.is_contiguous()
        y, dx = outputs_and_gradients(
            lambda x, w=w: fused_norm(x, w), [x.detach().requires_grad_()], [x]
        )
        same, d_same = outputs_and_gradients(
            lambda x, w=w: fused_norm(x, w),
            [x.detach().clone(memory_format=torch.contiguous_format).requires_grad_()],
            [x.contiguous()],
        )
        assert torch.equal(y, same) and torch.equal(dx, d_same)


@needs_triton
def test_a_frozen_weight_gets_no_gradient_and_x_the_same_one() -> None:
    x, weight = (
        on_device(33, 48, dtype=torch.float32),
        on_device(48, dtype=torch.float32, seed=1),
    )
    both = torch.autograd.grad(fused_norm(x, weight).sum(), (x, weight))
    (alone,) = torch.autograd.grad(fused_norm(x, weight.detach()).sum(), x)
    assert torch.equal(both[0], alone)


@needs_triton
def test_no_rows_give_no_rows_and_a_zero_weight_gradient() -> None:
    x, weight = on_device(0, 48, dtype=torch.float32), on_device(48, dtype=torch.float32)
    y = fused_norm(x, weight)
    dx, dweight = torch.autograd.grad(y.sum(), (x, weight))
    assert y.shape == dx.shape == (0, 48) and torch.equal(dweight, torch.zeros_like(weight))


@needs_triton
def test_a_float32_weight_stays_float32_beside_half_precision() -> None:
    x, weight = on_device(9, 48, dtype=torch.float16), on_device(48, dtype=torch.float32, seed=1)
    for scaling, dtype in (("rounded", torch.float32), ("wide", torch.float16)):
        problems = worst_excess(
            partial(fused_norm, scaling=scaling),
            partial(rms_norm, eps=EPS, scaling=scaling),  # type: ignore[arg-type]
            [x, weight],
            ["y", "dx", "dweight"],
            [drawn(9, 48, seed=2).to(triton_device())],
        )
        assert not problems, "; ".join(problems)
        assert fused_norm(x, weight, scaling).dtype == dtype


@needs_triton
def test_many_tiles_of_one_program_add_up() -> None:
    from harts.ops.norm import kernels

    num_rows = 3 if interpreted() else 3 * kernels.PROGRAMS + 1
    x, weight = on_device(num_rows, 1536, dtype=torch.float32), on_device(1536, dtype=torch.float32)
    (dweight,) = torch.autograd.grad(fused_norm(x, weight).sum(), weight)
    want = (x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS)).sum(0)
    bound = 4 * torch.finfo(torch.float32).eps * x.abs().sum(0).max().item()
    assert (dweight.double() - want).abs().max().item() <= bound


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("shape", [(65_537, 1536), (4099, 16, 128)], ids=str)
def test_large_inputs_are_exact_repeat_their_bits_and_never_wait_for_the_host(
    shape: tuple[int, ...],
) -> None:
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        x = torch.randn(shape, device="cuda", generator=generator, dtype=torch.bfloat16)
        return x.requires_grad_()

    x, gate, weight, dy = normal(*shape), normal(*shape), normal(shape[-1]), normal(*shape)
    calls: list[tuple[Any, Any, list[torch.Tensor], list[str]]] = [
        (
            partial(rms_norm, eps=EPS, impl="fused"),
            partial(rms_norm, eps=EPS),
            [x, weight],
            ["y", "dx", "dweight"],
        ),
        (
            partial(gated_rms_norm, eps=EPS, activation="sigmoid", scaling="wide", impl="fused"),
            partial(gated_rms_norm, eps=EPS, activation="sigmoid", scaling="wide"),
            [x, gate, weight],
            ["y", "dx", "dgate", "dweight"],
        ),
    ]
    for fused, reference, inputs, names in calls:
        problems = worst_excess(fused, reference, inputs, names, [dy.detach()])
        assert not problems, "; ".join(problems)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            first, second = (outputs_and_gradients(fused, inputs, [dy.detach()]) for _ in range(2))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


@pytest.mark.gpu
@on_gpu
def test_another_number_of_rows_compiles_nothing() -> None:
    from harts.ops.norm import kernels

    compiled = (kernels._norm_rows_kernel, kernels._norm_rows_backward_kernel)

    def step(num_rows: int) -> list[int]:
        x = torch.ones(num_rows, 1536, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.ones(1536, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        rms_norm(x, weight, eps=EPS, impl="fused").sum().backward()
        device = torch.cuda.current_device()
        return [len(kernel.device_caches[device][0]) for kernel in compiled]

    first = step(64)
    assert all(step(num_rows) == first for num_rows in (1, 2, 16, 17, 4096, 70_001))


@pytest.mark.gpu
@on_gpu
def test_what_the_kernels_do_not_serve_is_refused_in_one_line() -> None:
    for width, dtype, message in (
        (16, torch.float64, "computes bfloat16, float16 and float32"),
        (8208, torch.float32, "at most 8,192 columns, got 8,208"),
    ):
        x = torch.ones(2, width, device="cuda", dtype=dtype)
        with pytest.raises(HartsError) as error:
            rms_norm(x, x[0], eps=EPS, impl="fused")
        assert message in str(error.value) and "\n" not in str(error.value)
