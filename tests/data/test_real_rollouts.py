"""Real agent logs, where they lie beside the repository: facts published with them."""

from pathlib import Path

import numpy as np
import pytest

from harts.data.aliases import find
from harts.data.read import read
from harts.data.write import write
from tests.data.comparison import assert_equal_batches

FOLDER = Path(__file__).parents[3] / "shared" / "rollouts" / "tokens"

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no real rollouts in {FOLDER.name}/")

# file, trajectories, raw tokens, trie nodes, longest, scored tokens
FACTS = [
    ("tiny_tau", 48, 15_625, 4_142, 583, 1_512),
    ("tau_airline_step_plain", 229, 1_187_905, 51_515, 8_409, 13_749),
    ("tau_airline_step_qwen3", 229, 1_188_821, 64_687, 8_413, 14_665),
    ("claude_code_step_qwen3", 69, 1_230_741, 274_916, 88_669, 21_955),
]


@pytest.mark.parametrize(("name", "trajectories", "raw", "trie", "longest", "scored"), FACTS)
def test_real_rollouts_are_read_whole(name, trajectories, raw, trie, longest, scored):
    batch = read(FOLDER / f"{name}.jsonl.xz")
    assert len(batch) == trajectories
    assert len(batch.tokens) == raw
    assert batch.lengths.max() == longest
    assert batch.loss_mask.sum() == scored
    assert find(batch.position_fields, "advantages") == "advantages"
    assert batch.trajectory_fields["reward"].dtype == np.float64
    assert count_trie_nodes(batch) == trie


def test_real_rollouts_survive_writing(tmp_path):
    batch = read(FOLDER / "tiny_tau.jsonl.xz")
    for suffix in (".jsonl.zst", ".parquet"):
        write(batch, tmp_path / f"a{suffix}")
        assert_equal_batches(read(tmp_path / f"a{suffix}"), batch)


def count_trie_nodes(batch):
    """Sorted as byte strings, each trajectory adds what it does not share with the one before."""
    keys = sorted(row["input_ids"].astype(">i4").tobytes() for row in batch.rows())
    nodes, previous = 0, np.zeros(0, ">i4")
    for key in keys:
        tokens = np.frombuffer(key, ">i4")
        shared = min(tokens.size, previous.size)
        differs = np.flatnonzero(tokens[:shared] != previous[:shared])
        nodes += tokens.size - (differs[0] if differs.size else shared)
        previous = tokens
    return nodes
