"""Write a small file of agent-like rollouts: python examples/make_rollouts.py FILE [SEED]

Several attempts at a few tasks under one system prompt; one trajectory per rollout, every
generated token scored once.
"""

from __future__ import annotations

import sys
from pathlib import Path

import harts
from harts.data.synthetic import agent_batch


def main() -> None:
    """Generate, write beside, rename."""
    path = Path(sys.argv[1])
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    path.parent.mkdir(parents=True, exist_ok=True)
    batch = agent_batch(seed=seed, shape="agent_tree", raw_tokens=20_000)
    harts.write(batch, path)
    print(f"{path}: {len(batch)} trajectories, {len(batch.tokens):,} tokens")


if __name__ == "__main__":
    main()
