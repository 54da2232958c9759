"""A conversation becomes one trajectory an assistant turn: the history as prompt, the turn scored.

The prompt is the template's rendering of the history with the generation prompt; what is scored is
what the template adds for the turn behind it. Token ids that a log recorded are used as they are.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from harts.data.chat.messages import Message
from harts.data.chat.templates import Render, choose_template
from harts.data.chat.tokenizers import TextTokenizer, load_tokenizer
from harts.data.formats.options import ReadOptions, Sampling
from harts.data.pieces import PieceRow
from harts.data.values import Array, fail
from harts.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Ids that the log holds of one turn: int32 (n,), log-probs float64 (n,); None where not."""

    prompt: Array | None = None
    completion: Array | None = None
    log_probs: Array | None = None


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """messages in order; `turns`: indices of the assistant messages to train; `recorded`: index ->
    ids the log holds; fields: one value each for all its trajectories, with `rollout_id`."""

    messages: Sequence[Message]
    turns: Sequence[int]
    fields: dict[str, Any]
    source: str
    tools: Sequence[Any] = ()
    recorded: dict[int, Recorded] = field(default_factory=dict)


class TurnReader:
    """Renders and encodes turns; the tokenizer is opened when a turn first needs it."""

    def __init__(self, path_name: str, options: ReadOptions) -> None:
        self._path_name = path_name
        self._options = options
        self._tokenizer: TextTokenizer | None = None
        self._render: Render | None = None
        if options.tokenizer is not None:  # a wrong path should not wait for the first text
            self._open()

    def rows(self, conversation: Conversation) -> Iterator[PieceRow]:
        """A row a turn. Raises DataError for a template that rewrites its own prompt."""
        for number, turn in enumerate(conversation.turns):
            where = f"{conversation.source} message {turn}"
            recorded = conversation.recorded.get(turn, Recorded())
            prompt, completion = self._prompt_and_completion(conversation, turn, recorded, where)
            num_prompt = sum(piece.size for piece in prompt)
            num_completion = sum(piece.size for piece in completion)
            if num_prompt == 0:
                fail(where, "the turn has an empty prompt", "drop the turn or mend the log")
            positions: dict[str, list[tuple[int, Array]]] = {}
            if recorded.log_probs is not None:
                positions["rollout_log_probs"] = [(num_prompt, recorded.log_probs)]
            fields = dict(conversation.fields)
            name = fields.pop("trajectory_id", None)
            fields["trajectory_id"] = f"{name}/{number}" if name is not None else None
            if name is None:
                fields["trajectory_id"] = f"{fields['group_id']}/{fields['rollout_id']}/{number}"
            yield PieceRow(
                tokens=[*prompt, *completion],
                scored=[(num_prompt, np.ones(num_completion, np.bool_))],
                positions=positions,
                fields=fields,
                source=where,
            )

    def _prompt_and_completion(
        self, conversation: Conversation, turn: int, recorded: Recorded, where: str
    ) -> tuple[list[Array], list[Array]]:
        if recorded.prompt is not None and recorded.completion is not None:
            return [recorded.prompt], [recorded.completion]
        render, tokenizer = self._open()
        try:
            before = render(conversation.messages[:turn], conversation.tools, True)
            after = render(conversation.messages[: turn + 1], conversation.tools, False)
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        prompt_text, whole_text = "".join(before), "".join(after)
        if not whole_text.startswith(prompt_text):
            problem = "the template renders the turn so that its prompt is no prefix of it"
            fail(where, problem, "use another chat template, or record token ids")
        prompt = [recorded.prompt] if recorded.prompt is not None else tokenizer.pieces(before)
        if recorded.completion is not None:
            return list(prompt), [recorded.completion]
        return list(prompt), tokenizer.pieces([whole_text[len(prompt_text) :]])

    def _open(self) -> tuple[Render, TextTokenizer]:
        if self._tokenizer is None or self._render is None:
            if self._options.tokenizer is None:
                raise ConfigError(
                    f"{self._path_name}: it holds messages without token ids, which need a "
                    "tokenizer; give tokenizer (--tokenizer): a Hugging Face folder or a "
                    ".tiktoken file"
                )
            self._tokenizer = load_tokenizer(self._options.tokenizer)
            own, tokens = self._tokenizer.template, self._tokenizer.template_tokens
            self._render = choose_template(self._options.chat_template, own, tokens)
        return self._render, self._tokenizer


def sampled(rows: Iterable[PieceRow], sampling: Sampling | None, name: str) -> Iterator[PieceRow]:
    """ "step" (or None) passes every row; "tree-step" each distinct step of a group once.

    Rollouts of a group that went on from a common state share steps: the same prompt and the same
    turn. "tree-step" keeps the first and gives it the mean reward of the rollouts through it.
    Recorded log-probs stay only if every row has them (a warning names one that has not).
    Holds the rows' references, not their tokens; O(tokens).
    """
    kept = _uniform(list(rows), name)
    if sampling != "tree-step":
        yield from kept
        return
    steps: dict[bytes, tuple[PieceRow, list[float | None]]] = {}
    for row in kept:
        digest = blake2b(repr(row.fields.get("group_id")).encode(), digest_size=16)
        for piece in row.tokens:
            digest.update(piece.tobytes())
        digest.update(repr([(begin, part.size) for begin, part in row.scored]).encode())
        _, rewards = steps.setdefault(digest.digest(), (row, []))
        rewards.append(row.fields.get("reward"))
    for row, rewards in steps.values():
        known = [reward for reward in rewards if reward is not None]
        mean = float(np.mean(known)) if known else None
        yield replace(row, fields={**row.fields, "reward": mean})


def _uniform(rows: list[PieceRow], name: str) -> list[PieceRow]:
    missing = next((row for row in rows if not row.positions), None)
    if missing is None or not any(row.positions for row in rows):
        return rows
    message = f"{name}: recorded log-probs are left out, {missing.source} has none"
    warnings.warn(message, stacklevel=2)
    return [replace(row, positions={}) for row in rows]
