import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harts.data.trajectory import TrajectoryBatch
from harts.errors import DataError
from tests.data.comparison import assert_equal_batches
from tests.strategies import token_trees, trajectory_batches

FINITE = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text('ab1 "\\\n\u00e9\u2603\x00', max_size=4)
SCALARS = {
    "ints": st.integers(-(2**63), 2**63 - 1),
    "floats": FINITE,
    "floats or None": st.none() | FINITE,
    "bools": st.booleans(),
    "strings": TEXT,
    "strings or None": st.none() | TEXT,
    "dicts": st.dictionaries(TEXT, st.integers() | TEXT, max_size=2),
    "anything": st.none() | st.booleans() | st.integers(0, 9) | FINITE | TEXT,
    "float32": st.floats(width=32, allow_nan=False, allow_infinity=False).map(np.float32),
}
DTYPES = ["bool", "int8", "uint16", "int32", "int64", "uint64", "float16", "float32", "float64"]


def small_row(**fields):
    return {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], **fields}


@st.composite
def any_rows(draw):
    """Rows as from_rows takes them, with fields of every kind."""
    trajectories = draw(token_trees(max_trajectories=4))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    scalars = draw(st.lists(st.sampled_from(sorted(SCALARS)), max_size=3, unique=True))
    dtypes = draw(st.lists(st.sampled_from(DTYPES), max_size=3, unique=True))
    rows = []
    for tokens in trajectories:
        row = {"input_ids": tokens, "loss_mask": [0] + [1] * (len(tokens) - 1)}
        row |= {f"field of {kind}": draw(SCALARS[kind]) for kind in scalars}
        row |= {f"per token {d}": rng.integers(0, 2, len(tokens)).astype(d) for d in dtypes}
        rows.append(row)
    return rows


@given(any_rows())
def test_rows_are_the_inverse_of_from_rows(rows):
    batch = TrajectoryBatch.from_rows(rows)
    assert_equal_batches(TrajectoryBatch.from_rows(batch.rows()), batch)


@given(any_rows())
def test_from_rows_keeps_every_value_of_every_row(rows):
    for row, carried in zip(rows, TrajectoryBatch.from_rows(rows).rows(), strict=True):
        assert carried.keys() == row.keys()
        for name, value in row.items():
            if isinstance(value, list | np.ndarray):
                assert list(value) == carried[name].tolist()
            else:
                assert value == carried[name]


@given(trajectory_batches(with_identity=True), st.data())
def test_select_keeps_the_order_given_and_whole_rows(batch, data):
    ids = data.draw(st.lists(st.integers(0, len(batch) - 1), min_size=1, max_size=5))
    rows = batch.rows()
    expected = TrajectoryBatch.from_rows([rows[i] for i in ids])
    assert_equal_batches(batch.select(ids), expected)


def test_select_takes_sources_along():
    batch = TrajectoryBatch.from_rows(
        [small_row(), small_row()], sources=["a.jsonl:1", "a.jsonl:4"]
    )
    assert batch.select([1, 0]).name_of(0) == "trajectory 0 (a.jsonl:4)"
    assert batch.select(np.array([1])).sources == ("a.jsonl:4",)
    assert TrajectoryBatch.from_rows([small_row()]).name_of(0) == "trajectory 0"


@pytest.mark.parametrize("ids", [[], [2], [-1], [True, False], [0.0], [[0]]], ids=str)
def test_select_refuses_what_names_no_trajectory(ids):
    batch = TrajectoryBatch.from_rows([small_row(), small_row()])
    with pytest.raises(DataError, match="; give"):
        batch.select(ids)


def test_python_numbers_become_64_bit_and_arrays_keep_their_dtype():
    row = small_row(
        a=1, b=0.5, c=True, d="x", e=[1, 2, 3], f=[1, 2.5, 3], g=np.arange(3, dtype=np.float32)
    )
    batch = TrajectoryBatch.from_rows([row])
    assert batch.tokens.dtype == np.int32
    assert batch.offsets.dtype == np.int64
    assert batch.loss_mask.dtype == np.bool_
    dtypes = {name: values.dtype for name, values in batch.trajectory_fields.items()}
    assert dtypes == {"a": np.int64, "b": np.float64, "c": np.bool_, "d": np.dtype(object)}
    dtypes = {name: values.dtype for name, values in batch.position_fields.items()}
    assert dtypes == {"e": np.int64, "f": np.float64, "g": np.float32}


def test_lengths_and_offsets_describe_the_rows():
    batch = TrajectoryBatch.from_rows(
        [small_row(), {"input_ids": [7], "loss_mask": [0]}, small_row()]
    )
    assert len(batch) == 3
    assert batch.lengths.tolist() == [3, 1, 3]
    assert batch.offsets.tolist() == [0, 3, 4, 7]


def test_a_field_given_per_token_in_one_row_is_spread_in_the_others():
    rows = [small_row(advantages=2), small_row(advantages=[0.5, -1.0, 0.0])]
    batch = TrajectoryBatch.from_rows(rows)
    assert batch.position_fields["advantages"].tolist() == [2, 2, 2, 0.5, -1, 0]
    assert not batch.trajectory_fields


def test_none_in_a_numeric_field_is_nan_and_comes_back_as_none():
    batch = TrajectoryBatch.from_rows([small_row(reward=1), small_row(reward=None)])
    assert batch.trajectory_fields["reward"].dtype == np.float64
    assert np.isnan(batch.trajectory_fields["reward"][1])
    assert [row["reward"] for row in batch.rows()] == [1.0, None]
    unknown = TrajectoryBatch.from_rows([small_row(reward=None, note=None)])
    assert np.isnan(unknown.trajectory_fields["reward"][0])
    assert unknown.trajectory_fields["note"].tolist() == [None]


