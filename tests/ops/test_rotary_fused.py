"""The fused assembly of latent attention against float64: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from tests.ops.test_norm import drawn, outputs_and_gradients, worst_excess
from tests.ops.test_norm_fused import DTYPES, on_device, on_gpu
from tests.ops.test_rotary import angles
from tests.ops.triton_device import interpreted, needs_triton, triton_device

from harts.ops.rotary import assemble_keys_values, rotate_queries


class Widths(NamedTuple):
    """heads, columns without position, rotary columns, value columns."""

    heads: int
    plain: int
    rotary: int
    value: int


LING = Widths(16, 128, 64, 128)
CASES = [LING, Widths(2, 16, 16, 24), Widths(3, 5, 6, 7), Widths(1, 0, 2, 1)]


def fused_rotate(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    from harts.ops.rotary.fused import rotate_queries_fused

    return rotate_queries_fused(q, cos, sin)


def fused_assemble(
    kv: torch.Tensor,
    k_rope: torch.Tensor,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    *,
    value_width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    from harts.ops.rotary.fused import assemble_keys_values_fused

    return assemble_keys_values_fused(kv, k_rope, cos, sin, value_width)


def plain_assemble(
    kv: torch.Tensor,
    k_rope: torch.Tensor,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    *,
    value_width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    return assemble_keys_values(kv, k_rope, cos, sin, value_width=value_width)


def angles_on_device(
    num_rows: int, width: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    _, cos, sin = angles(num_rows, width, dtype)
    return cos.to(triton_device()), sin.to(triton_device())


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("widths", CASES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 7])
def test_rotation_is_as_exact_as_plain_pytorch(
    num_rows: int, widths: Widths, dtype: torch.dtype
) -> None:
    shape = (num_rows, widths.heads, widths.plain + widths.rotary)
    problems = worst_excess(
        fused_rotate,
        rotate_queries,
        [on_device(*shape, dtype=dtype), *angles_on_device(num_rows, widths.rotary, dtype)],
        ["q", "dq"],
        [drawn(*shape, seed=2).to(triton_device())],
    )
    assert not problems, "; ".join(problems)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("widths", CASES, ids=str)
@pytest.mark.parametrize("rotate", [True, False], ids=["rotary", "without"])
@pytest.mark.parametrize("num_rows", [1, 7])
def test_assembly_is_as_exact_as_plain_pytorch(
    num_rows: int, rotate: bool, widths: Widths, dtype: torch.dtype
) -> None:
    device = triton_device()
    kv = on_device(num_rows, widths.heads, widths.plain + widths.value, dtype=dtype)
    wide = drawn(num_rows, 3 + widths.rotary, dtype=dtype, seed=1).to(device)
    k_rope = wide[:, 3:].detach().requires_grad_()
    problems = worst_excess(
        partial(fused_assemble, value_width=widths.value),
        partial(plain_assemble, value_width=widths.value),
        [kv, k_rope, *(angles_on_device(num_rows, widths.rotary, dtype) if rotate else ())],
        ["keys", "values", "dkv", "dk_rope"],
        [
            drawn(num_rows, widths.heads, widths.plain + widths.rotary, seed=2).to(device),
            drawn(num_rows, widths.heads, widths.value, seed=3).to(device),
        ],
    )
    assert not problems, "; ".join(problems)


@needs_triton
def test_half_precision_rounds_like_plain_pytorch() -> None:
    """Every product is rounded where eager rounds it: the same bits in the interpreter, and on a
    GPU, whose compiler may contract a product into the sum, within one rounding of each."""
    dtype = DTYPES[-1]
    cos, sin = angles_on_device(7, 64, dtype)
    q = on_device(7, 16, 192, dtype=dtype)
    kv, k_rope = on_device(7, 16, 256, dtype=dtype), on_device(7, 64, dtype=dtype, seed=1)
    got = (
        fused_rotate(q, cos, sin),
        *fused_assemble(kv, k_rope, cos, sin, value_width=128),
    )
    want = (
        rotate_queries(q, cos, sin),
        *plain_assemble(kv, k_rope, cos, sin, value_width=128),
    )
    for one, two in zip(got, want, strict=True):
        if interpreted():
            assert torch.equal(one, two)
        else:
            bound = 2 * torch.finfo(dtype).eps * two.abs().max()
            assert (one - two).abs().max() <= bound


@needs_triton
def test_no_rows_give_no_rows() -> None:
    cos, sin = angles_on_device(0, 6, torch.float32)
    q, kv = on_device(0, 2, 8, dtype=torch.float32), on_device(0, 2, 9, dtype=torch.float32)
    k_rope = on_device(0, 6, dtype=torch.float32)
    y, dq, *_ = outputs_and_gradients(fused_rotate, [q, cos, sin], [q])
    keys, values = fused_assemble(kv, k_rope, cos, sin, value_width=7)
    d_kv, d_k_rope = torch.autograd.grad((keys.sum() + values.sum()), (kv, k_rope))
    assert y.shape == dq.shape == q.shape and keys.shape == (0, 2, 8)
    assert d_kv.shape == kv.shape and d_k_rope.shape == k_rope.shape


@pytest.mark.gpu
@on_gpu
def test_large_inputs_are_exact_repeat_their_bits_and_never_wait_for_the_host() -> None:
    num_rows, generator = 65_537, torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator, dtype=torch.bfloat16)

    cos, sin = angles_on_device(num_rows, 64, torch.bfloat16)
    q, kv = normal(num_rows, 16, 192).requires_grad_(), normal(num_rows, 16, 256).requires_grad_()
    k_rope = normal(num_rows, 576)[:, 512:].requires_grad_()
    d_values = normal(num_rows, 16, 128)
    calls: list[tuple[Any, Any, list[torch.Tensor], list[str], list[torch.Tensor]]] = [
        (
            partial(rotate_queries, impl="fused"),
            rotate_queries,
            [q, cos, sin],
            ["q", "dq"],
            [q.detach()],
        ),
        (
            partial(assemble_keys_values, value_width=128, impl="fused"),
            partial(assemble_keys_values, value_width=128),
            [kv, k_rope, cos, sin],
            ["keys", "values", "dkv", "dk_rope"],
            [q.detach(), d_values],
        ),
    ]
    for fused, reference, inputs, names, d_outputs in calls:
        problems = worst_excess(fused, reference, inputs, names, d_outputs)
        assert not problems, "; ".join(problems)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            first, second = (outputs_and_gradients(fused, inputs, d_outputs) for _ in range(2))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
