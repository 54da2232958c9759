"""One form for the messages of every log: OpenAI's, with reasoning beside the content."""

import json
from typing import Any

from harts.data.formats.values import as_object, optional
from harts.data.values import describe, fail

Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool")
_ROLE_NAMES = {"developer": "system", "function": "tool", "ai": "assistant", "human": "user"}
_REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")


def normalised(message: Any, where: str) -> Message:
    """{"role", "content", "reasoning_content"?, "tool_calls"?, "name"?, "tool_call_id"?}.

    Content is one text (parts are joined; anything but text is refused). A tool call is
    {"type": "function", "id"?, "function": {"name", "arguments"}} with arguments as the log has
    them, JSON text or an object. Raises DataError with the place.
    """
    record = as_object(message, "the message", where)
    role = _ROLE_NAMES.get(str(record.get("role")), str(record.get("role")))
    if role not in ROLES:
        fail(where, f"role is {describe(record.get('role'))}", f"use one of {', '.join(ROLES)}")
    plain: Message = {"role": role, "content": _text(record.get("content"), where)}
    for name in _REASONING_NAMES:
        if record.get(name):
            plain["reasoning_content"] = _text(record[name], where)
            break
    calls = optional(record, "tool_calls", list, where)
    if calls:
        plain["tool_calls"] = [
            _tool_call(call, f"{where} tool call {index}") for index, call in enumerate(calls)
        ]
    tool_name = record.get("name") or record.get("tool_name")
    if isinstance(tool_name, str):
        plain["name"] = tool_name
    if isinstance(record.get("tool_call_id"), str):
        plain["tool_call_id"] = record["tool_call_id"]
    return plain


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        fail(where, f"content is {describe(content)}", "give a text or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, dict) else None
            problem = f"content[{index}] is {describe(kind if kind else part)}"
            fail(where, problem, "only text is read; images and audio need token ids")
    return "".join(texts)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    record = as_object(call, "it", where)
    function = record.get("function", record)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        fail(where, f"the name is {describe(name)}", "give the name of the function")
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str | dict):
        fail(where, f"arguments is {describe(arguments)}", "give JSON text or an object")
    plain: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if isinstance(record.get("id"), str):
        plain["id"] = record["id"]
    return plain


def arguments_text(arguments: str | dict[str, Any]) -> str:
    """Arguments as the model wrote them, or as JSON where the log holds an object."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def arguments_object(arguments: str | dict[str, Any]) -> str | dict[str, Any]:
    """Arguments as an object where the text is one (templates of Hugging Face expect that)."""
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            return arguments
        return parsed if isinstance(parsed, dict) else arguments
    return arguments
