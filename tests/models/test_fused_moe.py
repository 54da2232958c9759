"""The MoE adapters against the modules of transformers that they replace.

On CPU with the plain twins of the operators, on GPU as they run. transformers leaves the order of
a sigmoid router's choice open, so choices are compared as sets with their weights.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import harts
from harts.errors import ConfigError
from harts.models.families import family_of
from harts.models.fused.adapters import fused_experts
from harts.models.fused.moe import Experts, expert_adapters, fused_moe
from harts.models.presets import tiny_model
from harts.ops.moe.api import ExpertsImplementation
from tests.ops.moe_cases import implementations
from tests.oracles import float64_throughout

FAMILIES = {
    "bailing_hybrid": "bailing_hybrid",
    "kimi_linear": "kimi_linear",
    "qwen3_next": "qwen3_next",
    "qwen3_5_moe_text": "qwen3_5_moe",
}
families = pytest.mark.parametrize(
    "model_type", [name for name in FAMILIES if name in CONFIG_MAPPING]
)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
HIDDEN = 64
EXPERTS: ExpertsImplementation = "grouped"
"""What stands for the experts, unless a test says otherwise."""


@pytest.fixture
def plain_twins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from harts.models.fused import moe

    monkeypatch.setattr(moe._Fused, "implementation", "reference")
    monkeypatch.setattr(f"{__name__}.EXPERTS", "reference")
    yield


def module_of(model_type: str) -> ModuleType:
    family = FAMILIES[model_type]
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def adapters(model_type: str, experts: ExpertsImplementation | None = None) -> dict[type, type]:
    module = module_of(model_type)
    return fused_moe(module) | expert_adapters(module, experts or EXPERTS)


def block_of(model_type: str, **changes: Any) -> nn.Module:
    """The last layer's MoE block, with a correction bias and a router that decides clearly."""
    model = tiny_model(model_type, vocab_size=16, **changes)
    model.set_experts_implementation("eager")
    block = model.get_decoder().layers[-1].mlp
    g = torch.Generator().manual_seed(1)
    bias = getattr(block.gate, "e_score_correction_bias", None)
    if bias is not None:
        bias.copy_(torch.randn(bias.shape, generator=g) / 8)
    with torch.no_grad():
        block.gate.weight.copy_(torch.randn(block.gate.weight.shape, generator=g) / 4)
    return block


def adapted(
    block: nn.Module, model_type: str, experts: ExpertsImplementation | None = None
) -> nn.Module:
    """A copy with every class replaced in place, as `attach` does."""
    block, table = copy.deepcopy(block), adapters(model_type, experts)
    replaced = [module for module in block.modules() if type(module) in table]
    assert len(replaced) == 3  # router, experts, block
    for module in replaced:
        module.__class__ = table[type(module)]
    return block


def inputs(dtype: torch.dtype, rows: int = 50) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden, d_output = (torch.randn(1, rows, HIDDEN, generator=g).to(dtype) for _ in range(2))
    return hidden.requires_grad_(), d_output


def results(
    block: nn.Module, hidden: torch.Tensor, d_output: torch.Tensor, *, recomputed: bool = False
) -> dict[str, torch.Tensor]:
    """Output, router logits and every gradient, with a router loss beside the output's."""
    logits: list[torch.Tensor] = []
    handle = block.gate.register_forward_hook(lambda _, __, output: logits.append(output[0]))
    if recomputed:
        output = torch.utils.checkpoint.checkpoint(block, hidden, use_reentrant=False)
    else:
        output = block(hidden)
    handle.remove()
    named = dict(hidden=hidden) | dict(block.named_parameters())
    loss = (output * d_output).sum() + logits[0].square().mean().to(output.dtype)
    gradients = torch.autograd.grad(loss, list(named.values()))
    found = {f"d_{name}": g for name, g in zip(named, gradients, strict=True)}
    return found | dict(output=output.detach(), logits=logits[0].detach())


def error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    scale = exact.double().abs().max()
    return ((actual.double() - exact.double()).abs().max() / scale).item()


@families
def test_the_block_and_its_gradients_are_those_of_the_original_in_float64(
    model_type: str, plain_twins: None
) -> None:
    block = block_of(model_type).double()
    with float64_throughout():
        hidden, d_output = inputs(torch.float64)
        expected = results(block, hidden, d_output)
        actual = results(adapted(block, model_type), hidden, d_output)
        recomputed = results(adapted(block, model_type), hidden, d_output, recomputed=True)
    assert actual.keys() == expected.keys()
    for name, exact in expected.items():
        assert error(actual[name], exact) < 1e-13, name
        assert torch.equal(recomputed[name], actual[name]), name


