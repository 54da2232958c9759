"""Refuse any model with a part that might mix tokens in a way harts does not understand.

Everything is allowed by name: the family's mixers and token-wise classes, and a short list of
torch and PEFT modules that treat every row alone. Whatever else turns up is named and refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers.activations import ACT2CLS

from harts.errors import UnsupportedModelError
from harts.models.protocol import Family

_TOKEN_WISE = (
    nn.Linear,
    nn.Embedding,
    nn.Identity,
    nn.ModuleList,
    nn.ModuleDict,
    nn.ParameterList,
    nn.ParameterDict,
    nn.SiLU,
    nn.GELU,
    nn.Sigmoid,
)
_ACTIVATIONS = tuple({c[0] if isinstance(c, tuple) else c for c in ACT2CLS.values()} - {None})
_PEFT_PACKAGE = "peft.tuners.lora"
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


@dataclass(frozen=True)
class LayerFinding:
    """What harts makes of one module: its name, its class, and how it will run."""

    name: str
    kind: str
    treatment: str


def audit(model: nn.Module, family: Family) -> tuple[LayerFinding, ...]:
    """Walk every module of a model; return its token mixers and routers.

    Raises UnsupportedModelError naming the first module or option that is not understood.
    """
    _check_config(model.config, family)
    mixers = tuple(family.linear_mixers) + family.attention
    findings: list[LayerFinding] = []
    for name, module in model.named_modules():
        treatment = _treatment(module, family)
        if treatment:
            findings.append(LayerFinding(name, type(module).__name__, treatment))
        elif not _is_token_wise(name, module, model, family, mixers):
            raise UnsupportedModelError(
                f"{name or 'the model'} is a {type(module).__name__}, which harts does not know "
                f"for {family.model_type}; it may mix tokens across branches, so the model is "
                "refused (remove the module, or add it to the family's adapter)"
            )
    if not any(finding.treatment.startswith("tree") for finding in findings):
        raise UnsupportedModelError(f"{type(model).__name__} has no attention layer to run")
    return tuple(findings)


def _treatment(module: nn.Module, family: Family) -> str | None:
    kind = family.kind_of(module)
    if kind in family.linear_mixers:
        return "tree linear attention"
    if kind in family.attention:
        return "tree attention"
    if kind in family.routers:
        return f"{family.routers[kind]} router, weighted by multiplicity"
    return None


def _is_token_wise(
    name: str, module: nn.Module, model: nn.Module, family: Family, mixers: tuple[type, ...]
) -> bool:
    allowed = (*family.token_wise, *family.architectures, *_TOKEN_WISE, *_ACTIVATIONS)
    if family.kind_of(module) in allowed:
        return True
    if type(module) is nn.Dropout:
        return module.p == 0.0 or not isinstance(model.get_submodule(_parent(name)), mixers)
    if type(module) is nn.Conv1d:  # the mixer runs it over true ancestors
        return isinstance(model.get_submodule(_parent(name)), tuple(family.linear_mixers))
    return type(module).__module__.startswith(_PEFT_PACKAGE)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _check_config(config: object, family: Family) -> None:
    reason = family.refuse(config)
    dropout = getattr(config, "attention_dropout", 0.0)
    if dropout:
        reason = f"attention_dropout is {dropout}: shared rows would share it; set it to 0"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
        reason = (
            f"rope_type {rope['rope_type']!r} depends on the length of the whole input, which a "
            "tree does not have; use a fixed one (default, linear, yarn, llama3)"
        )
    if reason:
        raise UnsupportedModelError(f"{family.model_type}: {reason}")
