"""The fused log-probabilities on a GPU: against float64 beside the reference, bits, waits, memory.

Log-probabilities and gradients may err twice as much as the reference of the same precision, plus
one rounding of what is added up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import pytest
import torch
from tests.ops.test_cross_entropy import Scored, dense_log_probs, many_positions, on_cuda, view_of

from harts.ops.cross_entropy import mapped_log_probs
from harts.views.logprobs import LogProbView

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
Result = TypeVar("Result")
NAMES = ("log_probs", "entropy", "d_hidden", "d_weight", "d_bias")
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


@pytest.fixture(autouse=True)
def float32_without_tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def crowded_row(num_targets: int, vocabulary: int) -> list[Scored]:
    """One row with many targets, some of them the same, between rows with few."""
    draw = np.random.default_rng(1)
    targets = draw.integers(0, min(vocabulary, 2 * num_targets // 3), num_targets)
    return [Scored(2, int(target)) for target in targets] + many_positions(40, vocabulary, 200)


CASES = {
    "ragged": (many_positions(300, 5003, 1500), 5003),
    "whole-blocks": (many_positions(300, 8192, 1500), 8192),
    "one-target-a-row": ([Scored(row, row % 1000) for row in range(0, 300, 2)], 1000),
    "row-with-300-targets": (crowded_row(300, 5003), 5003),
    "row-with-2400-targets": (crowded_row(2400, 4104), 4104),
    "many-temperatures": ([Scored(k % 11, k, 0.5 + 0.1 * (k % 17)) for k in range(600)], 700),
}


def draw_inputs(
    vocabulary: int, dtype: torch.dtype, *, num_rows: int = 300, width: int = 256, seed: int = 0
) -> list[torch.Tensor]:
    """hidden, weight, bias; logits spread over several nats."""
    generator = torch.Generator("cuda").manual_seed(seed)
    drawn = [
        torch.randn(shape, generator=generator, device="cuda")
        for shape in ((num_rows, width), (vocabulary, width), (vocabulary,))
    ]
    drawn[1] *= 2 * width**-0.5
    return [x.to(dtype).requires_grad_() for x in drawn]


def results(
    outputs: tuple[torch.Tensor, torch.Tensor], inputs: list[torch.Tensor], with_entropy: bool
) -> list[torch.Tensor]:
    log_probs, entropy = outputs
    generator = torch.Generator("cuda").manual_seed(1)
    slopes = torch.randn(2, len(log_probs), generator=generator, device="cuda").to(log_probs.dtype)
    loss = (log_probs * slopes[0]).sum()
    if with_entropy:
        loss = loss + (entropy * slopes[1]).sum()
    return [log_probs.detach(), entropy.detach(), *torch.autograd.grad(loss, inputs)]


def run(
    inputs: list[torch.Tensor],
    view: LogProbView,
    *,
    with_entropy: bool = True,
    **options: object,
) -> list[torch.Tensor]:
    hidden, weight, bias = [*inputs, None][:3]
    outputs = mapped_log_probs(hidden, weight, view=view, bias=bias, **options)
    return results(outputs, inputs, with_entropy)


def exact_results(
    inputs: list[torch.Tensor], scored: list[Scored], with_entropy: bool
) -> list[torch.Tensor]:
    exact = [x.detach().double().requires_grad_() for x in inputs]
    hidden, weight, bias = [*exact, None][:3]
    with torch.device("cuda"):
        outputs = dense_log_probs(scored, hidden, weight, bias)
    return results(outputs, exact, with_entropy)


@dtypes
@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("case", list(CASES))
def test_fused_is_as_exact_as_the_reference(
    case: str, with_bias: bool, with_entropy: bool, dtype: torch.dtype
) -> None:
    scored, vocabulary = CASES[case]
    view = on_cuda(view_of(scored))
    inputs = draw_inputs(vocabulary, dtype)[: 3 if with_bias else 2]
    block_bytes = 90 * (vocabulary + 8) * 4  # several blocks, the last one ragged
    want = exact_results(inputs, scored, with_entropy)
    theirs = run(inputs, view, with_entropy=with_entropy, max_block_bytes=block_bytes)
    ours = run(inputs, view, with_entropy=with_entropy, max_block_bytes=block_bytes, impl="fused")
    eps32, problems = torch.finfo(torch.float32).eps, []
    for name, got, beside, true in zip(NAMES, ours, theirs, want, strict=False):
        assert got.dtype == beside.dtype and got.shape == true.shape
        size = max(1.0, true.abs().max().item())
        # Sums of 256 products and of a row's exponentials end as numbers of this size.
        band = 8 * eps32 * size
        if name.startswith("d_"):
            band += torch.finfo(dtype).eps * true.abs().max().item()
        allowed = 2 * (beside.double() - true).abs().max().item() + band
        error = (got.double() - true).abs().max().item()
        if not error <= allowed:
            problems.append(f"{name}: error {error:.2e}, want at most {allowed:.2e}")
    assert not problems, "; ".join(problems)


@dtypes
def test_fused_repeats_its_bits(dtype: torch.dtype) -> None:
    scored, vocabulary = CASES["row-with-300-targets"]
    view, inputs = on_cuda(view_of(scored)), draw_inputs(vocabulary, dtype)
    first, *others = (
        run(inputs, view, impl="fused", max_block_bytes=20 * vocabulary * 4) for _ in range(3)
    )
    for other in others:
        for name, one, two in zip(NAMES, first, other, strict=True):
            assert torch.equal(one, two), name


@contextmanager
def no_waiting() -> Iterator[None]:
    """Any operation of torch that waits for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("impl", ["fused", "reference"])
