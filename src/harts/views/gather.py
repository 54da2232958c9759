"""Index tensors of a packed layout: which compact row each packed row shows.

Legend: C compact rows, P packed rows, E packed rows that repeat a compact row, R compact rows
that are repeated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True)
class RowGather:
    """packed[p] = compact[source[p]]; a zero row where source[p] is -1.

    source: int64 (P,). own: int64 (C,), the packed row that is row c's own place.
    extra_packed, extra_compact: int64 (E,), the remaining packed rows that show a compact row
    (replay, convolution context), ascending in packed order.
    repeated: int64 (R,), the compact rows among extra_compact, ascending. shown_packed: int64
    (R + E,) and shown_ptr: int64 (R+1,), all packed rows that show each of them: its own place,
    then the others ascending. Backward adds them in this order.
    """

    source: torch.Tensor
    own: torch.Tensor
    extra_packed: torch.Tensor
    extra_compact: torch.Tensor
    repeated: torch.Tensor
    shown_packed: torch.Tensor
    shown_ptr: torch.Tensor


def build_row_gather(
    source: npt.NDArray[np.int64], is_own: npt.NDArray[np.bool_], device: torch.device
) -> RowGather:
    """From source (P,) and which packed rows are own places (P,); each row has exactly one."""
    own_packed = np.flatnonzero(is_own)
    own = np.empty(len(own_packed), np.int64)
    own[source[own_packed]] = own_packed
    extra = np.flatnonzero(~is_own & (source >= 0))
    repeated, count = np.unique(source[extra], return_counts=True)
    shown_ptr = np.concatenate([[0], np.cumsum(count + 1)])
    shown = np.empty(len(repeated) + len(extra), np.int64)
    shown[shown_ptr[:-1]] = own[repeated]
    is_first = np.zeros(len(shown), bool)
    is_first[shown_ptr[:-1]] = True
    shown[~is_first] = extra[np.argsort(source[extra], kind="stable")]
    arrays = (source, own, extra, source[extra], repeated, shown, shown_ptr)
    return RowGather(*(on_device(x, device) for x in arrays))


def on_device(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Copy a plan array to the device once, without waiting for it."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
