"""Readers of formats that carry token ids: what each trajectory holds, and where it was read."""

import json

import numpy as np
import pytest

from harts.data.read import detect, read
from harts.errors import ConfigError, DataError
from harts.plan.planner import plan_step
from tests.data.samples.records import (
    ATIF,
    DROP,
    EPISODE,
    EVENTS,
    SHAPE,
    TRACE,
    agent_step,
    changed,
    model_request,
    write_lines,
)


def rows(batch):
    return [
        (row["input_ids"].tolist(), np.flatnonzero(row["loss_mask"]).tolist())
        for row in batch.rows()
    ]


def test_a_verifiers_trace_gives_one_trajectory_a_branch(tmp_path):
    batch = read(write_lines(tmp_path / "traces.jsonl", EPISODE))
    assert rows(batch) == [
        ([1, 2, 3, 9, 5, 6, 7, 8, 4], [4, 5, 7, 8]),
        ([1, 2, 3, 9, 5, 6, 11, 12], [4, 5]),
    ]
    log_probs = batch.position_fields["rollout_log_probs"]
    assert log_probs.tolist() == [0, 0, 0, 0, -0.5, -0.25, 0, -1, -2, 0, 0, 0, 0, -0.5, -0.25, 0, 0]
    assert batch.position_fields["advantages"][:9].tolist() == [0, 0, 0, 0, 0.5, 0.5, 0, 1, 2]
    assert batch.trajectory_fields["reward"].tolist() == [1.5, 1.5]
    assert batch.trajectory_fields["group_id"].tolist() == ["g1", "g1"]
    assert batch.name_of(1) == "trajectory 1 (traces.jsonl:1 trace 0 leaf 4)"


def test_a_verifiers_trace_by_steps_scores_each_sampled_node_once(tmp_path):
    path = write_lines(tmp_path / "traces.jsonl", EPISODE)
    for sampling in ("step", "tree-step"):
        assert rows(read(path, sampling=sampling)) == [
            ([1, 2, 3, 9, 5, 6], [4, 5]),
            ([1, 2, 3, 9, 5, 6, 7, 8, 4], [7, 8]),
        ]


def test_a_trace_that_failed_before_its_first_call_is_passed_over(tmp_path):
    failed = {**EPISODE, "traces": [{**TRACE, "nodes": []}]}
    path = write_lines(tmp_path / "a.jsonl", failed, EPISODE, TRACE)
    batch = read(path)
    assert len(batch) == 4
    assert batch.sources[2] == "a.jsonl:3 leaf 3"


def test_the_tree_of_verifiers_nodes_is_the_tree_of_the_plan(tmp_path):
    plan = plan_step(read(write_lines(tmp_path / "traces.jsonl", EPISODE)))
    assert plan.trie_tokens == sum(len(node["token_ids"]) for node in TRACE["nodes"])


def test_each_model_call_of_an_atif_trajectory_is_a_row(tmp_path):
    path = tmp_path / "trajectory.json"
    path.write_text(json.dumps(ATIF, indent=2))
    batch = read(path)
    assert rows(batch) == [([1, 2, 3, 4], [2, 3]), ([1, 2, 3, 4, 5, 6], [5])]
    assert batch.position_fields["rollout_log_probs"][2:4].tolist() == [-0.5, -0.5]
    assert batch.trajectory_fields["trajectory_id"].tolist() == ["root/2", "root/3"]
    assert batch.sources == ("trajectory.json step 2", "trajectory.json step 3")


@pytest.mark.parametrize("minor", range(9))
def test_every_version_of_atif_is_read(tmp_path, minor):
    path = write_lines(tmp_path / "a.jsonl", {**ATIF, "schema_version": f"ATIF-v1.{minor}"})
    assert detect(path) == "atif"
    assert len(read(path)) == 2


def test_copied_context_and_steps_without_a_model_call_are_no_rows(tmp_path):
    copied = changed(ATIF, "steps.1.is_copied_context", True)
    assert len(read(write_lines(tmp_path / "a.jsonl", copied))) == 1
    dispatched = changed(ATIF, "steps.1.llm_call_count", 0)
    assert len(read(write_lines(tmp_path / "a.jsonl", dispatched))) == 1


def test_continued_and_subagent_trajectories_are_followed(tmp_path):
    inner = {
        **ATIF,
        "trajectory_id": "inner",
        "steps": [agent_step(1, [20], [21])],
    }
    root = changed(ATIF, "steps.1.observation.results.0.subagent_trajectory_ref", [
        {"trajectory_id": "inner"},
        {"trajectory_path": "sub.json"},
    ])  # fmt: skip
    root |= {"subagent_trajectories": [inner], "continued_trajectory_ref": "t.cont-1.json"}
    continued = {
        **ATIF,
        "trajectory_id": "more",
        "steps": [
            {**ATIF["steps"][1], "is_copied_context": True},
            agent_step(2, [30], [31]),
        ],
    }
    outer = {**ATIF, "trajectory_id": None, "steps": [agent_step(1, [40], [41])]}
    for name, record in (("t.json", root), ("t.cont-1.json", continued), ("sub.json", outer)):
        (tmp_path / name).write_text(json.dumps(record))
    batch = read(tmp_path / "t.json")
    assert [tokens for tokens, _ in rows(batch)] == [
        [1, 2, 3, 4],
        [1, 2, 3, 4, 5, 6],
        [30, 31],
        [20, 21],
        [40, 41],
    ]
    ids = batch.trajectory_fields["trajectory_id"].tolist()
    assert ids == ["root/2", "root/3", "more/2", "inner/1", "root/sub/1"]
    assert set(batch.trajectory_fields["rollout_id"]) == {"run-1"}


