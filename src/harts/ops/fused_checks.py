"""What every operator with a "reference" and a "fused" implementation checks before it chooses."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from harts.errors import ConfigError, HartsError

Implementation = Literal["reference", "fused"]
FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def runs_fused(op: str, impl: str, *tensors: torch.Tensor) -> bool:
    """Whether impl is "fused", which the tensors then can take.

    Raises ConfigError for an unknown impl and for tensors that are not on a GPU, HartsError for
    dtypes that the kernels do not compute.
    """
    if impl not in get_args(Implementation):
        known = ", ".join(get_args(Implementation))
        raise ConfigError(f"{op}: impl is {impl!r}, want one of {known}")
    if impl == "reference":
        return False
    for tensor in tensors:
        if not tensor.is_cuda:
            raise ConfigError(
                f"{op}: impl 'fused' needs CUDA tensors, got them on {tensor.device}; use impl "
                "'reference', for a model attach it with token_wise='eager'"
            )
        if tensor.dtype not in FUSED_DTYPES:
            raise HartsError(
                f"{op}: impl 'fused' computes bfloat16, float16 and float32, not {tensor.dtype}"
            )
    return True
