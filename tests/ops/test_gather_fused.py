"""The fused gathers have the reference's bits: on a GPU, or tiny in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.linear_oracles import gather_from
from tests.ops.test_gather import gathers
from tests.ops.test_norm_fused import DTYPES, on_gpu
from tests.ops.triton_device import needs_triton, triton_device

from harts.errors import HartsError
from harts.ops.gather import gather_rows, own_rows
from harts.views.gather import RowGather, build_row_gather

NUMBERS = {2: torch.int16, 4: torch.int32}
TRAILING: list[tuple[int, ...]] = [(), (1,), (33,), (2, 3), (128,), (3, 2, 64), (1536,), (1027,)]


@pytest.fixture(autouse=True, scope="module")
def unwritten_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty returns
    yield
    torch.use_deterministic_algorithms(False)


def fused(op: Any) -> Any:
    from harts.ops.gather.fused import gather_rows_fused, own_rows_fused

    return {gather_rows: gather_rows_fused, own_rows: own_rows_fused}[op]


def on_device(gather: RowGather) -> RowGather:
    return RowGather(**{name: x.to(triton_device()) for name, x in vars(gather).items()})


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Magnitudes from 1e-3 to 1e3, so that sums show their order; some zeros are negative."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10 ** (torch.rand(shape, generator=generator) * 6 - 3)
    values = torch.randn(shape, generator=generator) * scale
    zero = torch.rand(shape, generator=generator) < 0.1
    return values.masked_fill(zero, -0.0).to(triton_device(), dtype)


def output_and_gradient(
    op: Any, x: torch.Tensor, gather: RowGather, grad: torch.Tensor
) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    y = op(x, gather)
    return [y.detach(), *torch.autograd.grad(y, x, grad)]


def first_difference(got: torch.Tensor, want: torch.Tensor) -> str:
    """Where the bits first differ, or nothing."""
    assert got.shape == want.shape and got.dtype == want.dtype
    numbers = NUMBERS[got.dtype.itemsize]
    differs = (got.contiguous().view(numbers) != want.contiguous().view(numbers)).nonzero()
    if len(differs) == 0:
        return ""
    at = tuple(differs[0].tolist())
    return f"{len(differs)} differ, first at {at}: got {got[at].item()}, want {want[at].item()}"


def assert_bits_of_the_reference(
    op: Any, x: torch.Tensor, gather: RowGather, grad: torch.Tensor
) -> None:
    got = output_and_gradient(fused(op), x, gather, grad)
    want = output_and_gradient(op, x, gather, grad)
    for name, ours, theirs in zip(("rows", "gradient"), got, want, strict=True):
        problem = first_difference(ours, theirs)
        assert not problem, f"{op.__name__}, {name}: {problem}"


def assert_both_bits(gather: RowGather, trailing: tuple[int, ...], dtype: torch.dtype) -> None:
    gather = on_device(gather)
    compact = normal(len(gather.own), *trailing, dtype=dtype)
    packed = normal(len(gather.source), *trailing, dtype=dtype, seed=1)
    assert_bits_of_the_reference(gather_rows, compact, gather, packed)
    assert_bits_of_the_reference(own_rows, packed, gather, compact)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=40, deadline=None)
@given(gather=gathers(), trailing=st.sampled_from(TRAILING))
def test_rows_and_gradients_have_the_bits_of_the_reference(
    gather: RowGather, trailing: tuple[int, ...], dtype: torch.dtype
) -> None:
    assert_both_bits(gather, trailing, dtype)


@needs_triton
@pytest.mark.parametrize("trailing", [(), (65,), (2, 512)], ids=str)
@pytest.mark.parametrize(
    ("source", "is_own"),
    [
        ([0], [True]),
        ([0, -1], [True, False]),
        ([2, 0, 1], [True] * 3),
        ([-1, 1, 0, -1, -1], [False, True, True, False, False]),
    ],
    ids=["one-row", "one-row-and-zeros", "permutation", "zeros"],
)
def test_gathers_without_repeats_have_the_bits_of_the_reference(
    source: list[int], is_own: list[bool], trailing: tuple[int, ...]
) -> None:
    assert_both_bits(gather_from(source, is_own), trailing, torch.float32)


@needs_triton
@pytest.mark.parametrize("num_repeats", [*range(1, 10), 63])
def test_repeats_are_added_in_packed_order_in_float32(num_repeats: int) -> None:
    rows = [0] * (num_repeats + 1) + [1, 1]
    own = [place == num_repeats // 2 for place in range(num_repeats + 1)] + [False, True]
    for dtype in DTYPES:
        assert_both_bits(gather_from(rows, own), (48,), dtype)


@needs_triton
@pytest.mark.parametrize("trailing", [(), (2,), (24,)], ids=str)
def test_more_rows_than_a_tile_takes_have_the_bits_of_the_reference(
    trailing: tuple[int, ...],
) -> None:
    generator = torch.Generator().manual_seed(0)
    repeats = torch.randint(-1, 4500, (60,), generator=generator).tolist()
    rows = [*range(4500), *repeats]
    order = torch.randperm(len(rows), generator=generator).tolist()
    gather = gather_from([rows[i] for i in order], [i < 4500 for i in order])
    assert_both_bits(gather, trailing, torch.float32)


@needs_triton
def test_rows_that_lie_apart_and_expanded_gradients_give_the_same_bits() -> None:
    gather = on_device(gather_from([1, 0, -1, 2, 1], [True, True, False, True, False]))
    wide = normal(5, 4, 64, dtype=torch.float32)
    layouts = {
        "slices of wider rows": wide.flatten(1)[:, 16:48],
        "every second column": wide.flatten(1)[:, ::2],
        "slices of heads": wide[..., 3:20],
        "swapped heads": wide.transpose(1, 2),
        "every second element": wide.flatten()[::7][:5],
        "one row repeated": wide.flatten(1)[:1].expand(5, -1),
    }
    for name, packed in layouts.items():
        compact = packed[1:4]
        assert not packed.is_contiguous(), name
        assert_bits_of_the_reference(gather_rows, compact, gather, packed)
        assert_bits_of_the_reference(own_rows, packed, gather, compact)


@needs_triton
def test_no_columns_give_no_columns() -> None:
    gather = on_device(gather_from([0, 0, -1], [True, False, False]))
    for op, num_rows, num_results in ((gather_rows, 1, 3), (own_rows, 3, 1)):
        x = torch.zeros(num_rows, 2, 0, device=triton_device(), requires_grad=True)
        y = fused(op)(x, gather)
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert y.shape == (num_results, 2, 0) and grad.shape == x.shape


def large_gather(num_rows: int, num_repeats: int, num_zeros: int) -> RowGather:
    """Compact rows, repeats of the first eighth of them and zero rows, in random order."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.arange(num_rows)
    repeats = torch.randint(0, num_rows // 8, (num_repeats,), generator=generator)
    source = torch.cat([rows, repeats, torch.full((num_zeros,), -1)])
    order = torch.randperm(len(source), generator=generator)
    is_own = order < num_rows
    return build_row_gather(source[order].numpy(), is_own.numpy(), triton_device())


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("num_repeats", [0, 500, 70_000])
def test_large_gathers_are_exact_repeat_their_bits_and_never_wait_for_the_host(
    num_repeats: int,
) -> None:
    gather = large_gather(65_537, num_repeats, num_zeros=300)
    compact = normal(65_537, 1536, dtype=torch.bfloat16)
    packed = normal(len(gather.source), 1536, dtype=torch.bfloat16, seed=1)
    for op, x, grad in ((gather_rows, compact, packed), (own_rows, packed, compact)):
        assert_bits_of_the_reference(op, x, gather, grad)
        x = x.clone().requires_grad_()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            y = op(x, gather, impl="fused")
            first, second = (
                torch.autograd.grad(y, x, grad, retain_graph=True)[0] for _ in range(2)
            )
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(first, second)


@pytest.mark.gpu
@on_gpu
def test_more_than_2_to_the_31_elements_are_addressed() -> None:
    width, num_rows = 1 << 16, (1 << 15) + 9
    last = num_rows - 1
    gather = on_device(gather_from([*range(num_rows), last], [True] * num_rows + [False]))
    compact = torch.zeros(num_rows, width, device="cuda", dtype=torch.bfloat16)
    compact[-9:] = normal(9, width, dtype=torch.bfloat16)
    packed = torch.zeros(num_rows + 1, width, device="cuda", dtype=torch.bfloat16)
    packed[-10:] = normal(10, width, dtype=torch.bfloat16, seed=1)
    rows, grad = output_and_gradient(fused(gather_rows), compact, gather, packed)
    assert torch.equal(rows[:-1], compact) and torch.equal(rows[-1], compact[-1])
    assert torch.equal(grad[:-1], packed[:-2])
    assert torch.equal(grad[-1], (packed[-2].float() + packed[-1].float()).bfloat16())
    del rows, grad
    chosen, grad = output_and_gradient(fused(own_rows), packed, gather, compact)
    assert torch.equal(chosen, packed[:-1])
    assert torch.equal(grad[:-1], compact) and not grad[-1].any()


@pytest.mark.gpu
@on_gpu
def test_another_number_of_rows_compiles_nothing() -> None:
    from harts.ops.gather import kernels

    compiled = (
        kernels._copy_rows_kernel,
        kernels._copy_to_own_rows_kernel,
        kernels._sum_rows_kernel,
    )

    def step(num_rows: int, num_repeats: int) -> list[int]:
        gather = large_gather(num_rows, num_repeats, num_zeros=2)
        x = torch.ones(num_rows, 1536, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        packed = gather_rows(x, gather, impl="fused")
        own_rows(packed * 2, gather, impl="fused").mul(2).sum().backward()
        device = torch.cuda.current_device()
        return [len(kernel.device_caches[device][0]) for kernel in compiled]

    first = step(64, 3)
    assert all(step(n, k) == first for n, k in ((8, 1), (16, 16), (17, 5), (4096, 1), (70_001, 64)))


@pytest.mark.gpu
@on_gpu
def test_what_the_kernels_do_not_serve_is_refused_in_one_line() -> None:
    gather = on_device(gather_from([0, 0], [True, False]))
    for op, num_rows in ((gather_rows, 1), (own_rows, 2)):
        x = torch.ones(num_rows, 16, device="cuda", dtype=torch.float64)
        with pytest.raises(HartsError, match="computes bfloat16, float16 and float32") as error:
            op(x, gather, impl="fused")
        assert "\n" not in str(error.value)
