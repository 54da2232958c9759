"""chunk_kda on GPU: the scan against fla on every trajectory, the rounds and the reference.

fla's autotuner picks by timing, so the suite holds each of its kernels to one configuration. With
TRITON_F32_DEFAULT=ieee and a TRITON_CACHE_DIR of its own, float32 runs without tf32.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest
import torch
from tests.ops.linear_oracles import chains_of, forest_of, leaves_of, linear_view, path_to
from tests.ops.test_linear_attention import NAMES, drawn_inputs, largest_error, results_of

from harts.data.synthetic import agent_batch
from harts.errors import ConfigError, HartsError
from harts.ops.gather import gather_rows
from harts.ops.linear_attention import KdaGate, chunk_kda, log_decay_of
from harts.plan.planner import plan_step
from harts.views.linear import LinearView
from harts.views.tree import build_tree_view


def missing() -> str | None:
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    try:
        installed = version("fla-core")
    except PackageNotFoundError:
        installed = "none"
    return None if installed == "0.6.0" else f"needs fla-core 0.6.0, got {installed}"


REASON = missing()
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=REASON or "")]
pytestmark = pytest.mark.usefixtures("without_tf32")
WITHOUT_TF32 = os.environ.get("TRITON_F32_DEFAULT") == "ieee"

# The trunk forks at 63, 64, 65 and 128; a branch forks again; one-token chains; three roots.
TREE = forest_of(
    [
        (-1, 63),
        (0, 1),
        (1, 1),
        (2, 63),
        (3, 70),
        (0, 40),
        (0, 1),
        (1, 70),
        (1, 1),
        (2, 30),
        (3, 130),
        (3, 1),
        (10, 3),
        (10, 66),
        (4, 1),
        (4, 60),
        (-1, 100),
        (16, 29),
        (16, 28),
        (-1, 1),
    ]
)
CASES = {
    "kda-bfloat16": (torch.bfloat16, 1, False),
    "kda-float32": (torch.float32, 1, False),
    "gdn-grouped-bfloat16": (torch.bfloat16, 2, True),
    "gdn-grouped-float32": (torch.float32, 2, True),
}
cases = pytest.mark.parametrize(("dtype", "group", "scalar_gate"), CASES.values(), ids=CASES)
kernel_cases = pytest.mark.parametrize(
    ("dtype", "group", "scalar_gate", "safe_gate"),
    [
        *((*case, False) for case in CASES.values()),
        (torch.bfloat16, 1, False, True),
        (torch.float32, 2, False, True),
    ],
    ids=[*CASES, "bounded-bfloat16", "bounded-grouped-float32"],
)
"""With the gates for which backward within chunks is a kernel of harts, and those of fla."""


@pytest.fixture(scope="module")
def without_tf32() -> None:
    """fla writes the precision of one product out; all others follow the environment."""
    if WITHOUT_TF32 and REASON is None:
        import triton.language as tl
        from fla.ops.kda import chunk_intra

        chunk_intra.SOLVE_TRIL_DOT_PRECISION = tl.constexpr("ieee")


def on_device(value: Any, device: str) -> Any:
    """The same view with its tensors on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if is_dataclass(value):
        moved = {f.name: on_device(getattr(value, f.name), device) for f in fields(value)}
        return replace(value, **moved)  # type: ignore[type-var]
    return value


def on_cuda(value: Any) -> Any:
    return on_device(value, "cuda")


def inputs_of(
    parents: list[int],
    dtype: torch.dtype,
    group: int = 1,
    scalar_gate: bool = False,
    widths: tuple[int, int] = (128, 128),
    **more: Any,
) -> list[torch.Tensor]:
    """Compact rows on the device; the gate stays float32 as models have it.

    widths: of a head's keys and values.
    """
    drawn = drawn_inputs(
        len(parents),
        group=group,
        scalar_gate=scalar_gate,
        key_width=widths[0],
        value_width=widths[1],
        dtype=dtype,
        **more,
    )
    drawn[3] = drawn[3].float()
    return [x.detach().cuda().requires_grad_() for x in drawn]


