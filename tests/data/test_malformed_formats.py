"""Every format broken in many ways: one line that says where, what and what to do.

Each case: the bad record stands second (third for events), the message begins with its file and
line (or record) and holds the pieces in their order.
"""

import json
from pathlib import Path

import pytest

from harts.cli.main import main
from harts.data.read import read
from harts.errors import HartsError
from tests.data.samples.records import (
    ART,
    ATIF,
    CHAT,
    DROP,
    EPISODE,
    EVENTS,
    SHAPE,
    ByteTokenizer,
    changed,
    write_lines,
)

NODE = "traces.0.nodes.1"

VERIFIERS = {
    "traces missing": (changed(EPISODE, "traces", DROP), ["no traces", "give a list"]),
    "traces a dict": (changed(EPISODE, "traces", {}), ["traces is a dict", "give a list"]),
    "trace a number": (changed(EPISODE, "traces.0", 7), ["traces[0] is 7", "give an object"]),
    "nodes missing": (changed(EPISODE, "traces.0.nodes", DROP), ["trace 0", "no nodes"]),
    "node a string": (changed(EPISODE, NODE, "x"), ["trace 0", "nodes[1] is the string 'x'"]),
    "parent later": (changed(EPISODE, f"{NODE}.parent", 3), ["node 1: parent is 3", "before"]),
    "parent itself": (changed(EPISODE, f"{NODE}.parent", 1), ["node 1: parent is 1", "before"]),
    "parent negative": (changed(EPISODE, f"{NODE}.parent", -1), ["parent is -1", "null is a root"]),
    "parent true": (changed(EPISODE, f"{NODE}.parent", True), ["parent is true", "whole number"]),
    "mask short": (
        changed(EPISODE, f"{NODE}.mask", [True]),
        ["node 1: mask has 1 entries, token_ids 3", "equally long"],
    ),
    "mask of twos": (changed(EPISODE, f"{NODE}.mask", [0, 2, 1]), ["mask[1] is 2", "use 0 or 1"]),
    "mask missing": (changed(EPISODE, f"{NODE}.mask", DROP), ["a sampled node has no mask"]),
    "token negative": (
        changed(EPISODE, f"{NODE}.token_ids", [9, -5, 6]),
        ["node 1: token_ids[1] is -5, negative", "from 0"],
    ),
    "logprobs long": (
        changed(EPISODE, f"{NODE}.logprobs", [-1, -2, -3]),
        ["logprobs has 3 entries, the sampled tokens", "2", "agree"],
    ),
    "logprobs null": (changed(EPISODE, f"{NODE}.logprobs", [None, -1]), ["logprobs[0] is null"]),
    "logprobs text": (changed(EPISODE, f"{NODE}.logprobs", "x"), ["logprobs is the string 'x'"]),
    "logprobs of one node missing": (
        changed(EPISODE, f"{NODE}.logprobs", DROP),
        ["node 1: there are no logprobs, but other", "every sampled node or none"],
    ),
    "advantages short": (changed(EPISODE, f"{NODE}.advantages", [1]), ["advantages has 1 entries"]),
    "reward text": (
        changed(EPISODE, "traces.0.rewards.r.value", "good"),
        ["rewards.r is the string 'good'", "number or null"],
    ),
    "reward of another form": (
        changed(EPISODE, "traces.0.rewards.r", {"points": 1}),
        ["rewards.r is a dict", "give a number"],
    ),
    "no token ids": (
        changed(EPISODE, "traces.0.nodes", [{"parent": None, "message": {}}]),
        ["no node has token_ids", "read it as a chat log"],
    ),
    "first token sampled": (
        changed(EPISODE, "traces.0.nodes.0.mask", [True, False, False]),
        ["trace 0 node 0: there are no logprobs", "every sampled node"],
    ),
}

