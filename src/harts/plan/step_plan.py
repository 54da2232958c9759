"""The plan of one optimisation step: what runs where, and what it costs."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from harts.data.trajectory import TrajectoryBatch
from harts.plan.denominators import Denominators
from harts.plan.microbatch import MicroBatch
from harts.tree.order import Ints, TrajectoryOrder


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Microbatches of a batch, with their replica and slot.

    microbatch_of_trajectory: int64 (N,), ids 0..K-1. replica_of_microbatch,
    slot_of_microbatch, compact_tokens_of_microbatch: int64 (K,). order: the whole batch in
    lexicographic order; trie_tokens: rows if everything were one microbatch. dropped: int64,
    trajectories of the given batch that were longer than the capacity and are not in `batch`.
    """

    batch: TrajectoryBatch
    order: TrajectoryOrder
    capacity: int
    replicas: int
    chunk_size: int
    microbatch_of_trajectory: Ints
    replica_of_microbatch: Ints
    slot_of_microbatch: Ints
    compact_tokens_of_microbatch: Ints
    denominators: Denominators
    plan_seconds: float
    dropped: Ints = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def num_microbatches(self) -> int:
        """K, a multiple of the replicas."""
        return len(self.compact_tokens_of_microbatch)

    @property
    def num_slots(self) -> int:
        """Slots K / D."""
        return self.num_microbatches // self.replicas

    @property
    def raw_tokens(self) -> int:
        """Tokens of all trajectories, S."""
        return len(self.batch.tokens)

    @property
    def compact_tokens(self) -> int:
        """Rows computed: compact tokens summed over microbatches."""
        return int(self.compact_tokens_of_microbatch.sum())

    @property
    def trie_tokens(self) -> int:
        """Unique prefixes of the whole batch, a lower bound of compact_tokens."""
        return int(self.order.new_rows.sum())

    @property
    def compression(self) -> float:
        """raw_tokens / compact_tokens."""
        return self.raw_tokens / self.compact_tokens

    @cached_property
    def slot_imbalance(self) -> dict[str, float]:
        """Median and 95th percentile of Equation 23 within slots, as fractions."""
        per_slot = _imbalance(self._work_of_slot_and_replica)
        p50, p95 = np.quantile(per_slot, [0.5, 0.95])
        return {"p50": float(p50), "p95": float(p95)}

    @cached_property
    def step_imbalance(self) -> float:
        """Equation 23 over the replicas' totals of the step, as a fraction."""
        return float(_imbalance(self._work_of_slot_and_replica.sum(axis=0, keepdims=True))[0])

    def microbatches(self, replica: int = 0) -> list[MicroBatch]:
        """The microbatches of one replica in slot order."""
        if not 0 <= replica < self.replicas:
            raise IndexError(f"replica {replica}; this plan has replicas 0 to {self.replicas - 1}")
        mine = np.flatnonzero(self.replica_of_microbatch == replica)
        return [self._all[k] for k in mine[np.argsort(self.slot_of_microbatch[mine])].tolist()]

    def summary(self) -> dict[str, Any]:
        """The keys of `harts plan --json`; rounds and replay plan every microbatch's chains."""
        calls = [microbatch.calls for microbatch in self._all]
        return {
            "trajectories": len(self.batch),
            "raw_tokens": self.raw_tokens,
            "trie_tokens": self.trie_tokens,
            "compact_tokens": self.compact_tokens,
            "compression": self.compression,
            "microbatches": self.num_microbatches,
            "slots": self.num_slots,
            "replicas": self.replicas,
            "slot_imbalance": self.slot_imbalance,
            "step_imbalance": self.step_imbalance,
            "plan_seconds": self.plan_seconds,
            "rounds": {
                "max": max(call.num_rounds for call in calls),
                "mean": float(np.mean([call.num_rounds for call in calls])),
            },
            "replay_tokens": sum(call.replay_tokens for call in calls),
        }

    def to_json(self) -> str:
        """Summary, options and assignments as one JSON object."""
        assignments = {
            name: getattr(self, name).tolist()
            for name in (
                "microbatch_of_trajectory",
                "replica_of_microbatch",
                "slot_of_microbatch",
                "compact_tokens_of_microbatch",
            )
        }
        options = {"capacity": self.capacity, "chunk_size": self.chunk_size}
        return json.dumps(self.summary() | options | assignments)

    @cached_property
    def _all(self) -> list[MicroBatch]:
        microbatch_of_place = self.microbatch_of_trajectory[self.order.ids]
        by_microbatch = np.argsort(microbatch_of_place, kind="stable")
        bounds = np.searchsorted(
            microbatch_of_place[by_microbatch], np.arange(self.num_microbatches + 1)
        )
        return [
            MicroBatch(
                k,
                self.batch,
                self.order.take(by_microbatch[bounds[k] : bounds[k + 1]]),
                self.chunk_size,
            )
            for k in range(self.num_microbatches)
        ]

    @cached_property
    def _work_of_slot_and_replica(self) -> Ints:
        work = np.zeros((self.num_slots, self.replicas), np.int64)
        work[self.slot_of_microbatch, self.replica_of_microbatch] = (
            self.compact_tokens_of_microbatch
        )
        return work


def _imbalance(work: Ints) -> npt.NDArray[np.float64]:
    """Excess of the heaviest replica over the mean, per row (Equation 23)."""
    imbalance: npt.NDArray[np.float64] = work.max(axis=1) / work.mean(axis=1) - 1
    return imbalance
