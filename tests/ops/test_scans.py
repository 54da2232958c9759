"""The scans against the reference, in Triton's interpreter.

The Triton kernels of harts run as they are; plain PyTorch stands in for fla's within chunks. What
fla does itself, and the rounding of bfloat16, is tested on a GPU (test_linear_attention_gpu).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.ops.linear_oracles import chains_of, forest_of, linear_view
from tests.ops.test_linear_attention import NAMES, drawn_inputs, largest_error, results_of
from tests.ops.triton_device import interpreted, needs_triton

from harts.ops.gather import gather_rows
from harts.ops.linear_attention import chunk_kda
from harts.views.linear import LinearView

Scan = Callable[..., tuple[torch.Tensor, torch.Tensor]]

B = 32
# forks one row before, at and after a chunk's end, below a fork, one-token chains, several roots
TREE = forest_of(
    [
        (-1, B - 1),
        (0, 1),
        (1, 1),
        (2, B - 1),
        (3, 9),
        (0, 7),
        (0, 1),
        (1, 2 * B + 1),
        (3, 1),
        (4, B + 3),
        (-1, 5),
        (-1, 1),
    ]
)
HEADS, KEY_WIDTH, VALUE_WIDTH = 2, 16, 32


@pytest.fixture(autouse=True)
def fill_new_memory_with_nan() -> Iterator[None]:
    """A row that a kernel leaves out shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["per_head", "per_channel"])
def scan(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scan]:
    """The scan of a gate of width 1 or K on the CPU."""
    if not interpreted():
        pytest.skip("on a GPU fla's own kernels run (test_linear_attention_gpu)")
    name = f"harts.ops.linear_attention.{request.param}"
    monkeypatch.setitem(sys.modules, "harts.ops.linear_attention.fla06", _stand_in())
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    per_head = request.param == "per_head"

    def run(*inputs: torch.Tensor, view: LinearView, keep_intermediates: bool = False) -> Any:
        scale = KEY_WIDTH**-0.5
        if per_head:
            return module.PerHeadScan.apply(*inputs, view, scale, keep_intermediates)
        bounded = True
        return module.PerChannelScan.apply(
            *inputs, None, None, view, scale, bounded, None, keep_intermediates
        )

    run.per_head = per_head  # type: ignore[attr-defined]
    yield run
    sys.modules.pop(name, None)  # it holds the stand-in
    vars(importlib.import_module("harts.ops.linear_attention")).pop(request.param, None)


def _inputs(scan: Any, group: int, strength: float) -> list[torch.Tensor]:
    return drawn_inputs(
        len(TREE),
        heads=HEADS,
        group=group,
        scalar_gate=scan.per_head,
        strength=strength,
        key_width=KEY_WIDTH,
        value_width=VALUE_WIDTH,
        dtype=torch.float32,
    )


