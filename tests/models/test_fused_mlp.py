"""Adapters of SwiGLU MLPs: every family, children called, equal to the original."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from harts.errors import ConfigError
from harts.models.fused.mlp import SwigluMlp, fused_mlp
from harts.models.presets import tiny_model
from tests.families import FAMILIES
from tests.models.test_fused_norms import modelling


def original_and_adapted(family: str) -> list[Any]:
    """The first MLP of a tiny model, and a copy that computes by the reference."""
    ((original, adapter),) = fused_mlp(modelling(family)).items()
    model = tiny_model(family, vocab_size=11)
    module = next(m for m in model.modules() if type(m) is original)
    adapted: Any = copy.deepcopy(module)
    adapted.__class__ = adapter
    adapted.implementation = "reference"
    return [module, adapted]


def run(module: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    module = module.to(dtype)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 7, module.hidden_size, generator=generator, dtype=torch.float64).to(dtype)
    y = module(x.requires_grad_())
    return [y, *torch.autograd.grad(y, [x, *module.parameters()], x.detach())]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_gives_the_bits_of_the_original(family: str, dtype: torch.dtype) -> None:
    """But the gradient of the rows: its second part is added before it is rounded."""
    original, adapted = original_and_adapted(family)
    (y, d_x, *d_weights), (our_y, our_d_x, *our_d_weights) = (
        run(module, dtype) for module in (original, adapted)
    )
    _, exact, *_ = run(original.double(), torch.float64)
    assert torch.equal(our_y, y)
    assert all(map(torch.equal, our_d_weights, d_weights))
    rounding = torch.finfo(dtype).eps * exact.norm()
    assert (our_d_x - exact).norm() <= 1.1 * (d_x - exact).norm() + rounding


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernels_refuse_cpu_tensors_in_one_line(family: str) -> None:
    _, adapted = original_and_adapted(family)
    del adapted.implementation
    with pytest.raises(ConfigError, match="'fused' needs CUDA tensors") as error:
        run(adapted, torch.float32)
    assert "\n" not in str(error.value) and "token_wise='eager'" in str(error.value)


def test_wrapped_projections_are_called() -> None:
    module, adapted = original_and_adapted("llama")
    for mlp in (module, adapted):
        mlp.gate_proj = nn.Sequential(mlp.gate_proj, nn.Tanh())
    want, got = (run(mlp, torch.float64) for mlp in (module, adapted))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, want, strict=True))


def test_another_activation_is_refused_in_one_line() -> None:
    _, adapted = original_and_adapted("llama")
    adapted.act_fn = nn.GELU()
    with pytest.raises(ConfigError, match="the activation is GELU") as error:
        run(adapted, torch.float32)
    assert isinstance(adapted, SwigluMlp) and "\n" not in str(error.value)
