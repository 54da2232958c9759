"""One good record of each JSON format, and a tokenizer of bytes to read the texts with."""

import copy
import json
from pathlib import Path
from typing import Any

TRACE = {
    "version": 1,
    "id": "trace-a",
    "nodes": [
        {
            "parent": None,
            "message": {"role": "user", "content": "hi"},
            "sampled": False,
            "token_ids": [1, 2, 3],
            "mask": [False, False, False],
            "is_content": [],
            "logprobs": [],
        },
        {
            "parent": 0,
            "message": {"role": "assistant", "content": "yo"},
            "sampled": True,
            "token_ids": [9, 5, 6],
            "mask": [False, True, True],
            "logprobs": [-0.5, -0.25],
            "advantages": [0.5, 0.5],
        },
        {
            "parent": 1,
            "message": {"role": "tool", "content": "ok"},
            "sampled": False,
            "token_ids": [7],
            "mask": [False],
        },
        {
            "parent": 2,
            "message": {"role": "assistant", "content": "a"},
            "sampled": True,
            "token_ids": [8, 4],
            "mask": [True, True],
            "logprobs": [-1.0, -2.0],
            "advantages": [1.0, 2.0],
        },
        {
            "parent": 1,
            "message": {"role": "user", "content": "b"},
            "sampled": False,
            "token_ids": [11, 12],
            "mask": [False, False],
        },
    ],
    "calls": [],
    "rewards": {"r": {"value": 1.0}, "style": {"score": 2.0, "weight": 0.25}, "off": None},
    "metrics": {},
    "is_completed": True,
}
EPISODE = {"id": "e1", "env": {}, "task": {"q": 1}, "group": {"id": "g1"}, "traces": [TRACE]}


def agent_step(number: int, prompt: list[int], completion: list[int], **more: Any) -> dict:
    return {
        "step_id": number,
        "source": "agent",
        "message": f"answer {number}",
        "metrics": {
            "prompt_token_ids": prompt,
            "completion_token_ids": completion,
            "logprobs": [-0.5] * len(completion),
        },
        **more,
    }


ATIF = {
    "schema_version": "ATIF-v1.8",
    "session_id": "run-1",
    "trajectory_id": "root",
    "agent": {"name": "terminus", "version": "2", "model_name": "m"},
    "steps": [
        {"step_id": 1, "source": "user", "message": "do it"},
        agent_step(
            2,
            [1, 2],
            [3, 4],
            tool_calls=[{"tool_call_id": "c", "function_name": "sh", "arguments": {"x": 1}}],
            observation={"results": [{"source_call_id": "c", "content": "done"}]},
        ),
        agent_step(3, [1, 2, 3, 4, 5], [6]),
    ],
}

CHAT = {
    "task_id": "t1",
    "trial_id": 0,
    "reward": 1.0,
    "tools": [{"type": "function", "function": {"name": "look", "parameters": {}}}],
    "messages": [
        {"role": "system", "content": "be good"},
        {"role": "user", "content": "what?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "look", "arguments": '{"at": "it"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "seen"},
        {"role": "assistant", "content": "this", "reasoning": "hm"},
        {"role": "user", "content": [{"type": "text", "text": "sure?"}]},
        {"role": "assistant", "content": "yes"},
    ],
}

CHOICE = {
    "finish_reason": "stop",
    "index": 0,
    "message": {"role": "assistant", "content": "four"},
    "logprobs": {
        "content": [
            {"token": "token_id:70", "logprob": -0.5},
            {"token": "token_id:71", "logprob": -0.25},
        ]
    },
}
ART = {
    "messages_and_choices": [
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "an example, not sampled"},
        {"role": "user", "content": "go"},
        CHOICE,
    ],
    "tools": None,
    "additional_histories": [
        {"messages_and_choices": [{"role": "user", "content": "sum up"}, CHOICE]}
    ],
    "reward": 0.5,
    "metadata": {"task_id": "sum"},
}


def model_request(rollout: str, prompt: list[int], answer: list[int], **more: Any) -> dict:
    return {
        "event_type": "model_request",
        "rollout_id": rollout,
        "attempt_id": "at-1",
        "timestamp": 1.0,
        "data": {
            "model": "m",
            "request": {"messages": [{"role": "user", "content": "hi"}]},
            "response": {
                "prompt_token_ids": prompt,
                "choices": [
                    {"message": {"role": "assistant", "content": "x"}, "token_ids": answer}
                ],
            },
            "status": "ok",
            **more,
        },
    }


def reward_event(rollout: str, value: Any) -> dict:
    return {
        "event_type": "reward",
        "rollout_id": rollout,
        "attempt_id": "at-1",
        "timestamp": 2.0,
        "data": {"value": value},
    }


EVENTS = [
    model_request("r1", [1, 2], [3]),
    model_request("r2", [1, 2], [4, 5]),
    model_request("r1", [1, 2, 3, 6], [7]),
    {"event_type": "note", "rollout_id": "r1", "attempt_id": "at-1", "data": {}},
    model_request("r2", [1], [9], status="error"),
    reward_event("r1", 1.0),
    reward_event("r2", 0.0),
]

SHAPE = {
    "task": "a",
    "seg": [[1, 2], [-1, 3], [1, 4], [2, 1]],
    "traj": [[0, 3, 5, 0], [3, 5, 8, 0], [1, 2, 3, 1]],
}


class ByteTokenizer:
    """Ids of the UTF-8 bytes: what is read back is the text itself."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def text_of(ids: Any) -> str:
    return bytes(ids.tolist()).decode()


def changed(record: dict, path: str, value: Any) -> dict:
    """A copy with the entry at a path such as "nodes.1.mask" replaced; DROP deletes it."""
    copied = copy.deepcopy(record)
    *parents, last = (int(p) if p.isdigit() else p for p in path.split("."))
    place: Any = copied
    for name in parents:
        place = place[name]
    if value is DROP:
        del place[last]
    else:
        place[last] = value
    return copied


DROP = object()


def write_lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
