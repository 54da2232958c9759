"""chunk_kda against a token-by-token recurrence over every trajectory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ops.linear_oracles import (
    chains_of,
    expanded_recurrence,
    forest_of,
    forests,
    linear_view,
    path_to,
)

from harts.errors import ConfigError, HartsError
from harts.ops.gather import gather_rows
from harts.ops.linear_attention import KdaGate, chunk_kda, log_decay_of
from harts.views.linear import LinearView

Inputs = list[torch.Tensor]
NAMES = ("output", "states", "q", "k", "v", "log_decay", "beta")

# Forks at B-1, B, B+1, 2B and 1 for B = 8; one-token leaves; several consumers of one state.
B = 8
BRANCHING = forest_of(
    [
        (-1, 1),
        (0, B - 2),
        (1, 1),
        (2, 1),
        (3, B - 1),
        (4, 2 * B + 3),
        (4, 1),
        (4, B),
        (3, 5),
        (2, 2 * B),
        (1, 1),
        (0, B + 2),
        (-1, 3),
        (12, 1),
    ]
)


def drawn_inputs(
    num_rows: int,
    *,
    heads: int = 2,
    group: int = 1,
    scalar_gate: bool = False,
    strength: float = 1.0,
    seed: int = 0,
    key_width: int = 5,
    value_width: int = 3,
    dtype: torch.dtype = torch.float64,
) -> Inputs:
    """q, k, v, log_decay, beta of compact rows; log_decay uniform in (-strength, 0]."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, dtype=torch.float64, generator=generator)

    value_heads = heads * group
    inputs = [
        torch.nn.functional.normalize(normal(num_rows, heads, key_width), dim=-1),
        torch.nn.functional.normalize(normal(num_rows, heads, key_width), dim=-1),
        normal(num_rows, value_heads, value_width),
        -strength * uniform(num_rows, value_heads, 1 if scalar_gate else key_width),
        uniform(num_rows, value_heads),
    ]
    return [x.to(dtype).requires_grad_() for x in inputs]


def run(
    inputs: Inputs, view: LinearView, external: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compact rows in, own rows out."""
    packed = (gather_rows(x, view.packed) for x in inputs)
    output, states = chunk_kda(*packed, view=view, initial_states=external)
    return output.index_select(0, view.packed.own), states


def loss_of(output: torch.Tensor, states: torch.Tensor, seed: int = 1) -> torch.Tensor:
    """Every entry of both counts, each with its own weight."""
    generator = torch.Generator().manual_seed(seed)
    weights = [
        torch.randn(x.shape, dtype=torch.float64, generator=generator).to(x.dtype)
        for x in (output, states)
    ]
    return (output * weights[0]).sum() + (states * weights[1]).sum()


def results_of(output: torch.Tensor, states: torch.Tensor, leaves: Inputs) -> Inputs:
    """Output, states, then a gradient for each leaf."""
    grads = torch.autograd.grad(loss_of(output, states), leaves)
    return [output.detach(), states.detach(), *grads]


def expected_results(
    parents: list[int],
    inputs: Inputs,
    rows: list[int],
    external: torch.Tensor | None = None,
    external_of_root: dict[int, int] | None = None,
) -> Inputs:
    output, after = expanded_recurrence(
        parents, inputs, external=external, external_of_root=external_of_root
    )
    states = output.new_zeros(0, inputs[2].shape[1], inputs[1].shape[2], inputs[2].shape[2])
    if rows:
        states = torch.stack([after[row] for row in rows])
    leaves = inputs if external is None else [*inputs, external]
    return results_of(output, states, leaves)


def largest_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the largest entry of the expected tensor."""
    if expected.numel() == 0:
        return 0.0
    difference = (actual.double() - expected.double()).abs().max()
    return (difference / expected.double().abs().max().clamp(min=1e-30)).item()


def assert_equal_within(actual: Inputs, expected: Inputs, bound: float) -> None:
    for name, a, e in zip((*NAMES, "external"), actual, expected, strict=False):
        assert a.shape == e.shape, name
        assert largest_error(a, e) <= bound, f"{name}: {largest_error(a, e):.2e} > {bound:.0e}"


# ---- a tree equals its trajectories ----


@settings(max_examples=45, deadline=None)
@given(data=st.data(), chunk_size=st.sampled_from([1, 2, 4, 5, 8]))
def test_a_forest_equals_its_trajectories_in_outputs_states_and_gradients(
    data: st.DataObject, chunk_size: int
) -> None:
    parents = data.draw(forests(chunk_size))
    inputs = drawn_inputs(
        len(parents),
        group=data.draw(st.sampled_from([1, 2])),
        scalar_gate=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 1000)),
    )
    packed = linear_view(parents, chunk_size)
    actual = results_of(*run(inputs, packed.view), inputs)
    expected = expected_results(parents, inputs, packed.row_of_produced)
    assert_equal_within(actual, expected, 1e-10)


