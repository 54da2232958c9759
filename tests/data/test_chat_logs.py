"""Chat logs: what the prompt of each turn is, what is scored, what is never tokenised anew."""

import json
import sys

import numpy as np
import pytest

from harts.data.chat.tokenizers import load_tokenizer
from harts.data.read import read
from harts.errors import ConfigError, DataError
from harts.plan.planner import plan_step
from tests.data.samples.records import (
    ART,
    ATIF,
    CHAT,
    DROP,
    ByteTokenizer,
    changed,
    model_request,
    text_of,
    write_lines,
)

SYSTEM = (
    "<|im_start|>system\nbe good\n\n# Tools\n\nYou may call one or more functions to assist with "
    "the user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:"
    '\n<tools>\n{"type": "function", "function": {"name": "look", "parameters": {}}}\n</tools>\n\n'
    "For each function call, return a json object with function name and arguments within XML "
    "tags.<|im_end|>\n<|im_start|>user\nwhat?<|im_end|>\n"
)
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call><|im_end|>\n'
SEEN = "<|im_start|>user\n<tool_response>\nseen\n</tool_response><|im_end|>\n"
SURE = "<|im_start|>user\nsure?<|im_end|>\n"
TURN = "<|im_start|>assistant\n"


def texts(batch):
    """(prompt, scored text) of each trajectory."""
    out = []
    for row in batch.rows():
        begin = int(np.argmax(row["loss_mask"]))
        assert row["loss_mask"][begin:].all()
        out.append((text_of(row["input_ids"][:begin]), text_of(row["input_ids"][begin:])))
    return out


def test_chatml_appends_and_scores_each_assistant_turn(tmp_path):
    batch = read(
        write_lines(tmp_path / "a.jsonl", CHAT), tokenizer=ByteTokenizer(), chat_template="chatml"
    )
    think = "<think>\nhm\n</think>\n\nthis<|im_end|>\n"
    assert texts(batch) == [
        (SYSTEM + TURN, CALL),
        (SYSTEM + TURN + CALL + SEEN + TURN, think),
        (SYSTEM + TURN + CALL + SEEN + TURN + think + SURE + TURN, "yes<|im_end|>\n"),
    ]
    assert batch.trajectory_fields["trajectory_id"].tolist() == ["t1/0/0", "t1/0/1", "t1/0/2"]
    assert batch.trajectory_fields["reward"].tolist() == [1, 1, 1]
    assert batch.name_of(1) == "trajectory 1 (a.jsonl:1 message 4)"
    assert plan_step(batch).trie_tokens == batch.lengths.max()  # each a prefix of the next


def test_qwen3_drops_reasoning_before_the_last_user_message(tmp_path):
    batch = read(
        write_lines(tmp_path / "a.jsonl", CHAT), tokenizer=ByteTokenizer(), chat_template="qwen3"
    )
    empty = "<think>\n\n</think>\n\n"
    assert texts(batch) == [
        (SYSTEM + TURN, empty + CALL),
        (SYSTEM + TURN + CALL + SEEN + TURN, "<think>\nhm\n</think>\n\nthis<|im_end|>\n"),
        (
            SYSTEM + TURN + CALL + SEEN + TURN + "this<|im_end|>\n" + SURE + TURN,
            empty + "yes<|im_end|>\n",
        ),
    ]


