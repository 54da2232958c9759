"""Prove a plan legal without trusting the code that made it.

Work is recounted from hashes of prefixes, not from the sort; chains are replayed from their
definitions, not from Algorithm 1.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from harts.data.trajectory import TrajectoryBatch
from harts.errors import PlanError
from harts.plan.calls import CallPlan
from harts.plan.microbatch import MicroBatch
from harts.plan.step_plan import StepPlan
from harts.tree.order import Ints


def verify_plan(plan: StepPlan) -> None:
    """Raise PlanError at the first violation of invariants 2 and 3, or of a call plan's rules.

    O(S log S) for the hashes, O(V) for the chains.
    """
    _verify_assignment(plan)
    _verify_order(plan)
    _verify_denominators(plan)
    membership = plan.microbatch_of_trajectory
    by_microbatch = np.argsort(membership, kind="stable")
    bounds = np.searchsorted(membership[by_microbatch], np.arange(plan.num_microbatches + 1))
    for k in range(plan.num_microbatches):
        members = by_microbatch[bounds[k] : bounds[k + 1]].tolist()
        hashes = [_prefix_hashes(plan.batch, i) for i in members]
        rows = len(np.unique(np.concatenate(hashes)))
        claimed = int(plan.compact_tokens_of_microbatch[k])
        _require(rows == claimed, f"microbatch {k}", f"{rows} unique prefixes, not {claimed}")
        _require(rows <= plan.capacity, f"microbatch {k}", f"{rows} rows within {plan.capacity}")
    seen = np.zeros(len(plan.batch), np.int64)
    for replica in range(plan.replicas):
        for microbatch in plan.microbatches(replica):
            seen[microbatch.trajectory_ids] += 1
            forest = microbatch.forest
            verify_calls(microbatch.calls, forest.parent, forest.length, plan.chunk_size)
            _verify_layout(microbatch, int(plan.compact_tokens_of_microbatch[microbatch.index]))
    _require(bool((seen == 1).all()), "coverage", "every trajectory on exactly one replica, once")


def _verify_assignment(plan: StepPlan) -> None:
    num_trajectories, num_microbatches = len(plan.batch), plan.num_microbatches
    membership = plan.microbatch_of_trajectory
    _require(membership.shape == (num_trajectories,), "coverage", "one microbatch a trajectory")
    in_range = (membership >= 0) & (membership < num_microbatches)
    _require(bool(in_range.all()), "coverage", "microbatch ids 0..K-1")
    counts = np.bincount(membership, minlength=num_microbatches)
    _require(bool((counts > 0).all()), "coverage", "no empty microbatch")
    aligned = plan.replicas >= 1 and num_microbatches % plan.replicas == 0
    _require(aligned, "replicas", f"K = {num_microbatches} to be a multiple of {plan.replicas}")
    places = list(
        zip(plan.slot_of_microbatch.tolist(), plan.replica_of_microbatch.tolist(), strict=False)
    )
    every = [(slot, d) for slot in range(plan.num_slots) for d in range(plan.replicas)]
    _require(
        sorted(places) == every and len(plan.slot_of_microbatch) == len(plan.replica_of_microbatch),
        "slots",
        "exactly one microbatch for every replica in every slot",
    )


def _verify_order(plan: StepPlan) -> None:
    order, lengths = plan.order, plan.batch.lengths
    is_permutation = np.array_equal(np.sort(order.ids), np.arange(len(plan.batch)))
    _require(is_permutation, "order", "every trajectory once")
    _require(np.array_equal(order.lengths, lengths[order.ids]), "order", "the batch's lengths")
    longest = np.minimum(order.lengths, np.concatenate([[0], order.lengths[:-1]]))
    in_range = order.lcp.shape == longest.shape and bool(
        ((order.lcp >= 0) & (order.lcp <= longest)).all()
    )
    _require(in_range, "order", "common prefixes no longer than either neighbour")


def _verify_denominators(plan: StepPlan) -> None:
    denominators, mask = plan.denominators, plan.batch.loss_mask
    scored = np.add.reduceat(mask, plan.batch.offsets[:-1], dtype=np.int64)
    _require(
        denominators.num_scored_tokens == int(mask.sum())
        and denominators.num_trajectories == len(plan.batch)
        and denominators.num_scored_trajectories == int(np.count_nonzero(scored))
        and np.array_equal(denominators.scored_tokens_of_trajectory, scored),
        "denominators",
        "counts over the whole step",
    )


def _verify_layout(microbatch: MicroBatch, num_rows: int) -> None:
    layout, where = microbatch.layout, f"microbatch {microbatch.index}"
    _require(layout.num_rows == num_rows, where, f"a layout of exactly {num_rows} rows")
    row, batch = layout.semantic_to_compact, microbatch.batch
    same_tokens = np.array_equal(layout.tokens[row], batch.tokens[microbatch.batch_position])
    _require(same_tokens, where, "rows that show the tokens of its trajectories")


def verify_calls(plan: CallPlan, parent: Ints, length: Ints, chunk_size: int) -> None:
    """Raise PlanError unless every chain can run in its round.

    Its rows are contiguous on one path, each segment is computed once, and its start state
    exists before its round; sources come before the chains that start from them. O(V).
    """
    start = np.zeros(len(parent), np.int64)
    for segment in range(len(parent)):
        if parent[segment] >= 0:
            start[segment] = start[parent[segment]] + length[parent[segment]]
    computed = [segment for sequence in plan.sequences for segment in sequence.segments]
    _require(sorted(computed) == list(range(len(parent))), "chains", "every segment exactly once")
    rounds = {sequence.round for sequence in plan.sequences}
    _require(rounds == set(range(1, plan.num_rounds + 1)), "rounds", "1..num_rounds without gaps")
    owner = {s: q for q, sequence in enumerate(plan.sequences) for s in sequence.segments}
    continued = np.full(len(parent), -1, np.int64)
    for q, sequence in enumerate(plan.sequences):
        where, segments = f"sequence {q}", sequence.segments
        _require(len(segments) > 0, where, "at least one segment")
        linked = all(parent[below] == above for above, below in pairwise(segments))
        _require(linked, where, "each segment the child of the one before")
        continued[list(segments[:-1])] = segments[1:]
        first_depth = int(start[segments[0]])
        _require(sequence.start == first_depth, where, "start = depth of its first own row")
        anchor = first_depth // chunk_size * chunk_size
        _require(sequence.anchor == anchor, where, "the nearest chunk boundary as anchor")
        if anchor == 0:
            _require(sequence.source == -1, where, "a zero start state at anchor 0")
            continue
        # the parent's chain computes every row up to here since its own anchor, so it passes this
        above_owner = owner[int(parent[segments[0]])]
        _require(sequence.source == above_owner, where, "its parent's chain as source")
        _require(sequence.source < q, where, "its source before it")
        source = plan.sequences[sequence.source]
        # at the anchor of the source itself, the state was there before the source's round
        ready = source.round + 1 if anchor > source.anchor else source.round
        _require(sequence.round >= ready, where, f"round {ready} or later, when its state exists")
    _require(
        np.array_equal(plan.direct_child, continued),
        "direct_child",
        "the segments that chains join",
    )


def _prefix_hashes(batch: TrajectoryBatch, trajectory: int) -> npt.NDArray[np.uint64]:
    """A 64-bit hash of the prefix that ends at each token: sums of mixed (token, position)."""
    span = slice(batch.offsets[trajectory], batch.offsets[trajectory + 1])
    value = batch.tokens[span].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    identity = batch.position_fields.get("identity")
    if identity is not None:
        value = _mix(value ^ identity[span].view(np.uint64))
    position = np.arange(1, len(value) + 1, dtype=np.uint64)
    return np.cumsum(_mix(value + _mix(position)), dtype=np.uint64)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The splitmix64 finaliser."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _require(holds: bool, where: str, want: str) -> None:
    if not holds:
        raise PlanError(f"illegal plan: {where}: want {want}")