@pytest.mark.parametrize("scalar_gate", [False, True], ids=["kda", "gdn"])
@pytest.mark.parametrize("chunk_size", [4, 8, 64])
def test_forks_around_every_boundary_equal_their_trajectories(
    chunk_size: int, scalar_gate: bool
) -> None:
    inputs = drawn_inputs(len(BRANCHING), group=2, scalar_gate=scalar_gate)
    packed = linear_view(BRANCHING, chunk_size)
    actual = results_of(*run(inputs, packed.view), inputs)
    assert_equal_within(actual, expected_results(BRANCHING, inputs, packed.row_of_produced), 1e-10)


def test_a_caterpillar_of_one_token_forks_equals_its_trajectories() -> None:
    segments = [(-1, 3)]
    for _ in range(12):
        segments += [(len(segments) - 1, 1), (len(segments) - 1, 2)]
    parents = forest_of(segments)
    inputs = drawn_inputs(len(parents))
    packed = linear_view(parents, 4)
    actual = results_of(*run(inputs, packed.view), inputs)
    assert_equal_within(actual, expected_results(parents, inputs, packed.row_of_produced), 1e-10)


# ---- precision ----


@pytest.mark.parametrize("strength", [0.05, 1.0, 5.0])
@pytest.mark.parametrize("scalar_gate", [False, True], ids=["kda", "gdn"])
def test_float32_errs_at_most_twice_as_much_as_the_float32_recurrence(
    scalar_gate: bool, strength: float
) -> None:
    parents = forest_of([(-1, 70), (0, 80), (0, 5), (2, 64)])
    single = drawn_inputs(
        len(parents),
        scalar_gate=scalar_gate,
        strength=strength,
        key_width=16,
        value_width=16,
        dtype=torch.float32,
    )
    double = [x.detach().double().requires_grad_() for x in single]
    packed = linear_view(parents, 64)
    exact = expected_results(parents, double, packed.row_of_produced)
    plain = expected_results(parents, single, packed.row_of_produced)
    actual = results_of(*run(single, packed.view), single)
    rounding_band = torch.finfo(torch.float32).eps
    for name, a, p, e in zip(NAMES, actual, plain, exact, strict=True):
        bound = 2 * largest_error(p, e) + rounding_band
        assert largest_error(a, e) <= bound, f"{name}: {largest_error(a, e):.2e} > {bound:.2e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scalar_gate", [False, True], ids=["kda", "gdn"])
@pytest.mark.parametrize("strength", [5.0, 30.0])
def test_strong_gates_stay_finite_and_exact(
    strength: float, scalar_gate: bool, dtype: torch.dtype
) -> None:
    """A chunk of 64 rows decays by up to exp(-1920); one row in four has a weak gate."""
    parents = forest_of([(-1, 70), (0, 66), (0, 3)])
    inputs = drawn_inputs(
        len(parents), scalar_gate=scalar_gate, strength=strength, dtype=dtype, key_width=8
    )
    with torch.no_grad():
        inputs[3][::4] *= 1e-3
        inputs[3][1::4] = -strength
    packed = linear_view(parents, 64)
    actual = results_of(*run(inputs, packed.view), inputs)
    assert all(x.isfinite().all() for x in actual)
    double = [x.detach().double().requires_grad_() for x in inputs]
    exact = expected_results(parents, double, packed.row_of_produced)
    assert_equal_within(actual, exact, 1e-10 if dtype == torch.float64 else 1e-5)


