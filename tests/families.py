"""Model families that the installed transformers has."""

from __future__ import annotations

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from harts.models.presets import TINY

FAMILIES = sorted(name for name in TINY if name in CONFIG_MAPPING)
MOE_FAMILIES = [
    name
    for name in ("bailing_hybrid", "kimi_linear", "qwen3_next", "qwen3_5_moe_text")
    if name in FAMILIES
]
# a hybrid with a sigmoid router and an expert bias: Ling 3, or Kimi Linear before transformers 5.20
KDA_MOE = MOE_FAMILIES[0]
needs_ling = pytest.mark.skipif(
    "bailing_hybrid" not in FAMILIES, reason="this transformers has no bailing_hybrid (needs 5.20)"
)