def test_forward_never_waits_for_the_device(impl: str) -> None:
    scored, vocabulary = CASES["row-with-300-targets"]
    hidden, weight, bias = draw_inputs(vocabulary, torch.bfloat16)
    view = on_cuda(view_of(scored))
    mapped_log_probs(hidden, weight, view=view, bias=bias, impl=impl)  # compiles
    with no_waiting():
        mapped_log_probs(hidden, weight, view=view, bias=bias, impl=impl)


@dtypes
def test_forward_and_backward_never_wait_for_the_device(dtype: torch.dtype) -> None:
    scored, vocabulary = CASES["row-with-300-targets"]
    inputs, view = draw_inputs(vocabulary, dtype), on_cuda(view_of(scored))
    block_bytes = 20 * vocabulary * 4
    slopes = torch.ones(len(scored), device="cuda")

    def step() -> None:
        hidden, weight, bias = inputs
        outputs = mapped_log_probs(
            hidden, weight, view=view, bias=bias, impl="fused", max_block_bytes=block_bytes
        )
        torch.autograd.grad(outputs, inputs, (slopes, slopes))

    step()  # compiles
    with no_waiting():
        step()


@dtypes
def test_logits_of_one_block_exist_at_a_time(dtype: torch.dtype) -> None:
    num_rows, vocabulary, width, block_rows = 2048, 16_384, 64, 256
    scored = [Scored(row, 7 * row % vocabulary) for row in range(num_rows)]
    view = on_cuda(view_of(scored))
    hidden, weight, _ = draw_inputs(vocabulary, dtype, num_rows=num_rows, width=width)
    block_bytes = block_rows * vocabulary * 4
    slopes = torch.ones(num_rows, device="cuda")

    def forward() -> torch.Tensor:
        options = {"impl": "fused", "max_block_bytes": block_bytes}
        return mapped_log_probs(hidden, weight, view=view, **options)[0]

    def backward(log_probs: torch.Tensor) -> None:
        torch.autograd.grad(log_probs, (hidden, weight), slopes)

    backward(forward())  # cuBLAS takes its workspace
    forward_peak, log_probs = peak_of(forward)
    backward_peak, _ = peak_of(lambda: backward(log_probs))
    gradient_bytes = block_rows * vocabulary * dtype.itemsize
    of_weight = weight.numel() * (4 + (0 if dtype == torch.float32 else dtype.itemsize))
    of_hidden = hidden.numel() * dtype.itemsize
    small = 4 << 20  # rows of the block, statistics, rounding of the allocator
    assert block_bytes <= forward_peak <= block_bytes + small
    assert backward_peak <= block_bytes + gradient_bytes + of_weight + of_hidden + small
    assert block_bytes + small < num_rows * vocabulary * 4 / 4


def peak_of(call: Callable[[], Result]) -> tuple[int, Result]:
    """Bytes that the call allocates at most above what is allocated before it, and its result."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    return torch.cuda.max_memory_allocated() - before, result


def test_a_frozen_head_costs_no_gradient_of_its_size() -> None:
    vocabulary = 65_536
    scored = [Scored(row, row) for row in range(64)]
    hidden, weight, _ = draw_inputs(vocabulary, torch.bfloat16, num_rows=64)
    weight.requires_grad_(False)
    view, slopes = on_cuda(view_of(scored)), torch.ones(64, device="cuda")
    options = {"impl": "fused", "max_block_bytes": 8 * vocabulary * 4}
    for _ in range(2):
        log_probs, _ = mapped_log_probs(hidden, weight, view=view, **options)
        peak, _ = peak_of(lambda out=log_probs: torch.autograd.grad(out, hidden, slopes)[0])
    assert peak < 8 * vocabulary * 6 + (4 << 20) < weight.numel() * 4


def test_another_number_of_rows_or_positions_compiles_nothing() -> None:
    from harts.ops.cross_entropy import fused_kernels as kernels

    vocabulary = 1000
    inputs = draw_inputs(vocabulary, torch.bfloat16)

    def compiled() -> int:
        jitted = [x for name, x in vars(kernels).items() if name.endswith("_kernel")]
        assert len(jitted) == 6
        return sum(len(cache[0]) for x in jitted for cache in x.device_caches.values())

    def step(num_rows: int, positions_a_row: int, block_rows: int) -> None:
        scored = [
            Scored(row, (17 * row + k) % vocabulary, 0.7)
            for row in range(num_rows)
            for k in range(positions_a_row)
        ]
        run(inputs, on_cuda(view_of(scored)), impl="fused", max_block_bytes=block_rows * 4000)

    step(300, 3, 128)
    before = compiled()
    for num_rows, positions_a_row, block_rows in (
        (1, 1, 128),
        (1, 16, 1),
        (16, 1, 1),
        (17, 3, 5),
        (160, 16, 16),
        (300, 7, 1000),
    ):
        step(num_rows, positions_a_row, block_rows)
    assert compiled() == before > 0


def test_no_log_prob_exceeds_zero() -> None:
    """The target holds all the mass, at a temperature that is no power of two."""
    hidden = torch.linspace(20, 90, 300, device="cuda")[:, None].expand(-1, 8).contiguous()
    weight = torch.zeros(1000, 8, device="cuda")
    weight[7] = 1.0
    view = on_cuda(view_of([Scored(row, 7, 0.7) for row in range(300)]))
    log_probs, entropy = mapped_log_probs(hidden, weight, view=view, impl="fused")
    assert log_probs.max().item() <= 0 and entropy.isfinite().all()