@needs_triton
@pytest.mark.parametrize(
    ("group", "keep_intermediates", "strength", "parts", "chunk"),
    [(1, True, 1.0, 1, B), (2, False, 4.99, 2, 64), (1, False, 0.01, 4, B)],
    ids=["kept", "grouped-strong-in-two-parts-long-chunks", "weak-in-four-parts"],
)
def test_a_scan_is_the_reference(
    scan: Any,
    group: int,
    keep_intermediates: bool,
    strength: float,
    parts: int,
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two roots start from outside, and the state after every chain is asked for.

    parts: programs of backward that share the key channels of a head.
    """
    monkeypatch.setattr("harts.ops.linear_attention.rows_backward._BLOCK_K", KEY_WIDTH // parts)
    roots = [row for row, above in enumerate(TREE) if above < 0]
    requested = tuple(chain[-1] for chain in chains_of(TREE))
    view = linear_view(
        TREE, chunk, external_of_root={roots[0]: 1, roots[2]: 0}, requested=requested
    ).view
    inputs = _inputs(scan, group, strength)
    if strength > 4:  # as strong as bounded gates are, everywhere
        with torch.no_grad():
            inputs[3].fill_(-strength)
    generator = torch.Generator().manual_seed(1)
    external = torch.randn(2, HEADS * group, KEY_WIDTH, VALUE_WIDTH, generator=generator)
    leaves = [*inputs, external.requires_grad_()]
    results = []
    for is_scan in (True, False):
        packed = [gather_rows(x, view.packed) for x in inputs]
        if is_scan:
            output, states = scan(
                *packed, external, view=view, keep_intermediates=keep_intermediates
            )
        else:
            output, states = chunk_kda(*packed, view=view, initial_states=external)
        own = output.index_select(0, view.packed.own)
        results.append(results_of(own, states, leaves))
    for name, actual, expected in zip((*NAMES, "external"), *results, strict=True):
        assert largest_error(actual, expected) < 1e-4, name


@needs_triton
def test_gradients_of_the_output_or_of_the_states_alone_are_right(scan: Any) -> None:
    view = linear_view(TREE, B, requested=tuple(chain[-1] for chain in chains_of(TREE))).view
    inputs = _inputs(scan, group=1, strength=1.0)
    external = torch.zeros(0, HEADS, KEY_WIDTH, VALUE_WIDTH)
    torch.manual_seed(0)
    for place in (0, 1):
        packed = [gather_rows(x, view.packed) for x in inputs]
        results = (
            scan(*packed, external, view=view)[place],
            chunk_kda(*packed, view=view)[place],
        )
        weights = torch.randn_like(results[0])
        if place == 0:  # nobody reads the output of replay rows
            weights *= torch.zeros(len(weights), 1, 1).index_fill(0, view.packed.own, 1.0)
        got, want = (
            torch.autograd.grad(result, inputs[1:5], weights, retain_graph=True)
            for result in results
        )
        for name, actual, expected in zip(NAMES[3:], got, want, strict=True):
            assert largest_error(actual, expected) < 3e-5, name


# ---- what the scans call of fla06; a gate has the width of a head's keys, or none ----


def _stand_in() -> Any:
    return SimpleNamespace(
        chunk_cumsum=_chunk_cumsum,
        per_head_intra=_intra,
        per_head_rows=lambda *args, view: _intra(*args[:4], view=view)[:2],
        per_head_output=_per_head_output,
        per_head_within=lambda q, k, gate, d_output, **options: _within(
            _pairs_of(q, k, gate, options["view"]), d_output, **options
        ),
        intra_forward=_intra_forward,
        decayed_rows=_decayed_rows,
        output_forward=_output,
        output_backward=lambda q, k, v_new, d_output, Aqk, *, scale, view: (
            None,
            _within(Aqk, d_output, scale=1.0, view=view),
        ),
    )


def _chunks(view: LinearView) -> Iterator[slice]:
    bounds = view.cu_seqlens.tolist()
    for chain, place in view.chunk_indices.tolist():
        start = bounds[chain] + place * view.chunk_size
        yield slice(start, min(start + view.chunk_size, bounds[chain + 1]))


def _chunk_cumsum(
    x: torch.Tensor, view: LinearView, *, reverse: bool = False, to_log2: bool = False
) -> torch.Tensor:
    summed = torch.empty_like(x)
    for rows in _chunks(view):
        part = x[:, rows]
        summed[:, rows] = part.flip(1).cumsum(1).flip(1) if reverse else part.cumsum(1)
    return summed / torch.log(torch.tensor(2.0)) if to_log2 else summed


def _wide(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """(rows, G, K) of (rows, H, K)."""
    return x.repeat_interleave(num_heads // x.shape[1], 1)


def _decay(gate: torch.Tensor) -> torch.Tensor:
    """(rows, G, K or 1), 2^g."""
    return torch.exp2(gate if gate.ndim == 3 else gate[..., None])


def _decayed_pairs(a: torch.Tensor, b: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """(G, rows, rows): a_i . 2^(g_i - g_j) b_j where j <= i, else zero."""
    wide = gate if gate.ndim == 3 else gate[..., None]
    lower = torch.ones(len(wide), len(wide)).tril()[:, :, None, None]
    ratio = torch.exp2((wide[:, None] - wide[None, :]) * lower) * lower
    return (a[:, None] * b[None, :] * ratio).sum(-1).permute(2, 0, 1)


def _intra(
    k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor, beta: torch.Tensor, *, view: LinearView
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_rows, num_heads = gate.shape[1:3]
    w = k.new_empty(1, num_rows, num_heads, k.shape[3])
    u, T = torch.empty_like(v), k.new_full((1, num_rows, num_heads, view.chunk_size), torch.nan)
    for rows in _chunks(view):  # nobody may read T beyond the rows of a chunk
        keys, b, g = _wide(k[0, rows], num_heads), beta[0, rows, :, None], gate[0, rows]
        lower = _decayed_pairs(keys * b, keys, g).tril(-1)
        inverse = torch.linalg.inv(torch.eye(lower.shape[1]) + lower)
        w[0, rows] = torch.einsum("gij,jgk->igk", inverse, keys * b * _decay(g))
        u[0, rows] = torch.einsum("gij,jgv->igv", inverse, v[0, rows] * b)
        T[0, rows, :, : inverse.shape[1]] = inverse.permute(1, 0, 2)
    return w, u, T


def _pairs_of(
    q: torch.Tensor, k: torch.Tensor, gate: torch.Tensor, view: LinearView
) -> torch.Tensor:
    """(1, P, G, B), q_i . 2^(g_i - g_j) k_j."""
    num_rows, num_heads = gate.shape[1:3]
    pairs = q.new_zeros(1, num_rows, num_heads, view.chunk_size)
    for rows in _chunks(view):
        queries, keys = _wide(q[0, rows], num_heads), _wide(k[0, rows], num_heads)
        within = _decayed_pairs(queries, keys, gate[0, rows])
        pairs[0, rows, :, : within.shape[1]] = within.permute(1, 0, 2)
    return pairs


def _intra_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    *,
    scale: float,
    safe_gate: bool,
    with_q: bool,
    view: LinearView,
) -> tuple[torch.Tensor, ...]:
    assert safe_gate
    *_, T = _intra(k, v, gate, beta, view=view)
    rows = _decayed_rows(q, k, v, gate, beta, T, view=view)
    return *rows, _pairs_of(q, k, gate, view) * scale, T


def _decayed_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    T: torch.Tensor,
    *,
    view: LinearView,
) -> tuple[torch.Tensor, ...]:
    w, u, _ = _intra(k, v, gate, beta, view=view)
    num_heads = gate.shape[2]
    from_start, to_end = _wide(q[0], num_heads) * torch.exp2(gate[0]), torch.empty_like(w)
    for rows in _chunks(view):
        g = gate[0, rows]
        to_end[0, rows] = _wide(k[0, rows], num_heads) * torch.exp2(g[-1] - g)
    return w, u, from_start[None], to_end


def _output(
    q: torch.Tensor,
    v_new: torch.Tensor,
    gate: torch.Tensor,
    Aqk: torch.Tensor,
    states: torch.Tensor,
    *,
    scale: float,
    view: LinearView,
) -> torch.Tensor:
    output, num_heads = torch.empty_like(v_new), gate.shape[2]
    for chunk, rows in enumerate(_chunks(view)):
        decayed = _wide(q[0, rows], num_heads) * _decay(gate[0, rows])
        from_start = torch.einsum("igk,gkv->igv", decayed, states[0, chunk])
        within = torch.einsum("igj,jgv->igv", Aqk[0, rows, :, : len(decayed)], v_new[0, rows])
        output[0, rows] = scale * from_start + within
    return output


def _per_head_output(
    q: torch.Tensor,
    k: torch.Tensor,
    v_new: torch.Tensor,
    gate: torch.Tensor,
    states: torch.Tensor,
    *,
    scale: float,
    view: LinearView,
) -> torch.Tensor:
    Aqk = scale * _pairs_of(q, k, gate, view)
    return _output(q, v_new, gate, Aqk, states, scale=scale, view=view)


def _within(
    pairs: torch.Tensor, d_output: torch.Tensor, *, scale: float, view: LinearView
) -> torch.Tensor:
    d_v_new = torch.empty_like(d_output)
    for rows in _chunks(view):
        here = pairs[0, rows, :, : rows.stop - rows.start]
        d_v_new[0, rows] = scale * torch.einsum("igj,igv->jgv", here, d_output[0, rows])
    return d_v_new
