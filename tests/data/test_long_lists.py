"""Long lists of numbers take a faster way, with the values, dtypes and errors of short ones."""

import json

import numpy as np
import pytest

from harts.data.read import read
from harts.data.trajectory import TrajectoryBatch
from harts.errors import DataError
from tests.data.comparison import assert_equal_batches

LONG = 400
ROW = {
    "input_ids": list(range(LONG)),
    "loss_mask": [0, *[1] * (LONG - 1)],
    "logprobs": [-0.1 * i for i in range(LONG)],
    "mixed": [0, *[0.5] * (LONG - 1)],
    "big": [2**62 + 1] * LONG,
    "reward": 1.0,
}


def with_entry(name, value):
    return {**ROW, name: [*ROW[name][:-1], value]}


@pytest.mark.parametrize(
    "row",
    [ROW, {**ROW, "loss_mask": [False, *[True] * (LONG - 1)]}, with_entry("mixed", 2**52)],
    ids=["numbers", "truth values", "large among fractions"],
)
def test_a_file_gives_the_batch_of_its_rows(tmp_path, row):
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row))
    assert_equal_batches(read(tmp_path / "a.jsonl"), TrajectoryBatch.from_rows([row, row]))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("input_ids", -1),
        ("input_ids", 2**31),
        ("input_ids", 1.5),
        ("input_ids", None),
        ("input_ids", "1"),
        ("input_ids", True),
        ("input_ids", [1]),
        ("loss_mask", 2),
        ("loss_mask", 0.5),
        ("mixed", 2**53 + 1),
        ("mixed", True),
        ("logprobs", None),
    ],
    ids=str,
)
def test_a_bad_entry_is_refused_as_in_a_row_of_python_values(tmp_path, name, value):
    row = with_entry(name, value)
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    with pytest.raises(DataError) as from_rows:
        TrajectoryBatch.from_rows([row], sources=["a.jsonl:1"])
    with pytest.raises(DataError) as from_file:
        read(tmp_path / "a.jsonl")
    assert str(from_file.value) == str(from_rows.value)


def test_columns_of_many_trajectories_are_split_whole(tmp_path):
    line = {
        "prompt_ids": [[1, 2]] * LONG,
        "response_ids": [[3]] * LONG,
        "rewards": [float(i) for i in range(LONG)],
        "index": list(range(LONG)),
    }
    (tmp_path / "a.jsonl").write_text(json.dumps(line))
    batch = read(tmp_path / "a.jsonl")
    assert len(batch) == LONG
    assert np.array_equal(batch.trajectory_fields["rewards"], np.arange(LONG, dtype=float))
    assert np.array_equal(batch.trajectory_fields["index"], np.arange(LONG))
