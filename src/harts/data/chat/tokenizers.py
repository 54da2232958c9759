"""Text becomes token ids, each piece between special tokens once.

A tokenizer never merges text across a special token, so a rollout's prompts, which repeat their
messages, are encoded by pieces from a cache: the cost is that of the unique text.
"""

import json
import re
import unicodedata
from base64 import b64decode
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harts.errors import ConfigError

Tokens = npt.NDArray[np.int32]

_PATTERN_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERN_QWEN_3_5 = _PATTERN_QWEN.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}\p{N}]+", r"[^\s\p{L}\p{M}\p{N}]+"
)
QWEN_SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>"),
)
"""Added tokens of Qwen 3 and 3.5, in the order of their ids behind the merges."""

_QWEN = {151_643: _PATTERN_QWEN, 248_044: _PATTERN_QWEN_3_5}
"""Merges in the .tiktoken file -> how text is cut before they apply."""


class TextTokenizer:
    """Encodes text by pieces between `special` tokens, each distinct piece once.

    encode: text without special tokens -> ids. special: text -> id; empty gives the whole text to
    `encode`. template: jinja source of the tokenizer's own chat template, a built-in name, or None.
    template_tokens: what the template may name, such as {"bos_token": "<s>"}.
    """

    def __init__(
        self,
        encode: Callable[[str], Iterable[int]],
        special: dict[str, int],
        template: str | None = None,
        template_tokens: dict[str, str] | None = None,
    ) -> None:
        self.template = template
        self.template_tokens = template_tokens or {}
        self._encode = encode
        self._special = special
        longest_first = sorted(special, key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        self._cache: dict[str, Tokens] = {}

    def pieces(self, parts: Sequence[str]) -> list[Tokens]:
        """Ids of the parts' pieces in order; arrays are shared between calls, not to be written to.

        O(letters), of which only pieces not seen before are encoded.
        """
        found: list[Tokens] = []
        for part in parts:
            if not self._special:
                found.append(np.array(list(self._encode(part)), np.int32))
            elif len(parts) > 1:  # a template that names its messages: one entry a message
                found.append(self._cached(part, self._joined))
            else:
                found.extend(
                    self._cached(text, self._one) for text in self._cut.split(part) if text
                )
        return [tokens for tokens in found if tokens.size]

    def _cached(self, text: str, encode: Callable[[str], Tokens]) -> Tokens:
        tokens = self._cache.get(text)
        if tokens is None:
            tokens = self._cache[text] = encode(text)
        return tokens

    def _one(self, text: str) -> Tokens:
        ids = [self._special[text]] if text in self._special else list(self._encode(text))
        return np.array(ids, np.int32)

    def _joined(self, part: str) -> Tokens:
        pieces = [self._one(text) for text in self._cut.split(part) if text]
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int32)


def load_tokenizer(tokenizer: Any) -> TextTokenizer:
    """A path to a Hugging Face folder or a .tiktoken file, or an object that encodes text.

    Objects: a transformers tokenizer, a tokenizers.Tokenizer, a tiktoken.Encoding, or anything
    with encode(text) -> ids. Raises ConfigError for what is neither.
    """
    if isinstance(tokenizer, TextTokenizer):
        return tokenizer
    if isinstance(tokenizer, str | Path):
        path = Path(tokenizer)
        if path.is_dir():
            return _from_folder(path)
        if path.suffix == ".tiktoken" and path.is_file():
            return _from_tiktoken(path)
        if path.name == "tokenizer.json" and path.is_file():
            return _from_folder(path.parent)
        problem = f"tokenizer is {str(tokenizer)!r}, " + (
            "which is not there" if not path.exists() else "which is not a tokenizer"
        )
        raise ConfigError(f"{problem}; give a Hugging Face folder or a .tiktoken file")
    if hasattr(tokenizer, "apply_chat_template"):
        return _from_transformers(tokenizer)
    if hasattr(tokenizer, "encode_ordinary"):  # tiktoken
        special = {
            name: tokenizer.encode_single_token(name) for name in tokenizer.special_tokens_set
        }
        return TextTokenizer(tokenizer.encode_ordinary, special)
    if hasattr(tokenizer, "get_added_tokens_decoder"):  # tokenizers
        return TextTokenizer(lambda text: tokenizer.encode(text, add_special_tokens=False).ids, {})
    if hasattr(tokenizer, "encode"):
        return TextTokenizer(tokenizer.encode, {})
    problem = f"tokenizer is a {type(tokenizer).__name__}, which has no encode"
    raise ConfigError(f"{problem}; give a path or an object with encode(text) -> ids")