def run(
    inputs: list[torch.Tensor],
    view: LinearView,
    external: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    packed = (gather_rows(x, view.packed) for x in inputs)
    output, states = chunk_kda(*packed, view=view, initial_states=external, **options)
    return output.index_select(0, view.packed.own), states


def all_results(
    inputs: list[torch.Tensor], view: LinearView, external: torch.Tensor | None, **options: Any
) -> list[torch.Tensor]:
    """Output, states, gradients of the inputs and of the external states; loss drawn on CPU."""
    output, states = run(inputs, view, external, **options)
    leaves = inputs if external is None else [*inputs, external]
    return [x.cpu() for x in results_of(output.cpu(), states.cpu(), leaves)]


def exact_results(
    inputs: list[torch.Tensor], view: LinearView, external: torch.Tensor | None
) -> list[torch.Tensor]:
    """The reference in float64, on the CPU: thousands of small steps, and tests share the GPU."""
    wide = [x.detach().cpu().double().requires_grad_() for x in inputs]
    start = None if external is None else external.detach().cpu().double().requires_grad_()
    return all_results(wide, on_device(view, "cpu"), start)


def tree_with_external_states(group: int) -> tuple[LinearView, torch.Tensor]:
    """Two of three roots start from outside, and the state after every chain is asked for."""
    roots = [row for row, above in enumerate(TREE) if above < 0]
    packed = linear_view(
        TREE,
        64,
        external_of_root={roots[0]: 1, roots[2]: 1, roots[1]: 0},
        requested=tuple(chain[-1] for chain in chains_of(TREE)),
    )
    generator = torch.Generator().manual_seed(5)
    external = torch.randn(2, 2 * group, 128, 128, generator=generator)
    return on_cuda(packed.view), external.cuda().requires_grad_()


def agent_view() -> tuple[LinearView, int]:
    """The view that the planner makes of generated agent trees, with its rounds."""
    batch = agent_batch(seed=1, shape="agent_tree", raw_tokens=9000)
    plan = plan_step(batch, capacity=int(batch.lengths.sum()))
    (microbatch,) = plan._all
    tree = build_tree_view(microbatch, device=torch.device("cuda"))
    return tree.linear, tree.num_rows


def assert_errs_at_most_twice_as_much(
    actual: list[torch.Tensor],
    other: list[torch.Tensor],
    exact: list[torch.Tensor],
    dtype: torch.dtype,
) -> None:
    """The largest error over the largest entry and the error's norm over the norm, each with one
    rounding of the dtype on top: small entries count in the second."""
    band = torch.finfo(dtype).eps
    for name, a, o, e in zip((*NAMES, "external"), actual, other, exact, strict=False):
        for measure in (largest_error, norm_of_error):
            error, bound = measure(a, e), 2 * measure(o, e) + band
            print(f"{name:10} {measure.__name__:13} scan {error:.2e}  other {measure(o, e):.2e}")
            assert error <= bound, f"{name}, {measure.__name__}: {error:.2e} > {bound:.2e}"


def norm_of_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    if not exact.numel():
        return 0.0
    return float((actual.double() - exact).norm() / exact.norm().clamp(min=1e-30))


def each(*marks: Any) -> Any:
    def apply(function: Any) -> Any:
        for mark in marks:
            function = mark(function)
        return function

    return apply


def assert_bitwise(
    alone: Callable[[list[int]], tuple[torch.Tensor, torch.Tensor]],
    output: torch.Tensor,
    states: torch.Tensor,
    row_of_produced: list[int],
) -> None:
    """alone: rows of a path -> output and end state of fla's operator."""
    for leaf in leaves_of(TREE):
        path = path_to(TREE, leaf)
        differs = (output[path] != alone(path)[0]).flatten(1).any(1).nonzero().flatten().tolist()
        assert not differs, f"trajectory of row {leaf}: first differing position {differs[0]}"
    for slot, row in enumerate(row_of_produced):
        assert torch.equal(states[slot], alone(path_to(TREE, row))[1]), f"state after row {row}"


@each(*on_gpu)
@pytest.mark.parametrize("safe_gate", [False, True], ids=["any_gate", "safe_gate"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_output_and_states_are_bitwise_those_of_fla_on_every_trajectory(
    dtype: torch.dtype, safe_gate: bool
) -> None:
    from harts.ops.linear_attention.fla06 import chunk_kda_packed

    inputs = [x.detach() for x in inputs_of(TREE, dtype)]
    packed = linear_view(TREE, 64)
    view = on_cuda(packed.view)
    output, states = run(inputs, view, impl="scan", safe_gate=safe_gate)
    same_output, same_states = run(inputs, view, impl="rounds", safe_gate=safe_gate)

    def alone(path: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        end, state = chunk_kda_packed(
            *(x[path].unsqueeze(0) for x in inputs),
            scale=128**-0.5,
            safe_gate=safe_gate,
            initial_states=torch.zeros(1, 2, 128, 128, device="cuda"),
            lengths=[len(path)],
        )
        return end[0], state[0]

    assert_bitwise(alone, output, states, packed.row_of_produced)
    assert torch.equal(output, same_output) and torch.equal(states, same_states)


@each(*on_gpu)
@pytest.mark.parametrize("group", [1, 2])
def test_with_one_decay_a_head_they_are_those_of_the_gated_delta_rule(group: int) -> None:
    from harts.ops.linear_attention.fla06 import chunk_gated_delta_rule_packed

    inputs = [x.detach() for x in inputs_of(TREE, torch.bfloat16, group, scalar_gate=True)]
    packed = linear_view(TREE, 64)
    output, states = run(inputs, on_cuda(packed.view), impl="scan")

    def alone(path: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, log_decay, beta = (x[path].unsqueeze(0) for x in inputs)
        end, state = chunk_gated_delta_rule_packed(
            q,
            k,
            v,
            log_decay.squeeze(-1),
            beta,
            scale=128**-0.5,
            initial_states=torch.zeros(1, 2 * group, 128, 128, device="cuda"),
            lengths=[len(path)],
        )
        return end[0], state[0]

    assert_bitwise(alone, output, states, packed.row_of_produced)


@each(*on_gpu)
@cases
def test_errors_are_at_most_twice_those_of_one_fla_call_a_round(
    dtype: torch.dtype, group: int, scalar_gate: bool
) -> None:
    view, external = tree_with_external_states(group)
    inputs = inputs_of(TREE, dtype, group, scalar_gate)
    actual, other = (
        all_results(inputs, view, external, impl=impl)  # type: ignore[arg-type]
        for impl in ("scan", "rounds")
    )
    assert_errs_at_most_twice_as_much(actual, other, exact_results(inputs, view, external), dtype)


@each(*on_gpu)
@pytest.mark.skipif(not WITHOUT_TF32, reason="needs TRITON_F32_DEFAULT=ieee")
@pytest.mark.parametrize("scalar_gate", [False, True], ids=["kda", "gdn"])
def test_float32_without_tf32_errs_by_float32_roundings(scalar_gate: bool) -> None:
    """fla's factors 2^g and 2^-g cost a few more roundings than the reference's differences."""
    view, external = tree_with_external_states(1)
    inputs = inputs_of(TREE, torch.float32, 1, scalar_gate)
    actual, other, reference = (
        all_results(inputs, view, external, impl=impl)  # type: ignore[arg-type]
        for impl in ("scan", "rounds", "reference")
    )
    exact = exact_results(inputs, view, external)
    assert_errs_at_most_twice_as_much(actual, other, exact, torch.float32)
    for name, a, r, e in zip((*NAMES, "external"), actual, reference, exact, strict=True):
        error, plain = largest_error(a, e), largest_error(r, e)
        print(f"{name:10} scan {error:.2e}  reference {plain:.2e}")
        assert error <= 10 * plain + torch.finfo(torch.float32).eps, name


@each(*on_gpu)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("everywhere", [False, True], ids=["up_to_the_bound", "at_the_bound"])
def test_a_bounded_gate_errs_at_most_twice_as_much_as_fla_with_the_same_promise(
    dtype: torch.dtype, everywhere: bool
) -> None:
    view, external = tree_with_external_states(1)
    inputs = inputs_of(TREE, dtype, strength=4.9)
    if everywhere:
        with torch.no_grad():
            inputs[3].fill_(-4.99)
    actual, other = (
        all_results(inputs, view, external, impl=impl, safe_gate=True)  # type: ignore[arg-type]
        for impl in ("scan", "rounds")
    )
    exact = exact_results(inputs, view, external)
    assert_errs_at_most_twice_as_much(actual, other, exact, dtype)


@each(*on_gpu)
@pytest.mark.parametrize("key_width", [16, 32, 64, 128])
@pytest.mark.parametrize(
    ("dtype", "value_width"),
    [*((torch.bfloat16, width) for width in (16, 32, 64, 256)), (torch.float32, 128)],
)
@pytest.mark.parametrize("scalar_gate", [False, True], ids=["bounded", "per_head"])
def test_heads_of_every_width_are_right(
    key_width: int, dtype: torch.dtype, value_width: int, scalar_gate: bool
) -> None:
    """Own kernels alone; Triton miscompiles backward for some widths with some numbers of warps.

    Value widths: one for every block of values that backward compiles for.
    """
    widths = (key_width, value_width)
    view = on_cuda(linear_view(TREE, 64).view)
    inputs = inputs_of(TREE, dtype, 2, scalar_gate, widths=widths, strength=3)
    actual = all_results(inputs, view, None, impl="scan", safe_gate=True)
    exact = exact_results(inputs, view, None)
    for name, a, e in zip(NAMES, actual, exact, strict=True):
        error = norm_of_error(a, e)
        assert error < (0.03 if dtype == torch.bfloat16 else 0.01), f"{name}: {error:.2e}"


@each(*on_gpu)
@kernel_cases
def test_the_same_inputs_twice_give_the_same_bits(
    dtype: torch.dtype, group: int, scalar_gate: bool, safe_gate: bool
) -> None:
    """Packed rows are the leaves: the gather's own backward is another operator."""
    view, external = tree_with_external_states(group)
    compact = inputs_of(TREE, dtype, group, scalar_gate)
    packed = [gather_rows(x.detach(), view.packed).requires_grad_() for x in compact]

    def once() -> list[torch.Tensor]:
        output, states = chunk_kda(
            *packed, view=view, initial_states=external, impl="scan", safe_gate=safe_gate
        )
        return results_of(output.cpu(), states.cpu(), [*packed, external])

    first = once()
    for name, a, b in zip((*NAMES, "external"), first, once(), strict=True):
        assert torch.equal(a, b), f"{name} differs between two runs"


@each(*on_gpu)
@pytest.mark.parametrize("per_head", [False, True], ids=["per_channel", "per_head"])
def test_a_pipelined_scan_has_the_bits_of_one_without(per_head: bool) -> None:
    """Triton 3.6 can overwrite a tile too early in a pipelined loop on Hopper."""
    from harts.ops.linear_attention import scan_kernels

    view, _ = agent_view()
    num_rows, num_heads = len(view.grid_row), 4
    generator = torch.Generator("cuda").manual_seed(2)

    def normal(*shape: int, size: float = 0.02) -> torch.Tensor:
        """Small keys, or states would grow without bound along a chain."""
        return torch.randn(shape, device="cuda", generator=generator).mul(size).bfloat16()

    q, k, w = (normal(num_rows, num_heads, 128) for _ in range(3))
    u, d_output, d_v_new = (normal(num_rows, num_heads, 128, size=1) for _ in range(3))
    gate = -normal(num_rows, num_heads, *(() if per_head else (128,)), size=1).float().abs()
    pool = torch.zeros(view.num_slots, num_heads, 128, 128, device="cuda")

    def results(launch: Any) -> list[torch.Tensor]:
        filled = pool.clone()
        first = scan_kernels.scan_states(k, w, u, gate, filled, view, fill_pool=True, launch=launch)
        again = scan_kernels.scan_states(
            k, w, u, gate, filled, view, fill_pool=False, launch=launch
        )
        back = scan_kernels.scan_state_gradients(
            q, k, w, gate, d_output, d_v_new, None, view, scale=0.1, launch=launch
        )
        return [*first, *again, *back, filled]

    plain = scan_kernels.ScanLaunch(block_v=32, num_warps=4, num_stages=1)
    for got, want in zip(results(None), results(plain), strict=True):
        assert want.isfinite().all() and want.any()
        assert torch.equal(got, want)


@each(*on_gpu)
@pytest.mark.parametrize("lower_bound", [None, -5.0], ids=["softplus", "bounded"])
def test_a_learned_gate_errs_at_most_twice_as_much_as_its_decay_given(
    lower_bound: float | None,
) -> None:
    """Gate and its gradients in fla's kernels against the decay made by PyTorch in float32."""
    view, external = tree_with_external_states(1)
    inputs = inputs_of(TREE, torch.bfloat16)
    generator = torch.Generator().manual_seed(3)
    raw = torch.randn(len(TREE), 2, 128, generator=generator).bfloat16()
    learned = [torch.randn(2, generator=generator) * 0.3, torch.randn(2, 128, generator=generator)]

    def results(dtype: torch.dtype, **options: Any) -> list[torch.Tensor]:
        """float64 on the CPU, as in exact_results."""
        wide = dtype == torch.float64
        device = "cpu" if wide else "cuda"
        here = on_device(view, device)

        def given(x: torch.Tensor) -> torch.Tensor:
            return x.detach().to(device, dtype if wide else x.dtype)

        leaves = [given(x) for x in (*inputs[:3], raw, inputs[4])]
        rate, offset = (given(x).requires_grad_() for x in learned)
        for leaf in leaves:
            leaf.requires_grad_()
        gate, start = KdaGate(rate, offset, lower_bound), given(external)
        if options.pop("outside", False):
            packed = [gather_rows(x, here.packed) for x in leaves]
            packed[3] = log_decay_of(packed[3], gate)
            output, states = chunk_kda(*packed, view=here, initial_states=start, **options)
            output = output.index_select(0, here.packed.own)
        else:
            output, states = run(leaves, here, start, gate=gate, **options)
        return [x.cpu() for x in results_of(output.cpu(), states.cpu(), [*leaves, rate, offset])]

    actual = results(torch.bfloat16, impl="scan")
    safe = lower_bound is not None
    other = results(torch.bfloat16, impl="scan", outside=True, safe_gate=safe)
    exact = results(torch.float64)
    names = (*NAMES, "log_rate", "offset")
    for name, a, o, e in zip(names, actual, other, exact, strict=True):
        error = largest_error(a, e)
        bound = 2 * largest_error(o, e) + torch.finfo(torch.bfloat16).eps
        assert error <= bound, f"{name}: {error:.2e} > {bound:.2e}"


@each(*on_gpu)
@kernel_cases
def test_kept_intermediates_change_no_bit(
    dtype: torch.dtype, group: int, scalar_gate: bool, safe_gate: bool
) -> None:
    view, external = tree_with_external_states(group)
    inputs = inputs_of(TREE, dtype, group, scalar_gate)
    options: dict[str, Any] = {"impl": "scan", "safe_gate": safe_gate}
    little, much = (
        all_results(inputs, view, external, keep_intermediates=keep, **options)
        for keep in (False, True)
    )
    for name, a, b in zip((*NAMES, "external"), little, much, strict=True):
        assert torch.equal(a, b), f"{name} differs where intermediates are kept"


@each(*on_gpu)
@pytest.mark.parametrize("safe_gate", [False, True], ids=["any_gate", "safe_gate"])
def test_the_rounds_of_a_plan_run_as_well_as_fla_call_by_call(safe_gate: bool) -> None:
    view, num_rows = agent_view()
    assert len(view.round_ptr) > 2 and view.num_slots > 2
    inputs = inputs_of(list(range(num_rows)), torch.bfloat16)
    actual, other = (
        all_results(inputs, view, None, impl=impl, safe_gate=safe_gate)  # type: ignore[arg-type]
        for impl in ("scan", "rounds")
    )
    assert torch.equal(actual[0], other[0]) and torch.equal(actual[1], other[1])
    exact = exact_results(inputs, view, None)
    assert_errs_at_most_twice_as_much(actual, other, exact, torch.bfloat16)


@each(*on_gpu)
@pytest.mark.parametrize("safe_gate", [False, True], ids=["any_gate", "safe_gate"])
def test_gradients_of_the_output_or_of_the_states_alone_are_right(safe_gate: bool) -> None:
    view, external = tree_with_external_states(1)
    leaves = [*inputs_of(TREE, torch.float32), external]
    exact = [x.detach().cpu().double().requires_grad_() for x in leaves]
    results = run(leaves[:-1], view, external, impl="scan", safe_gate=safe_gate)
    exact_ones = run(exact[:-1], on_device(view, "cpu"), exact[-1])
    for part, result, exact_result in zip(("output", "states"), results, exact_ones, strict=True):
        got, want = (
            torch.autograd.grad(x.sum(), of, retain_graph=True, materialize_grads=True)
            for x, of in ((result, leaves), (exact_result, exact))
        )
        for name, a, e in zip((*NAMES[2:], "external"), got, want, strict=True):
            assert norm_of_error(a.cpu(), e) < 0.01, f"{name} of the {part}"


@each(*on_gpu)
def test_what_the_kernels_cannot_run_is_refused_in_one_line() -> None:
    view = on_cuda(linear_view(TREE, 64).view)
    packed = [gather_rows(x.detach(), view.packed) for x in inputs_of(TREE, torch.bfloat16)]
    q, k, v, log_decay, beta = packed
    eight = on_cuda(linear_view([-1, 0, 1], 8).view)
    cases: list[tuple[str, list[torch.Tensor], LinearView, str]] = [
        ("scan", [x[:3] for x in packed], eight, "chunk_size 64, the view has 8"),
        ("rounds", [x[:3] for x in packed], eight, "chunk_size 64, the view has 8"),
        ("scan", [x.double() for x in packed], view, "one dtype up to float32"),
        ("scan", [q, k, v.float(), log_decay, beta], view, "one dtype up to float32"),
        ("rounds", [q, k, v, log_decay.double(), beta], view, "log_decay is float64"),
        ("scan", [q[..., :24], k[..., :24], v, log_decay[..., :24], beta], view, "16, 32, 64 or"),
        ("scan", [q, k, v[..., :24], log_decay, beta], view, "a multiple of 16, got 128 and 24"),
        ("scan", [q, k, v, log_decay, beta.cpu()], view, "beta is on cpu"),
    ]
    for impl, arguments, its_view, message in cases:
        with pytest.raises(HartsError, match=message) as error:
            chunk_kda(*arguments, view=its_view, impl=impl)  # type: ignore[arg-type]
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("impl", ["scan", "rounds"])
def test_tensors_on_the_cpu_are_refused_in_one_line(impl: str) -> None:
    inputs = [x.detach() for x in drawn_inputs(3, dtype=torch.float32)]
    with pytest.raises(ConfigError, match="needs CUDA tensors, q is on cpu") as error:
        chunk_kda(*inputs, view=linear_view([-1, 0, 1], 64).view, impl=impl)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
