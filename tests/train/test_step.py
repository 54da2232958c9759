"""What happens inside one step: nothing is read back, layers are recomputed as asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import harts
from harts.data.synthetic import SyntheticOptions, generate
from harts.errors import ConfigError
from harts.models.presets import tiny_model
from harts.models.routing import RouterRecord
from harts.models.tree_model import TreeOutput, attach
from harts.ops.attention import views
from harts.train import device as devices
from harts.train.determinism import deterministic
from harts.train.options import OBJECTIVES, ObjectiveOptions, TrainOptions
from harts.train.recompute import set_recomputation
from harts.train.sampling import with_advantages
from harts.train.step import accumulate_gradients
from harts.train.trainer import train
from tests.families import KDA_MOE
from tests.train.conftest import read_metrics, write_config

MOE = ObjectiveOptions(load_balancing=1e-3, router_z=1e-4)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def plan() -> harts.StepPlan:
    options = SyntheticOptions(
        tasks=3, rollouts=3, turns=3, system_tokens=40, turn_tokens=12, observation_tokens=12
    )
    return harts.plan_step(with_advantages(generate(options), "group"), 400)


class _Reads(TorchDispatchMode):
    """Counts what would make the host wait for a CUDA device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        waiting = ("_local_scalar_dense", "nonzero", "_unique", "masked_select", "is_nonzero")
        self.count += any(name in str(func) for name in waiting)
        return func(*args, **(kwargs or {}))


