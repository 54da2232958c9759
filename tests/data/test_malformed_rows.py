"""Every way a row can be wrong, and the line that says so: where; what and got; want and do."""

import numpy as np
import pytest

from harts.data.trajectory import TrajectoryBatch
from harts.errors import DataError

SOURCES = ["bad.jsonl:1", "bad.jsonl:2", "bad.jsonl:3"]
GOOD = {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}


def changed(**fields):
    return {**GOOD, **fields}


def without(name):
    return {key: value for key, value in GOOD.items() if key != name}


def response(**fields):
    return {"prompt_ids": [1, 2], "response_ids": [3, 4, 5], **fields}


class OnAnotherDevice:
    ndim = 1

    def __array__(self, dtype=None, copy=None):
        raise TypeError("can't convert cuda:0 tensor")


# The bad row stands third; each message begins with its name and holds these pieces in this order.
BAD_ROWS = {
    "tokens missing": (without("input_ids"), ["no input_ids", "give input_ids"]),
    "prompt only": ({"prompt_ids": [1]}, ["no input_ids, only prompt_ids", "response_ids"]),
    "response only": ({"response_ids": [1]}, ["no input_ids, only response_ids", "prompt_ids"]),
    "another half first": (
        {**{f"f{n}": n for n in range(8)}, "prompt_ids": [1]},
        ["no input_ids, only prompt_ids, f0, f1, f2, f3, f4, f5, f6 and 1 more;"],
    ),
    "empty row": ({}, ["no input_ids, the row is empty;"]),
    "tokens misspelt": (
        {"tokenids": [5, 6], "loss_mask": [0, 1]},
        ["no input_ids, only tokenids, loss_mask;", "(rename tokenids to input_ids?)"],
    ),
    "prompt and response misspelt": (
        {"promptIds": np.array([5]), "response": [6], "response_mask": [1], "tokens_seen": 3},
        ["(rename promptIds to prompt_ids, response to response_ids?)"],
    ),
    "verl's dump of texts": (
        {"input": "2+2", "output": "4", "gts": None, "score": 1.0, "step": 3},
        [
            "no input_ids, only input, output, gts, score, step: input and output hold text only",
            "as in verl's rollout_data_dir; write their token ids as prompt_ids and response_ids",
            "--tokenizer",
        ],
    ),
    "TRL's dump of texts": (
        {"step": 1, "prompt": "2+2", "completion": "4", "advantage": 0.5},
        ["only step, prompt, completion, advantage: prompt and completion hold text", "TRL's"],
    ),
    "tokens null": (changed(input_ids=None), ["input_ids is null", "give a list of token ids"]),
    "tokens string": (changed(input_ids="567"), ["input_ids is the string '567'", "give a list"]),
    "tokens number": (changed(input_ids=5), ["input_ids is 5", "give a list"]),
    "tokens true": (changed(input_ids=True), ["input_ids is true", "give a list"]),
    "tokens dict": (changed(input_ids={"a": 1}), ["input_ids is a dict", "give a list"]),
    "tokens nested": (
        changed(input_ids=[[5, 6, 7]]),
        ["input_ids[0] is a list of 3", "one number"],
    ),
    "token string": (changed(input_ids=[5, "6", 7]), ["input_ids[1] is the string '6'", "number"]),
    "token null": (changed(input_ids=[5, 6, None]), ["input_ids[2] is null", "one number"]),
    "token true": (changed(input_ids=[5, True, 7]), ["input_ids[1] is true", "one kind"]),
    "tokens all true": (changed(input_ids=[True] * 3), ["input_ids holds truth", "token ids"]),
    "token half": (changed(input_ids=[5, 6.5, 7]), ["input_ids[1] is 6.5", "not whole", "whole"]),
    "token negative": (changed(input_ids=[5, 6, -1]), ["input_ids[2] is -1", "negative", "from 0"]),
    "token 2**31": (changed(input_ids=[2**31, 6, 7]), ["[0] is 2147483648", "not below 2**31"]),
    "token 2**70": (changed(input_ids=[5, 2**70, 7]), ["[1] is 11805", "64 bits", "smaller"]),
    "token NaN": (changed(input_ids=[5, float("nan"), 7]), ["input_ids[1] is nan", "finite"]),
    "tokens matrix": (changed(input_ids=np.ones((1, 3), int)), ["shape (1, 3)", "one number"]),
    "tokens dates": (changed(input_ids=np.zeros(3, "M8[s]")), ["dtype datetime64", "one number"]),
    "tokens elsewhere": (changed(input_ids=OnAnotherDevice()), ["cuda:0", "numpy array"]),
    "no tokens": (changed(input_ids=[], loss_mask=[]), ["no tokens", "drop the row"]),
    "no prompt": (response(prompt_ids=[]), ["loss_mask[0] is 1", "set it to 0"]),
    "two names of tokens": (
        {"tokens": [1], "token_ids": [1], "loss_mask": [0]},
        ["both tokens and token_ids", "keep one"],
    ),
    "mask missing": (without("loss_mask"), ["no loss_mask", "give one 0 or 1 per token"]),
    "mask short": (changed(loss_mask=[0, 1]), ["loss_mask has 2 entries, input_ids 3", "equally"]),
    "mask null": (changed(loss_mask=None), ["loss_mask is null", "one 0 or 1 per token"]),
    "mask scalar": (changed(loss_mask=1), ["loss_mask is 1", "one 0 or 1 per token"]),
    "mask 2": (changed(loss_mask=[0, 1, 2]), ["loss_mask[2] is 2", "use 0 or 1"]),
    "mask half": (changed(loss_mask=[0, 0.5, 1]), ["loss_mask[1] is 0.5", "use 0 or 1"]),
    "mask negative": (changed(loss_mask=np.array([0, -1, 1])), ["[1] is -1", "use 0 or 1"]),
    "mask NaN": (changed(loss_mask=[0.0, float("nan"), 1.0]), ["loss_mask[1] is nan", "finite"]),
    "mask string": (changed(loss_mask="011"), ["loss_mask is the string '011'", "one 0 or 1"]),
    "first token scored": (changed(loss_mask=[1, 1, 1]), ["loss_mask[0] is 1", "set it to 0"]),
    "response mask short": (
        response(response_mask=[1, 1]),
        ["response_mask has 2 entries, response_ids 3", "equally long"],
    ),
    "two names of the mask": (
        response(response_mask=[1, 1, 1], env_mask=[1, 1, 1]),
        ["both response_mask and env_mask", "keep one"],
    ),
    "field short": (changed(v=[1.0, 2.0]), ["v has 2 entries, input_ids 3", "equally long"]),
    "field empty": (changed(v=[]), ["v has 0 entries, input_ids 3", "equally long"]),
    "field NaN": (changed(v=[0.0, 1.0, float("nan")]), ["v[2] is nan", "finite number"]),
    "field infinite": (changed(v=np.array([0, np.inf, 1])), ["v[1] is inf", "finite number"]),
    "field with null": (changed(v=[0.0, None, 1.0]), ["v[1] is null", "one number per token"]),
    "field of strings": (changed(v=["a", "b", "c"]), ["v[0] is the string 'a'", "one number"]),
    "field of string array": (changed(v=np.array(["a"] * 3)), ["v has dtype <U1", "one number"]),
    "field nested": (changed(v=[[1], [2], [3]]), ["v[0] is a list of 1", "one number"]),
    "field complex": (changed(v=np.zeros(3, complex)), ["v has dtype complex128", "one number"]),
    "field of kinds": (changed(v=[1, True, 2]), ["v[1] is true among numbers", "one kind"]),
    "field beyond 2**53": (changed(v=[2**53 + 1, 0.5, 1]), ["v[0] is 9007199254740993", "smaller"]),
    "field masked": (changed(v=np.ma.masked_equal([1, 2, 3], 2)), ["v is a masked", "fill"]),
    "scalar NaN": (changed(reward=float("nan")), ["reward is nan", "finite number or null"]),
    "scalar infinite": (changed(reward=np.float32("inf")), ["reward is inf", "finite number"]),
    "dict with NaN": (changed(meta={"a": [{"b": float("nan")}]}), ["meta holds nan", "finite"]),
    "name of a microbatch field": (changed(position=[0, 1, 2]), ["'position'", "rename it"]),
    "name not a string": ({**GOOD, 3: 1}, ["named 3", "rename it"]),
    "not a dict": ([1, 2, 3], ["the row is a list of 3", "give a dict"]),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_malformed_row_is_refused_in_one_line(case):
    bad, pieces = BAD_ROWS[case]
    with pytest.raises(DataError) as caught:
        TrajectoryBatch.from_rows([GOOD, GOOD, bad], sources=SOURCES)
    message = str(caught.value)
    assert message.startswith("trajectory 2 (bad.jsonl:3): ")
    assert "\n" not in message
    what, _, advice = message.rpartition(";")
    assert what and advice
    position = 0
    for piece in pieces:
        assert piece in message[position:], message
        position = message.index(piece, position)


# Rows whose fields disagree, or are wrong as a column.
BAD_TOGETHER = {
    "field missing later": (
        [changed(reward=1.0), GOOD],
        "trajectory 1: there is no reward, but trajectory 0 has it; give it in every row",
    ),
    "field missing first": (
        [GOOD, changed(reward=1.0)],
        "trajectory 0: there is no reward, but trajectory 1 has it; give it in every row",
    ),
    "null beside lists": (
        [changed(v=[1, 2, 3]), changed(v=None)],
        "trajectory 1: v is null; give one number per token",
    ),
    "string beside lists": (
        [changed(v="x"), changed(v=[1, 2, 3])],
        "trajectory 0: v is the string 'x'; give one number per token",
    ),
    "truth values beside numbers": (
        [changed(v=[1, 2, 3]), changed(v=[True, True, False])],
        "trajectory 1: v mixes truth values and numbers, see trajectory 0; use one kind",
    ),
    "whole numbers beyond 2**53 beside fractions": (
        [changed(v=0.5), changed(v=2**53 + 1)],
        "trajectory 1: v has whole numbers beyond 2**53, other rows fractions or nulls; use",
    ),
    "whole numbers beyond 2**53 beside null": (
        [changed(v=None), changed(v=-(2**60))],
        "trajectory 1: v has whole numbers beyond 2**53, other rows fractions or nulls; use",
    ),
    "whole number beyond 64 bits": (
        [changed(seed=2**64)],
        "trajectory 0: seed is 18446744073709551616, which needs more than 64 bits; give it as",
    ),
    "reward true": ([changed(reward=True)], "trajectory 0: reward is true; give a number"),
    "log-probs of truth values": (
        [changed(logprobs=[True, True, False])],
        "trajectory 0: logprobs is truth values; give a number",
    ),
    "advantages in a dict": (
        [changed(advantages={"a": 1})],
        "trajectory 0: advantages is a dict; give a number",
    ),
    "identity null": (
        [changed(identity=1), changed(identity=None)],
        "trajectory 1: identity is null; give one number per token",
    ),
    "identity a string": (
        [changed(identity="lora-1")],
        "trajectory 0: identity is the string 'lora-1'; give one number per token",
    ),
    "identity half": (
        [changed(identity=0.5)],
        "trajectory 0: identity has dtype float64; give whole numbers",
    ),
    "reward string beside numbers": (
        [changed(reward=0.5), changed(reward="0.5")],
        "trajectory 1: reward is the string '0.5'; give a number",
    ),
    "identity in one row only": (
        [changed(identity=1), changed(identity=[0.5, 1, 1])],
        "trajectory 0: identity has dtype float64; give whole numbers",
    ),
}


@pytest.mark.parametrize("case", BAD_TOGETHER)
def test_rows_that_do_not_agree_are_refused_by_name(case):
    rows, message = BAD_TOGETHER[case]
    with pytest.raises(DataError) as caught:
        TrajectoryBatch.from_rows(rows)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_the_message_for_unequal_lengths_is_word_for_word():
    bad = {"input_ids": [1, 2, 3, 4, 5, 6], "loss_mask": [0, 1, 1, 1, 1]}
    with pytest.raises(DataError) as caught:
        TrajectoryBatch.from_rows([GOOD, GOOD, bad], sources=SOURCES)
    assert str(caught.value) == (
        "trajectory 2 (bad.jsonl:3): loss_mask has 5 entries, input_ids 6; "
        "they must be equally long"
    )


@pytest.mark.parametrize(
    ("rows", "sources", "message"),
    [
        ([], None, "the batch has no trajectories; give at least one row"),
        (GOOD, None, "rows is one dict; give a list of dicts"),
        ([GOOD], ["a", "b"], "sources has 2 entries, rows 1; they must be equally long"),
    ],
    ids=["no rows", "one dict", "too many sources"],
)
def test_what_is_no_batch_is_refused(rows, sources, message):
    with pytest.raises(DataError, match=message):
        TrajectoryBatch.from_rows(rows, sources=sources)


def test_a_message_stays_on_one_line_whatever_the_names_hold():
    with pytest.raises(DataError) as caught:
        TrajectoryBatch.from_rows([changed(**{"a\nb": "x\ny", "reward": "x\ny"})])
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError) as caught:
        TrajectoryBatch.from_rows([changed(**{"a\nb": [1]})])
    assert "\n" not in str(caught.value)
