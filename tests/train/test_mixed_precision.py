"""bfloat16 weights train as float32 weights that the model sees rounded."""

from __future__ import annotations

import struct
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from harts.errors import CheckpointError
from harts.train import mixed_precision
from harts.train.mixed_precision import MixedPrecisionOptimizer
from harts.train.trainer import train
from tests.train.conftest import equal_bits, read_metrics, saved_weights, write_config

ADAMW = partial(torch.optim.AdamW, lr=1.0, weight_decay=0.1)
STEPS, MICROBATCHES = 6, 3


class Mixed(nn.Module):
    """A linear map in bfloat16 with a scale in float32, as families keep some parameters."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        weights = [torch.randn(n, 24, generator=draw).bfloat16() for n in (5, 7)]
        self.weights = nn.ParameterList(nn.Parameter(w.to(dtype)) for w in weights)
        self.scale = nn.Parameter(torch.ones(24))
        self.frozen = nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False)


def _gradients(step: int, microbatch: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * step + microbatch)
    return [torch.randn(*shape, generator=draw).bfloat16() for shape in ((5, 24), (7, 24), (24,))]


def _backward(model: Mixed, gradients: list[torch.Tensor]) -> None:
    """Give every parameter exactly this gradient."""
    parameters = [*model.weights, model.scale]
    terms = [(p * g.to(p)).sum() for p, g in zip(parameters, gradients, strict=True)]
    torch.stack([term.float() for term in terms]).sum().backward()


def _rounded_half_away(master: torch.Tensor) -> torch.Tensor:
    """Through integers of the standard library: float32 bits, half of the last place added."""
    bits = [struct.unpack("<I", struct.pack("<f", x))[0] for x in master.flatten().tolist()]
    kept = [(b + 0x8000) & 0xFFFF0000 for b in bits]
    values = [struct.unpack("<f", struct.pack("<I", b))[0] for b in kept]
    return torch.tensor(values).reshape(master.shape).bfloat16()


CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    ],
)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("master_bytes", [1, 1 << 30], ids=["a-batch-each", "one-batch"])
def test_the_updates_are_those_of_float32_weights_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, master_bytes: int, device: str
) -> None:
    monkeypatch.setattr(mixed_precision, "_MASTER_BYTES", master_bytes)
    half, wide = (Mixed(dtype).to(device) for dtype in (torch.bfloat16, torch.float32))
    optimizer = MixedPrecisionOptimizer(half, ADAMW)
    trained = [p for p in wide.parameters() if p.requires_grad]
    reference = ADAMW(trained)
    for step in range(STEPS):
        rate = 10.0 ** -(step % 4)  # updates above and below the last place of bfloat16
        optimizer.zero_grad()
        reference.zero_grad()
        for microbatch in range(MICROBATCHES):
            _backward(half, _gradients(step, microbatch))
            _backward(wide, _gradients(step, microbatch))
        norms = [
            optimizer.clip_gradients(5.0),
            nn.utils.clip_grad_norm_(trained, 5.0),
        ]
        assert torch.equal(*norms)
        optimizer.step(rate)
        reference.param_groups[0]["lr"] = rate
        reference.step()
        assert torch.equal(half.scale, wide.scale)
        for narrow, exact in zip(half.weights, wide.weights, strict=True):
            assert torch.equal(narrow.cpu(), _rounded_half_away(exact))
    assert torch.equal(half.frozen.cpu(), torch.ones(3, dtype=torch.bfloat16))


def test_small_updates_add_up() -> None:
    model = Mixed(torch.bfloat16)
    optimizer = MixedPrecisionOptimizer(model, partial(torch.optim.SGD, lr=1.0))
    before = model.weights[0].detach().clone()
    for _ in range(64):
        optimizer.zero_grad()
        _backward(model, [torch.full_like(w, 2**-12) for w in [*model.weights, model.scale]])
        optimizer.step(1.0)
    moved = before.float() - 64 * 2**-12
    torch.testing.assert_close(model.weights[0].float(), moved, rtol=2**-8, atol=0)


def test_a_value_between_two_neighbours_goes_to_the_nearest_and_comes_back() -> None:
    patterns = torch.tensor([0x3F80_0000, 0x3F80_7FFF, 0x3F80_8000, 0x3F81_8000, 0x3F80_FFFF])
    master = torch.cat([patterns, patterns + 0x8000_0000 - 2**32]).int().view(torch.float32)
    holder = nn.Module()
    holder.weight = nn.Parameter(torch.zeros(len(master), dtype=torch.bfloat16))
    whole = mixed_precision._Master(holder.weight)
    whole.join()
    whole.value.data.copy_(master)
    whole.split()
    assert torch.equal(holder.weight, _rounded_half_away(master))
    whole.join()
    assert torch.equal(whole.value, master)


def test_masters_and_gradients_take_no_memory_between_steps() -> None:
    model = Mixed(torch.bfloat16)
    optimizer = MixedPrecisionOptimizer(model, ADAMW)
    _backward(model, _gradients(0, 0))
    assert all(weight.grad is None for weight in model.weights)
    optimizer.step(1e-3)
    for master in optimizer._masters.values():
        assert master.value.untyped_storage().nbytes() == 0
        state = [t for o in optimizer._optimizers for t in o.state.get(master.value, {}).values()]
        kept = [master.weight, master.remainder, master.value.grad, *state]
        assert sum(t.nbytes for t in kept if t.dim()) == 16 * master.weight.numel()


def test_a_float32_model_keeps_its_own_gradients() -> None:
    model = Mixed(torch.float32)
    optimizer = MixedPrecisionOptimizer(model, ADAMW)
    _backward(model, _gradients(0, 0))
    assert len(optimizer._optimizers) == 1
    assert all(weight.grad is not None for weight in model.weights)
    assert optimizer.state_dict()["remainders"] == {}


def test_a_state_for_other_dtypes_is_refused() -> None:
    state = MixedPrecisionOptimizer(Mixed(torch.float32), ADAMW).state_dict()
    with pytest.raises(CheckpointError, match=r"has 0 bfloat16 parameters, the model 2.*weights.0"):
        MixedPrecisionOptimizer(Mixed(torch.bfloat16), ADAMW).load_state_dict(state)


@pytest.mark.parametrize("model", ["bailing_hybrid", "olmo_hybrid", "qwen3_next"])
def test_a_resumed_bfloat16_run_ends_with_the_same_bits(
    tmp_path: Path, rollouts: Path, model: str
) -> None:
    overrides = ["model.dtype=bfloat16", f"model.path=tiny:{model}", "train.learning_rate=1e-2"]
    if model != "bailing_hybrid":
        overrides.append("objective.expert_bias_rate=0.0")
    if model == "olmo_hybrid":
        overrides += ["objective.load_balancing=0.0", "objective.router_z=0.0"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir(), cut.mkdir()
    train(write_config(whole, rollouts, *overrides))
    train(write_config(cut, rollouts, *overrides, "train.steps=2"))
    train(write_config(cut, rollouts, *overrides), resume=True)
    weights = [saved_weights(folder / "run", 4, torch.bfloat16) for folder in (whole, cut)]
    assert equal_bits(*weights)
    assert {w.dtype for w in weights[0].values()} >= {torch.bfloat16}
    losses = [[line["loss"] for line in read_metrics(folder)] for folder in (whole, cut)]
    assert losses[0] == losses[1]


def test_bfloat16_follows_float32(tmp_path: Path, rollouts: Path) -> None:
    """Log-probs have 8 significant bits at least where they are of the order of 6."""
    lines = []
    for dtype in ("float32", "bfloat16"):
        folder = tmp_path / dtype
        folder.mkdir()
        train(write_config(folder, rollouts, f"model.dtype={dtype}"))
        lines.append(read_metrics(folder))
    for wide, narrow in zip(*lines, strict=True):
        assert narrow["log_prob"] == pytest.approx(wide["log_prob"], abs=6 * 2**-7)
        assert narrow["log_prob"] != wide["log_prob"]


@pytest.mark.parametrize("device", [CUDA])
def test_a_run_on_cuda_follows_one_on_the_cpu(tmp_path: Path, rollouts: Path, device: str) -> None:
    """Within bfloat16's rounding, with the kernels that attach chooses for each."""
    lines = []
    overrides = ["model.path=tiny:llama", "train.steps=2"]
    moe = ("load_balancing", "router_z", "expert_bias_rate")
    overrides += [f"objective.{name}=0.0" for name in moe]
    selective = ["train.recompute=selective", "train.recompute_layers=3"]
    for name, more in (("cpu", []), (device, ["model.dtype=bfloat16", *selective])):
        folder = tmp_path / name
        folder.mkdir()
        train(write_config(folder, rollouts, *overrides, f"train.device={name}", *more))
        lines.append(read_metrics(folder))
    for wide, narrow in zip(*lines, strict=True):
        assert narrow["log_prob"] == pytest.approx(wide["log_prob"], abs=6 * 2**-7)
        assert 0 < narrow["gradient_seconds"] <= narrow["seconds"]
        assert 0 < narrow["peak_memory_gib"] < 4
