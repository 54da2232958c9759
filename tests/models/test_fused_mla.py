"""Adapters of latent attention: a tree through them equals a tree through the original."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import harts
from harts.errors import ConfigError
from harts.models.fused.mla import fused_mla
from harts.models.fused.mlp import fused_mlp
from harts.models.fused.norms import fused_norms
from harts.models.presets import tiny_model
from tests import oracles
from tests.families import FAMILIES, needs_ling
from tests.models.test_fused_norms import modelling
from tests.shapes import SHAPES, VOCABULARY

# One layer of latent attention with a dense MLP.
ONE_LAYER: dict[str, dict[str, Any]] = {
    "bailing_hybrid": dict(num_hidden_layers=1, layer_group_size=1),
    "kimi_linear": dict(
        num_hidden_layers=1, layer_types=["full_attention"], mlp_layer_types=["dense"]
    ),
}
MLA_FAMILIES = [name for name in ONE_LAYER if name in FAMILIES]


def microbatch() -> harts.MicroBatch:
    batch = harts.TrajectoryBatch.from_rows(
        [{"input_ids": t, "loss_mask": [0] + [1] * (len(t) - 1)} for t in SHAPES["three-levels"]]
    )
    (only,) = harts.plan_step(batch).microbatches()
    return only


def adapt(model: Any, *tables: Callable[..., dict[Any, Any]]) -> list[Any]:
    """Swap in adapters that compute by the reference; returns the adapted modules."""
    adapted = []
    for table in tables:
        adapters = table(modelling(model.config.model_type))
        for module in model.modules():
            if type(module) in adapters:
                module.__class__ = adapters[type(module)]
                module.implementation = "reference"
                adapted.append(module)
    return adapted


def one_layer(family: str, **changes: Any) -> Any:
    return tiny_model(family, vocab_size=VOCABULARY, **ONE_LAYER[family], **changes)


def results(tree_model: harts.TreeModel) -> dict[str, torch.Tensor]:
    """Log-probs of a microbatch and every gradient, in float64."""
    model = tree_model.model
    model.zero_grad(set_to_none=True)
    with oracles.float64_throughout():
        log_probs = tree_model.log_probs(microbatch()).log_probs
        log_probs.square().sum().backward()
    return {"log_probs": log_probs.detach()} | {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("lora_queries", [True, False], ids=["q-lora", "q-full"])
@pytest.mark.parametrize("family", MLA_FAMILIES)
def test_a_tree_through_the_reference_equals_one_through_the_original(
    family: str, lora_queries: bool
) -> None:
    model = one_layer(family, q_lora_rank=32 if lora_queries else None).double().train()
    tree_model = harts.attach(model)
    want = results(tree_model)
    assert len(adapt(model, fused_mla)) == 1
    adapt(model, fused_norms, fused_mlp)
    got = results(tree_model)
    assert got.keys() == want.keys()
    for name, theirs in want.items():
        scale = max(1.0, theirs.abs().max().item())
        assert (got[name] - theirs).abs().max().item() <= 1e-11 * scale, name


@pytest.mark.parametrize("family", MLA_FAMILIES)
def test_without_a_tree_it_is_the_original_forward(family: str) -> None:
    model = one_layer(family)
    harts.attach(model)
    ids = torch.tensor([SHAPES["one-trajectory"][0][:20]])
    options: Any = dict(max_new_tokens=5, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        before, tokens = model(ids).logits, model.generate(ids, **options)
        for module in adapt(model, fused_mla):
            del module.implementation
        assert torch.equal(model(ids).logits, before)
        assert torch.equal(model.generate(ids, **options), tokens)


@pytest.mark.parametrize("family", MLA_FAMILIES)
def test_the_kernels_refuse_cpu_tensors_in_one_line(family: str) -> None:
    model = one_layer(family)
    tree_model = harts.attach(model)
    for module in adapt(model, fused_mla):
        del module.implementation
    with pytest.raises(ConfigError, match="'fused' needs CUDA tensors") as error:
        tree_model.log_probs(microbatch())
    assert "\n" not in str(error.value)


@needs_ling
def test_names_stay_and_the_class_is_the_same_every_time() -> None:
    model = one_layer("bailing_hybrid")
    names = list(model.state_dict())
    (module,) = adapt(model, fused_mla)
    assert list(model.state_dict()) == names
    hf: Any = modelling("bailing_hybrid")
    assert fused_mla(hf) is fused_mla(hf) and isinstance(module, hf.BailingHybridAttention)


@needs_ling
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernels_are_as_exact_as_the_original() -> None:
    """The layer alone on random rows, its attention by PyTorch: bfloat16 against float64."""
    model = one_layer("bailing_hybrid").cuda()
    model.set_attn_implementation("eager")
    hf: Any = modelling("bailing_hybrid")
    original = next(m for m in model.modules() if type(m) is hf.BailingHybridAttention)
    original = original.bfloat16()
    adapted = copy.deepcopy(original)
    adapted.__class__ = fused_mla(hf)[hf.BailingHybridAttention]
    num_rows, generator = 333, torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(1, num_rows, 64, device="cuda", generator=generator).bfloat16()
    positions = torch.arange(num_rows, device="cuda")[None]
    angles = model.model.rotary_emb(hidden, positions)
    mask = torch.full((num_rows, num_rows), -torch.inf, device="cuda").triu(1)[None, None]

    def layer_results(layer: Any, dtype: torch.dtype, tree: object) -> list[torch.Tensor]:
        layer = copy.deepcopy(layer).to(dtype)
        x = hidden.to(dtype).requires_grad_()
        cos_sin = tuple(angle.to(dtype) for angle in angles)
        y, _ = layer(x, cos_sin, mask.to(dtype), tree=tree)
        gradients = torch.autograd.grad(y, [x, *layer.parameters()], hidden.to(dtype))
        return [y.detach(), *gradients]

    with oracles.float64_throughout():
        exact = layer_results(original, torch.float64, None)
    eager = layer_results(original, torch.bfloat16, None)
    fused = layer_results(adapted, torch.bfloat16, object())
    again = layer_results(adapted, torch.bfloat16, object())
    for want, theirs, ours, same in zip(exact, eager, fused, again, strict=True):
        band = torch.finfo(torch.bfloat16).eps * want.abs().max()
        allowed = 2 * (theirs.double() - want).abs().max() + band
        assert (ours.double() - want).abs().max() <= allowed
        assert torch.equal(ours, same)
