"""attach: in place, names unchanged, everything else as before; refusals name the module."""

from __future__ import annotations

import copy
import importlib.util
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import harts
from harts.errors import ConfigError
from harts.models.kernels import kernels_for
from harts.models.presets import tiny_model
from tests.families import FAMILIES, KDA_MOE, needs_ling
from tests.shapes import SHAPES, VOCABULARY


def _microbatch(shape: str = "three-levels") -> harts.MicroBatch:
    batch = harts.TrajectoryBatch.from_rows(
        [{"input_ids": t, "loss_mask": [0] + [1] * (len(t) - 1)} for t in SHAPES[shape]]
    )
    (microbatch,) = harts.plan_step(batch).microbatches()
    return microbatch


@pytest.mark.parametrize("model_type", FAMILIES)
def test_parameters_keep_their_names_and_identity(model_type: str) -> None:
    model = tiny_model(model_type, vocab_size=VOCABULARY)
    before = {name: id(p) for name, p in model.named_parameters()}
    harts.attach(model)
    assert {name: id(p) for name, p in model.named_parameters()} == before


@pytest.mark.parametrize("model_type", FAMILIES)
def test_an_attached_model_called_as_before_gives_the_same_logits(model_type: str) -> None:
    model = tiny_model(model_type, vocab_size=VOCABULARY)
    ids = torch.tensor([SHAPES["one-trajectory"][0]])
    with torch.no_grad():
        before = model(ids).logits
        harts.attach(model)
        assert torch.equal(model(ids).logits, before)


def test_an_attached_model_still_generates() -> None:
    model = tiny_model(KDA_MOE, vocab_size=VOCABULARY)
    ids = torch.tensor([SHAPES["one-trajectory"][0][:20]])
    before = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    harts.attach(model)
    after = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(before, after)


def test_attaching_twice_is_harmless() -> None:
    model = tiny_model("qwen3_next", vocab_size=VOCABULARY)
    microbatch = _microbatch()
    first = harts.attach(model).log_probs(microbatch).log_probs
    second = harts.attach(model).log_probs(microbatch).log_probs
    assert torch.equal(first, second)


def test_a_model_that_moved_after_attach_is_warned_about_once() -> None:
    model = tiny_model("llama", vocab_size=VOCABULARY)
    moved, chosen = harts.attach(model), harts.attach(model, kernels=harts.Kernels())
    moved._chosen_on = chosen._chosen_on or torch.device("cuda")
    with pytest.warns(UserWarning, match="attached on cuda and runs on cpu .* attach it again"):
        moved.log_probs(_microbatch())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        moved.log_probs(_microbatch())
        chosen.log_probs(_microbatch())


def test_kernels_that_cannot_run_here_are_refused_with_what_to_do() -> None:
    model = tiny_model("llama", vocab_size=VOCABULARY)
    if importlib.util.find_spec("flash_attn") is None:
        with pytest.raises(ConfigError, match=r"attention='fa4'.*pip install.*harts.Kernels\(\)"):
            harts.attach(model, kernels=harts.Kernels(attention="fa4"))
    if importlib.util.find_spec("triton") is None:
        with pytest.raises(ConfigError, match=r"convolution='fused'.*Triton"):
            harts.attach(model, kernels=harts.Kernels(convolution="fused"))
    if importlib.util.find_spec("quack") is None:
        gathered = harts.Kernels(experts="gathered")
        with pytest.raises(ConfigError, match=r"experts='gathered'.* found none"):
            harts.attach(tiny_model("qwen3_next", vocab_size=VOCABULARY), kernels=gathered)
        harts.attach(model, kernels=gathered)  # it has none


@pytest.mark.parametrize(
    ("capability", "attention", "experts"),
    [
        (8, "flex", "grouped"),
        (9, "fa4", "gathered"),
        (10, "fa4", "grouped"),
        (12, "flex", "grouped"),
    ],
)
def test_the_fast_kernels_are_those_of_the_card(
    capability: int, attention: str, experts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (capability, 0))
    chosen = kernels_for(torch.device("cuda"), torch.bfloat16)
    assert (chosen.attention, chosen.experts) == (attention, experts)
    assert kernels_for(torch.device("cuda"), torch.float32) == harts.Kernels()


def test_every_compact_row_passes_the_embedding_once() -> None:
    model = tiny_model("kimi_linear", vocab_size=VOCABULARY)
    tree_model, microbatch, rows = harts.attach(model), _microbatch(), []
    model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: rows.append(inputs[0].numel())
    )
    tree_model.log_probs(microbatch)
    assert rows == [microbatch.num_rows]


def test_checkpointing_after_attach_works_with_its_default_arguments() -> None:
    model = tiny_model(KDA_MOE, vocab_size=VOCABULARY)
    tree_model, microbatch = harts.attach(model), _microbatch()
    model.train()
    model.gradient_checkpointing_enable()
    tree_model.log_probs(microbatch).log_probs.sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.dim() > 1)


