"""Index tensors of a packed layout: which compact row each packed row shows.

Legend: C compact rows, P packed rows, E packed rows that repeat a compact row.
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
    (replay, convolution context), ascending in packed order: backward adds them in this order.
    """

    source: torch.Tensor
    own: torch.Tensor
    extra_packed: torch.Tensor
    extra_compact: torch.Tensor


def build_row_gather(
    source: npt.NDArray[np.int64], is_own: npt.NDArray[np.bool_], device: torch.device
) -> RowGather:
    """From source (P,) and which packed rows are own places (P,); each row has exactly one."""
    own_packed = np.flatnonzero(is_own)
    own = np.empty(len(own_packed), np.int64)
    own[source[own_packed]] = own_packed
    extra = np.flatnonzero(~is_own & (source >= 0))
    return RowGather(*(on_device(x, device) for x in (source, own, extra, source[extra])))


def on_device(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Copy a plan array to the device once, without waiting for it."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
