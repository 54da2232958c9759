"""Where Triton kernels can be tested: on a GPU, or on the CPU in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch

Test = TypeVar("Test", bound=Callable[..., Any])


def interpreted() -> bool:
    """TRITON_INTERPRET=1 and Triton is installed."""
    has_triton = importlib.util.find_spec("triton") is not None
    return has_triton and os.environ.get("TRITON_INTERPRET") == "1"


def needs_triton(test: Test) -> Test:
    """Skip without either; marked so that `make test-gpu` and `make test-interpreter` find it."""
    unavailable = pytest.mark.skipif(
        not interpreted() and not torch.cuda.is_available(),
        reason="needs a GPU, or Triton with TRITON_INTERPRET=1 (make test-interpreter)",
    )
    marked: Test = pytest.mark.triton(unavailable(test))
    return marked


def triton_device() -> torch.device:
    return torch.device("cpu" if interpreted() else "cuda")
