"""Trajectories above the capacity, as people read of them."""

import numpy as np
import pytest

from harts.data.trajectory import TrajectoryBatch
from harts.errors import PlanError
from harts.plan.over_capacity import dropped_text, within_capacity


def batch_of(lengths: list[int], *, sources: list[str] | None = None) -> TrajectoryBatch:
    rows = [{"input_ids": [1] * n, "loss_mask": [0] * n} for n in lengths]
    return TrajectoryBatch.from_rows(rows, sources)


def test_the_others_that_are_too_long_are_counted_as_trajectories() -> None:
    with pytest.raises(PlanError) as caught:
        within_capacity(batch_of([276, *range(200, 220), 5]), 200, "error")
    assert str(caught.value).startswith(
        "trajectory 0 has 276 tokens, more than the capacity 200 (and 19 more trajectories are too "
        "long); raise the capacity"
    )


def test_of_a_few_dropped_trajectories_all_are_named() -> None:
    batch = batch_of([9, 1, 8], sources=["a:1", "a:2", "a:3"])
    _, dropped = within_capacity(batch, 5, "drop")
    assert dropped_text(batch, dropped) == "2 of 3: trajectory 0 (a:1), trajectory 2 (a:3)"


def test_of_many_dropped_trajectories_ten_are_named() -> None:
    text = dropped_text(batch_of([1] * 2000), np.arange(1500))
    assert text.startswith("1,500 of 2,000: trajectory 0, trajectory 1, ")
    assert text.endswith("trajectory 9, ...")
