"""attach: make a transformers model compute rollout trees; TreeModel: log-probs of a microbatch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from harts.errors import ConfigError, DataError, UnsupportedModelError
from harts.models.audit import LayerFinding, audit
from harts.models.families import family_of
from harts.models.full_attention import IMPLEMENTATION
from harts.models.kernels import Kernels, kernels_for
from harts.models.protocol import Family
from harts.models.routing import RouterRecord
from harts.models.tree_run import TreeRun
from harts.ops.cross_entropy import mapped_log_probs
from harts.plan.microbatch import MicroBatch
from harts.plan.step_plan import StepPlan
from harts.views.tree import TreeView, build_tree_view


@dataclass(frozen=True)
class TreeOutput:
    """log_probs, entropy: (P,), float, one per scored position in the order of `mb.fields`.

    routers: one record per MoE layer, for the losses of `harts.rl.moe_losses`.
    num_tokens: semantic positions of the microbatch, scored or not.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor
    routers: tuple[RouterRecord, ...]
    num_tokens: int


class TreeModel:
    """A transformers model whose token mixers understand trees; made by `attach`.

    model: the module that was given, changed in place. findings: what runs how. kernels: with
    which implementations.
    """

    def __init__(
        self,
        model: nn.Module,
        causal_lm: Any,
        family: Family,
        findings: tuple[LayerFinding, ...],
        kernels: Kernels,
        chosen_on: torch.device | None = None,
    ) -> None:
        self.model = model
        self.family = family
        self.findings = findings
        self.kernels = kernels
        self._chosen_on = chosen_on
        self._causal_lm = causal_lm
        self._layers = [m for m in causal_lm.modules() if isinstance(m, GradientCheckpointingLayer)]
        self._conv_widths = {
            layer.conv1d.kernel_size[0]
            for layer in causal_lm.modules()
            if isinstance(layer, tuple(family.linear_mixers))
        }
        self.routers = {
            name: module
            for name, module in causal_lm.named_modules()
            if family.kind_of(module) in family.routers
        }

    @property
    def device(self) -> torch.device:
        """Where the embedding lies."""
        return self._causal_lm.get_input_embeddings().weight.device

    def view(self, microbatch: MicroBatch) -> TreeView:
        """The index tensors of a microbatch, on the model's device.

        Raises ConfigError for anything but a MicroBatch.
        """
        _require_microbatch(microbatch)
        return build_tree_view(microbatch, conv_widths=self._conv_widths, device=self.device)

    def log_probs(self, microbatch: MicroBatch, *, view: TreeView | None = None) -> TreeOutput:
        """Log-probability and entropy of every scored position, each compact row computed once.

        view: what `view(microbatch)` returned, for a caller that builds it ahead.
        Differentiable; under `torch.no_grad()` it is the old- or reference-policy pass.
        Raises ConfigError for anything but a MicroBatch, DataError for token ids outside the
        model's vocabulary, UnsupportedModelError for an LM head that is no plain nn.Linear.
        """
        _require_microbatch(microbatch)
        self._check_vocabulary(microbatch)
        self._warn_if_moved()
        view = self.view(microbatch) if view is None else view
        recorded = _recorded(self.routers, self.family, view.multiplicity)
        # kernels start on the current device, which need not be the model's
        with torch.cuda.device_of(view.tokens), recorded as records:
            hidden = self._backbone(view)
        head = self._causal_lm.get_output_embeddings()
        if type(head) is not nn.Linear:
            raise UnsupportedModelError(
                f"the LM head is a {type(head).__name__}; harts computes its logits in row blocks "
                "and needs a plain nn.Linear, so leave lm_head out of the LoRA targets"
            )
        log_probs, entropy = mapped_log_probs(
            hidden,
            head.weight,
            view=view.logprobs,
            bias=head.bias,
            impl=self.kernels.log_probs,
        )
        return TreeOutput(log_probs, entropy, tuple(records), microbatch.num_tokens)

    def _warn_if_moved(self) -> None:
        """Once: kernels that `attach` chose for another kind of device."""
        if self._chosen_on is not None and self._chosen_on.type != self.device.type:
            warnings.warn(
                f"the model was attached on {self._chosen_on.type} and runs on {self.device.type} "
                f"with the kernels of {self._chosen_on.type}; attach it again after moving it",
                stacklevel=3,
            )
            self._chosen_on = None

    def _check_vocabulary(self, microbatch: MicroBatch) -> None:
        known = self._causal_lm.get_input_embeddings().weight.shape[0]
        largest = int(microbatch.layout.tokens.max())
        if largest >= known:
            raise DataError(
                f"token id {largest:,} of the rollouts is outside the model's vocabulary of "
                f"{known:,}; take data and model of the same tokenizer"
            )

    def _all_layers_recomputed(self) -> bool:
        layers = self._layers
        return self._causal_lm.training and all(layer.gradient_checkpointing for layer in layers)

    def _backbone(self, view: TreeView) -> torch.Tensor:
        """Last hidden states of the compact rows, (C, hidden)."""
        output = self._causal_lm.get_decoder()(
            input_ids=view.tokens[None],
            position_ids=view.positions[None],
            # a ready 4-D mask keeps transformers from building a (C, C) one; nobody reads it
            attention_mask=torch.zeros(1, 1, 1, 1, device=self.device),
            use_cache=False,
            tree=TreeRun(view, self.kernels, self._all_layers_recomputed()),
        )
        return output.last_hidden_state.squeeze(0)


