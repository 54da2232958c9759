"""Do the log-probabilities that the rollout recorded match those of the model that trains?

They never match exactly (other kernels, other precision), but a mean difference of tenths of a
nat has a reason: another checkpoint or tokenizer, a temperature that one side left out, or values
that lie one position off. The last two leave a trace in the differences, which is looked for.

Legend: S tokens of the batch, P scored positions.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harts.data.aliases import FIELD_ALIASES, find
from harts.data.trajectory import TrajectoryBatch
from harts.errors import DataError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

DEFAULT_TOLERANCE = 0.05
"""Mean absolute difference in nats that engines and training stacks commonly stay below."""

NUM_WORST = 5

_EXPLAINS = 0.5
"""A suspicion must bring the mean absolute difference below this part of it."""

_LEFT_BY_RATIO = 0.1
_NEGLIGIBLE = 1e-3
_FEWEST_POSITIONS = 16
_FIRST_RANGE = 64


@dataclass(frozen=True, kw_only=True)
class WorstPlace:
    """trajectory: index in the batch. name: as messages call it. Log-probabilities in nats."""

    trajectory: int
    name: str
    position: int
    token: int
    recorded: float
    recomputed: float


@dataclass(frozen=True, kw_only=True)
class PositionRange:
    """Scored positions first to last (inclusive) of all trajectories; differences in nats."""

    first: int
    last: int
    count: int
    mean_abs: float
    max_abs: float


@dataclass(frozen=True, kw_only=True)
class RecordedComparison:
    """Recorded minus recomputed over the scored positions, in nats.

    field: where the recorded values are. temperature_field: None where the data has none, which
    counts as 1. p50, p95, p99: of the absolute difference. worst: largest first.
    suspicion: what the differences look like, or None.
    """

    field: str
    temperature_field: str | None
    tolerance: float
    count: int
    mean: float
    mean_abs: float
    p50: float
    p95: float
    p99: float
    max_abs: float
    by_position: tuple[PositionRange, ...]
    worst: tuple[WorstPlace, ...]
    suspicion: str | None

    @property
    def passed(self) -> bool:
        """Whether the mean absolute difference is within the tolerance; NaN never is."""
        return self.mean_abs <= self.tolerance

    def summary(self) -> dict[str, Any]:
        """Everything as nested dicts, for `harts verify --json`."""
        return asdict(self) | {"passed": self.passed}


def recorded_field(batch: TrajectoryBatch) -> str:
    """The field with the log-probabilities that the rollout engine recorded.

    rollout_log_probs and its aliases win over old_log_probs and its own, which a trainer may have
    recomputed. Raises DataError where there is none, or one that is not per token.
    """
    names = [*batch.position_fields, *batch.trajectory_fields]
    field = find(names, "rollout_log_probs") or find(names, "old_log_probs")
    if field is None:
        known = ", ".join(FIELD_ALIASES["old_log_probs"])
        raise DataError(
            f"there are no recorded log-probabilities; name them one of {known}, or leave out "
            "--rollout-logprobs"
        )
    if field not in batch.position_fields:
        raise DataError(f"{field} has one value a trajectory; give one for each token")
    return field


def compare_recorded(
    batch: TrajectoryBatch,
    log_probs: Floats,
    entropy: Floats,
    *,
    tolerance: float = DEFAULT_TOLERANCE,
) -> RecordedComparison:
    """Compare what the batch recorded with the model's own values.

    log_probs, entropy: (S,), with the temperature of the data applied, at the scored positions
    (`Verification.log_probs`). Raises DataError as `recorded_field` does, and where all recorded
    values are 0 or one is above 0. O(S).
    """
    field = recorded_field(batch)
    recorded = batch.position_fields[field].astype(np.float64)
    places = np.flatnonzero(batch.loss_mask)
    _require_log_probs(batch, recorded, places, field)
    difference = recorded[places] - log_probs[places]
    size = np.abs(difference)
    trajectory = np.searchsorted(batch.offsets, places, side="right") - 1
    position = places - batch.offsets[trajectory]
    p50, p95, p99 = np.quantile(size, [0.5, 0.95, 0.99]).tolist()
    worst = np.argsort(-size, kind="stable")[:NUM_WORST]
    return RecordedComparison(
        field=field,
        temperature_field=find([*batch.position_fields, *batch.trajectory_fields], "temperature"),
        tolerance=tolerance,
        count=len(places),
        mean=float(difference.mean()),
        mean_abs=float(size.mean()),
        p50=p50,
        p95=p95,
        p99=p99,
        max_abs=float(size.max()),
        by_position=_by_position(position, size),
        worst=tuple(
            WorstPlace(
                trajectory=int(trajectory[i]),
                name=batch.name_of(int(trajectory[i])),
                position=int(position[i]),
                token=int(batch.tokens[places[i]]),
                recorded=float(recorded[places[i]]),
                recomputed=float(log_probs[places[i]]),
            )
            for i in worst.tolist()
        ),
        suspicion=_suspicion(batch, recorded, log_probs, entropy, places),
    )


def _require_log_probs(batch: TrajectoryBatch, recorded: Floats, places: Ints, field: str) -> None:
    if not recorded[places].any():
        raise DataError(
            f"{field} is 0 at every scored position, so nothing was recorded; give the engine's "
            "log-probabilities"
        )
    above = places[recorded[places] > 1e-6]
    if len(above):
        trajectory = int(np.searchsorted(batch.offsets, above[0], side="right")) - 1
        position = int(above[0] - batch.offsets[trajectory])
        raise DataError(
            f"{batch.name_of(trajectory)}: {field}[{position}] is {recorded[above[0]]:.6g}, which "
            "is no logarithm of a probability; give log-probabilities (0 or less)"
        )


def _by_position(position: Ints, size: Floats) -> tuple[PositionRange, ...]:
    """Ranges that double in width: 0 to 63, 64 to 127, 128 to 255, and so on; none is empty."""
    ranges, begin, end = [], 0, _FIRST_RANGE
    while begin <= position.max():
        inside = (position >= begin) & (position < end)
        if inside.any():
            ranges.append(
                PositionRange(
                    first=begin,
                    last=end - 1,
                    count=int(inside.sum()),
                    mean_abs=float(size[inside].mean()),
                    max_abs=float(size[inside].max()),
                )
            )
        begin, end = end, 2 * end
    return tuple(ranges)


def _suspicion(
    batch: TrajectoryBatch, recorded: Floats, log_probs: Floats, entropy: Floats, places: Ints
) -> str | None:
    """The simple mistake that explains the differences best, if one explains most of them."""
    size = float(np.abs(recorded[places] - log_probs[places]).mean())
    if len(places) < _FEWEST_POSITIONS or not size > _NEGLIGIBLE:
        return None
    explanations = [
        _shift(batch, recorded, log_probs, places, 1),
        _shift(batch, recorded, log_probs, places, -1),
        _temperature(recorded[places], log_probs[places], entropy[places]),
        _constant_ratio(recorded[places], log_probs[places]),
    ]
    left, text = min(explanations)
    return text if left < _EXPLAINS * size else None


def _shift(
    batch: TrajectoryBatch, recorded: Floats, log_probs: Floats, places: Ints, by: int
) -> tuple[float, str]:
    """What is left if position t's value lies at t + by; both within one trajectory."""
    trajectory = np.searchsorted(batch.offsets, places, side="right") - 1
    other = places + by
    inside = (other >= batch.offsets[trajectory]) & (other < batch.offsets[trajectory + 1])
    left = np.abs(recorded[other[inside]] - log_probs[places[inside]])
    where = "after" if by > 0 else "before"
    text = (
        f"each recorded value lies one position {where} its token; position t must hold the "
        "log-probability of token t itself"
    )
    return (float(left.mean()) if len(left) >= _FEWEST_POSITIONS else np.inf), text


