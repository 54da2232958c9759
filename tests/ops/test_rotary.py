"""Assembly of latent attention in plain PyTorch: the rotation written out, and what is refused."""

from __future__ import annotations

import cmath
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ops.test_norm import drawn

from harts.errors import ConfigError, HartsError
from harts.ops.rotary import assemble_keys_values, rotate_queries


def angles(
    num_rows: int, width: int, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Angle of each pair (C, R / 2), cosine and sine (C, R), both halves alike."""
    position = torch.arange(num_rows, dtype=torch.float64)[:, None]
    angle = position * 0.5 ** torch.arange(width // 2, dtype=torch.float64)
    both = torch.cat([angle, angle], dim=1)
    return angle, both.cos().to(dtype), both.sin().to(dtype)


def test_every_pair_is_turned_by_its_angle_and_comes_out_as_halves() -> None:
    q, (angle, cos, sin) = drawn(5, 2, 7 + 6), angles(5, 6)
    y = rotate_queries(q, cos, sin)
    assert torch.equal(y[..., :7], q[..., :7])
    for row in range(5):
        for head in range(2):
            for pair in range(3):
                first, second = q[row, head, 7 + 2 * pair : 9 + 2 * pair].tolist()
                turned = complex(first, second) * cmath.exp(1j * float(angle[row, pair]))
                got = complex(y[row, head, 7 + pair], y[row, head, 10 + pair])
                assert abs(got - turned) < 1e-14


def test_all_heads_get_the_same_rotated_key_part() -> None:
    kv, k_rope, (_, cos, sin) = drawn(5, 3, 4 + 8), drawn(5, 6, seed=1), angles(5, 6)
    keys, values = assemble_keys_values(kv, k_rope, cos, sin, value_width=8)
    want = rotate_queries(k_rope[:, None], cos, sin)
    assert torch.equal(keys[..., :4], kv[..., :4]) and torch.equal(values, kv[..., 4:])
    assert all(torch.equal(keys[:, head, 4:], want[:, 0]) for head in range(3))
    assert keys.is_contiguous() and values.is_contiguous()


def test_without_angles_the_key_part_is_copied() -> None:
    kv, k_rope = drawn(5, 3, 4 + 8), drawn(5, 6, seed=1)
    keys, _ = assemble_keys_values(kv, k_rope, None, None, value_width=8)
    assert torch.equal(keys[..., 4:], k_rope[:, None].expand(-1, 3, -1))


def test_gradients_are_those_of_finite_differences() -> None:
    _, cos, sin = angles(3, 4)
    q, kv = drawn(3, 2, 7).requires_grad_(), drawn(3, 2, 5, seed=1).requires_grad_()
    k_rope = drawn(3, 4, seed=2).requires_grad_()
    torch.autograd.gradcheck(lambda x: rotate_queries(x, cos, sin), (q,))
    torch.autograd.gradcheck(
        lambda x, y: assemble_keys_values(x, y, cos, sin, value_width=2), (kv, k_rope)
    )


def test_what_does_not_fit_is_refused_in_one_line() -> None:
    q, kv, k_rope = torch.ones(3, 2, 8), torch.ones(3, 2, 8), torch.ones(3, 4)
    cos = sin = torch.ones(3, 4)

    def assemble(*args: Any, **options: Any) -> Any:
        return assemble_keys_values(*args, **{"value_width": 4} | options)

    refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (HartsError, "want (rows, heads, columns)", lambda: rotate_queries(q[0], cos, sin)),
        (HartsError, "want (3 rows, rotary", lambda: rotate_queries(q, cos[:2], sin[:2])),
        (HartsError, "an even number", lambda: rotate_queries(q, cos[:, :3], sin[:, :3])),
        (HartsError, "want the dtype of the heads", lambda: rotate_queries(q.half(), cos, sin)),
        (HartsError, "got one of cos and sin", lambda: assemble(kv, k_rope, cos, None)),
        (HartsError, "values 9 wide", lambda: assemble(kv, k_rope, cos, sin, value_width=9)),
        (HartsError, "of one dtype", lambda: assemble(kv, k_rope.half(), cos, sin)),
        (
            HartsError,
            "cos has 2 columns, k_rope 4",
            lambda: assemble(kv, k_rope, cos[:, :2], sin[:, :2]),
        ),
        (ConfigError, "impl is 'fast'", lambda: assemble(kv, k_rope, cos, sin, impl="fast")),
        (
            ConfigError,
            "'fused' needs CUDA tensors",
            lambda: rotate_queries(q, cos, sin, impl="fused"),
        ),
    ]
    for kind, message, call in refused:
        with pytest.raises(kind) as error:
            call()
        assert message in str(error.value) and "\n" not in str(error.value)
