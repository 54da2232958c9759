"""What an objective divides by: totals of the whole optimisation step, not of one microbatch.

With these, the sum of the microbatch losses is the loss of the step, however the trajectories
fall into microbatches and replicas (invariant 8).
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True)
class Denominators:
    """Counts over all trajectories of the step, on every replica.

    num_scored_tokens: positions with a true loss mask.
    num_trajectories: trajectories N, scored or not.
    num_scored_trajectories: trajectories with at least one scored position.
    scored_tokens_of_trajectory: int64 (N,), by index in the batch.
    """

    num_scored_tokens: int
    num_trajectories: int
    num_scored_trajectories: int
    scored_tokens_of_trajectory: npt.NDArray[np.int64]

    @classmethod
    def of(cls, loss_mask: npt.NDArray[np.bool_], offsets: npt.NDArray[np.int64]) -> "Denominators":
        """Count a flat mask (S,) with trajectory boundaries offsets (N+1,)."""
        counts = [np.count_nonzero(loss_mask[a:b]) for a, b in pairwise(offsets.tolist())]
        scored = np.array(counts, dtype=np.int64)
        return cls(
            num_scored_tokens=int(scored.sum()),
            num_trajectories=len(scored),
            num_scored_trajectories=int((scored > 0).sum()),
            scored_tokens_of_trajectory=scored,
        )
