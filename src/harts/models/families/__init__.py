"""Model families by `model_type`; a family's file is imported when a model needs it."""

from __future__ import annotations

from importlib import import_module

from harts.errors import UnsupportedModelError
from harts.models.protocol import Family

SUPPORTED = (
    "bailing_hybrid",
    "kimi_linear",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "olmo_hybrid",
    "qwen3",
    "llama",
    "mistral",
)


def family_of(model_type: str) -> Family:
    """The family of a transformers `model_type`; raises UnsupportedModelError."""
    if model_type not in SUPPORTED:
        raise UnsupportedModelError(
            f"model type {model_type!r} is not supported; harts knows {', '.join(SUPPORTED)}"
        )
    try:
        module = import_module(f"harts.models.families.{model_type.removesuffix('_text')}")
    except ImportError as error:
        raise UnsupportedModelError(
            f"the installed transformers has no {model_type} ({error}); install a newer one "
            "(pip install 'transformers>=5.20')"
        ) from None
    family: Family = module.FAMILY
    return family
