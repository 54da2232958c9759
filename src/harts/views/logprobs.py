"""Which rows need the LM head, and which target each scored position reads (section 3.5).

Legend: R head rows, P scored positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from harts.data.aliases import find
from harts.errors import DataError
from harts.plan.microbatch import MicroBatch
from harts.views.gather import on_device


@dataclass(frozen=True)
class LogProbView:
    """Head rows are the distinct (compact row, temperature) pairs that a scored position needs.

    compact_row: int64 (R,), ascending. temperature: float64 (R,), or None where all are 1.
    target, head_row: int64 (P,), scored positions sorted by head row.
    original: int64 (P,), place of each sorted position in the output order.
    row_ptr: int64 numpy (R+1,), sorted positions of head row r are [row_ptr[r], row_ptr[r+1]).
    position_ptr: int64 (R+1,), row_ptr on the device, for kernels.
    last_row, smallest_target, largest_target: extremes of compact_row and target, so that nothing
    waits for the device to check them; -1, 0 and -1 without scored positions.
    """

    compact_row: torch.Tensor
    temperature: torch.Tensor | None
    target: torch.Tensor
    head_row: torch.Tensor
    original: torch.Tensor
    row_ptr: npt.NDArray[np.int64]
    position_ptr: torch.Tensor
    last_row: int
    smallest_target: int
    largest_target: int

    @property
    def num_positions(self) -> int:
        """Scored positions P."""
        return self.target.numel()


def build_logprob_view(microbatch: MicroBatch, device: torch.device) -> LogProbView:
    """A position t is predicted by the row of position t - 1 of its trajectory. O(P log P)."""
    row = microbatch.layout.semantic_to_compact[microbatch.scored - 1]
    target = microbatch.batch.tokens[microbatch.batch_position[microbatch.scored]].astype(np.int64)
    temperature = _temperatures(microbatch)
    original = np.lexsort((temperature, row))
    row, temperature = row[original], temperature[original]
    is_first = np.ones(len(row), bool)
    is_first[1:] = (row[1:] != row[:-1]) | (temperature[1:] != temperature[:-1])
    heads = np.flatnonzero(is_first)
    row_ptr = np.concatenate([heads, [len(row)]])
    return LogProbView(
        compact_row=on_device(row[heads], device),
        temperature=None
        if bool((temperature == 1).all())
        else on_device(temperature[heads], device),
        target=on_device(target[original], device),
        head_row=on_device(np.cumsum(is_first) - 1, device),
        original=on_device(original, device),
        row_ptr=row_ptr,
        position_ptr=on_device(row_ptr, device),
        last_row=int(row.max(initial=-1)),
        smallest_target=int(target.min()) if len(target) else 0,
        largest_target=int(target.max(initial=-1)),
    )


def _temperatures(microbatch: MicroBatch) -> npt.NDArray[np.float64]:
    """Sampling temperature of each scored position (P,), 1 where the data has none."""
    name = find(microbatch.fields, "temperature")
    if name is None:
        return np.ones(microbatch.num_scored)
    temperature: npt.NDArray[np.float64] = microbatch.fields[name].astype(np.float64)
    wrong = np.flatnonzero(~(temperature > 0))
    if len(wrong):
        place = int(wrong[0])
        trajectory = microbatch.batch.name_of(int(microbatch.fields["trajectory_index"][place]))
        raise DataError(
            f"{trajectory}: {name} is {temperature[place]} at position "
            f"{microbatch.fields['position'][place]}; give a temperature above 0"
        )
    return temperature