JINJA = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments | tojson }})"
    "{% endfor %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def folder(tmp_path):
    """A Hugging Face tokenizer of bytes with three added tokens and a chat template."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "[assistant]", "[user]"])
    place = tmp_path / "tokenizer"
    place.mkdir()
    tokenizer.save(str(place / "tokenizer.json"))
    settings = {"bos_token": {"content": "<s>"}, "chat_template": JINJA}
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    return place


def test_a_folder_of_hugging_face_gives_tokenizer_and_template(tmp_path, folder):
    import tokenizers

    whole = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    batch = read(write_lines(tmp_path / "a.jsonl", CHAT), tokenizer=folder)
    row = batch.rows()[1]
    begin = int(np.argmax(row["loss_mask"]))
    prompt = (
        '<s>[system]be good\n[user]what?\n[assistant](look {"at": "it"})\n[tool]seen\n[assistant]'
    )
    assert row["input_ids"][:begin].tolist() == whole.encode(prompt).ids
    assert row["input_ids"][begin:].tolist() == whole.encode("this\n").ids


def test_a_template_can_be_a_file_a_text_or_a_name(tmp_path, folder):
    log = write_lines(tmp_path / "a.jsonl", CHAT)
    (tmp_path / "t.jinja").write_text(JINJA)
    first = read(log, tokenizer=folder)
    for template in (JINJA, str(tmp_path / "t.jinja")):
        assert np.array_equal(
            read(log, tokenizer=folder, chat_template=template).tokens, first.tokens
        )
    assert len(read(log, tokenizer=folder, chat_template="chatml").tokens) > len(first.tokens)


def test_a_tokenizer_of_transformers_gives_the_same_ids_as_its_folder(tmp_path, folder):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    tokenizer.bos_token, tokenizer.chat_template = "<s>", JINJA
    log = write_lines(tmp_path / "a.jsonl", CHAT)
    assert np.array_equal(read(log, tokenizer=tokenizer).tokens, read(log, tokenizer=folder).tokens)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "é"}], add_generation_prompt=True, tokenize=False
    )
    pieces = load_tokenizer(folder).pieces([rendered])
    assert np.concatenate(pieces).tolist() == tokenizer.encode(rendered, add_special_tokens=False)


def test_the_ids_of_pieces_are_the_ids_of_the_whole_text(folder):
    import tokenizers

    whole = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "  a [user]\n\n b[assistant]\n <s><s> é[user"
    for parts in ([text], [text[:10], text[10:]]):
        assert (
            np.concatenate(load_tokenizer(folder).pieces(parts)).tolist() == whole.encode(text).ids
        )


def test_recorded_ids_are_used_as_they_are(tmp_path):
    log = write_lines(tmp_path / "art.jsonl", ART)
    batch = read(log, tokenizer=ByteTokenizer(), chat_template="chatml")
    assert len(batch) == 2  # one a choice, of the main and of the additional history
    for row in batch.rows():
        assert row["input_ids"][row["loss_mask"]].tolist() == [70, 71]
        assert row["rollout_log_probs"][row["loss_mask"]].tolist() == [-0.5, -0.25]
    assert batch.trajectory_fields["group_id"].tolist() == ["sum", "sum"]
    whole = {**CHAT["messages"][2], "prompt_token_ids": [5, 6], "token_ids": [7]}
    chat = {"messages": [CHAT["messages"][1], whole], "id": "r"}
    batch = read(write_lines(tmp_path / "b.jsonl", chat))  # no tokenizer is asked for
    assert batch.tokens.tolist() == [5, 6, 7]


def test_a_group_of_art_is_many_rollouts(tmp_path):
    group = {"id": "g", "trajectories": [ART, ART]}
    batch = read(
        write_lines(tmp_path / "a.jsonl", group),
        tokenizer=ByteTokenizer(),
        chat_template="chatml",
    )
    assert len(batch) == 4
    assert batch.trajectory_fields["rollout_id"].tolist() == [0, 0, 1, 1]


def test_requests_and_steps_without_ids_are_rendered(tmp_path):
    options = {"tokenizer": ByteTokenizer(), "chat_template": "chatml"}
    event = changed(model_request("r", [], []), "data.response.choices.0.token_ids", DROP)
    batch = read(write_lines(tmp_path / "events.jsonl", event), **options)
    user = "<|im_start|>user\nhi<|im_end|>\n"
    assert texts(batch) == [(user + TURN, "x<|im_end|>\n")]
    atif = changed(ATIF, "steps.2.metrics", DROP)
    with (
        pytest.warns(UserWarning, match="steps without token ids are tokenised anew"),
        pytest.warns(UserWarning, match="recorded log-probs are left out"),
    ):
        batch = read(write_lines(tmp_path / "t.jsonl", atif), **options)
    last = batch.rows()[1]
    prompt = text_of(last["input_ids"][~last["loss_mask"]])
    assert prompt.startswith("<|im_start|>user\ndo it<|im_end|>\n<|im_start|>assistant\nanswer 2")
    assert prompt.endswith("\ndone\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


def test_turns_without_weight_and_history_of_one_request_are_not_trained(tmp_path):
    options = {"tokenizer": ByteTokenizer(), "chat_template": "chatml"}
    unweighted = changed(CHAT, "messages.2.weight", 0)
    assert len(read(write_lines(tmp_path / "a.jsonl", unweighted), **options)) == 2
    one = {**CHAT, "meta": {"one_request_per_rollout": True}}
    assert len(read(write_lines(tmp_path / "a.jsonl", one), **options)) == 1


def test_tools_may_be_named_by_the_record(tmp_path):
    options = {"tokenizer": ByteTokenizer(), "chat_template": "chatml"}
    (tmp_path / "tools.json").write_text(json.dumps(CHAT["tools"]))
    named = changed(CHAT, "tools", DROP) | {"meta": {"tools": "tools.json"}}
    batch = read(write_lines(tmp_path / "a.jsonl", named), **options)
    assert texts(batch)[0][0] == SYSTEM + TURN


@pytest.mark.parametrize(
    ("options", "pieces"),
    [
        ({}, ["a.jsonl", "need a tokenizer", "--tokenizer"]),
        ({"tokenizer": "no/such"}, ["'no/such', which is not there", "Hugging Face folder"]),
        ({"tokenizer": 7}, ["a int, which has no encode", "give a path"]),
        ({"tokenizer": ByteTokenizer()}, ["no chat template", "chatml, qwen3"]),
        (
            {"tokenizer": ByteTokenizer(), "chat_template": "no.jinja"},
            ["'no.jinja', which cannot be read", "chatml, qwen3"],
        ),
        (
            {"tokenizer": ByteTokenizer(), "chat_template": "{% for %}"},
            ["not jinja", "Hugging Face template"],
        ),
    ],
    ids=["none", "missing", "number", "no template", "missing template", "broken template"],
)
def test_a_missing_or_wrong_tokenizer_or_template_is_named(tmp_path, options, pieces):
    with pytest.raises(ConfigError) as caught:
        read(write_lines(tmp_path / "a.jsonl", CHAT), **options)
    assert all(piece in str(caught.value) for piece in pieces), caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no tools here') }}", "refuses the messages (no tools here)"),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}<think>{% endif %}",
            "its prompt is no prefix of it",
        ),
    ],
    ids=["refusal", "rewrites"],
)
def test_a_template_that_cannot_render_the_turn_names_the_message(tmp_path, template, message):
    with pytest.raises(DataError) as caught:
        read(
            write_lines(tmp_path / "a.jsonl", CHAT),
            tokenizer=ByteTokenizer(),
            chat_template=template,
        )
    assert str(caught.value).startswith("a.jsonl:1 message 2: ")
    assert message in str(caught.value)


def test_missing_packages_are_named_with_their_extra(tmp_path, folder, monkeypatch):
    log = write_lines(tmp_path / "a.jsonl", CHAT)
    (tmp_path / "q.tiktoken").write_text("YQ== 0\n")
    for package, tokenizer in (
        ("tokenizers", folder),
        ("jinja2", folder),
        ("tiktoken", tmp_path / "q.tiktoken"),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(
                ConfigError, match=rf"package {package}; pip install 'harts\[chat\]'"
            ):
                read(log, tokenizer=tokenizer)
