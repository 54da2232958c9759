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
    if not runs_on_gpu(op, impl, *tensors, known=get_args(Implementation), part="token_wise"):
        return False
    for tensor in tensors:
        if tensor.dtype not in FUSED_DTYPES:
            raise HartsError(
                f"{op}: impl 'fused' computes bfloat16, float16 and float32, not {tensor.dtype}"
            )
    return True


def runs_on_gpu(
    op: str, impl: str, *tensors: torch.Tensor, known: tuple[str, ...], part: str
) -> bool:
    """Whether impl is not "reference"; the tensors then are on a GPU.

    known: the operator's implementations. part: of `Kernels`, the one that chooses among them.
    Raises ConfigError for an unknown impl and for tensors that are not on a GPU.
    """
    if impl not in known:
        raise ConfigError(f"{op}: impl is {impl!r}, want one of {', '.join(known)}")
    if impl == "reference":
        return False
    for tensor in tensors:
        if not tensor.is_cuda:
            raise ConfigError(
                f"{op}: impl {impl!r} needs CUDA tensors, got them on {tensor.device}; use impl "
                f"'reference', for a model attach it with {part}='eager'"
            )
    return True
