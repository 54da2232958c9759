"""Token ids to text, from files alone: a Hugging Face folder, a tokenizer.json or *.tiktoken."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from harts.data.chat.tokenizers import QWEN_SPECIAL_TOKENS
from harts.errors import ConfigError

_SPECIAL_TOKENS = {151643: QWEN_SPECIAL_TOKENS, 248044: QWEN_SPECIAL_TOKENS}
"""Number of merges of a .tiktoken file -> the special tokens that follow them."""


def load_decoder(path: str | os.PathLike[str]) -> Callable[[Sequence[int]], str]:
    """A function from token ids to text that keeps special tokens and never raises.

    path: a folder with tokenizer.json, that file itself (both need the package tokenizers), or a
    .tiktoken file of lines `base64 rank`, also in a folder of its own (needs nothing; the special
    tokens of Qwen's two vocabularies are known, others read `<id 151700>`). Raises ConfigError.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        merges = sorted(file.glob("*.tiktoken"))
        file = file / "tokenizer.json"
        if not file.is_file() and len(merges) == 1:
            file = merges[0]
        if not file.is_file():
            raise ConfigError(
                f"tokenizer {path}: the folder has no tokenizer.json; give a Hugging Face "
                "tokenizer folder or a .tiktoken file"
            )
    if not file.is_file():
        raise ConfigError(
            f"tokenizer {path}: no such file; give a folder with tokenizer.json or a .tiktoken file"
        )
    return _from_json(file) if file.suffix == ".json" else _from_tiktoken(file)


def _from_tiktoken(file: Path) -> Callable[[Sequence[int]], str]:
    token_bytes: dict[int, bytes] = {}
    number = 0
    try:
        for line in file.read_bytes().splitlines():
            number += 1
            if line.strip():
                text, rank = line.split()
                token_bytes[int(rank)] = base64.b64decode(text, validate=True)
    except OSError as error:
        raise ConfigError(f"tokenizer {file}: cannot be read ({error}); check it") from None
    except ValueError:
        raise ConfigError(
            f"tokenizer {file}:{number}: not a line `base64 rank`; give a .tiktoken file, or a "
            "folder with tokenizer.json"
        ) from None
    if not token_bytes:
        raise ConfigError(f"tokenizer {file}: the file is empty; give a .tiktoken file")
    first_special = max(token_bytes) + 1
    for place, name in enumerate(_SPECIAL_TOKENS.get(first_special, ())):
        token_bytes[first_special + place] = name.encode()

    def decode(ids: Sequence[int]) -> str:
        parts = (token_bytes.get(token) or b"<id %d>" % token for token in ids)
        return b"".join(parts).decode("utf-8", "replace")

    return decode


def _from_json(file: Path) -> Callable[[Sequence[int]], str]:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError(
            f"tokenizer {file}: needs the package tokenizers; pip install 'harts[hf]'"
        ) from None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        problem = " ".join(str(error).split())[:200]
        raise ConfigError(f"tokenizer {file}: cannot be read ({problem}); check it") from None

    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)
        return text

    return decode
