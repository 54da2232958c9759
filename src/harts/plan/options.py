"""Options of the planners, and one check for every whole-number option."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from harts.errors import PlanError
from harts.plan.jit import HAVE_NUMBA

SMALL_BATCH = 64
"""Trajectories up to which plain Python plans in less time than loading compiled loops takes."""


@dataclass(frozen=True, kw_only=True)
class PlannerOptions:
    """Constants of paper section 3.2, and what goes beyond it.

    exact_limit: most trajectories for the exact contiguous search (N_0). sampled_k: numbers of
    microbatches tried above it (Q_max). refined_anchors: candidates refined above it (B_ref).
    neighbourhood: places around a cut or a trajectory (H). boundary_sweeps, repair_iterations.

    Beyond the paper, each can be switched off:
    contiguous: "exact" runs the exact search at every size ("paper": up to exact_limit).
    search_steps: repackings of a few microbatches at a time that lower total work (0 is off).
    balance_steps: exchanges that make the microbatches of a slot even at equal total work (0 off).
    placement: "even" evens the replicas' totals, "paper" places greedily.
    use_numba: compiled loops, for batches that are large enough to gain from them; the results
    are the same without. The first use on a machine compiles for about 13 seconds.
    """

    exact_limit: int = 512
    sampled_k: int = 32
    refined_anchors: int = 3
    neighbourhood: int = 8
    boundary_sweeps: int = 2
    repair_iterations: int = 4
    contiguous: Literal["paper", "exact"] = "exact"
    search_steps: int = 10_000
    balance_steps: int = 4_000
    placement: Literal["paper", "even"] = "even"
    use_numba: bool = HAVE_NUMBA

    def for_size(self, num_trajectories: int) -> PlannerOptions:
        """The options for a batch: small ones need fewer steps, and no compiled loops."""
        steps = max(500, 25 * num_trajectories)
        return replace(
            self,
            search_steps=min(self.search_steps, steps),
            balance_steps=min(self.balance_steps, steps),
            use_numba=self.use_numba and num_trajectories > SMALL_BATCH,
        )

    @classmethod
    def paper(cls, *, use_numba: bool = HAVE_NUMBA) -> PlannerOptions:
        """The planner of the paper, nothing beyond it."""
        return cls(
            contiguous="paper",
            search_steps=0,
            balance_steps=0,
            placement="paper",
            use_numba=use_numba,
        )


def at_least_one(name: str, value: object) -> int:
    """The option as a Python int; PlanError unless it is a whole number from 1 up."""
    if not isinstance(value, int | np.integer):
        raise PlanError(f"{name} is {value!r}; give a whole number from 1 up")
    if value < 1:
        raise PlanError(f"{name} is {value}; it must be at least 1")
    return int(value)
