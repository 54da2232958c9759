"""Settings of the whole suite: properties have no deadline, because machines differ."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("harts", deadline=None, print_blob=True)
settings.load_profile("harts")


@pytest.fixture(autouse=True)
def return_gpu_memory() -> Iterator[None]:
    """Several workers share one GPU, and torch would keep what a test has freed."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