STEP = "steps.1"
ATIFS = {
    "version unknown": (
        changed(ATIF, "schema_version", "ATIF-v2.0"),
        ["schema_version is the string 'ATIF-v2.0'", "ATIF-v1.0 to ATIF-v1.8"],
    ),
    "version missing": (changed(ATIF, "schema_version", DROP), ["schema_version is null"]),
    "steps a dict": (changed(ATIF, "steps", {}), ["steps is a dict", "give a list"]),
    "step a list": (changed(ATIF, STEP, []), ["steps[1] is a list of 0", "give an object"]),
    "source unknown": (
        changed(ATIF, f"{STEP}.source", "robot"),
        ["step 2: source is the string 'robot'", "system, user, agent"],
    ),
    "prompt ids text": (
        changed(ATIF, f"{STEP}.metrics.prompt_token_ids", "1 2"),
        ["step 2: prompt_token_ids is the string '1 2'", "list of token ids"],
    ),
    "completion id half": (
        changed(ATIF, f"{STEP}.metrics.completion_token_ids", [3, 4.5]),
        ["step 2: completion_token_ids[1] is 4.5, not whole"],
    ),
    "logprobs short": (
        changed(ATIF, f"{STEP}.metrics.logprobs", [-1]),
        ["step 2: logprobs has 1 entries, completion_token_ids 2", "agree"],
    ),
    "metrics a list": (changed(ATIF, f"{STEP}.metrics", [1]), ["metrics is a list of 1"]),
    "message a number": (changed(ATIF, f"{STEP}.message", 5), ["step 2: content is 5", "text"]),
    "image": (
        changed(ATIF, f"{STEP}.message", [{"type": "image", "source": {}}]),
        ["step 2: content[0] is the string 'image'", "only text is read"],
    ),
    "continuation missing": (
        changed(ATIF, "continued_trajectory_ref", "more.json"),
        ["continued_trajectory_ref names more.json, which is not there", "put it at"],
    ),
    "continuation elsewhere": (
        changed(ATIF, "continued_trajectory_ref", "s3://x/more.json"),
        ["continued_trajectory_ref is s3://x/more.json", "fetch it"],
    ),
    "continuation of itself": (
        changed(ATIF, "continued_trajectory_ref", "bad.jsonl"),
        ["leads back to itself", "no circle"],
    ),
    "subagent nowhere": (
        changed(
            ATIF,
            f"{STEP}.observation.results.0.subagent_trajectory_ref",
            [{"trajectory_id": "gone"}],
        ),
        ["step 2: subagent 'gone' is not in subagent_trajectories", "embed it"],
    ),
    "subagent without id": (
        changed(ATIF, "subagent_trajectories", [{"steps": []}]),
        ["subagent 0: there is no trajectory_id"],
    ),
    "subagents of one id": (
        changed(ATIF, "subagent_trajectories", [{"trajectory_id": "a"}, {"trajectory_id": "a"}]),
        ["subagent 1: trajectory_id 'a' is there twice", "unique"],
    ),
}

CHATS = {
    "messages a dict": (changed(CHAT, "messages", {}), ["messages is a dict", "give a list"]),
    "no assistant": (
        changed(CHAT, "messages", CHAT["messages"][:2]),
        ["no assistant message to train", "drop the line"],
    ),
    "message a string": (changed(CHAT, "messages.1", "hi"), ["messages[1] is the string 'hi'"]),
    "role unknown": (
        changed(CHAT, "messages.1.role", "judge"),
        ["message 1: role is the string 'judge'", "system, user, assistant, tool"],
    ),
    "role missing": (changed(CHAT, "messages.1.role", DROP), ["message 1: role is null"]),
    "content a number": (changed(CHAT, "messages.1.content", 4), ["message 1: content is 4"]),
    "content an image": (
        changed(CHAT, "messages.1.content", [{"type": "image_url", "image_url": {}}]),
        ["message 1: content[0] is the string 'image_url'", "only text is read"],
    ),
    "tool calls a dict": (changed(CHAT, "messages.2.tool_calls", {}), ["tool_calls is a dict"]),
    "tool call without name": (
        changed(CHAT, "messages.2.tool_calls.0.function.name", DROP),
        ["message 2 tool call 0: the name is null", "name of the function"],
    ),
    "arguments a list": (
        changed(CHAT, "messages.2.tool_calls.0.function.arguments", [1]),
        ["message 2 tool call 0: arguments is a list of 1", "JSON text or an object"],
    ),
    "reward text": (changed(CHAT, "reward", "1.0"), ["reward is the string '1.0'", "number"]),
    "reward true": (changed(CHAT, "reward", True), ["reward is true", "number or null"]),
    "tools a number": (changed(CHAT, "tools", 3), ["tools is 3", "JSON file beside the log"]),
    "tools file missing": (changed(CHAT, "tools", "no.json"), ["tools names no.json", "put it at"]),
    "token ids negative": (
        changed(CHAT, "messages.2.token_ids", [-1]),
        ["message 2: token_ids[0] is -1, negative"],
    ),
    "ART without choices": (
        changed(ART, "messages_and_choices", ART["messages_and_choices"][:3]),
        ["no choices (sampled turns)"],
    ),
    "ART choice of a user": (
        changed(ART, "messages_and_choices.3.message.role", "user"),
        ["message 3: a choice has the role user"],
    ),
    "ART log-probs a string": (
        changed(ART, "messages_and_choices.3.logprobs.content", "x"),
        ["message 3: logprobs.content is the string 'x'"],
    ),
    "ART token id no number": (
        changed(ART, "messages_and_choices.3.logprobs.content.0.token", "token_id:a"),
        ["message 3: logprobs.content has a token_id that is no number"],
    ),
    "ART log-prob null": (
        changed(ART, "messages_and_choices.3.logprobs.content.0.logprob", None),
        ["message 3: logprobs.content[0] is null"],
    ),
    "ART history a list": (
        changed(ART, "additional_histories.0", []),
        ["additional_histories[0] is a list of 0"],
    ),
}

