"""Rows as verl, AReaL, SkyRL, rLLM, TRL and slime write them become the same two trajectories."""

import json

import numpy as np
import pytest

from harts.data.aliases import find
from harts.data.read import read

PROMPT, RESPONSE, MASK = [1, 2], [3, 4, 5], [1, 0, 1]

DIALECTS = {
    "flat": {"input_ids": PROMPT + RESPONSE, "loss_mask": [0, 0, *MASK]},
    "AReaL, padded, in columns": {
        "input_ids": [[*PROMPT, *RESPONSE, 0, 0]],
        "loss_mask": [[0, 0, *MASK, 0, 0]],
        "attention_mask": [[1, 1, 1, 1, 1, 0, 0]],
        "logprobs": [[0, 0, -1.0, 0, -3.0, 0, 0]],
        "versions": [[-1, -1, 4, 4, 4, 0, 0]],
        "rewards": [0.5],
    },
    "SkyRL": {
        "prompt_token_ids": [PROMPT],
        "response_ids": [RESPONSE],
        "loss_masks": [MASK],
        "rollout_logprobs": [[-1.0, 0, -3.0]],
        "rewards": [0.5],
        "trajectory_ids": [{"instance_id": "t", "repetition_id": 3}],
        "is_last_step": [True],
    },
    "rLLM": {
        "prompt_ids": PROMPT,
        "response_ids": RESPONSE,
        "response_mask": MASK,
        "logprobs": [-1.0, 0, -3.0],
        "reward": 0.5,
        "advantage": 1.5,
    },
    "verl": {
        "prompts": [0, 0, *PROMPT],
        "responses": [*RESPONSE, 0],
        "response_mask": [*MASK, 0],
        "attention_mask": [0, 0, 1, 1, 1, 1, 1, 0],
        "input_ids": [0, 0, *PROMPT, *RESPONSE, 0],
        "position_ids": [0, 0, 0, 1, 2, 3, 4, 0],
        "rollout_log_probs": [-1.0, 0, -3.0, 0],
        "token_level_scores": [0, 0, 0.5, 0],
        "uid": "t",
    },
    "TRL": {
        "prompt_ids": PROMPT,
        "completion_ids": RESPONSE,
        "logprobs": [-1.0, 0, -3.0],
        "env_mask": MASK,
        "reward": 0.5,
    },
    "TRL tools": {"prompt_ids": PROMPT, "completion_ids": RESPONSE, "tool_mask": MASK},
    "slime": {
        "tokens": PROMPT + RESPONSE,
        "response_length": 3,
        "loss_mask": MASK,
        "rollout_log_probs": [-1.0, 0, -3.0],
        "reward": 0.5,
        "group_index": 7,
    },
}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("container", ["jsonl", "parquet"])
def test_a_dialect_is_read_as_the_plain_row(tmp_path, dialect, container):
    row = DIALECTS[dialect]
    if container == "jsonl":
        path = tmp_path / "a.jsonl"
        path.write_text(json.dumps(row))
    else:
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet as pq

        path = tmp_path / "a.parquet"
        if any(isinstance(v, list) and isinstance(v[0], list) for v in row.values()):
            row = {name: value[0] for name, value in row.items()}
        pq.write_table(pa.Table.from_pylist([row]), path)
    batch = read(path)
    assert batch.tokens.tolist() == PROMPT + RESPONSE
    assert batch.loss_mask.tolist() == [False, False, True, False, True]
    log_probs = find(batch.position_fields, "old_log_probs")
    if log_probs is not None:
        assert batch.position_fields[log_probs].tolist() == [0, 0, -1, 0, -3]
    reward = find(batch.trajectory_fields, "reward")
    if reward is not None:
        assert batch.trajectory_fields[reward].tolist() == [0.5]


def test_ids_of_skyrl_and_verl_name_the_group(tmp_path):
    for dialect in ("SkyRL", "verl"):
        path = tmp_path / "a.jsonl"
        path.write_text(json.dumps(DIALECTS[dialect]))
        fields = read(path).trajectory_fields
        assert fields[find(fields, "group_id")].tolist() == ["t"]


def test_versions_of_areal_lose_their_padding_too(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(DIALECTS["AReaL, padded, in columns"]))
    fields = read(path).position_fields
    assert np.array_equal(fields[find(fields, "version")], [-1, -1, 4, 4, 4])