@families
def test_the_router_returns_what_the_original_returns(model_type: str, plain_twins: None) -> None:
    block = block_of(model_type)
    hidden, _ = inputs(torch.float32)
    expected, actual = block.gate(hidden[0]), adapted(block, model_type).gate(hidden[0])
    assert [x.dtype for x in actual] == [x.dtype for x in expected]
    assert [x.shape for x in actual] == [x.shape for x in expected]
    assert torch.allclose(actual[0], expected[0], rtol=1e-6)
    (a_index, a_order), (e_index, e_order) = actual[2].sort(-1), expected[2].sort(-1)
    assert torch.equal(a_index, e_index)
    assert torch.allclose(
        actual[1].gather(1, a_order), expected[1].gather(1, e_order), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("bailing_hybrid", dict(norm_topk_prob=False)),
        ("bailing_hybrid", dict(n_group=1, topk_group=1, routed_scaling_factor=2.5)),
        ("qwen3_next", dict(norm_topk_prob=False)),
    ],
    ids=["sigmoid-unnormalised", "one-group-scaled", "softmax-unnormalised"],
)
def test_options_of_the_router_mean_what_they_mean_there(
    model_type: str, changes: dict[str, Any], plain_twins: None
) -> None:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"the installed transformers has no {model_type}")
    block = block_of(model_type, **changes).double()
    with float64_throughout():
        hidden, d_output = inputs(torch.float64)
        expected = results(block, hidden, d_output)
        actual = results(adapted(block, model_type), hidden, d_output)
    for name, exact in expected.items():
        assert error(actual[name], exact) < 1e-13, name


@families
def test_names_of_parameters_and_buffers_stay(model_type: str) -> None:
    block = block_of(model_type)
    assert list(adapted(block, model_type).state_dict()) == list(block.state_dict())
    assert adapters(model_type) == adapters(model_type)


def test_families_without_moe_have_no_adapters() -> None:
    module = importlib.import_module("transformers.models.llama.modeling_llama")
    assert fused_moe(module) == {}
    assert fused_experts(module) == {"grouped": {}, "gathered": {}}


@families
def test_experts_are_chosen_apart_and_attaching_again_changes_them(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harts.Kernels, "check", lambda self, **_: None)  # nothing runs here
    model: Any = tiny_model(model_type, vocab_size=16)
    family = family_of(model_type)
    originals = set(family_experts(family))
    for experts in ("grouped", "gathered", "eager", "gathered", "grouped"):
        kernels: Any = harts.Kernels(experts=experts)
        harts.attach(model, kernels=kernels)
        kinds = {type(m) for m in model.modules() if isinstance(m, tuple(originals))}
        assert kinds == (set(family.experts.get(experts, {}).values()) or originals)
        assert {issubclass(kind, Experts) for kind in kinds} == {experts != "eager"}
        assert {getattr(kind, "implementation", "eager") for kind in kinds} == {experts}
        assert family.has_experts(model)
    assert not family.has_experts(nn.Linear(1, 1))


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is installed")
def test_experts_without_triton_are_refused_in_one_line() -> None:
    model: Any = tiny_model("qwen3_next", vocab_size=16)
    with pytest.raises(ConfigError, match="experts='grouped': fast kernels need Triton") as caught:
        harts.attach(model, kernels=harts.Kernels(experts="grouped"))
    assert "\n" not in str(caught.value)


def family_experts(family: Any) -> tuple[type, ...]:
    return tuple(family.experts["grouped"])


@families
def test_rows_on_the_cpu_are_refused_in_one_line(model_type: str) -> None:
    with pytest.raises(ConfigError, match="needs CUDA tensors, got them on cpu") as caught:
        adapted(block_of(model_type), model_type)(inputs(torch.float32)[0])
    assert "\n" not in str(caught.value)


@families
def test_another_activation_is_refused_in_one_line(model_type: str, plain_twins: None) -> None:
    block = adapted(block_of(model_type, hidden_act="gelu"), model_type)
    with pytest.raises(ConfigError, match="the activation is GELUActivation") as caught:
        block(inputs(torch.float32)[0])
    assert "\n" not in str(caught.value)


def on_cuda(block: nn.Module) -> nn.Module:
    """bfloat16, but for the router weight of the sigmoid families, as checkpoints load them."""
    router = copy.deepcopy(block.gate)
    block = block.bfloat16()
    if hasattr(router, "e_score_correction_bias"):
        block.gate = router
    return block.cuda()


@pytest.mark.gpu
@on_gpu
@families
@implementations
def test_on_gpu_the_block_errs_at_most_twice_as_much_as_the_original(
    model_type: str, impl: ExpertsImplementation
) -> None:
    """Against float64 of the same bfloat16 values; rows whose choice rounding may flip are left
    out of the comparison by giving them no gradient and no place in the output."""
    block = on_cuda(block_of(model_type))
    hidden, d_output = (x.detach().cuda() for x in inputs(torch.bfloat16, rows=400))
    wide = copy.deepcopy(block).double()
    choices = [
        adapted(block, model_type).gate(hidden[0])[2].sort(-1)[0],
        block.gate(hidden[0])[2].sort(-1)[0],
    ]
    with float64_throughout():
        choices.append(wide.gate(hidden[0].double())[2].sort(-1)[0])
    agree = ((choices[0] == choices[1]) & (choices[0] == choices[2])).all(-1)
    assert agree.float().mean() > 0.9
    hidden = hidden[:, agree].contiguous().requires_grad_()
    d_output = d_output[:, agree].contiguous()
    plain = results(block, hidden, d_output)
    actual = results(adapted(block, model_type, impl), hidden, d_output)
    again = results(adapted(block, model_type, impl), hidden, d_output, recomputed=True)
    with float64_throughout():
        exact = results(wide, hidden.detach().double().requires_grad_(), d_output.double())
    for name, value in actual.items():
        bound = 2 * error(plain[name], exact[name]) + torch.finfo(torch.bfloat16).eps
        print(f"{name:34} {error(value, exact[name]):.2e}  original {bound:.2e}")
        assert error(value, exact[name]) <= bound, name
        assert torch.equal(again[name], value), f"{name} differs when recomputed"
