"""Adapters of RMS norms: every norm of every family, equal to the original."""

from __future__ import annotations

import copy
import importlib
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from harts.errors import ConfigError
from harts.models.fused.norms import fused_norms
from harts.models.presets import tiny_model
from harts.models.protocol import Family
from tests.families import FAMILIES
from tests.oracles import float64_throughout

WIDTH = 48


def modelling(family: str) -> ModuleType:
    name = family.removesuffix("_text")
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


NORMS = [
    pytest.param(original, adapter, id=original.__name__)
    for family in FAMILIES
    for original, adapter in fused_norms(modelling(family)).items()
]


def original_and_adapted(original: type[nn.Module], adapter: type[nn.Module]) -> list[Any]:
    """Two modules with the same random weight; the second computes by the reference."""
    torch.manual_seed(0)
    module: Any = original(WIDTH, eps=1e-5)
    nn.init.normal_(module.weight)
    adapted: Any = copy.deepcopy(module)
    adapted.__class__ = adapter
    adapted.implementation = "reference"
    return [module, adapted]


def run(module: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """Output and gradients for the same rows; a gated norm gets a gate."""
    module = module.to(dtype)
    generator = torch.Generator().manual_seed(1)
    x, gate, dy = (
        torch.randn(3, 5, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
        for _ in range(3)
    )
    inputs = [x.requires_grad_()]
    if hasattr(module, "activation"):
        inputs.append(gate.requires_grad_())
    y = module(*inputs)
    return [y, *torch.autograd.grad(y, [*inputs, module.weight], dy)]


@pytest.mark.parametrize(("original", "adapter"), NORMS)
def test_the_reference_equals_the_original_in_float64(original: Any, adapter: Any) -> None:
    with float64_throughout():
        want, got = (run(m, torch.float64) for m in original_and_adapted(original, adapter))
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("original", "adapter"), NORMS)
def test_the_reference_gives_the_bits_of_the_original(
    original: Any, adapter: Any, dtype: torch.dtype
) -> None:
    want, got = (run(m, dtype)[0] for m in original_and_adapted(original, adapter))
    assert torch.equal(got, want) and got.dtype == dtype


@pytest.mark.parametrize(("original", "adapter"), NORMS)
def test_the_kernels_refuse_cpu_tensors_in_one_line(original: Any, adapter: Any) -> None:
    _, adapted = original_and_adapted(original, adapter)
    del adapted.implementation
    with pytest.raises(ConfigError, match="'fused' needs CUDA tensors") as error:
        run(adapted, torch.float32)
    assert "\n" not in str(error.value) and "token_wise='eager'" in str(error.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_norm_of_a_model_has_an_adapter_and_keeps_its_names(family: str) -> None:
    model = tiny_model(family, vocab_size=11)
    names, adapters = list(model.state_dict()), fused_norms(modelling(family))
    assert adapters is fused_norms(modelling(family))
    for module in model.modules():
        if "Norm" in type(module).__name__:
            module.__class__ = adapters[type(module)]
    assert list(model.state_dict()) == names


def test_a_family_can_hold_the_adapters() -> None:
    hf: Any = modelling("llama")
    family = Family(
        model_type="llama",
        architectures=(hf.LlamaForCausalLM,),
        attention=(hf.LlamaAttention,),
        token_wise=(hf.LlamaRMSNorm,),
        fused=fused_norms(hf),
    )
    module = hf.LlamaRMSNorm(8)
    module.__class__ = family.fused[hf.LlamaRMSNorm]
    assert family.kind_of(module) is hf.LlamaRMSNorm


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("original", "adapter"), NORMS)
def test_the_kernels_are_as_exact_as_the_original(original: Any, adapter: Any) -> None:
    module, adapted = (m.cuda() for m in original_and_adapted(original, adapter))
    del adapted.implementation
    with torch.device("cuda"):
        generator = torch.Generator("cuda").manual_seed(1)
        x, gate, dy = (torch.randn(333, 4, WIDTH, generator=generator) for _ in range(3))

    def results(module: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        module = copy.deepcopy(module).to(torch.bfloat16).to(dtype)
        inputs = [x.bfloat16().to(dtype).requires_grad_()]
        if hasattr(module, "activation"):
            inputs.append(gate.bfloat16().to(dtype).requires_grad_())
        y = module(*inputs)
        gradients = torch.autograd.grad(y, [*inputs, module.weight], dy.bfloat16().to(dtype))
        return [y.detach(), *gradients]

    with float64_throughout():
        exact = results(module, torch.float64)
    eager, fused = (results(m, torch.bfloat16) for m in (module, adapted))
    for want, theirs, ours in zip(exact, eager, fused, strict=True):
        band = torch.finfo(torch.bfloat16).eps * want.abs().max()
        allowed = 2 * (theirs.double() - want).abs().max() + band
        assert ours.dtype == theirs.dtype and (ours.double() - want).abs().max() <= allowed