def test_bfloat16_is_computed_in_float32() -> None:
    wide = drawn_inputs(len(BRANCHING), group=2, dtype=torch.float32)
    narrow = [x.detach().bfloat16().requires_grad_() for x in wide]
    view = linear_view(BRANCHING, B).view
    output, states = run(narrow, view)
    expected, expected_states = run([x.float() for x in narrow], view)
    assert output.dtype == torch.bfloat16 and states.dtype == torch.float32
    assert torch.equal(output, expected.bfloat16()) and torch.equal(states, expected_states)
    grads = torch.autograd.grad(loss_of(output, states), narrow)
    assert all(g.dtype == torch.bfloat16 and g.isfinite().all() for g in grads)


def test_autocast_does_not_reach_the_recurrence() -> None:
    inputs = drawn_inputs(len(BRANCHING), dtype=torch.float32)
    view = linear_view(BRANCHING, B).view
    expected, _ = run(inputs, view)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual, _ = run(inputs, view)
    assert torch.equal(actual, expected)


def test_a_single_sequence_equals_transformers_kda() -> None:
    bailing = pytest.importorskip("transformers.models.bailing_hybrid.modeling_bailing_hybrid")
    fallback = bailing.chunk_kimi_delta_attention
    check_against_transformers(getattr(fallback, "__wrapped__", fallback), scalar_gate=False)


def test_a_single_sequence_equals_transformers_gated_delta_net() -> None:
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    fallback = qwen.torch_chunk_gated_delta_rule
    check_against_transformers(getattr(fallback, "__wrapped__", fallback), scalar_gate=True)


def check_against_transformers(fallback, scalar_gate: bool) -> None:  # type: ignore[no-untyped-def]
    """Both err by a few float32 roundings from the float64 result."""
    num_rows = 150
    single = drawn_inputs(
        num_rows,
        scalar_gate=scalar_gate,
        key_width=16,
        value_width=16,
        dtype=torch.float32,
    )
    double = [x.detach().double() for x in single]
    packed = linear_view(list(range(-1, num_rows - 1)), 64, requested=(num_rows - 1,))
    exact_output, exact_states = run(double, packed.view)
    output, states = run(single, packed.view)
    batched = [x.detach().unsqueeze(0) for x in single]
    if scalar_gate:
        batched[3] = batched[3].squeeze(-1)
    theirs, their_state = fallback(*batched, output_final_state=True)
    band = torch.finfo(torch.float32).eps
    for ours, other, exact in (
        (output, theirs[0], exact_output),
        (states, their_state, exact_states),
    ):
        their_error = largest_error(other, exact)
        assert their_error < 1e-5
        assert largest_error(ours, exact) <= 2 * their_error + band


# ---- nothing leaks, nothing moves ----


@pytest.mark.parametrize("argument", range(5), ids=["q", "k", "v", "log_decay", "beta"])
@pytest.mark.parametrize("scalar_gate", [False, True], ids=["kda", "gdn"])
def test_changing_a_row_changes_no_bit_of_rows_that_do_not_descend_from_it(
    argument: int, scalar_gate: bool
) -> None:
    view = linear_view(BRANCHING, B).view
    inputs = [
        x.detach()
        for x in drawn_inputs(
            len(BRANCHING), scalar_gate=scalar_gate, strength=0.2, dtype=torch.float32
        )
    ]
    before, _ = run(inputs, view)
    for changed in range(0, len(BRANCHING), 3):
        edited = [x.clone() for x in inputs]
        edited[argument][changed] *= 0.5
        after, _ = run(edited, view)
        for row in range(len(BRANCHING)):
            if changed not in path_to(BRANCHING, row):
                assert torch.equal(before[row], after[row]), f"row {row} moved with {changed}"
        if argument != 3 or BRANCHING[changed] >= 0:  # nothing to decay before a root
            assert not torch.equal(before[changed], after[changed])


