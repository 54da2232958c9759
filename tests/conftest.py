"""Settings of the whole suite: properties have no deadline, because machines differ."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("harts", deadline=None, print_blob=True)
settings.load_profile("harts")


def pytest_configure() -> None:
    """Autotuned kernels (fla's) keep their first configuration, whichever test imports them first.

    There is less to compile, and no bit depends on a choice by timing.
    """
    if importlib.util.find_spec("triton") is None:
        return
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.__init__

    def pinned(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.configs = self.configs[:1]

    Autotuner.__init__ = pinned


@pytest.fixture(autouse=True)
def return_gpu_memory() -> Iterator[None]:
    """Several workers share one GPU, and torch would keep what a test has freed."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
