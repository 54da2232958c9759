"""Messages become text: two templates built in, or any jinja template of Hugging Face.

chatml   append-only: every message is rendered the same wherever it stands, so the prompts of a
         rollout are prefixes of each other; reasoning stays
qwen3    reasoning is dropped before the last user message, the last turn has a think block
         (empty without reasoning), as in the template of Qwen 3
"""

import json
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from harts.data.chat.messages import Message, arguments_object, arguments_text
from harts.errors import ConfigError, DataError

Render = Callable[[Sequence[Message], Sequence[Any], bool], list[str]]
"""(messages, tools, add_generation_prompt) -> parts of the text; no token crosses two parts."""

BUILT_IN = ("chatml", "qwen3")

_TOOLS_BEFORE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
_TOOLS_AFTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within XML tags."
)


def choose_template(
    chat_template: str | None, own: str | None, template_tokens: dict[str, str]
) -> Render:
    """The template a user names, or the tokenizer's own.

    chat_template: `chatml`, `qwen3`, jinja source or a file of it; None takes `own`, the
    tokenizer's. template_tokens: what the source may name. Raises ConfigError when there is none.
    """
    chosen = chat_template or own
    if chosen is None:
        problem = "the tokenizer has no chat template"
        names = ", ".join(BUILT_IN)
        raise ConfigError(f"{problem}; give one with chat_template (a jinja file, {names})")
    if chosen in BUILT_IN:
        return _QwenTemplate(strips_reasoning=chosen == "qwen3")
    source = chosen if chat_template is None else _template_text(chosen)
    return jinja_template(source, template_tokens)


class _QwenTemplate:
    def __init__(self, *, strips_reasoning: bool) -> None:
        self._strips = strips_reasoning

    def __call__(
        self, messages: Sequence[Message], tools: Sequence[Any], add_generation_prompt: bool
    ) -> list[str]:
        parts: list[str] = []
        rest = list(messages)
        offset = 0
        if tools or (rest and rest[0]["role"] == "system"):
            system = ""
            if rest and rest[0]["role"] == "system":
                system, rest, offset = rest[0]["content"], rest[1:], 1
            parts.append(_block("system", system + _tools_text(tools, after=system)))
        last_query = self._last_query(messages)
        index = 0
        while index < len(rest):
            message = rest[index]
            if message["role"] == "tool":
                end = index
                while end < len(rest) and rest[end]["role"] == "tool":
                    end += 1
                responses = [
                    f"<tool_response>\n{m['content']}\n</tool_response>" for m in rest[index:end]
                ]
                parts.append(_block("user", "\n".join(responses)))
                index = end
                continue
            text = message["content"]
            if message["role"] == "assistant":
                is_last = index + 1 == len(rest)
                text = self._assistant(message, is_last, index + offset > last_query)
            parts.append(_block(message["role"], text))
            index += 1
        if add_generation_prompt:
            parts.append("<|im_start|>assistant\n")
        return parts

    def _last_query(self, messages: Sequence[Message]) -> int:
        users = [i for i, message in enumerate(messages) if message["role"] == "user"]
        return users[-1] if users else -1

    def _assistant(self, message: Message, is_last: bool, is_after_query: bool) -> str:
        text = str(message["content"])
        for number, call in enumerate(message.get("tool_calls", [])):
            function = call["function"]
            newline = "\n" if number or text else ""
            body = f'{{"name": "{function["name"]}", "arguments": '
            body += arguments_text(function["arguments"]) + "}"
            text += f"{newline}<tool_call>\n{body}\n</tool_call>"
        reasoning = message.get("reasoning_content", "")
        if not self._strips:
            return f"<think>\n{reasoning}\n</think>\n\n{text}" if reasoning else text
        if is_after_query and (is_last or reasoning):
            return f"<think>\n{reasoning}\n</think>\n\n{text}"
        return text


def _block(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def _tools_text(tools: Sequence[Any], *, after: str) -> str:
    if not tools:
        return ""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return ("\n\n" if after else "") + _TOOLS_BEFORE + lines + _TOOLS_AFTER


def jinja_template(source: str, special_tokens: dict[str, str]) -> Render:
    """A Hugging Face chat template, rendered in a sandbox as transformers does.

    special_tokens: such as {"bos_token": "<s>"}. Raises ConfigError for a template that is not
    jinja, DataError where it refuses the messages.
    """
    try:
        import jinja2
        import jinja2.ext
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        problem = "a chat template needs the package jinja2"
        raise ConfigError(f"{problem}; pip install 'harts[chat]'") from None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _strftime_now
    # training masks come from the turn, not from {% generation %} blocks
    plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", source)
    try:
        template = environment.from_string(plain)
    except jinja2.TemplateError as error:
        problem = f"the chat template is not jinja ({' '.join(str(error).split())})"
        raise ConfigError(f"{problem}; give a Hugging Face template") from None

    def render(
        messages: Sequence[Message], tools: Sequence[Any], add_generation_prompt: bool
    ) -> list[str]:
        try:
            text = template.render(
                messages=[_for_jinja(message) for message in messages],
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError) as error:
            problem = f"the chat template refuses the messages ({' '.join(str(error).split())})"
            raise DataError(f"{problem}; use another template or mend the log") from None
        return [text]

    return render


def _for_jinja(message: Message) -> Message:
    plain = dict(message)
    if "tool_calls" in plain:
        plain["tool_calls"] = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": arguments_object(call["function"]["arguments"]),
                },
            }
            for call in plain["tool_calls"]
        ]
    return plain


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def _template_text(chat_template: str) -> str:
    """The jinja source that `chat_template` is or names. Raises ConfigError for a missing file."""
    if "{%" in chat_template or "{{" in chat_template:
        return chat_template
    path = Path(chat_template)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        names = ", ".join(BUILT_IN)
        problem = f"chat_template is {chat_template!r}, which cannot be read as a file"
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{problem} ({reason}); give a jinja file or one of {names}") from None