def _temperature(recorded: Floats, log_probs: Floats, entropy: Floats) -> tuple[float, str]:
    """What is left after a change of 1 / temperature, to first order.

    The derivative of log p by the inverse temperature b is log p + H at b = 1 (H the entropy).
    """
    slope = log_probs + entropy
    square = float(slope @ slope)
    change = float((recorded - log_probs) @ slope) / square if square else 0.0
    left = float(np.abs(recorded - log_probs - change * slope).mean())
    factor = 1 / max(1 + change, 1e-3)
    text = (
        f"they look recorded at about {factor:.2g} times the temperature used here; record the "
        "sampling temperature, or log-probabilities that apply it"
    )
    return left, text


def _constant_ratio(recorded: Floats, log_probs: Floats) -> tuple[float, str]:
    """What is left of a constant factor; unrelated values also shrink, so little may be left."""
    square = float(log_probs @ log_probs)
    ratio = float(recorded @ log_probs) / square if square else 1.0
    left = float(np.abs(recorded - ratio * log_probs).mean())
    if left > _LEFT_BY_RATIO * float(np.abs(recorded - log_probs).mean()):
        left = np.inf
    hint = "base-2 logarithms" if abs(ratio * np.log(2) - 1) < 0.02 else "another unit or scale"
    return left, f"recorded values are {ratio:.3g} times the recomputed ones: {hint}"
