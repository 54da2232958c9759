"""What the linear-attention layers of all families share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harts.errors import ConfigError
from harts.models.kernels import Kernels
from harts.models.linear_layers import pack, unpack
from harts.models.tree_run import TreeRun
from tests.ops.linear_oracles import gather_from


def run_of(kernels: Kernels) -> TreeRun:
    gather = gather_from([0, 1, 0, 2], [True, True, False, True])
    view: Any = SimpleNamespace(linear=SimpleNamespace(packed=gather))
    return TreeRun(view, kernels)


def test_packed_rows_come_back() -> None:
    tree, rows = run_of(Kernels()), torch.randn(1, 3, 4)
    packed = pack(rows, tree)
    assert torch.equal(packed, rows[0, [0, 1, 0, 2]])
    assert torch.equal(unpack(packed, tree), rows)


def test_token_wise_chooses_the_gathers() -> None:
    """The fused ones refuse a CPU, so their refusal says that they were called."""
    tree = run_of(Kernels(token_wise="fused"))
    with pytest.raises(ConfigError, match="gather_rows: impl 'fused' needs CUDA"):
        pack(torch.zeros(1, 3, 4), tree)
    with pytest.raises(ConfigError, match="own_rows: impl 'fused' needs CUDA"):
        unpack(torch.zeros(4, 4), tree)
