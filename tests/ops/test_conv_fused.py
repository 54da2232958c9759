"""The fused convolution against the float64 reference: on a GPU, or tiny in the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.ops.linear_oracles import conv_view, forest_of
from tests.ops.triton_device import interpreted, needs_triton, triton_device

from harts.errors import ConfigError
from harts.ops.conv import causal_conv
from harts.views.conv import ConvView

FORESTS = {
    "one row": forest_of([(-1, 1)]),
    "one chain": forest_of([(-1, 70)]),
    "forks": forest_of([(-1, 9), (0, 3), (0, 1), (2, 5), (2, 1), (-1, 2), (5, 4), (5, 1)]),
    "high fan-out": forest_of([(-1, 3), *[(0, 2)] * 150]),
}


def on(view: ConvView, device: torch.device) -> ConvView:
    extended = replace(view.extended, **{k: v.to(device) for k, v in vars(view.extended).items()})
    tables = ("window", "branch_rows", "branch_ptr", "branch_reads")
    moved = {name: getattr(view, name).to(device) for name in tables}
    return replace(view, extended=extended, **moved)


def drawn(num_rows: int, channels: int, width: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    shapes = [(num_rows, channels), (channels, width), (channels,), (num_rows, channels)]
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def run(impl, inputs, view, *, dtype, device, activation, unit_width, with_bias):
    """y and the gradients, in float64 on the CPU; x is a slice of wider rows."""
    x, weight, bias, d_y = (t.to(dtype).to(device) for t in inputs)
    wider = torch.cat([x, x], dim=1).requires_grad_()
    used = [wider, weight.requires_grad_()] + ([bias.requires_grad_()] if with_bias else [])
    args = (wider[:, : x.shape[1]], weight, bias if with_bias else None)
    if impl == "reference":
        y = causal_conv(*args, view=view, activation=activation, unit_width=unit_width)
    else:
        from harts.ops.conv.fused import causal_conv_fused

        y = causal_conv_fused(*args, on(view, device), activation, unit_width)
    return [t.double().cpu() for t in (y, *torch.autograd.grad(y, used, d_y))]


@needs_triton
@pytest.mark.parametrize("forest", FORESTS)
@pytest.mark.parametrize(
    ("channels", "unit_width", "activation", "width", "with_bias"),
    [
        (32, 16, "silu", 4, False),
        (48, 24, "silu", 4, True),
        (20, None, "silu", 3, True),
        (8, None, None, 1, False),
    ],
)
def test_outputs_and_gradients_equal_the_reference(
    forest, channels, unit_width, activation, width, with_bias
):
    view = conv_view(FORESTS[forest], width)
    inputs = drawn(len(FORESTS[forest]), channels, width)
    options = dict(activation=activation, unit_width=unit_width, with_bias=with_bias)
    cpu = torch.device("cpu")
    exact = run("reference", inputs, view, dtype=torch.float64, device=cpu, **options)
    fused = run("fused", inputs, view, dtype=torch.float32, device=triton_device(), **options)
    single = run("reference", inputs, view, dtype=torch.float32, device=cpu, **options)
    for got, want, reference in zip(fused, exact, single, strict=True):
        band = 4 * torch.finfo(torch.float32).eps * want.norm()
        assert (got - want).norm() <= 2 * (reference - want).norm() + band


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or interpreted(), reason="needs a GPU")
@pytest.mark.parametrize("unit_width", [128, None])
def test_bfloat16_is_as_good_as_the_reference_in_bfloat16_and_repeats_its_bits(unit_width):
    forest = forest_of([(-1, 3000), *[(0, 700)] * 3, (1, 100), (1, 90), *[(2, 5)] * 40])
    view, inputs = conv_view(forest, 4), drawn(len(forest), 256, 4)
    rounded = [t.bfloat16().double() for t in inputs]
    options = dict(activation="silu", unit_width=unit_width, with_bias=False)
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    exact = run("reference", rounded, view, dtype=torch.float64, device=cpu, **options)
    low = run("reference", rounded, view, dtype=torch.bfloat16, device=cpu, **options)
    fused = run("fused", rounded, view, dtype=torch.bfloat16, device=gpu, **options)
    again = run("fused", rounded, view, dtype=torch.bfloat16, device=gpu, **options)
    for got, want, reference, repeated in zip(fused, exact, low, again, strict=True):
        assert torch.equal(got, repeated)
        # d_x sums four gradients that were rounded to bfloat16 once each
        band = 2 * torch.finfo(torch.bfloat16).eps * want.norm()
        assert (got - want).norm() <= 2 * (reference - want).norm() + band


def test_the_fused_convolution_is_refused_on_the_cpu():
    view = conv_view(FORESTS["forks"], 4)
    x, weight, _, _ = (t.float() for t in drawn(len(FORESTS["forks"]), 8, 4))
    with pytest.raises(ConfigError, match="'fused' needs CUDA tensors"):
        causal_conv(x, weight, None, view=view, activation="silu", impl="fused")
    with pytest.raises(ConfigError, match="impl is 'fast', want one of reference, fused"):
        causal_conv(x, weight, None, view=view, activation="silu", impl="fast")  # type: ignore