def attach(model: nn.Module, *, kernels: Kernels | None = None) -> TreeModel:
    """Make a transformers causal language model compute trees, in place.

    Parameters keep their names and identity; LoRA (PEFT) wrappers, `train()`,
    `gradient_checkpointing_enable()` and ordinary calls of the model keep working, before and
    after. Attaching twice is harmless.

    kernels: None takes the fast ones for a model in bfloat16 on a GPU, the references otherwise;
    attach after moving the model. Raises ConfigError where their packages are missing or they are
    no Kernels, UnsupportedModelError naming the module or option that harts does not understand;
    the model is then unchanged.
    """
    causal_lm = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = getattr(causal_lm, "config", None)
    model_type = getattr(config, "model_type", None)
    if model_type is None or not hasattr(causal_lm, "get_decoder"):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a transformers causal language model; "
            "give one made by AutoModelForCausalLM"
        )
    family = family_of(model_type)
    if type(causal_lm) not in family.architectures:
        known = ", ".join(c.__name__ for c in family.architectures)
        raise UnsupportedModelError(f"{type(causal_lm).__name__} is not supported; use {known}")
    findings = audit(causal_lm, family)
    if kernels is not None and not isinstance(kernels, Kernels):
        raise ConfigError(
            f"attach: kernels is a {type(kernels).__name__}; give harts.Kernels(...), or nothing "
            "for those that fit the model's device and dtype"
        )
    chosen_on = None
    if kernels is None:
        weight = causal_lm.get_input_embeddings().weight
        chosen_on = weight.device
        kernels = kernels_for(weight.device, weight.dtype)
    kernels.check(has_experts=family.has_experts(causal_lm))
    adapters = dict(family.linear_mixers) | family.experts.get(kernels.experts, {})
    if kernels.token_wise == "fused":
        adapters |= family.fused
    for module in causal_lm.modules():
        kind = family.kind_of(module)
        if type(module) is not (wanted := adapters.get(kind, kind)):
            module.__class__ = wanted
    causal_lm.set_attn_implementation(IMPLEMENTATION)
    return TreeModel(model, causal_lm, family, findings, kernels, chosen_on)


def _require_microbatch(given: object) -> None:
    if isinstance(given, MicroBatch):
        return
    plan = "plan" if isinstance(given, StepPlan) else "harts.plan_step(batch, ...)"
    raise ConfigError(
        f"microbatch is a {type(given).__name__}; give those of a plan one by one: "
        f"for mb in {plan}.microbatches(): model.log_probs(mb)"
    )


@contextmanager
def _recorded(
    routers: dict[str, nn.Module], family: Family, multiplicity: torch.Tensor
) -> Iterator[list[RouterRecord]]:
    """Collect what the routers decide during one forward pass.

    The hooks are gone when recomputation runs the layers again, so every decision counts once.
    """
    records: list[RouterRecord] = []

    def record(name: str, module: nn.Module, output: tuple[torch.Tensor, ...]) -> None:
        logits, _, indices = output
        kind = family.routers[family.kind_of(module)]
        records.append(
            RouterRecord(
                name=name, kind=kind, logits=logits, indices=indices, multiplicity=multiplicity
            )
        )

    handles = [
        module.register_forward_hook(lambda m, _, output, name=name: record(name, m, output))
        for name, module in routers.items()
    ]
    try:
        yield records
    finally:
        for handle in handles:
            handle.remove()
