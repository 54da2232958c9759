"""Mapped log-probabilities against a log-softmax at every scored position, by plain autograd."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harts.errors import ConfigError, HartsError
from harts.ops.cross_entropy import mapped_log_probs
from harts.views.logprobs import LogProbView


@dataclass(frozen=True)
class Scored:
    """One scored position: the compact row that predicts it, its token and its temperature."""

    row: int
    target: int
    temperature: float = 1.0


def view_of(scored: list[Scored]) -> LogProbView:
    heads = sorted({(each.row, each.temperature) for each in scored})
    head_of_position = [heads.index((each.row, each.temperature)) for each in scored]
    order = sorted(range(len(scored)), key=lambda position: head_of_position[position])
    temperatures = [temperature for _, temperature in heads]
    first = [sum(head < row for head in head_of_position) for row in range(len(heads) + 1)]
    return LogProbView(
        compact_row=torch.tensor([row for row, _ in heads], dtype=torch.int64),
        temperature=None
        if set(temperatures) <= {1.0}
        else torch.tensor(temperatures, dtype=torch.float64),
        target=torch.tensor([scored[position].target for position in order], dtype=torch.int64),
        head_row=torch.tensor([head_of_position[position] for position in order]).long(),
        original=torch.tensor(order, dtype=torch.int64),
        row_ptr=np.array(first, dtype=np.int64),
        position_ptr=torch.tensor(first, dtype=torch.int64),
        last_row=max((row for row, _ in heads), default=-1),
        smallest_target=min((each.target for each in scored), default=0),
        largest_target=max((each.target for each in scored), default=-1),
    )


def dense_log_probs(
    scored: list[Scored], hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of every semantic position, P x V of them."""
    rows = torch.tensor([each.row for each in scored])
    temperatures = torch.tensor([each.temperature for each in scored], dtype=hidden.dtype)
    logits = hidden[rows] @ weight.T
    if bias is not None:
        logits = logits + bias
    log_softmax = (logits / temperatures[:, None]).log_softmax(-1)
    targets = torch.tensor([each.target for each in scored])
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return log_softmax[torch.arange(len(scored)), targets], entropy


