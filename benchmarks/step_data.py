"""Batches for the step benchmark, and the files that carry them to a machine without the sources.

    python benchmarks/step_data.py carry/step   # table2-row1.jsonl.xz, claude-code.jsonl.xz

A file holds the trajectories of one microbatch that the planner made of a whole step at capacity
65,536: row 1 of the paper's Table 2 (generated), and the shapes of real Claude Code sessions.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from plan_data import shape_batch, table2_batch

import harts
from harts.data.write import write

CAPACITY = 65_536


def prototype_batch(rows: int = CAPACITY, seed: int = 0) -> harts.TrajectoryBatch:
    """One agent-like tree of `rows` unique tokens, every position but the first scored.

    A long main line with side branches that may fork again, the same tree that the first
    measurements of this design used: S/C 5.563 for 65,536 rows and seed 0.
    """
    tree = _grown(rows, random.Random(seed))
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(0, 157_000, length) for length in tree.length]
    for children in tree.children:  # siblings differ in their first token
        for rank, child in enumerate(children):
            tokens[child][0] = rank
    leaves = [node for node, below in enumerate(tree.children) if not below]
    rows_of = [np.concatenate([tokens[node] for node in tree.path(leaf)]) for leaf in leaves]
    return harts.TrajectoryBatch.from_rows(
        [
            {"input_ids": ids, "loss_mask": np.arange(len(ids)) > 0, "group_id": "tree"}
            for ids in rows_of
        ]
    )


@dataclass
class _Tree:
    parent: list[int] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    children: list[list[int]] = field(default_factory=list)

    def add(self, parent: int, length: int) -> int:
        self.parent.append(parent)
        self.length.append(length)
        self.children.append([])
        if parent >= 0:
            self.children[parent].append(len(self.parent) - 1)
        return len(self.parent) - 1

    def path(self, node: int) -> list[int]:
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parent[node]
        return nodes[::-1]


def _grown(rows: int, rng: random.Random) -> _Tree:
    """The first segment is up to 12 % of the rows; 55 % of the others branch off recent ones."""
    tree = _Tree()
    line = tree.add(-1, int(rows * 0.12 * rng.uniform(0.3, 1)) + 1)
    total, nodes = tree.length[0], [line]
    while total < rows:
        length = min(rows - total, max(1, int(rng.expovariate(1 / 1500))))
        parent = rng.choice(nodes[-12:]) if rng.random() < 0.55 else line
        node = tree.add(parent, length)
        nodes.append(node)
        total += length
        if parent == line and rng.random() < 0.7:
            line = node
    return tree


def one_microbatch(batch: harts.TrajectoryBatch, capacity: int = CAPACITY) -> harts.TrajectoryBatch:
    """The trajectories of the microbatch whose compression is the median of the planned step."""
    plan = harts.plan_step(batch, capacity)
    full = [mb for mb in plan.microbatches() if mb.num_rows >= 0.9 * capacity]
    by_compression = sorted(full, key=lambda mb: mb.num_tokens / mb.num_rows)
    chosen = by_compression[len(by_compression) // 2]
    compression = chosen.num_tokens / chosen.num_rows
    print(
        f"compression {plan.compression:.3f} of the step, {compression:.3f} of the microbatch: "
        f"{chosen.num_rows:,} rows, {len(chosen.trajectory_ids)} trajectories; the step was "
        f"planned in {plan.plan_seconds:.2f} s, {plan.num_microbatches} microbatches"
    )
    picked = batch.select(chosen.trajectory_ids)
    return replace(picked, position_fields={}, trajectory_fields={})


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    write(one_microbatch(table2_batch(1)), folder / "table2-row1.jsonl.xz")
    claude = shape_batch("claude_code_sessions.qwen3", None)
    write(one_microbatch(claude), folder / "claude-code.jsonl.xz")


if __name__ == "__main__":
    main()
