"""What a model family tells harts about itself, and what the tree layers may rely on.

A family replaces the class of each token mixer in place by a subclass whose `forward` accepts
`tree`; parameters, buffers and child names stay as they are. Called without `tree`, a layer is
the original layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn

from harts.models.routing import RouterKind


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family of transformers.

    model_type: `config.model_type`. architectures: classes that `attach` accepts.
    linear_mixers: original class -> its tree subclass.
    attention: classes that go through the attention interface.
    routers: MoE router class -> how it scores; its forward returns (logits, weights, indices).
    token_wise: further classes that treat every row alone.
    fused: original class -> adapter that computes the same with fused kernels.
    experts: the same for MoE experts, by the name of the implementation in `Kernels`.
    refuse: config -> reason why this configuration cannot run on a tree, or None.
    """

    model_type: str
    architectures: tuple[type[nn.Module], ...]
    attention: tuple[type[nn.Module], ...]
    token_wise: tuple[type[nn.Module], ...]
    linear_mixers: Mapping[type[nn.Module], type[nn.Module]] = field(default_factory=dict)
    routers: Mapping[type[nn.Module], RouterKind] = field(default_factory=dict)
    fused: Mapping[type[nn.Module], type[nn.Module]] = field(default_factory=dict)
    experts: Mapping[str, Mapping[type[nn.Module], type[nn.Module]]] = field(default_factory=dict)
    refuse: Callable[[Any], str | None] = lambda config: None

    def has_experts(self, model: nn.Module) -> bool:
        """Whether a model has MoE experts that an implementation in `Kernels` would replace."""
        kinds = {kind for table in self.experts.values() for kind in table}
        return any(self.kind_of(module) in kinds for module in model.modules())

    def kind_of(self, module: nn.Module) -> type[nn.Module]:
        """The class of a module as transformers made it, whatever adapter it has now."""
        return self._kind_of_adapter.get(type(module), type(module))

    @cached_property
    def _kind_of_adapter(self) -> dict[type[nn.Module], type[nn.Module]]:
        tables = (self.linear_mixers, self.fused, *self.experts.values())
        return {adapter: kind for table in tables for kind, adapter in table.items()}