REQUEST, REWARD = EVENTS[0], EVENTS[-1]
AGENT_LIGHTNING = {
    "type missing": (changed(REQUEST, "event_type", DROP), ["there is no event_type"]),
    "type a number": (changed(REQUEST, "event_type", 1), ["event_type is 1", "give a string"]),
    "rollout missing": (changed(REQUEST, "rollout_id", DROP), ["there is no rollout_id"]),
    "data missing": (changed(REQUEST, "data", DROP), ["there is no data", "give an object"]),
    "response a list": (changed(REQUEST, "data.response", []), ["response is a list of 0"]),
    "choice a number": (
        changed(REQUEST, "data.response.choices.0", 3),
        ["response.choices[0] is 3", "give an object"],
    ),
    "token ids text": (
        changed(REQUEST, "data.response.choices.0.token_ids", "3"),
        ["token_ids is the string '3'"],
    ),
    "reward missing": (changed(REWARD, "data.value", DROP), ["the reward has no value"]),
    "reward text": (changed(REWARD, "data.value", "x"), ["data.value is the string 'x'"]),
    "log-probs short": (
        changed(REQUEST, "data", {"response_token_ids": [1, 2], "response_log_probs": [0.5]}),
        ["response_log_probs has 1 entries, response_token_ids 2"],
    ),
    "no answer": (
        changed(REQUEST, "data.response", {"choices": [{}]}),
        ["answer: the message is null", "give an object"],
    ),
}

SHAPES = {
    "segments a string": (changed(SHAPE, "seg.0", "x"), ["seg is not a list of pairs"]),
    "segments cycle": (changed(SHAPE, "seg.1", [0, 3]), ["seg has a cycle", "parent -1"]),
    "length zero": (changed(SHAPE, "seg.0", [1, 0]), ["seg[0] is [1, 0]", "at least 1"]),
    "end beyond": (changed(SHAPE, "traj.0", [9, 3, 5, 0]), ["traj 0: end is 9, there are 4"]),
    "length wrong": (
        changed(SHAPE, "traj.0", [0, 3, 6, 0]),
        ["traj 0: its segments hold 5 tokens, length is 6", "agree"],
    ),
    "trained from the start": (changed(SHAPE, "traj.0", [0, 0, 5, 0]), ["trained_start 0"]),
    "trajectory short": (changed(SHAPE, "traj.0", [0]), ["traj 0: is not a list of numbers"]),
}