def test_identity_is_an_int64_position_field_however_it_is_given():
    rows = [small_row(identity=5), small_row(identity=np.array([1, 1, 2], np.uint8))]
    identity = TrajectoryBatch.from_rows(rows).position_fields["identity"]
    assert identity.dtype == np.int64
    assert identity.tolist() == [5, 5, 5, 1, 1, 2]
    assert TrajectoryBatch.from_rows([small_row(identity=5)]).position_fields["identity"].size == 3


def test_an_all_zero_mask_is_allowed():
    batch = TrajectoryBatch.from_rows([{"input_ids": [1, 2], "loss_mask": [False, 0]}])
    assert not batch.loss_mask.any()


@pytest.mark.parametrize("tokens", ["input_ids", "tokens", "token_ids"])
@pytest.mark.parametrize("mask", ["loss_mask", "loss_masks", "mask"])
def test_flat_rows_have_aliases(tokens, mask):
    batch = TrajectoryBatch.from_rows([{tokens: [1, 2], mask: [0, 1]}])
    assert batch.tokens.tolist() == [1, 2]
    assert batch.loss_mask.tolist() == [False, True]
    assert not batch.position_fields


@pytest.mark.parametrize("prompt", ["prompt_ids", "prompt_token_ids", "prompts"])
@pytest.mark.parametrize("response", ["response_ids", "completion_ids", "responses"])
@pytest.mark.parametrize("mask", [None, "response_mask", "loss_mask", "loss_masks", "env_mask"])
def test_prompt_and_response_rows_are_joined(prompt, response, mask):
    row = {prompt: [1, 2], response: [3, 4, 5], "logprobs": [-1.0, -2.0, -3.0], "uid": "t"}
    if mask is not None:
        row[mask] = [1, 0, 1]
    batch = TrajectoryBatch.from_rows([row])
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5]
    assert batch.loss_mask.tolist() == [False, False, True, mask is None, True]
    assert batch.position_fields["logprobs"].tolist() == [0, 0, -1, -2, -3]
    assert list(batch.position_fields) == ["logprobs"]
    assert list(batch.trajectory_fields) == ["uid"]


def test_fields_over_prompt_and_response_are_taken_as_they_are():
    row = {"prompt_ids": [1], "response_ids": [2, 3], "loss_mask": [0, 0, 1], "v": [7, 8, 9]}
    batch = TrajectoryBatch.from_rows([row])
    assert batch.loss_mask.tolist() == [False, False, True]
    assert batch.position_fields["v"].tolist() == [7, 8, 9]


def test_objects_with_an_array_interface_are_read_without_their_library():
    class HostTensor:
        ndim = 1

        def __array__(self, dtype=None, copy=None):
            return np.array([1, 2, 3], np.int16)

    row = {"input_ids": HostTensor(), "loss_mask": (0, 1, 1), "v": HostTensor()}
    batch = TrajectoryBatch.from_rows([row])
    assert batch.tokens.tolist() == [1, 2, 3]
    assert batch.position_fields["v"].dtype == np.int16


def test_big_endian_arrays_are_carried_in_native_order():
    batch = TrajectoryBatch.from_rows([small_row(v=np.arange(3, dtype=">f4"))])
    assert batch.position_fields["v"].dtype == np.float32
    assert batch.position_fields["v"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": np.array([1, 2, 3])},
        {"tokens": np.array([1, -2, 3], np.int32)},
        {"tokens": [1, 2, 3]},
        {"loss_mask": np.array([False, True])},
        {"loss_mask": np.array([0, 1, 1])},
        {"loss_mask": np.array([True, True, True])},
        {"offsets": np.array([0])},
        {"offsets": np.array([0, 2])},
        {"offsets": np.array([1, 3])},
        {"offsets": np.array([0, 0, 3])},
        {"offsets": np.array([0, 3], np.int32)},
        {"position_fields": {"a": np.zeros(2)}},
        {"position_fields": {"a": np.zeros((3, 1))}},
        {"position_fields": {"a": np.array(["x", "y", "z"])}},
        {"position_fields": {"a": np.zeros(3, ">f8")}},
        {"position_fields": {"position": np.zeros(3)}},
        {"position_fields": {"identity": np.zeros(3)}},
        {"trajectory_fields": {"a": np.zeros(3)}},
        {"trajectory_fields": {"loss_mask": np.zeros(1)}},
        {"trajectory_fields": {"identity": np.zeros(1, np.int64)}},
        {"trajectory_fields": {"a": np.zeros(1)}, "position_fields": {"a": np.zeros(3)}},
        {"sources": ("a", "b")},
    ],
    ids=lambda change: "-".join(f"{name}={value}" for name, value in change.items()),
)
def test_a_batch_built_by_hand_is_checked(change):
    parts = {
        "tokens": np.array([1, 2, 3], np.int32),
        "offsets": np.array([0, 3]),
        "loss_mask": np.array([False, True, True]),
    }
    TrajectoryBatch(**parts)
    with pytest.raises(DataError, match="; ") as caught:
        TrajectoryBatch(**{**parts, **change})
    assert "\n" not in str(caught.value)


def test_five_million_tokens_in_arrays_are_checked_within_two_seconds():
    rng = np.random.default_rng(0)
    rows = [
        {
            "input_ids": rng.integers(0, 1000, 25_000),
            "loss_mask": np.arange(25_000) > 100,
            "advantages": np.zeros(25_000, np.float32),
        }
        for _ in range(200)
    ]
    started = time.perf_counter()
    batch = TrajectoryBatch.from_rows(rows)
    assert len(batch.tokens) == 5_000_000
    assert time.perf_counter() - started < 2.0