def test_the_same_inputs_twice_give_the_same_bits() -> None:
    view = linear_view(BRANCHING, B).view
    inputs = drawn_inputs(len(BRANCHING), group=2, key_width=16, dtype=torch.float32)
    first, second = (results_of(*run(inputs, view), inputs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# ---- states in, states out ----


@pytest.mark.parametrize("scalar_gate", [False, True], ids=["kda", "gdn"])
def test_two_calls_joined_by_a_state_equal_one_call(scalar_gate: bool) -> None:
    """The second call has two consumers of the external state and forks of its own."""
    branches = [(-1, B + 3), (0, 4), (0, B), (-1, 5), (3, 2 * B)]
    later = forest_of(branches)
    whole = forest_of([(-1, 2 * B)] + [(above + 1, length) for above, length in branches])
    inputs = drawn_inputs(len(whole), scalar_gate=scalar_gate, group=2)
    one = linear_view(whole, B)
    expected_output, _ = run(inputs, one.view)
    expected = torch.autograd.grad(loss_of(expected_output, expected_output[:0]), inputs)

    roots = {row: 0 for row, above in enumerate(later) if above < 0}
    first = linear_view(list(range(-1, 2 * B - 1)), B, requested=(2 * B - 1,)).view
    second = linear_view(later, B, external_of_root=roots).view
    head, state = run([x[: 2 * B] for x in inputs], first)
    tail, _ = run([x[2 * B :] for x in inputs], second, state)
    output = torch.cat([head, tail])
    actual = torch.autograd.grad(loss_of(output, output[:0]), inputs)
    assert torch.equal(output, expected_output)
    assert_equal_within([output, state, *actual], [expected_output, state, *expected], 1e-13)


def test_external_and_produced_states_carry_exact_gradients() -> None:
    parents = forest_of([(-1, B + 3), (0, 4), (0, 1), (-1, 5), (3, 2 * B), (-1, 3)])
    roots = [row for row, above in enumerate(parents) if above < 0]
    external_of_root = {roots[0]: 1, roots[1]: 0, roots[2]: 1}
    last_rows = tuple(chain[-1] for chain in chains_of(parents))
    packed = linear_view(parents, B, external_of_root=external_of_root, requested=last_rows)
    inputs = drawn_inputs(len(parents))
    external = torch.randn(2, 2, 5, 3, dtype=torch.float64, requires_grad=True)
    output, states = run(inputs, packed.view, external)
    actual = results_of(output, states, [*inputs, external])
    expected = expected_results(parents, inputs, packed.row_of_produced, external, external_of_root)
    assert len(packed.row_of_produced) > len(last_rows)
    assert_equal_within(actual, expected, 1e-10)


# ---- cost ----


def test_what_is_kept_for_backward_is_linear_in_the_rows() -> None:
    kept = [bytes_kept_for_backward(num_rows) for num_rows in (512, 1024)]
    per_row_and_head = kept[1] / 1024 / 2
    assert kept[1] < 2.1 * kept[0]
    # Two 64 x 64 products a chunk, and about 30 rows of width 16 a row (6 levels of decays).
    assert per_row_and_head < 4 * (2 * 64 + 30 * 16)


def bytes_kept_for_backward(num_rows: int) -> int:
    storages: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    inputs = drawn_inputs(num_rows, key_width=16, value_width=16, dtype=torch.float32)
    view = linear_view(list(range(-1, num_rows - 1)), 64).view
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        results = run(inputs, view)
    del results
    return sum(storages.values())


# ---- guards of these tests, and refusals ----


@pytest.mark.parametrize("field", ["grid_row", "start_state", "own", "shown_packed", "source"])
def test_the_comparison_notices_a_wrong_index(field: str) -> None:
    """The inputs above must be able to tell a wrong view from the right one."""
    inputs = drawn_inputs(len(BRANCHING))
    view = linear_view(BRANCHING, B).view
    in_gather = field in ("own", "shown_packed", "source")
    wrong = getattr(view.packed if in_gather else view, field).clone()
    wrong[[-1, -2]] = wrong[[-2, 0]]
    if in_gather:
        mutated = replace(view, packed=replace(view.packed, **{field: wrong}))
    else:
        mutated = replace(view, **{field: wrong})
    right, moved = (results_of(*run(inputs, v), inputs) for v in (view, mutated))
    assert max(largest_error(m, r) for m, r in zip(moved, right, strict=True)) > 1e-6


@pytest.mark.parametrize("lower_bound", [None, -5.0], ids=["softplus", "bounded"])
def test_a_learned_gate_is_its_formula_in_outputs_and_gradients(lower_bound: float | None) -> None:
    q, k, v, raw, beta = drawn_inputs(len(BRANCHING))
    generator = torch.Generator().manual_seed(2)
    rate, offset = (
        torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in [(2,), (2, 5)]
    )
    view = linear_view(BRANCHING, B).view
    packed = [gather_rows(x, view.packed) for x in (q, k, v, raw, beta)]
    output, states = chunk_kda(*packed, view=view, gate=KdaGate(rate, offset, lower_bound))
    if lower_bound is None:
        decay = -rate.exp()[:, None] * (1 + (raw + offset).exp()).log()
    else:
        decay = lower_bound / (1 + (-rate.exp()[:, None] * (raw + offset)).exp())
    torch.testing.assert_close(log_decay_of(raw, KdaGate(rate, offset, lower_bound)), decay)
    expected_output, expected_states = run([q, k, v, decay, beta], view)
    torch.testing.assert_close(output.index_select(0, view.packed.own), expected_output)
    leaves = [q, k, v, raw, beta, rate, offset]
    grads = torch.autograd.grad(output[view.packed.own].sum() + states.sum(), leaves)
    expected = torch.autograd.grad(expected_output.sum() + expected_states.sum(), leaves)
    for grad, expected_grad in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-9, atol=1e-11)


def test_a_gate_that_does_not_fit_is_refused() -> None:
    inputs, view = drawn_inputs(len(BRANCHING)), linear_view(BRANCHING, B).view
    packed = [gather_rows(x, view.packed) for x in inputs]
    with pytest.raises(HartsError, match="do not fit a gate input"):
        chunk_kda(*packed, view=view, gate=KdaGate(torch.zeros(2), torch.zeros(2, 4)))
    with pytest.raises(HartsError, match="it must be negative"):
        chunk_kda(*packed, view=view, gate=KdaGate(torch.zeros(2), torch.zeros(2, 5), 1.0))


def test_wrong_shapes_options_and_states_are_refused_in_one_line() -> None:
    q, k, v, log_decay, beta = (x.detach() for x in drawn_inputs(6, group=2))
    view = linear_view([-1, 0, 1, 2, 3, 4], 4).view
    cases = [
        ((q[:, 0], k, v, log_decay, beta), "want 3 dimensions"),
        ((q[1:], k[1:], v[1:], log_decay[1:], beta[1:]), "6 packed rows"),
        ((q[..., 1:], k, v, log_decay, beta), "q and k must have one shape"),
        ((q, k, v[:, :3], log_decay, beta), "must divide the 3 heads of v"),
        ((q, k, v, log_decay[..., :2], beta), "width 5 or 1"),
        ((q, k, v, log_decay, beta[:, :1]), "beta must have the 4 heads"),
        ((q, k, v.long(), log_decay, beta), "v is torch.int64"),
    ]
    for arguments, message in cases:
        with pytest.raises(HartsError, match=message) as error:
            chunk_kda(*arguments, view=view)
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="impl is 'nodes', want one of reference, scan, rounds"):
        chunk_kda(q, k, v, log_decay, beta, view=view, impl="nodes")  # type: ignore[arg-type]
    external = linear_view([-1, 0, 1, 2, 3, 4], 4, external_of_root={0: 0}).view
    with pytest.raises(HartsError, match=r"initial_states is None, want \(1, 4, 5, 3\)"):
        chunk_kda(q, k, v, log_decay, beta, view=external)
