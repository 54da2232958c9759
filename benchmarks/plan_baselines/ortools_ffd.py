"""OR-Tools + FFD: CP-SAT partitions each rollout tree, first-fit decreasing deals trees out.

The baseline of the paper's section 5.2. A tree is one task (`group_id`); the system prompt that
tasks share counts in each partition. Trees are dealt to replicas by first-fit decreasing of their
compact rows at the smallest bin that needs no more than D bins (MULTIFIT); partitions are then
split at their lowest valley, the cheapest split there is, until replicas have equal numbers, and
each replica runs its partitions heaviest first.

CP-SAT looks at one tree at a time, so the deal to replicas does not change what it finds; doing it
afterwards lets the deal count the rows of the partitions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from harts.data.aliases import find
from harts.data.trajectory import TrajectoryBatch
from harts.errors import PlanError
from harts.plan.placement import Placement, place_greedily
from harts.plan.step_plan import StepPlan
from harts.tree.order import Ints, TrajectoryOrder, sort_trajectories
from plan_baselines.assemble import assemble, partition_of, rows_of
from plan_baselines.tree_partition import partition_tree

Size = Literal["compact", "raw", "partitions"]


@dataclass(frozen=True, kw_only=True)
class PartitionedTrees:
    """What CP-SAT found. members: ascending places of each partition; tree_of_partition: (K,).

    raw_of_tree: tokens of each tree. num_optimal: trees with a proven optimum. seconds: sort,
    models and solving.
    """

    order: TrajectoryOrder
    members: list[Ints]
    tree_of_partition: Ints
    raw_of_tree: Ints
    num_optimal: int
    seconds: float


def plan_ortools(
    batch: TrajectoryBatch,
    capacity: int,
    replicas: int,
    *,
    seconds_per_tree: float = 1.0,
    workers: int = 2,
) -> StepPlan:
    """Partition every tree, then arrange; about trees * seconds_per_tree.

    Raises PlanError where there are too few trajectories for a multiple of `replicas`.
    """
    trees = partition_trees(batch, capacity, seconds_per_tree=seconds_per_tree, workers=workers)
    return arrange(batch, trees, capacity, replicas)


def partition_trees(
    batch: TrajectoryBatch,
    capacity: int,
    *,
    seconds_per_tree: float,
    workers: int = 2,
    progress: Callable[[str], None] | None = None,
) -> PartitionedTrees:
    """Sort, then one CP-SAT model a tree; a tree that fits one partition needs no model."""
    started = time.perf_counter()
    order = sort_trajectories(batch)
    tree_of_place = _tree_of_trajectory(batch)[order.ids]
    num_trees = int(tree_of_place.max()) + 1
    members: list[Ints] = []
    tree_of_partition: list[int] = []
    num_optimal = 0
    for tree in range(num_trees):
        places = np.flatnonzero(tree_of_place == tree)
        found = partition_tree(
            order.take(places), capacity, seconds=seconds_per_tree, workers=workers
        )
        num_optimal += found.optimal
        for k in range(int(found.partition_of_place.max()) + 1):
            members.append(places[found.partition_of_place == k])
            tree_of_partition.append(tree)
        if progress is not None:
            progress(f"tree {tree + 1}/{num_trees}")
    return PartitionedTrees(
        order=order,
        members=members,
        tree_of_partition=np.array(tree_of_partition),
        raw_of_tree=np.bincount(tree_of_place, weights=order.lengths).astype(np.int64),
        num_optimal=num_optimal,
        seconds=time.perf_counter() - started,
    )


def arrange(
    batch: TrajectoryBatch,
    trees: PartitionedTrees,
    capacity: int,
    replicas: int,
    *,
    size: Size = "compact",
    merge: bool = False,
) -> StepPlan:
    """Deal trees to replicas by `size`, split to equal numbers, order the slots.

    merge: first join partitions of a replica, of whatever tree, while a union fits and saves
    rows, most first. That goes beyond the paper's baseline and is reported beside it.
    """
    started = time.perf_counter() - trees.seconds
    replica_of_tree = _first_fit_decreasing(_sizes(trees, size), replicas)
    of_replica: list[list[Ints]] = [[] for _ in range(replicas)]
    for places, tree in zip(trees.members, trees.tree_of_partition.tolist(), strict=True):
        of_replica[replica_of_tree[tree]].append(places)
    if merge:
        of_replica = [_merge(trees.order, members, capacity) for members in of_replica]
    most = max(len(members) for members in of_replica)
    if all(sum(map(len, members)) >= most for members in of_replica):
        of_replica = [_split(trees.order, members, most) for members in of_replica]
        partition = partition_of(trees.order, [m for members in of_replica for m in members])
        replica = np.repeat(np.arange(replicas), most)
        placement = Placement(replica, _heaviest_first(partition.rows, replica))
    else:  # fewer trees than replicas, or too small ones: deal partitions instead of trees
        wanted = -(-len(trees.members) // replicas) * replicas
        if wanted > len(batch):
            raise PlanError(
                f"{len(batch)} trajectories do not form {wanted} non-empty microbatches; "
                "lower replicas, raise the capacity, or give more trajectories"
            )
        partition = partition_of(trees.order, _split(trees.order, trees.members, wanted))
        placement = place_greedily(partition.rows, replicas=replicas)
    return assemble(
        batch,
        trees.order,
        partition,
        placement,
        capacity=capacity,
        replicas=replicas,
        started=started,
    )


def _tree_of_trajectory(batch: TrajectoryBatch) -> Ints:
    """Trees 0.. by the task of each trajectory, or by its first token where tasks are unknown."""
    name = find(batch.trajectory_fields, "group_id")
    tasks = batch.tokens[batch.offsets[:-1]] if name is None else batch.trajectory_fields[name]
    return np.unique(tasks, return_inverse=True)[1].astype(np.int64)


def _sizes(trees: PartitionedTrees, size: Size) -> Ints:
    if size == "raw":
        return trees.raw_of_tree
    rows = [rows_of(trees.order, places) for places in trees.members]
    weights = None if size == "partitions" else np.array(rows)
    return np.bincount(trees.tree_of_partition, weights=weights).astype(np.int64)


def _first_fit_decreasing(sizes: Ints, num_bins: int) -> list[int]:
    """Bin of each item at the smallest bin capacity that bisection finds to need <= num_bins."""
    low, high = max(int(sizes.max()), -(-int(sizes.sum()) // num_bins)), int(sizes.sum())
    while low < high:
        middle = (low + high) // 2
        if max(_first_fit(sizes, middle)) < num_bins:
            high = middle
        else:
            low = middle + 1
    return _first_fit(sizes, high)


def _first_fit(sizes: Ints, capacity: int) -> list[int]:
    bins, loads = [0] * len(sizes), []
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        fitting = next((b for b, load in enumerate(loads) if load + size <= capacity), len(loads))
        if fitting == len(loads):
            loads.append(0)
        loads[fitting] += size
        bins[item] = fitting
    return bins


def _merge(order: TrajectoryOrder, members: list[Ints], capacity: int) -> list[Ints]:
    """Join the pair that saves most rows while its union fits; O(K^2) unions, then K a step."""
    groups = dict(enumerate(members))
    rows = {key: rows_of(order, places) for key, places in groups.items()}
    saving: dict[tuple[int, int], int] = {}

    def consider(a: int, b: int) -> None:
        union = rows_of(order, np.union1d(groups[a], groups[b]))
        if union <= capacity:
            saving[a, b] = rows[a] + rows[b] - union

    for a in groups:
        for b in groups:
            if a < b:
                consider(a, b)
    while saving:
        a, b = max(saving, key=saving.__getitem__)
        groups[a] = np.union1d(groups[a], groups.pop(b))
        rows[a] = rows_of(order, groups[a])
        saving = {pair: s for pair, s in saving.items() if not {a, b} & set(pair)}
        for other in groups:
            if other != a:
                consider(min(a, other), max(a, other))
    return list(groups.values())


def _split(order: TrajectoryOrder, members: list[Ints], wanted: int) -> list[Ints]:
    """Split the partition with the lowest valley there, until there are `wanted`."""
    members = list(members)
    while len(members) < wanted:
        valleys = [_lowest_valley(order, places) for places in members]
        index = min(range(len(members)), key=lambda k: valleys[k][:2])
        cut = valleys[index][2]
        members[index : index + 1] = [members[index][:cut], members[index][cut:]]
    return members


def _lowest_valley(order: TrajectoryOrder, places: Ints) -> tuple[float, int, int]:
    """Rows that a cut duplicates, rows of the larger side and where to cut; inf for one member."""
    if len(places) < 2:
        return np.inf, 0, 0
    inside = order.take(places)
    left = np.cumsum(inside.new_rows)[:-1]
    larger = np.maximum(left, left[-1] + inside.new_rows[-1] - left + inside.lcp[1:])
    cut = int(np.lexsort((larger, inside.lcp[1:]))[0])
    return float(inside.lcp[cut + 1]), int(larger[cut]), cut + 1


def _heaviest_first(rows: Ints, replica: Ints) -> Ints:
    slot = np.empty(len(rows), np.int64)
    for d in np.unique(replica):
        mine = np.flatnonzero(replica == d)
        slot[mine[np.argsort(-rows[mine], kind="stable")]] = np.arange(len(mine))
    return slot
