import numpy as np
import pytest
import torch
from hypothesis import given, settings

from harts.data.trajectory import TrajectoryBatch
from harts.errors import DataError
from harts.plan.planner import plan_step
from tests.strategies import trajectory_batches
from tests.tree.shapes import batch_of

some = settings(deadline=None, max_examples=50)


def microbatches_of(batch, replicas=1):
    return plan_step(batch, capacity=int(batch.lengths.max()), replicas=replicas)._all


def scored_places(batch, microbatch):
    """(trajectory, position) of every scored token, by trajectory in batch order."""
    return [
        (int(i), t)
        for i in microbatch.trajectory_ids
        for t, scored in enumerate(batch.rows()[i]["loss_mask"])
        if scored
    ]


@some
@given(trajectory_batches(with_identity=True))
def test_fields_are_in_batch_order_then_position(batch):
    rows = batch.rows()
    total = 0
    for mb in microbatches_of(batch):
        places = scored_places(batch, mb)
        assert mb.num_scored == len(places)
        total += len(places)
        assert mb.fields["trajectory_index"].tolist() == [i for i, _ in places]
        assert mb.fields["position"].tolist() == [t for _, t in places]
        assert mb.fields["trajectory_index"].dtype == mb.fields["position"].dtype == np.int64
        for name in batch.position_fields:
            assert mb.fields[name].tolist() == [rows[i][name][t] for i, t in places]
            assert mb.fields[name].dtype == batch.position_fields[name].dtype
        for name in batch.trajectory_fields:
            assert mb.fields[name].tolist() == [rows[i][name] for i, _ in places]
        assert set(mb.fields) == {
            *batch.position_fields,
            *batch.trajectory_fields,
            "trajectory_index",
            "position",
        }
    assert total == batch.loss_mask.sum()


@some
@given(trajectory_batches())
def test_scatter_and_padded_put_each_value_at_its_token(batch):
    for mb in microbatches_of(batch):
        values = np.arange(1.0, mb.num_scored + 1)
        wanted = [np.full(n, -7.0) for n in batch.lengths[mb.trajectory_ids]]
        row_of = {int(i): row for row, i in enumerate(mb.trajectory_ids)}
        for value, (i, t) in zip(values, scored_places(batch, mb), strict=True):
            wanted[row_of[i]][t] = value
        scattered = mb.scatter(values, fill=-7.0)
        assert [x.tolist() for x in scattered] == [x.tolist() for x in wanted]
        padded = mb.padded(values, fill=-7.0)
        assert padded.shape == (len(wanted), max(len(x) for x in wanted))
        for row, want in zip(padded, wanted, strict=True):
            assert row.tolist() == want.tolist() + [-7.0] * (len(row) - len(want))
        tensor = torch.tensor(values, requires_grad=True)
        assert mb.padded(tensor, fill=-7.0).tolist() == padded.tolist()
        assert [x.tolist() for x in mb.scatter(tensor, fill=-7.0)] == [x.tolist() for x in wanted]


@some
@given(trajectory_batches())
def test_gradients_flow_back_through_scatter_and_padded(batch):
    for mb in microbatches_of(batch):
        values = torch.randn(mb.num_scored, dtype=torch.float64, requires_grad=True)
        weights = torch.arange(1.0, mb.num_scored + 1, dtype=torch.float64)
        placed = torch.cat(mb.scatter(weights))
        (torch.cat(mb.scatter(values)) * placed).sum().backward()
        assert values.grad.tolist() == weights.tolist()
        values.grad = None
        (mb.padded(values, fill=3.0) * mb.padded(weights)).sum().backward()
        assert values.grad.tolist() == weights.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_torch_values_keep_their_dtype(dtype):
    (mb,) = microbatches_of(batch_of([[1, 2, 3]]))
    values = torch.tensor([1, 2], dtype=dtype)
    assert mb.padded(values).dtype == mb.scatter(values)[0].dtype == dtype


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, bool])
def test_numpy_values_keep_their_dtype(dtype):
    (mb,) = microbatches_of(batch_of([[1, 2, 3]]))
    values = np.array([1, 1], dtype=dtype)
    assert mb.padded(values).dtype == mb.scatter(values)[0].dtype == dtype


def test_the_default_fill_is_zero_and_lists_are_taken():
    (mb,) = microbatches_of(batch_of([[1, 2, 3]]))
    assert mb.padded([5.0, 6.0]).tolist() == [[0.0, 5.0, 6.0]]


def test_a_wrong_number_of_values_is_refused_in_one_line():
    (mb,) = microbatches_of(batch_of([[1, 2, 3]]))
    for values in (np.ones(3), torch.ones(1), np.ones(0)):
        with pytest.raises(ValueError, match=r"got \d values for 2 scored positions; give one"):
            mb.scatter(values)
        with pytest.raises(ValueError, match=r"got \d values for 2 scored positions; give one"):
            mb.padded(values)


def test_a_microbatch_without_scored_positions_scatters_nothing():
    rows = [{"input_ids": [1, 2], "loss_mask": [0, 0], "reward": 1.0}] * 2
    (mb,) = microbatches_of(TrajectoryBatch.from_rows(rows))
    assert mb.num_scored == 0
    assert mb.fields["reward"].shape == (0,)
    assert mb.padded(np.ones(0), fill=2).tolist() == [[2, 2], [2, 2]]
    assert [x.tolist() for x in mb.scatter(torch.ones(0))] == [[0, 0], [0, 0]]


def test_position_0_can_never_be_scored():
    with pytest.raises(DataError, match="trajectory 1: loss_mask"):
        TrajectoryBatch.from_rows(
            [
                {"input_ids": [1, 2], "loss_mask": [0, 1]},
                {"input_ids": [1, 2], "loss_mask": [1, 1]},
            ]
        )


@some
@given(trajectory_batches())
def test_no_scored_position_is_the_first_of_its_trajectory(batch):
    for mb in microbatches_of(batch):
        assert (mb.fields["position"] >= 1).all()


def test_members_are_by_ascending_index_whatever_the_lexicographic_order():
    batch = batch_of([[3, 1], [1, 1], [2, 1]], reward=[0.5, 1.5, 2.5])
    (mb,) = plan_step(batch).microbatches()
    assert mb.order.ids.tolist() == [1, 2, 0]
    assert mb.trajectory_ids.tolist() == [0, 1, 2]
    assert mb.fields["reward"].tolist() == [0.5, 1.5, 2.5]


def test_object_fields_are_carried():
    rows = [{"input_ids": [1, 2, k], "loss_mask": [0, 1, 1], "tag": f"t{k}"} for k in range(2)]
    (mb,) = plan_step(TrajectoryBatch.from_rows(rows)).microbatches()
    assert mb.fields["tag"].tolist() == ["t0", "t0", "t1", "t1"]