FLAT = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}
DIALECTS = {
    "attention mask short": (
        {**FLAT, "attention_mask": [1, 1]},
        ["attention_mask has 2 entries, input_ids 3", "equally long"],
    ),
    "attention mask of twos": ({**FLAT, "attention_mask": [1, 1, 2]}, ["attention_mask[2] is 2"]),
    "response length beyond": (
        {"tokens": [1, 2], "response_length": 3, "loss_mask": [1]},
        ["response_length is 3, tokens has 2 entries", "at the end of tokens"],
    ),
    "response length text": (
        {"tokens": [1, 2], "response_length": "1"},
        ["response_length is the string '1'"],
    ),
    "scores text": ({**FLAT, "token_level_scores": ["a"]}, ["token_level_scores[0] is the string"]),
    "columns uneven": (
        {"prompt_ids": [[1], [2]], "response_ids": [[3]]},
        ["response_ids has 1 entries, prompt_ids 2", "one entry a trajectory"],
    ),
}

GOOD = {
    "verifiers": ([EPISODE], VERIFIERS),
    "atif": ([ATIF], ATIFS),
    "chat": ([CHAT], CHATS),
    "agent-lightning": ([REQUEST, EVENTS[1]], AGENT_LIGHTNING),
    "shapes": ([SHAPE], SHAPES),
    "jsonl": ([FLAT], DIALECTS),
}
CASES = [(name, case) for name, (_, cases) in GOOD.items() for case in cases]


def bad_file(folder: Path, name: str, case: str) -> tuple[Path, int]:
    """A file whose last line is the bad one, and the number of that line."""
    good, cases = GOOD[name]
    return write_lines(folder / "bad.jsonl", *good, cases[case][0]), len(good) + 1


@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{n}: {c}" for n, c in CASES])
def test_a_malformed_record_is_refused_in_one_line_with_its_place(tmp_path, name, case):
    path, line = bad_file(tmp_path, name, case)
    texts = name in ("atif", "chat", "agent-lightning")
    options = {"tokenizer": ByteTokenizer(), "chat_template": "chatml"} if texts else {}
    with pytest.raises(HartsError) as caught:
        read(path, format=name, **options)
    message = str(caught.value)
    assert f"bad.jsonl:{line}" in message.split(": ", 1)[0] + ":", message
    assert "\n" not in message
    what, _, advice = message.rpartition("; ")
    assert what and advice
    position = 0
    for piece in GOOD[name][1][case][1]:
        assert piece in message[position:], message
        position = message.index(piece, position)


def test_there_are_at_least_forty_malformed_cases():
    assert len(CASES) >= 40


SAMPLE = [
    ("verifiers", "parent later"),
    ("verifiers", "logprobs long"),
    ("atif", "version unknown"),
    ("atif", "continuation missing"),
    ("agent-lightning", "reward text"),
    ("shapes", "segments cycle"),
    ("jsonl", "columns uneven"),
]


@pytest.mark.parametrize(("name", "case"), SAMPLE, ids=[f"{n}: {c}" for n, c in SAMPLE])
def test_the_command_line_exits_with_2_and_says_it_on_stderr(tmp_path, capsys, name, case):
    path, line = bad_file(tmp_path, name, case)
    assert main(["plan", str(path), "--format", name]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("harts: error: ")
    assert captured.err.count("\n") == 1
    assert f"bad.jsonl:{line}" in captured.err


def test_the_command_line_names_the_option_that_is_missing(tmp_path, capsys):
    log = write_lines(tmp_path / "log.jsonl", CHAT)
    assert main(["plan", str(log)]) == 2
    assert "--tokenizer" in capsys.readouterr().err
    (tmp_path / "1.pt").write_bytes(b"PK\x03\x04")
    assert main(["plan", str(tmp_path / "1.pt")]) == 2
    assert "--trust" in capsys.readouterr().err


BROKEN_FILES = {
    "cut document": (json.dumps(ATIF, indent=1)[:-9], "broken JSON at line"),
    "array of numbers": ("[1, 2]", "[0]: is not an object"),
    "empty array": ("[]", "no agent step"),
    "NaN in a document": ('{\n"schema_version": NaN,\n"steps": []}', "holds NaN"),
}


@pytest.mark.parametrize("case", BROKEN_FILES)
def test_a_document_that_is_broken_names_the_file(tmp_path, case):
    content, piece = BROKEN_FILES[case]
    path = tmp_path / "trajectory.json"
    path.write_text(content)
    with pytest.raises(HartsError) as caught:
        read(path, format="atif")
    assert "trajectory.json" in str(caught.value)
    assert piece in str(caught.value)
