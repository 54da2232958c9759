"""Log-probabilities of scored positions from compact rows, in the original order.

Source: section 3.5, Equations 17 and 19.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

from harts.errors import ConfigError, HartsError
from harts.ops.cross_entropy.reference import MappedLogProbs
from harts.views.logprobs import LogProbView

Implementation = Literal["reference", "fused"]

# A CPU wants a block in its cache (measured: 16 MiB is fastest of 4 to 256 at V = 151,669), a GPU
# wants large matmuls.
_BLOCK_BYTES_CPU = 16 << 20
_BLOCK_BYTES_GPU = 256 << 20


def mapped_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    view: LogProbView,
    bias: torch.Tensor | None = None,
    max_block_bytes: int | None = None,
    impl: Implementation = "reference",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each scored token and entropy of the distribution that scored it.

    hidden: (C, D), the rows before the LM head. weight: (V, D) and bias: (V,) or None, the LM
    head. All share one floating dtype. Returns two tensors (P,) in the view's original order,
    in nats, both differentiable: float64 for float64 inputs, else float32 (bfloat16 and float16
    inputs are multiplied in their dtype, everything after the matmul is float32).

    Logits exist for one block of head rows at a time: at most max_block_bytes (None chooses by
    device), but at least one row, and as much again for their gradient. Backward recomputes
    them, so the LM head's work is four matmuls of R x D x V over the R head rows, and
    O(R V + P) besides.

    "reference" is plain PyTorch on any device. "fused" needs CUDA, Triton and bfloat16 or float32:
    one pass over the logits forward and one backward, larger blocks by default (3.3 GiB), the
    same bits every time. Neither makes the host wait for the device.
    Raises ConfigError for an unknown impl or one that cannot run here, HartsError for shapes that
    do not fit and for a target outside the vocabulary.
    """
    if impl not in get_args(Implementation):
        known = ", ".join(get_args(Implementation))
        raise ConfigError(f"mapped_log_probs: impl is {impl!r}, want one of {known}")
    _check_inputs(hidden, weight, bias, max_block_bytes)
    _check_rows_and_targets(hidden.shape[0], weight.shape[0], view)
    if impl == "fused":
        return _fused(hidden, weight, bias, view, max_block_bytes)
    if max_block_bytes is None:
        max_block_bytes = _BLOCK_BYTES_GPU if hidden.is_cuda else _BLOCK_BYTES_CPU
    return MappedLogProbs.apply(hidden, weight, bias, view, max_block_bytes)


def _fused(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    view: LogProbView,
    max_block_bytes: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Imported here: it needs Triton."""
    if not hidden.is_cuda:
        raise ConfigError(
            f"mapped_log_probs: impl 'fused' needs CUDA tensors, hidden is on {hidden.device}; "
            "use impl='reference'"
        )
    from harts.ops.cross_entropy.fused import BLOCK_BYTES, fused_log_probs

    budget = BLOCK_BYTES if max_block_bytes is None else max_block_bytes
    return fused_log_probs(hidden, weight, bias, view, budget)


def _check_inputs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    max_block_bytes: int | None,
) -> None:
    shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}"
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise HartsError(f"mapped_log_probs: {shapes}; want (rows, width) and (vocabulary, width)")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise HartsError(
            f"mapped_log_probs: bias has shape {tuple(bias.shape)}, want ({weight.shape[0]},)"
        )
    dtypes = [tensor.dtype for tensor in (hidden, weight, bias) if tensor is not None]
    if len(set(dtypes)) > 1 or not hidden.is_floating_point():
        named = ", ".join(str(dtype) for dtype in dtypes)
        raise HartsError(
            f"mapped_log_probs: hidden, weight and bias are {named}; want one floating dtype"
        )
    if max_block_bytes is not None and max_block_bytes < 1:
        raise HartsError(f"mapped_log_probs: max_block_bytes is {max_block_bytes}, want at least 1")


def _check_rows_and_targets(num_rows: int, vocabulary: int, view: LogProbView) -> None:
    """From the extremes that the view holds on the host: reading its tensors would wait."""
    if view.last_row >= num_rows:
        raise HartsError(
            f"mapped_log_probs: the view reads row {view.last_row}, hidden has {num_rows} rows"
        )
    if view.smallest_target < 0 or view.largest_target >= vocabulary:
        outside = view.largest_target >= vocabulary
        token = view.largest_target if outside else view.smallest_target
        raise HartsError(
            f"mapped_log_probs: scored token {token} is outside the LM head's vocabulary of "
            f"{vocabulary}; the tokenizer and the model do not belong together"
        )