class _OneParameterModel:
    """Stands for a model, so that only the step's own operators are counted."""

    device = CPU

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.tensor(0.5))

    def log_probs(self, microbatch: harts.MicroBatch) -> TreeOutput:
        log_probs = -self.weight * torch.ones(microbatch.num_scored)
        routers = RouterRecord(
            name="router",
            kind="sigmoid",
            logits=self.weight * torch.ones(4, 8),
            indices=torch.zeros(4, 2, dtype=torch.int64),
            multiplicity=torch.ones(4, dtype=torch.int64),
        )
        return TreeOutput(log_probs, 2 * log_probs.detach(), (routers,), microbatch.num_tokens)


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "ppo", "sft"])
def test_no_value_is_read_back_before_the_step_is_over(
    plan: harts.StepPlan, name: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(tensor: torch.Tensor) -> Any:
        pytest.fail("a tensor was copied to the host")

    options = ObjectiveOptions(
        name=name, options=OBJECTIVES[name](), load_balancing=1e-3, router_z=1e-4
    )
    assert plan.num_microbatches > 1
    with _Reads() as reads:
        with monkeypatch.context() as patch:
            for copy_to_host in ("tolist", "numpy", "cpu"):
                patch.setattr(torch.Tensor, copy_to_host, refuse)
            result = accumulate_gradients(_OneParameterModel(), plan, options)  # type: ignore[arg-type]
        assert reads.count == 0
        assert float(result.losses[0]) == result.loss != result.policy_loss
        assert reads.count == 1  # the counter works
    assert result.means["log_prob"] == pytest.approx(-0.5)
    assert result.seconds > 0


def _gradients(plan: harts.StepPlan, train_options: TrainOptions) -> tuple[Any, int]:
    """All gradients of a step, and how often layers ran."""
    model = tiny_model(KDA_MOE, vocab_size=int(plan.batch.tokens.max()) + 1).train()
    tree_model = attach(model)
    set_recomputation(model, train_options)
    runs = SimpleNamespace(count=0)

    def count(*_: Any) -> None:
        runs.count += 1

    for layer in model.get_decoder().layers:
        layer.mlp.register_forward_pre_hook(count)
    accumulate_gradients(tree_model, plan, MOE)
    return {name: p.grad for name, p in model.named_parameters()}, runs.count


def test_selective_recomputation_runs_the_first_layers_twice_and_changes_no_bit(
    plan: harts.StepPlan,
) -> None:
    kept, runs = _gradients(plan, TrainOptions())
    microbatches, layers = plan.num_microbatches, 4
    assert runs == layers * microbatches
    for again in (1, 3):
        options = TrainOptions(recompute="selective", recompute_layers=again)
        gradients, runs = _gradients(plan, options)
        assert runs == (layers + again) * microbatches
        assert all(torch.equal(gradients[name], gradient) for name, gradient in kept.items())
    _, runs = _gradients(plan, TrainOptions(recompute="full"))
    assert runs == 2 * layers * microbatches


def test_selective_recomputation_never_runs_attention_again(
    plan: harts.StepPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    attend = views._attend_groups
    monkeypatch.setattr(views, "_attend_groups", lambda *args: (calls.append(1), attend(*args))[1])
    kept, _ = _gradients(plan, TrainOptions())
    once = len(calls)
    for recompute, layers_run, attention_runs in (("full", 8, 2), ("selective", 8, 1)):
        calls.clear()
        gradients, runs = _gradients(plan, TrainOptions(recompute=recompute))  # type: ignore[arg-type]
        assert runs == layers_run * plan.num_microbatches
        assert len(calls) == attention_runs * once
        assert all(torch.equal(gradients[name], gradient) for name, gradient in kept.items())


def test_the_first_layers_are_the_recomputed_ones() -> None:
    model = tiny_model("llama", vocab_size=16)
    set_recomputation(model, TrainOptions(recompute="selective", recompute_layers=3))
    switched = [layer.gradient_checkpointing for layer in model.get_decoder().layers]
    assert switched == [True, True, True, False]


def test_recomputing_every_layer_is_not_selective() -> None:
    model = tiny_model("llama", vocab_size=16)
    with pytest.raises(ConfigError, match="recompute_layers is 4, the model has 4 layers"):
        set_recomputation(model, TrainOptions(recompute="selective", recompute_layers=4))
    with pytest.raises(ConfigError, match="recompute_layers is 0; give at least 1"):
        TrainOptions(recompute="selective", recompute_layers=0)


def test_a_step_says_what_it_cost(tmp_path: Path, rollouts: Path) -> None:
    train(write_config(tmp_path, rollouts, "train.steps=2"))
    for line in read_metrics(tmp_path):
        assert 0.01 < line["peak_memory_gib"] < 64
        for rows in ("raw", "compact"):
            speed = line[f"{rows}_tokens"] / line["seconds"]
            assert line[f"{rows}_tokens_per_second"] == pytest.approx(speed)
        assert 0 < line["gradient_seconds"] < line["seconds"]


def test_a_run_says_dtype_and_device(
    tmp_path: Path, rollouts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(write_config(tmp_path, rollouts, "train.steps=1", "train.device=cpu"))
    header = capsys.readouterr().err.splitlines()[0]
    assert "M parameters, float32) on cpu, tree rows" in header


def test_cuda_is_refused_where_there_is_none(
    tmp_path: Path, rollouts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch sees no CUDA device; use 'cpu' or 'auto'"):
        train(write_config(tmp_path, rollouts, "train.device=cuda"))
    assert devices.choose_device("auto") == CPU


def test_deterministic_mode_is_on_in_the_run_and_off_after_it(
    tmp_path: Path, rollouts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(
        "harts.train.trainer.accumulate_gradients",
        lambda *args: (
            seen.append(torch.are_deterministic_algorithms_enabled()) or accumulate_gradients(*args)
        ),
    )
    train(write_config(tmp_path, rollouts, "train.steps=1", "train.deterministic=true"))
    assert seen == [True]
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("setting", [None, ":0:0"])
def test_deterministic_mode_needs_cublas_to_be_told(
    monkeypatch: pytest.MonkeyPatch, setting: str | None
) -> None:
    if setting is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    else:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", setting)
    cuda = torch.device("cuda")
    with (
        pytest.raises(ConfigError, match="start with CUBLAS_WORKSPACE_CONFIG=:4096:8 in the"),
        deterministic(True, cuda),
    ):
        pass
    with deterministic(False, cuda):
        assert not torch.are_deterministic_algorithms_enabled()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with deterministic(True, cuda):
        assert torch.are_deterministic_algorithms_enabled()
