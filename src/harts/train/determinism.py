"""Deterministic mode: the same inputs give the same bits, or an error names the operator."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from harts.errors import ConfigError

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_REPRODUCIBLE = (":4096:8", ":16:8")


@contextmanager
def deterministic(wanted: bool, device: torch.device) -> Iterator[None]:
    """Inside, torch uses deterministic algorithms where `wanted`; afterwards all is as before.

    cuBLAS reads its variable when it starts, so it must be set outside: ConfigError on CUDA
    without it. torch sees its own operators only; kernels of other libraries keep their promises.
    """
    if not wanted:
        yield
        return
    workspace = os.environ.get(_WORKSPACE)
    if device.type == "cuda" and workspace not in _REPRODUCIBLE:
        state = "unset" if workspace is None else repr(workspace)
        raise ConfigError(
            f"train.deterministic is true, but {_WORKSPACE} is {state}; start with "
            f"{_WORKSPACE}={_REPRODUCIBLE[0]} in the environment"
        )
    before = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warned)
