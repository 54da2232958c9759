"""Decoders from files: text, special tokens, and refusals in one line."""

import base64
import json
from pathlib import Path

import pytest

from harts.errors import ConfigError
from harts.inspection.decoding import load_decoder


def tiktoken_file(path: Path, count: int) -> Path:
    lines = (b"%s %d" % (base64.b64encode(bytes([n % 256])), n) for n in range(count))
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def test_a_tiktoken_file_spells_bytes_and_names_unknown_ids(tmp_path: Path) -> None:
    decode = load_decoder(tiktoken_file(tmp_path / "small.tiktoken", 256))
    assert decode([104, 105, 0xC3, 0xA9, 300]) == "hié<id 300>"
    assert decode([0xC3]) == "\ufffd"


@pytest.mark.parametrize("merges", [151_643, 248_044])
def test_special_tokens_of_qwen_are_known(tmp_path: Path, merges: int) -> None:
    decode = load_decoder(tiktoken_file(tmp_path / "qwen.tiktoken", merges))
    assert decode([merges + 1, merges + 24, merges + 25]) == "<|im_start|><think></think>"


def test_a_folder_or_its_tokenizer_json_is_read(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert load_decoder(path)([0, 1, 99]).split() == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("absent.tiktoken", None, "no such file"),
        ("empty.tiktoken", "", "empty"),
        ("words.tiktoken", "YQ== 0\nhello\n", "words.tiktoken:2"),
        ("rank.tiktoken", "YQ== zero\n", "rank.tiktoken:1"),
        ("tokenizer.json", json.dumps({"version": "1.0"}), "cannot be read"),
    ],
)
def test_what_is_no_tokenizer_is_refused(
    tmp_path: Path, name: str, content: str | None, part: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=part) as caught:
        load_decoder(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_the_one_tiktoken_file_of_a_folder_is_read(tmp_path: Path) -> None:
    tiktoken_file(tmp_path / "small.tiktoken", 256)
    assert load_decoder(tmp_path)([104, 105]) == "hi"


def test_a_folder_without_tokenizer_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        load_decoder(tmp_path)
