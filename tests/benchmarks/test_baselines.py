"""Baselines of the GPU benchmarks compute what harts computes: with stand-ins for fla and
FlashAttention on a CPU, with the libraries themselves on a GPU."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import harts
from harts.data.synthetic import agent_batch
from harts.ops.attention import tree_attention
from harts.ops.gather import gather_rows
from harts.ops.linear_attention import KdaGate, chunk_kda
from harts.plan.microbatch import MicroBatch
from harts.views.tree import TreeView, build_tree_view
from tests.ops.linear_oracles import recurrence
from tests.ops.test_attention_gpu import runs_fa4
from tests.ops.test_linear_attention_gpu import missing

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from baselines import kv_views_attention, node_by_node

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def devices(problem: str | None) -> pytest.MarkDecorator:
    """The CPU, and a GPU unless there is a problem with its library."""
    on_gpu = pytest.mark.gpu, pytest.mark.skipif(bool(problem), reason=problem or "runs")
    return pytest.mark.parametrize("device", [CPU, pytest.param(CUDA, marks=on_gpu)], ids=str)


def _tree(device: torch.device) -> tuple[MicroBatch, TreeView]:
    batch = agent_batch(seed=1, shape="agent_tree", compression=3.0, raw_tokens=3000)
    (microbatch,) = harts.plan_step(batch, 3000).microbatches()
    assert len(microbatch.forest.parent) > 5
    return microbatch, build_tree_view(microbatch, device=device)


def _random(device: torch.device, *shape: int) -> torch.Tensor:
    """The same on every device; bfloat16 where the libraries want it."""
    dtype = torch.float64 if device.type == "cpu" else torch.bfloat16
    return torch.randn(shape, dtype=torch.float64).to(device, dtype).requires_grad_()


def _assert_same(
    got: torch.Tensor, want: torch.Tensor, leaves: list[torch.Tensor], tolerance: float
) -> None:
    weights = torch.randn_like(want)
    got_and_gradients = [got, *torch.autograd.grad(got, leaves, weights, retain_graph=True)]
    want_and_gradients = [want, *torch.autograd.grad(want, leaves, weights, retain_graph=True)]
    for a, b in zip(got_and_gradients, want_and_gradients, strict=True):
        assert (a - b).norm() <= tolerance * b.norm()


@devices(missing())
def test_node_by_node_is_the_scan(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    microbatch, view = _tree(device)
    heads, width = 2, 8 if device == CPU else 64
    leaves = [_random(device, view.num_rows, heads, width) for _ in range(4)]
    leaves.append(_random(device, view.num_rows, heads))
    offset = _random(device, heads, width).detach().float()
    gate = KdaGate(torch.zeros(heads, device=device), offset, lower_bound=-5.0)
    if device == CPU:
        fake = SimpleNamespace(chunk_kda_packed=_recurrence)
        monkeypatch.setitem(sys.modules, "harts.ops.linear_attention.fla06", fake)  # type: ignore[arg-type]

    packed = view.linear.packed
    q, k, v, raw, beta = (gather_rows(x, packed) for x in leaves)
    rows = (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, raw, beta.sigmoid())
    got, _ = node_by_node(*rows, microbatch=microbatch, view=view.linear, gate=gate)
    impl: Any = "reference" if device == CPU else "scan"
    want, _ = chunk_kda(*rows, view=view.linear, gate=gate, impl=impl)
    assert len(packed.own) < len(got)  # some rows are replayed, and their output is nobody's
    _assert_same(got[packed.own], want[packed.own], leaves, 1e-9 if device == CPU else 2e-2)


def _recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float,
    safe_gate: bool,
    initial_states: torch.Tensor,
    lengths: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule row by row, in place of fla's operator."""
    assert safe_gate and lengths == [q.shape[1]] and scale == q.shape[3] ** -0.5
    rows = (x[0] for x in (q, k, v, log_decay, beta))
    output, states = recurrence(*rows, initial_states[0].double())
    return output[None], states[-1][None]


@devices(runs_fa4())
def test_attention_over_kv_views_is_tree_attention(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    _, view = _tree(device)
    heads, width = 4, 8 if device == CPU else 128
    q, k, v = (_random(device, view.num_rows, n, width) for n in (heads, heads, heads))
    if device == CPU:
        fake = ModuleType("flash_attn.cute.interface")
        fake.flash_attn_varlen_func = _varlen_attention  # type: ignore[attr-defined]
        for name in ("flash_attn", "flash_attn.cute"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", fake)
    got = kv_views_attention(q, k, v, view.attention, 0.3, False)
    want = tree_attention(q, k, v, view=view.attention, scale=0.3)
    _assert_same(got, want, [q, k, v], 1e-9 if device == CPU else 2e-2)


def _varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    deterministic: bool,
) -> tuple[torch.Tensor, None]:
    """Dense attention sequence by sequence, causal from the lower right."""
    assert causal and not deterministic
    assert max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k == cu_seqlens_k.diff().max()
    outputs = []
    queries, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for (a, b), (c, d) in zip(pairwise(queries), pairwise(keys), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q[a:b], k[c:d]) * softmax_scale
        seen = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
        weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        outputs.append(torch.einsum("hqk,khv->qhv", weights, v[c:d]))
    return torch.cat(outputs), None
