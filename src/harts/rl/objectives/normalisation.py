"""How per-token losses become one number, such that microbatch losses add to the step's loss.

Every rule divides by totals of the whole step, so that neither the split into microbatches nor
the replicas change the sum (DESIGN, invariant 8).

Legend: P scored positions of one microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from harts.errors import ConfigError, DataError
from harts.plan.denominators import Denominators
from harts.rl.objectives.inputs import Fields, trajectory_of_position
from harts.views.gather import on_device

Normalisation = Literal["token_mean", "sequence_mean", "constant_length"]


@dataclass(frozen=True, kw_only=True)
class ReductionOptions:
    """normalisation: what the sum over scored tokens is divided by.

    "token_mean": scored tokens of the step; every token weighs the same (DAPO).
    "sequence_mean": mean over scored trajectories of the mean over their tokens (GRPO's paper);
    in step-wise data, where every call is a trajectory, a short call weighs as much as a long one.
    "constant_length": scored trajectories times max_length (Dr. GRPO, arXiv 2503.20783).
    max_length: tokens, needed by "constant_length" and refused elsewhere.
    """

    normalisation: Normalisation = "token_mean"
    max_length: int | None = None

    def __post_init__(self) -> None:
        check_choice("normalisation", self.normalisation, get_args(Normalisation))
        if (self.normalisation == "constant_length") != (self.max_length is not None):
            raise ConfigError(
                f"max_length is {self.max_length} with normalisation '{self.normalisation}'; "
                "give it with 'constant_length' and only there"
            )
        if self.max_length is not None and self.max_length < 1:
            raise ConfigError(f"max_length is {self.max_length}; give at least 1 token")


def check_choice(option: str, value: Any, choices: tuple[Any, ...]) -> None:
    """ConfigError unless value is one of choices."""
    if value not in choices:
        named = ", ".join(repr(choice) for choice in choices)
        raise ConfigError(f"{option} is {value!r}; choose one of {named}")


def reduce_over_step(
    token_losses: torch.Tensor,
    fields: Fields,
    denominators: Denominators,
    options: ReductionOptions,
) -> torch.Tensor:
    """This microbatch's share of the step's loss: a scalar, attached even where P is 0."""
    if options.normalisation == "token_mean":
        return token_losses.sum() / max(denominators.num_scored_tokens, 1)
    num_trajectories = max(denominators.num_scored_trajectories, 1)
    if options.normalisation == "constant_length":
        assert options.max_length is not None, "ReductionOptions checks max_length"
        return token_losses.sum() / (num_trajectories * options.max_length)
    tokens_of_own_trajectory = scored_tokens_of_position(fields, denominators)
    token_weights = on_device(1.0 / tokens_of_own_trajectory, token_losses.device)
    token_weights = token_weights.to(token_losses.dtype)
    return (token_losses * token_weights).sum() / num_trajectories


def trajectory_mean(
    values: torch.Tensor, fields: Fields, denominators: Denominators
) -> torch.Tensor:
    """At each scored position the mean of values (P,) over its trajectory's scored positions.

    Without gradient. Sums run segment by segment, without atomics, so that their bits repeat.
    DataError where a trajectory is here only in part. O(P log P).
    """
    trajectory = trajectory_of_position(fields)
    present, first, rank, counts = np.unique(
        trajectory, return_index=True, return_inverse=True, return_counts=True
    )
    counts_in_step = scored_tokens_of_position(fields, denominators)[first]
    if (counts != counts_in_step).any():
        partial = int(np.argmax(counts != counts_in_step))
        raise DataError(
            f"trajectory {present[partial]} has {counts[partial]} scored positions here and "
            f"{counts_in_step[partial]} in the step; a sequence-level ratio needs them in one call"
        )
    if len(present) == 0:
        return values.detach()
    grouped_order, lengths, rank_of_position = (
        on_device(array, values.device) for array in (np.argsort(rank, kind="stable"), counts, rank)
    )
    # float64: GSPO clips at 3e-4, and a long float32 sum in sequence would lose digits of that.
    grouped = values.detach().double()[grouped_order]
    means = torch.segment_reduce(grouped, "mean", lengths=lengths, axis=0, unsafe=True)
    return means[rank_of_position].to(values.dtype)


def scored_tokens_of_position(fields: Fields, denominators: Denominators) -> npt.NDArray[np.int64]:
    """How many scored tokens the trajectory of each scored position has in the step, (P,)."""
    trajectory = trajectory_of_position(fields)
    scored_tokens = denominators.scored_tokens_of_trajectory
    inside = (trajectory >= 0) & (trajectory < len(scored_tokens))
    counted = np.zeros(len(trajectory), dtype=np.int64)
    counted[inside] = scored_tokens[trajectory[inside]]
    if (counted == 0).any():
        raise DataError(
            f"trajectory {trajectory[np.argmin(counted)]} has a scored position, but the "
            "denominators count none for it; pass the denominators of this step's plan"
        )
    return counted