def test_log_probs_that_some_steps_lack_are_left_out_with_a_warning(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", changed(ATIF, "steps.2.metrics.logprobs", DROP))
    with pytest.warns(UserWarning, match=r"log-probs are left out, a.jsonl:1 step 3 has none"):
        assert not read(path).position_fields


def test_agent_lightning_events_are_rows_with_the_rewards_that_follow(tmp_path):
    batch = read(write_lines(tmp_path / "events.jsonl", *EVENTS))
    assert rows(batch) == [
        ([1, 2, 3], [2]),
        ([1, 2, 4, 5], [2, 3]),
        ([1, 2, 3, 6, 7], [4]),
    ]
    assert batch.trajectory_fields["reward"].tolist() == [1, 0, 1]
    assert batch.trajectory_fields["trajectory_id"].tolist() == [
        "r1/at-1/0",
        "r2/at-1/0",
        "r1/at-1/1",
    ]


def test_agent_lightning_triplets_hold_their_ids_beside_the_response(tmp_path):
    event = model_request(
        "r1", [], [], prompt_token_ids=[1, 2], response_token_ids=[3], response_log_probs=[-1.5]
    )
    batch = read(write_lines(tmp_path / "events.jsonl", event))
    assert rows(batch) == [([1, 2, 3], [2])]
    assert batch.position_fields["rollout_log_probs"].tolist() == [0, 0, -1.5]
    assert np.isnan(batch.trajectory_fields["reward"]).all()


def test_tree_step_holds_a_shared_step_once_with_the_mean_reward(tmp_path):
    events = [
        {**event, "group_id": "g"}
        for event in (model_request("r1", [1], [2]), model_request("r2", [1], [2]))
    ]
    path = write_lines(tmp_path / "events.jsonl", *events, *EVENTS[-2:])
    assert len(read(path, sampling="step")) == 2
    batch = read(path, sampling="tree-step")
    assert rows(batch) == [([1, 2], [1])]
    assert batch.trajectory_fields["reward"].tolist() == [0.5]


def test_shapes_become_rows_whose_trie_is_the_given_tree(tmp_path):
    batch = read(write_lines(tmp_path / "shapes.jsonl", SHAPE, {**SHAPE, "task": "b"}))
    assert batch.lengths.tolist() == [5, 8, 3] * 2
    assert [scored for _, scored in rows(batch)][:3] == [[3, 4], [5, 6, 7], [2]]
    assert plan_step(batch).trie_tokens == 2 * sum(length for _, length in SHAPE["seg"])


def test_rewards_beside_the_file_are_found_by_trajectory_rollout_or_group(tmp_path):
    path = write_lines(tmp_path / "events.jsonl", *EVENTS[:3])
    assert read(path, rewards={"r1": 2.0, "r2": None}).trajectory_fields["reward"][0] == 2
    (tmp_path / "one.json").write_text('{"r1/at-1": 2.0, "r1": 3.0, "r2/at-1/0": 4}')
    lines = [{"rollout_id": f"r{n}/at-1", "reward": n, "group_id": "g"} for n in (1, 2)]
    write_lines(tmp_path / "lines.jsonl", *lines)
    (tmp_path / "table.csv").write_text("rollout_id,reward\nr1/at-1,1\nr2/at-1,2\n")
    assert read(path, rewards=tmp_path / "one.json").trajectory_fields["reward"].tolist() == [
        2,
        4,
        2,
    ]
    for name in ("lines.jsonl", "table.csv"):
        batch = read(path, rewards=tmp_path / name)
        assert batch.trajectory_fields["reward"].tolist() == [1, 2, 1]
    batch = read(path, rewards=tmp_path / "lines.jsonl")
    assert batch.trajectory_fields["group_id"].tolist() == ["g"] * 3
    with pytest.raises(DataError, match=r"trajectory 1 .*has no reward for it under .*; add it"):
        read(path, rewards={"r1": 1})


def test_options_that_mean_nothing_for_a_format_are_refused(tmp_path):
    flat = write_lines(tmp_path / "a.jsonl", {"input_ids": [1, 2], "loss_mask": [0, 1]})
    for option in ({"tokenizer": "x"}, {"chat_template": "chatml"}, {"sampling": "step"}):
        with pytest.raises(ConfigError, match=f"{next(iter(option))} is given, but jsonl files"):
            read(flat, **option)
    traces = write_lines(tmp_path / "b.jsonl", EPISODE)
    with pytest.raises(ConfigError, match="sampling is 'leaf'; use step or tree-step"):
        read(traces, sampling="leaf")


def test_the_format_can_be_said(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", EPISODE)
    assert detect(path) == "verifiers"
    with pytest.raises(DataError, match=r"a.jsonl:1\): there are no input_ids"):
        read(path, format="jsonl")


def test_progress_ends_at_the_size_of_the_file(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", *[{"input_ids": [1, 2], "loss_mask": [0, 1]}] * 9)
    seen = []
    read(path, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (path.stat().st_size, path.stat().st_size)