def draw_head(
    num_rows: int, vocabulary: int, width: int = 5, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    """hidden, weight and bias; logits spread over several nats."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(num_rows, width), (vocabulary, width), (vocabulary,)]
    drawn = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [x.to(dtype).requires_grad_() for x in drawn]


def outputs_and_gradients(
    log_probs: torch.Tensor, entropy: torch.Tensor, inputs: list[torch.Tensor], which: str
) -> list[torch.Tensor]:
    """Both outputs, and the gradients of a loss of log_probs, entropy or both."""
    generator = torch.Generator().manual_seed(1)
    slopes = torch.randn(2, len(log_probs), generator=generator, dtype=torch.float64)
    slopes = slopes.to(log_probs.dtype)
    losses = {
        "log_probs": (log_probs * slopes[0]).sum(),
        "entropy": (entropy * slopes[1]).sum(),
    }
    loss = sum(losses.values()) if which == "both" else losses[which]
    return [log_probs.detach(), entropy.detach(), *torch.autograd.grad(loss, inputs)]


def assert_close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-10) -> None:
    assert got.shape == want.shape
    error = ((got.double() - want.double()).abs().max() / want.abs().max().clamp_min(0.1)).item()
    assert error <= tolerance, f"relative error {error:.2e}, want at most {tolerance:.0e}"


NUM_ROWS, VOCABULARY = 6, 7

scored_positions = st.lists(
    st.builds(
        Scored,
        row=st.integers(0, NUM_ROWS - 1),
        target=st.integers(0, VOCABULARY - 1),
        temperature=st.sampled_from([1.0, 1.0, 0.6, 1.7]),
    ),
    min_size=1,
    max_size=30,
)

CASES = {
    "one-position": [Scored(2, 3)],
    "one-row-with-several-labels": [Scored(1, 4), Scored(1, 0), Scored(1, 6), Scored(1, 4)],
    "one-row-at-several-temperatures": [
        *(Scored(1, 4, temperature) for temperature in (0.5, 2.0, 1.0, 0.5)),
        *(Scored(3, 2, temperature) for temperature in (2.0, 0.5)),
    ],
    "rows-in-reverse-order": [Scored(row, row, 1.0) for row in (5, 4, 2, 0)],
    "one-temperature-other-than-1": [Scored(row, 1, 0.7) for row in (0, 3, 0, 5)],
}
ONE_ROW = 1
TWO_ROWS = 2 * VOCABULARY * 8
EVERYTHING = 1 << 20


@settings(max_examples=60, deadline=None)
@given(
    scored=scored_positions,
    with_bias=st.booleans(),
    which=st.sampled_from(["log_probs", "entropy", "both"]),
    max_block_bytes=st.sampled_from([ONE_ROW, TWO_ROWS, EVERYTHING]),
)
def test_compact_rows_equal_the_dense_head_at_every_position(
    scored: list[Scored], with_bias: bool, which: str, max_block_bytes: int
) -> None:
    hidden, weight, bias = draw_head(NUM_ROWS, VOCABULARY)
    inputs = [hidden, weight, bias] if with_bias else [hidden, weight]
    used_bias = bias if with_bias else None
    view = view_of(scored)
    compact = mapped_log_probs(
        hidden, weight, view=view, bias=used_bias, max_block_bytes=max_block_bytes
    )
    got = outputs_and_gradients(*compact, inputs, which)
    want = outputs_and_gradients(*dense_log_probs(scored, hidden, weight, used_bias), inputs, which)
    for got_each, want_each in zip(got, want, strict=True):
        assert_close(got_each, want_each)


@pytest.mark.parametrize("max_block_bytes", [ONE_ROW, TWO_ROWS, EVERYTHING])
@pytest.mark.parametrize("positions", list(CASES))
def test_named_positions_equal_the_dense_head(positions: str, max_block_bytes: int) -> None:
    scored, inputs = CASES[positions], draw_head(NUM_ROWS, VOCABULARY)
    hidden, weight, bias = inputs
    compact = mapped_log_probs(
        hidden, weight, view=view_of(scored), bias=bias, max_block_bytes=max_block_bytes
    )
    got = outputs_and_gradients(*compact, inputs, "both")
    want = outputs_and_gradients(*dense_log_probs(scored, *inputs), inputs, "both")
    for got_each, want_each in zip(got, want, strict=True):
        assert_close(got_each, want_each)


def many_positions(num_rows: int, vocabulary: int, count: int) -> list[Scored]:
    draw = np.random.default_rng(0)
    return [
        Scored(int(row), int(target), float(temperature))
        for row, target, temperature in zip(
            draw.integers(0, num_rows, count),
            draw.integers(0, vocabulary, count),
            draw.choice([1.0, 0.8], count),
            strict=True,
        )
    ]


def test_blocks_of_one_row_equal_one_block_to_rounding() -> None:
    view, inputs = view_of(many_positions(40, 50, 200)), draw_head(40, 50, width=8)
    hidden, weight, bias = inputs
    results = [
        outputs_and_gradients(
            *mapped_log_probs(hidden, weight, view=view, bias=bias, max_block_bytes=budget),
            inputs,
            "both",
        )
        for budget in (ONE_ROW, EVERYTHING)
    ]
    for one_row, one_block in zip(*results, strict=True):
        assert_close(one_row, one_block, 1e-13)


def test_the_same_inputs_give_the_same_bits() -> None:
    view = view_of(many_positions(40, 50, 500))
    results = []
    for _ in range(2):
        inputs = draw_head(40, 50, width=8, dtype=torch.float32)
        hidden, weight, bias = inputs
        compact = mapped_log_probs(hidden, weight, view=view, bias=bias, max_block_bytes=1000)
        results.append(outputs_and_gradients(*compact, inputs, "both"))
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


def test_backward_runs_twice_on_a_retained_graph_with_the_same_bits() -> None:
    scored, (hidden, weight, _) = CASES["one-row-with-several-labels"], draw_head(6, 7)
    log_probs, entropy = mapped_log_probs(hidden, weight, view=view_of(scored))
    loss = (log_probs + entropy).sum()
    first = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
    second = torch.autograd.grad(loss, [hidden, weight])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_frozen_head_receives_no_gradient() -> None:
    hidden, weight, bias = draw_head(6, 7)
    weight.requires_grad_(False), bias.requires_grad_(False)
    scored = CASES["one-row-at-several-temperatures"]
    log_probs, _ = mapped_log_probs(hidden, weight, view=view_of(scored), bias=bias)
    log_probs.sum().backward()
    want = torch.autograd.grad(dense_log_probs(scored, hidden, weight, bias)[0].sum(), hidden)[0]
    assert hidden.grad is not None
    assert_close(hidden.grad, want)
    assert weight.grad is None and bias.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_give_float32_log_probs(dtype: torch.dtype) -> None:
    scored = many_positions(20, 30, 60)
    inputs = draw_head(20, 30, dtype=dtype)
    hidden, weight, bias = inputs
    exact = [x.detach().double().requires_grad_() for x in inputs]
    compact = mapped_log_probs(
        hidden, weight, view=view_of(scored), bias=bias, max_block_bytes=1000
    )
    assert compact[0].dtype == compact[1].dtype == torch.float32
    got = outputs_and_gradients(*compact, inputs, "both")
    want = outputs_and_gradients(*dense_log_probs(scored, *exact), exact, "both")
    for got_each, want_each in zip(got[:2], want[:2], strict=True):
        assert_close(got_each, want_each, 1e-5)
    for got_each, want_each in zip(got[2:], want[2:], strict=True):
        assert got_each.dtype == dtype
        assert_close(got_each, want_each, 2 * torch.finfo(dtype).eps)


def test_no_scored_position_gives_empty_outputs_with_zero_gradients() -> None:
    inputs = draw_head(6, 7)
    hidden, weight, bias = inputs
    log_probs, entropy = mapped_log_probs(hidden, weight, view=view_of([]), bias=bias)
    assert log_probs.shape == entropy.shape == (0,)
    (log_probs.sum() + entropy.sum()).backward()
    for x in inputs:
        assert x.grad is not None and torch.equal(x.grad, torch.zeros_like(x))


def test_extreme_logits_stay_finite() -> None:
    hidden = torch.tensor([[300.0], [-300.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [-1.0]], requires_grad=True)
    scored = [Scored(0, 0), Scored(0, 2), Scored(1, 0)]
    log_probs, entropy = mapped_log_probs(hidden, weight, view=view_of(scored))
    assert log_probs.tolist() == [0.0, -600.0, -600.0]
    assert entropy.tolist() == [0.0, 0.0, 0.0]
    (log_probs + entropy).sum().backward()
    assert hidden.grad is not None and hidden.grad.isfinite().all()


def peak_bytes(profile: torch.profiler.profile) -> int:
    """Largest sum of live allocations since the profile began."""
    assert profile.profiler is not None
    events = profile.profiler.kineto_results.events()
    memory = [event for event in events if event.name() == "[memory]"]
    memory.sort(key=lambda event: event.start_ns())
    return int(np.cumsum([event.nbytes() for event in memory]).max())


def test_logits_of_one_block_exist_at_a_time() -> None:
    num_rows, vocabulary, width, labels_a_row = 64, 20_000, 4, 8
    scored = [Scored(row, label) for row in range(num_rows) for label in range(labels_a_row)]
    hidden, weight, _ = draw_head(num_rows, vocabulary, width, torch.float32)
    view = view_of(scored)
    block_bytes = 8 * vocabulary * 4
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as forward:
        outputs = mapped_log_probs(hidden, weight, view=view, max_block_bytes=block_bytes)
    with torch.profiler.profile(activities=activities, profile_memory=True) as backward:
        torch.stack(outputs).sum().backward()
    two_blocks = 2 * block_bytes + block_bytes // 4
    gradients = (hidden.numel() + weight.numel()) * 4
    assert block_bytes < peak_bytes(forward) < two_blocks
    assert block_bytes < peak_bytes(backward) < two_blocks + gradients
    assert two_blocks < num_rows * vocabulary * 4 / 3
    assert two_blocks < len(scored) * vocabulary * 4 / 25


@pytest.mark.parametrize("token", [7, 100, -1])
def test_a_token_outside_the_vocabulary_is_named(token: int) -> None:
    hidden, weight, _ = draw_head(6, 7)
    with pytest.raises(HartsError) as error:
        mapped_log_probs(hidden, weight, view=view_of([Scored(0, 3), Scored(2, token)]))
    assert f"scored token {token} is outside the LM head's vocabulary of 7" in str(error.value)
    assert "\n" not in str(error.value)


def test_inputs_that_do_not_fit_are_refused_in_one_line() -> None:
    hidden, weight, bias = draw_head(6, 7)
    view = view_of([Scored(5, 3)])
    refused = [
        ({"hidden": hidden[:, :4]}, "want (rows, width) and (vocabulary, width)"),
        ({"bias": bias[:6]}, "bias has shape (6,), want (7,)"),
        ({"weight": weight.float()}, "want one floating dtype"),
        ({"max_block_bytes": 0}, "max_block_bytes is 0, want at least 1"),
        ({"hidden": hidden[:5]}, "the view reads row 5, hidden has 5 rows"),
    ]
    for changed, message in refused:
        arguments = {"hidden": hidden, "weight": weight, "view": view, "bias": bias, **changed}
        with pytest.raises(HartsError) as error:
            mapped_log_probs(**arguments)
        assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("impl", "message"),
    [
        ("fused", "impl 'fused' needs CUDA tensors, hidden is on cpu; use impl='reference'"),
        ("quick", "impl is 'quick', want one of reference, fused"),
    ],
)
def test_an_implementation_that_cannot_run_is_refused_in_one_line(impl: str, message: str) -> None:
    hidden, weight, _ = draw_head(6, 7)
    with pytest.raises(ConfigError) as error:
        mapped_log_probs(hidden, weight, view=view_of([Scored(0, 3)]), impl=impl)
    assert message in str(error.value) and "\n" not in str(error.value)


def on_cuda(view: LogProbView) -> LogProbView:
    names = ("compact_row", "temperature", "target", "head_row", "original", "position_ptr")
    tensors = {name: getattr(view, name) for name in names}
    return replace(view, **{name: x if x is None else x.cuda() for name, x in tensors.items()})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_cuda_equals_the_dense_head_and_repeats_its_bits(dtype: torch.dtype) -> None:
    scored = many_positions(50, 40, 2000)
    on_cpu = draw_head(50, 40, width=16, dtype=dtype)
    inputs = [x.detach().cuda().requires_grad_() for x in on_cpu]
    exact = [x.detach().double().requires_grad_() for x in on_cpu]
    hidden, weight, bias = inputs
    view = on_cuda(view_of(scored))
    first, second = (
        outputs_and_gradients_on(
            *mapped_log_probs(hidden, weight, view=view, bias=bias, max_block_bytes=4000), inputs
        )
        for _ in range(2)
    )
    want = outputs_and_gradients_on(*dense_log_probs(scored, *exact), exact)
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
    for got_each, again_each, want_each in zip(first, second, want, strict=True):
        assert torch.equal(got_each, again_each)
        assert_close(got_each.cpu(), want_each, tolerance)


def outputs_and_gradients_on(
    log_probs: torch.Tensor, entropy: torch.Tensor, inputs: list[torch.Tensor]
) -> list[torch.Tensor]:
    loss = (log_probs.sin() + 0.1 * entropy).sum()
    return [log_probs.detach(), entropy.detach(), *torch.autograd.grad(loss, inputs)]