def test_lora_targets_resolve_before_and_after_attach() -> None:
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "b_proj"]
    config = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    microbatch, results = _microbatch(), []
    for attach_first in (False, True):
        model = tiny_model(KDA_MOE, vocab_size=VOCABULARY)
        if attach_first:
            harts.attach(model)
        torch.manual_seed(3)
        wrapped = get_peft_model(model, config)
        out = harts.attach(wrapped).log_probs(microbatch)
        out.log_probs.sum().backward()
        trained = [p for p in wrapped.parameters() if p.requires_grad]
        assert trained and all(p.grad is not None for p in trained)
        results.append(out.log_probs.detach())
    assert torch.equal(*results)


class _Mamba(nn.Module):
    pass


def _with_foreign_module() -> nn.Module:
    model = tiny_model("llama", vocab_size=VOCABULARY)
    model.model.layers[2].mixer = _Mamba()
    return model


def _with_mtp_loss() -> nn.Module:
    return tiny_model(
        "bailing_hybrid", vocab_size=VOCABULARY, num_mtp_layers=1, mtp_loss_scaling_factor=0.1
    )


REFUSED: dict[str, tuple[Any, str]] = {
    "foreign module": (_with_foreign_module, "model.layers.2.mixer is a _Mamba"),
    "multi-token prediction": (_with_mtp_loss, "mtp_loss_scaling_factor is 0.1"),
    "sliding window of mistral": (
        lambda: tiny_model("mistral", vocab_size=VOCABULARY, sliding_window=32),
        "sliding_window is 32",
    ),
    "sliding layers of qwen3": (
        lambda: tiny_model(
            "qwen3",
            vocab_size=VOCABULARY,
            use_sliding_window=True,
            sliding_window=16,
            max_window_layers=2,
        ),
        "layer 2 is 'sliding_attention'",
    ),
    "attention dropout": (
        lambda: tiny_model("llama", vocab_size=VOCABULARY, attention_dropout=0.1),
        "attention_dropout is 0.1",
    ),
    "length-dependent rope": (
        lambda: tiny_model(
            "llama",
            vocab_size=VOCABULARY,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        ),
        "rope_type 'dynamic'",
    ),
    "no transformers model": (lambda: nn.Linear(2, 2), "Linear is not a transformers"),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=needs_ling) if "multi-token" in c else c for c in sorted(REFUSED)],
)
def test_what_is_not_understood_is_refused_by_name_and_left_unchanged(case: str) -> None:
    make, message = REFUSED[case]
    model = make()
    classes = [type(m) for m in model.modules()]
    with pytest.raises(harts.UnsupportedModelError) as error:
        harts.attach(model)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert [type(m) for m in model.modules()] == classes


def test_mamba_models_are_refused() -> None:
    from transformers import AutoModelForCausalLM, MambaConfig

    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(harts.UnsupportedModelError, match="model type 'mamba' is not supported"):
        harts.attach(AutoModelForCausalLM.from_config(config))


def test_a_wrapped_lm_head_is_refused_with_what_to_do() -> None:
    model = tiny_model("llama", vocab_size=VOCABULARY)
    tree_model = harts.attach(model)
    model.set_output_embeddings(nn.Sequential(model.get_output_embeddings()))
    with pytest.raises(harts.UnsupportedModelError, match=r"needs a plain nn\.Linear"):
        tree_model.log_probs(_microbatch())


def test_an_empty_mask_gives_empty_log_probs_and_a_backward_of_zeros() -> None:
    model = tiny_model("qwen3", vocab_size=VOCABULARY)
    batch = harts.TrajectoryBatch.from_rows([{"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}])
    (microbatch,) = harts.plan_step(batch).microbatches()
    out = harts.attach(model).log_probs(microbatch)
    assert out.log_probs.shape == out.entropy.shape == (0,)
    out.log_probs.sum().backward()
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def test_float32_agrees_to_its_rounding() -> None:
    """At most twice the unmodified float32 model's own error against float64, plus a rounding."""
    from tests import oracles

    tokens = SHAPES["three-levels"]
    masks = [[False] + [True] * (len(t) - 1) for t in tokens]
    exact = tiny_model("qwen3_5", vocab_size=VOCABULARY).double()
    single = tiny_model("qwen3_5", vocab_size=VOCABULARY)
    with torch.no_grad():
        with oracles.float64_throughout():
            truth = oracles.expanded_run(exact, tokens, masks).log_probs
        own_error = oracles.expanded_run(copy.deepcopy(single), tokens, masks).log_probs - truth
        tree = harts.attach(single).log_probs(_microbatch()).log_probs
    assert tree.isfinite().all()
    bound = 2 * float(own_error.abs().max()) + 8 * torch.finfo(torch.float32).eps
    assert float((tree - truth).abs().max()) <= bound
