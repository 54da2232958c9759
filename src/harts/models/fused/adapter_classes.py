"""Adapter classes: a mixin in front of each original class that a modelling module has."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from torch import nn

Adapters = dict[type[nn.Module], type[nn.Module]]
"""Original class -> adapter."""


def adapter_classes(
    hf_module: ModuleType,
    mixin_of: Mapping[str, type[Any]],
    *,
    prefix: str = "Fused",
    **attributes: Any,
) -> Adapters:
    """For each name that the module has a subclass <prefix><name>, the mixin before the original.

    attributes: of every subclass; its docstring is the mixin's. New classes at every call.
    """
    return {
        original: type(
            f"{prefix}{name}", (mixin, original), {"__doc__": mixin.__doc__, **attributes}
        )
        for name, mixin in mixin_of.items()
        if (original := getattr(hf_module, name, None)) is not None
    }
