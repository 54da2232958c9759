"""Exact comparison of batches; a difference is said by field and first differing coordinate."""

import numpy as np

from harts.data.trajectory import TrajectoryBatch


def assert_equal_batches(
    actual: TrajectoryBatch, expected: TrajectoryBatch, *, same_dtypes: bool = True
) -> None:
    """Same values, order of fields and, unless told otherwise, dtypes. Sources are not compared."""
    pairs = {name: getattr(actual, name) for name in ("tokens", "offsets", "loss_mask")}
    for name, values in pairs.items():
        _assert_equal(name, values, getattr(expected, name), True)
    for kind in ("position_fields", "trajectory_fields"):
        left, right = getattr(actual, kind), getattr(expected, kind)
        assert list(left) == list(right)
        for name in right:
            _assert_equal(name, left[name], right[name], same_dtypes)


def _assert_equal(name: str, actual: np.ndarray, expected: np.ndarray, same_dtypes: bool) -> None:
    if same_dtypes:
        assert actual.dtype == expected.dtype, f"{name}: {actual.dtype} is not {expected.dtype}"
    assert actual.shape == expected.shape, f"{name}: {actual.shape} is not {expected.shape}"
    for index, (left, right) in enumerate(zip(actual.tolist(), expected.tolist(), strict=True)):
        both_nan = left != left and right != right
        assert both_nan or (left == right and _sign(left) == _sign(right)), (
            f"{name}[{index}]: {left!r} is not {right!r}"
        )
        if same_dtypes:
            assert type(left) is type(right), f"{name}[{index}]: {left!r} is not {right!r}"


def _sign(value: object) -> object:
    return np.signbit(value) if isinstance(value, float) else None