def _from_tiktoken(path: Path) -> TextTokenizer:
    try:
        import tiktoken
    except ImportError:
        problem = f"{path}: a .tiktoken file needs the package tiktoken"
        raise ConfigError(f"{problem}; pip install 'harts[chat]'") from None
    try:
        lines = path.read_bytes().splitlines()
        ranks = {b64decode(a): int(b) for a, b in (line.split() for line in lines if line)}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a .tiktoken file ({error}); download it again") from None
    if len(ranks) not in _QWEN:
        problem = f"{path}: has {len(ranks):,} merges, of which no pattern is known"
        raise ConfigError(f"{problem}; give a Hugging Face folder with tokenizer.json")
    special = {text: len(ranks) + number for number, text in enumerate(QWEN_SPECIAL_TOKENS)}
    encoding = tiktoken.Encoding(
        path.stem, pat_str=_QWEN[len(ranks)], mergeable_ranks=ranks, special_tokens=special
    )
    return TextTokenizer(
        lambda text: encoding.encode_ordinary(unicodedata.normalize("NFC", text)),
        special,
        "chatml",
    )


def _from_folder(folder: Path) -> TextTokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        merges = sorted(folder.glob("*.tiktoken"))
        if len(merges) == 1:
            return _from_tiktoken(merges[0])
        problem = f"{folder}: there is no tokenizer.json"
        raise ConfigError(f"{problem}; save the tokenizer with transformers' save_pretrained")
    try:
        import tokenizers
    except ImportError:
        problem = f"{file}: a Hugging Face tokenizer needs the package tokenizers"
        raise ConfigError(f"{problem}; pip install 'harts[chat]'") from None
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
        layout = json.loads(file.read_text(encoding="utf-8"))
    except Exception as error:  # the package raises bare Exception
        problem = f"{file}: not a tokenizer ({' '.join(str(error).split())[:100]})"
        raise ConfigError(f"{problem}; save it again") from None
    settings = _settings(folder)
    source = settings.get("chat_template")
    return TextTokenizer(
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        _split_points(layout),
        source if isinstance(source, str) else None,
        _special_tokens(settings),
    )


def _split_points(layout: dict[str, Any]) -> dict[str, int]:
    """Added tokens at which text may be cut before encoding, none where a piece's ids depend on
    what stands before it (a space put in front of the first piece, stripping around tokens)."""
    before = json.dumps([layout.get("normalizer"), layout.get("pre_tokenizer")])
    if re.search(r'"Metaspace"|"Prepend"|"Strip"|"add_prefix_space": true', before):
        return {}
    added = [token for token in layout.get("added_tokens", []) if isinstance(token, dict)]
    if any(t.get("lstrip") or t.get("rstrip") or t.get("single_word") for t in added):
        return {}
    return {token["content"]: token["id"] for token in added if not token.get("normalized")}


def _settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, its chat_template replaced by chat_template.jinja where that is."""
    settings: dict[str, Any] = {}
    file = folder / "tokenizer_config.json"
    if file.is_file():
        try:
            settings = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{file}: broken JSON ({error}); save the tokenizer again") from None
    named = settings.get("chat_template")
    if isinstance(named, list):  # several templates, by name
        by_name = {entry.get("name"): entry.get("template") for entry in named}
        settings["chat_template"] = by_name.get("default")
    if (folder / "chat_template.jinja").is_file():
        settings["chat_template"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return settings


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def _from_transformers(tokenizer: Any) -> TextTokenizer:
    source = getattr(tokenizer, "chat_template", None)
    if isinstance(source, dict):
        source = source.get("default")
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    return TextTokenizer(
        lambda text: list(tokenizer.encode(text, add_special_tokens=False)),
        {},
        source if isinstance(source, str) else None,
        _special_tokens({name: getattr(tokenizer, name, None) for name in names}),
    )
