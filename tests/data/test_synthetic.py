from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.data.synthetic import SyntheticOptions, agent_batch, generate
from harts.errors import ConfigError
from tests.data.comparison import assert_equal_batches

SHAPES = ["comb", "star", "caterpillar", "agent_steps", "agent_tree"]
AGENTS = ["agent_steps", "agent_tree"]


def trie_of(batch):
    """Prefix -> how often its last token is scored and how often it occurs, by brute force."""
    scored, occurs = {}, {}
    for row in batch.rows():
        tokens, mask = row["input_ids"].tobytes(), row["loss_mask"].tolist()
        prefix = 0
        for position, is_scored in enumerate(mask):
            prefix = hash((prefix, tokens[4 * position : 4 * position + 4]))
            scored[prefix] = scored.get(prefix, 0) + is_scored
            occurs[prefix] = occurs.get(prefix, 0) + 1
    return scored, occurs


@pytest.mark.parametrize("shape", AGENTS)
@pytest.mark.parametrize("seed", [0, 1, 197])
def test_an_agent_batch_has_the_compression_and_size_it_promises(shape, seed):
    batch = agent_batch(shape=shape, seed=seed)
    scored, occurs = trie_of(batch)
    assert abs(len(batch.tokens) / len(occurs) - 5.6) < 0.02
    assert abs(len(batch.tokens) / 45_000 - 1) < 0.02
    assert set(scored.values()) == {0, 1}
    assert batch.tokens.max() < 512


@pytest.mark.parametrize("compression", [7.0, 12.0])
def test_an_agent_batch_takes_other_compressions_and_sizes(compression):
    batch = agent_batch(compression=compression, raw_tokens=8000, vocabulary=64)
    assert len(batch.tokens) / len(trie_of(batch)[1]) == pytest.approx(compression, abs=0.2)
    assert len(batch.tokens) == pytest.approx(8000, rel=0.1)


@given(
    st.sampled_from(AGENTS),
    st.integers(0, 2**32),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 4),
)
@settings(max_examples=30)
def test_every_generated_token_is_scored_once(shape, seed, tasks, rollouts, turns):
    options = SyntheticOptions(
        shape=shape, seed=seed, tasks=tasks, rollouts=rollouts, turns=turns, turn_tokens=4
    )
    batch = generate(options)
    scored, _ = trie_of(batch)
    assert max(scored.values()) == 1
    assert (np.add.reduceat(batch.loss_mask, batch.offsets[:-1], dtype=np.int64) > 0).all()
    assert set(batch.trajectory_fields["group_id"].tolist()) == set(range(tasks))


def test_step_wise_prompts_are_the_history():
    batch = generate(SyntheticOptions(shape="agent_steps", rollouts=1, tasks=1, turns=6))
    rows = batch.rows()
    assert len(rows) > 2
    for earlier, later in pairwise(rows):
        length = earlier["input_ids"].size
        assert later["input_ids"][:length].tolist() == earlier["input_ids"].tolist()
        assert not later["loss_mask"][:length].any()


def test_rollouts_of_a_task_may_fork_inside_an_earlier_one():
    def common(fork_probability):
        options = SyntheticOptions(
            shape="agent_tree", tasks=1, rollouts=6, fork_probability=fork_probability
        )
        occurs = np.array(list(trie_of(generate(options))[1].values()))
        return set(occurs.tolist())

    assert common(0.0) == {1, 6}
    assert {1, 6} < common(1.0)


@pytest.mark.parametrize("shape", ["comb", "star", "caterpillar"])
def test_simple_shapes_have_the_forks_they_are_named_for(shape):
    options = SyntheticOptions(shape=shape, tasks=2, rollouts=3, turns=5, system_tokens=7)
    batch = generate(options)
    per_tree = {"comb": 5, "star": 3, "caterpillar": 5 * 4}[shape]
    assert len(batch) == 2 * per_tree
    _, occurs = trie_of(batch)
    expected = {"comb": {5, 4, 3, 2, 1}, "star": {3, 1}, "caterpillar": {20, 16, 12, 8, 4, 1}}
    assert set(occurs.values()) == expected[shape]
    assert sum(count == per_tree for count in occurs.values()) >= 2 * 7
    assert not batch.loss_mask[:7].any()


def test_a_caterpillar_may_be_deeper_than_the_recursion_limit():
    options = SyntheticOptions(
        shape="caterpillar", tasks=1, turns=1200, rollouts=1, turn_tokens=1, system_tokens=1
    )
    assert len(generate(options)) == 2400


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_options_give_the_same_bits_and_another_seed_does_not(shape):
    first, second, other = (
        generate(SyntheticOptions(shape=shape, seed=seed)) for seed in (3, 3, 4)
    )
    assert_equal_batches(first, second)
    assert first.tokens.tobytes() != other.tokens.tobytes()


@pytest.mark.parametrize("shape", SHAPES)
def test_advantages_are_rewards_normalised_over_the_rollouts_of_a_group(shape):
    fields = generate(SyntheticOptions(shape=shape)).trajectory_fields
    for group in np.unique(fields["group_id"]):
        of_rollout = {}
        for index in np.flatnonzero(fields["group_id"] == group):
            pair = fields["reward"][index], fields["advantages"][index]
            assert of_rollout.setdefault(fields["rollout_id"][index], pair) == pair
        reward, advantages = np.array(list(of_rollout.values())).T
        expected = (reward - reward.mean()) / (reward.std() + 1e-6)
        np.testing.assert_allclose(advantages, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {"shape": "bush"},
        {"tasks": 0},
        {"turns": 1.5},
        {"rollouts": True},
        {"vocabulary": 1},
        {"fork_probability": 1.5},
        {"fork_probability": float("nan")},
    ],
    ids=str,
)
def test_wrong_options_are_refused(options):
    with pytest.raises(ConfigError, match=r"; (use|give)"):
        SyntheticOptions(**options)


def test_what_cannot_be_made_is_refused():
    with pytest.raises(ConfigError, match="raise vocabulary"):
        generate(SyntheticOptions(shape="star", rollouts=20, vocabulary=8))
    with pytest.raises(ConfigError, match=r"compression is 1\.0; give a number between"):
        agent_batch(compression=1.0)
