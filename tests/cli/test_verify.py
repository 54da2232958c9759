"""`harts verify`: agreement is found, disagreement is found, bad input is refused."""

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harts.data.read import read
from harts.data.trajectory import TrajectoryBatch
from harts.errors import DataError
from harts.models.presets import TINY, tiny_model
from harts.models.tree_model import attach
from harts.train import verification
from harts.train.verification import VerifyOptions, verify_model
from harts.views.tree import TreeView, build_tree_view
from tests.cli.conftest import Run, assert_refused, write_rows
from tests.families import KDA_MOE
from tests.oracles import expanded_run, gradients

KEYS = {
    "compression",
    "max_abs_logprob_diff",
    "mean_abs_logprob_diff",
    "max_rel_grad_diff",
    "tree_seconds",
    "expanded_seconds",
    "speedup",
    "passed",
}


def test_json_has_the_promised_keys_and_passes(run_harts: Run, rollouts: Path) -> None:
    outcome = run_harts("verify", rollouts, "--model", "tiny:llama", "--json")
    assert outcome.code == 0
    result = outcome.json
    assert set(result) >= KEYS
    assert result["passed"] is True
    assert 0 < result["mean_abs_logprob_diff"] <= result["max_abs_logprob_diff"] < 1e-5
    assert 0 < result["max_rel_grad_diff"] < 1e-4
    assert result["compression"] == pytest.approx(118 / 52)
    assert result["speedup"] == pytest.approx(result["expanded_seconds"] / result["tree_seconds"])


@pytest.mark.parametrize("model_type", [KDA_MOE, "qwen3_next", "qwen3", "olmo_hybrid"])
def test_a_tree_equals_its_trajectories_through_several_microbatches(
    run_harts: Run, rollouts: Path, model_type: str
) -> None:
    options = ["--capacity", 30, "--chunk-size", 4, "--json"]
    outcome = run_harts("verify", rollouts, "--model", f"tiny:{model_type}", *options)
    assert outcome.code == 0, outcome
    assert outcome.json["microbatches"] > 1


def test_float64_shrinks_the_difference(run_harts: Run, rollouts: Path) -> None:
    words = ["verify", rollouts, "--dtype", "float64", "--json", "--model"]
    assert run_harts(*words, "tiny:llama").json["max_abs_logprob_diff"] < 1e-12
    assert run_harts(*words, "tiny:qwen3_next").code == 0  # experts and casts to float32


def test_limit_takes_the_first_trajectories(run_harts: Run, rollouts: Path) -> None:
    words = ["verify", rollouts, "--model", "tiny:llama", "--json", "--limit"]
    assert run_harts(*words, 2).json["raw_tokens"] == 22 + 21
    assert run_harts(*words, 100).json["trajectories"] == 6


def test_text_says_where_the_largest_differences_are(run_harts: Run, rollouts: Path) -> None:
    outcome = run_harts("verify", rollouts, "--model", "tiny:llama")
    lines = {line[:12].strip(): line[12:].strip() for line in outcome.stdout.splitlines()}
    assert lines["model"].startswith("LlamaForCausalLM")
    assert "at trajectory" in lines["log-probs"]
    assert "(rollouts.jsonl:" in lines["log-probs"]
    assert " in model." in lines["gradients"] or " in lm_head." in lines["gradients"]
    assert lines["passed"] == "yes"


def test_times_are_not_given_as_a_speed_up_of_training(run_harts: Run, rollouts: Path) -> None:
    outcome = run_harts("verify", rollouts, "--model", "tiny:llama")
    (time,) = (line for line in outcome.stdout.splitlines() if line.startswith("time "))
    assert "not a speed-up of training" in time and "one trajectory at a time" in time
    assert re.search(r"\d+(\.\d+)?x", time) is None


def neighbouring_row(view: TreeView) -> TreeView:
    rows = view.logprobs.compact_row
    return replace(view, logprobs=replace(view.logprobs, compact_row=(rows - 1).clamp(min=0)))


def leaking_siblings(view: TreeView) -> TreeView:
    end = torch.full_like(view.attention.end, view.num_rows)
    return replace(view, attention=replace(view.attention, end=end))


def stretched_positions(view: TreeView) -> TreeView:
    return replace(view, positions=2 * view.positions)


def next_target(view: TreeView) -> TreeView:
    return replace(view, logprobs=replace(view.logprobs, target=view.logprobs.target.roll(1)))


@pytest.mark.parametrize(
    "tamper", [neighbouring_row, leaking_siblings, stretched_positions, next_target]
)
def test_a_wrong_view_does_not_pass(
    run_harts: Run,
    rollouts: Path,
    monkeypatch: pytest.MonkeyPatch,
    tamper: Callable[[TreeView], TreeView],
) -> None:
    def build(*args: Any, **kwargs: Any) -> TreeView:
        return tamper(build_tree_view(*args, **kwargs))

    monkeypatch.setattr("harts.models.tree_model.build_tree_view", build)
    outcome = run_harts("verify", rollouts, "--model", "tiny:llama", "--json")
    assert outcome.code == 1
    assert outcome.json["passed"] is False
    assert outcome.json["max_abs_logprob_diff"] > 1e-2
    text = run_harts("verify", rollouts, "--model", "tiny:llama")
    assert text.code == 1
    assert "NO" in text.stdout.split()


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.3.mlp.up_proj.weight"])
def test_a_gradient_that_is_two_percent_off_does_not_pass_and_is_named(
    rollouts: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def attach_wrongly(model: torch.nn.Module) -> Any:
        model.get_parameter(name).register_hook(lambda gradient: 1.02 * gradient)
        return attach(model)

    monkeypatch.setattr("harts.train.verification.attach", attach_wrongly)
    result = verify_model(tiny_model("llama", vocab_size=24), read(rollouts))
    assert not result.passed
    assert result.max_abs_logprob_diff < 1e-5
    assert result.worst_parameter == name
    assert result.max_rel_grad_diff == pytest.approx(0.02, rel=1e-2)


def test_a_difference_is_named_by_trajectory_and_position(
    rollouts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*args: Any, **kwargs: Any) -> TreeView:
        view = build_tree_view(*args, **kwargs)
        target = view.logprobs.target.clone()
        last = int(view.logprobs.original.argmax())  # the last position of the last trajectory
        target[last] = (target[last] + 1) % 24
        return replace(view, logprobs=replace(view.logprobs, target=target))

    monkeypatch.setattr("harts.models.tree_model.build_tree_view", build)
    result = verify_model(tiny_model("llama", vocab_size=24), read(rollouts))
    assert (result.worst_trajectory, result.worst_position) == (5, 15)


def test_values_that_are_not_finite_never_pass_and_are_null_in_json(
    run_harts: Run, rollouts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attach_to_nan(model: torch.nn.Module) -> Any:
        model.get_parameter("lm_head.weight").data[0, 0] = torch.nan
        return attach(model)

    monkeypatch.setattr("harts.train.verification.attach", attach_to_nan)
    outcome = run_harts("verify", rollouts, "--model", "tiny:llama", "--json")
    assert outcome.code == 1
    assert json.loads(outcome.stdout, parse_constant=pytest.fail)["max_abs_logprob_diff"] is None


def test_a_model_that_is_not_finite_itself_is_refused(rollouts: Path) -> None:
    model = tiny_model("llama", vocab_size=24)
    model.lm_head.weight.data[0, 0] = torch.nan
    with pytest.raises(DataError, match=r"trajectory 0 \(rollouts.jsonl:1\).*position 9.*nan"):
        verify_model(model, read(rollouts))


def test_the_model_stays_unattached_and_without_gradients(rollouts: Path) -> None:
    model = tiny_model("qwen3_next", vocab_size=24)
    before = copy.deepcopy(model)
    assert verify_model(model, read(rollouts)).passed
    assert [type(module) for module in model.modules()] == [type(m) for m in before.modules()]
    assert model.config._attn_implementation == before.config._attn_implementation
    assert all(parameter.grad is None for parameter in model.parameters())


def test_temperatures_count_on_both_sides(rollouts: Path) -> None:
    rows = read(rollouts).rows()
    for index, row in enumerate(rows):
        row["temperature"] = 0.5 + index / 4
    assert verify_model(tiny_model("llama", vocab_size=24), TrajectoryBatch.from_rows(rows)).passed


def test_a_small_block_of_logits_gives_the_same_expanded_run(
    rollouts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harts.train.verification._HEAD_BLOCK_BYTES", 3 * 24 * 4)
    assert verify_model(tiny_model("llama", vocab_size=24), read(rollouts)).passed


def test_the_expanded_run_is_that_of_the_oracle(
    rollouts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, kept = read(rollouts), {}
    model = tiny_model("qwen3_next", vocab_size=24)
    original = verification._largest_gradient_difference

    def keep(tree: torch.nn.Module, expanded: torch.nn.Module) -> tuple[float, str]:
        kept.update({name: p.grad.clone() for name, p in expanded.named_parameters()})
        return original(tree, expanded)

    monkeypatch.setattr("harts.train.verification._largest_gradient_difference", keep)
    verify_model(model, batch, VerifyOptions(seed=3))
    rows = batch.rows()

    def loss() -> torch.Tensor:
        dense = expanded_run(
            model,
            [row["input_ids"].tolist() for row in rows],
            [row["loss_mask"].tolist() for row in rows],
        )
        draw = np.random.default_rng(3).uniform(0.5, 1.5, (2, len(batch.tokens)))
        nll, bonus = torch.from_numpy(draw[:, batch.loss_mask] / batch.loss_mask.sum())
        return (0.1 * bonus * dense.entropy - nll * dense.log_probs).sum()

    for name, gradient in gradients(model, loss).items():
        torch.testing.assert_close(kept[name], gradient, rtol=1e-3, atol=1e-6, msg=name)


def test_a_file_without_scored_positions_is_refused(run_harts: Run, tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}]
    path = write_rows(tmp_path / "unscored.jsonl", rows)
    assert_refused(run_harts("verify", path, "--model", "tiny:llama", "--json"), "no position")


def test_bad_data_is_refused_before_the_model_is_loaded(run_harts: Run, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("{\n")
    assert_refused(run_harts("verify", path, "--model", "tiny:llama"), "bad.jsonl:1", "broken JSON")
    path = tmp_path / "absent.jsonl"
    assert_refused(run_harts("verify", path, "--model", "tiny:llama"), path, "no such file")


def test_a_trajectory_over_the_capacity_is_named(run_harts: Run, rollouts: Path) -> None:
    words = ["verify", rollouts, "--model", "tiny:llama", "--capacity", 20, "--json"]
    assert_refused(run_harts(*words), "trajectory 0 (rollouts.jsonl:1)", "--capacity")


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ([], "--model"),
        (["--model", "tiny:llama", "--tolerance", "0"], "'0' is not a positive number"),
        (["--model", "tiny:llama", "--tolerance", "nan"], "--tolerance"),
        (["--model", "tiny:llama", "--dtype", "int8"], "int8"),
        (["--model", "tiny:llama", "--limit", "0"], "--limit"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_option_is_one_line(
    run_harts: Run, rollouts: Path, options: list[str], part: str
) -> None:
    assert_refused(run_harts("verify", rollouts, *options), part, "see harts verify --help")


@pytest.mark.parametrize("device", ["nonsense", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(run_harts: Run, rollouts: Path, device: str) -> None:
    words = ["verify", rollouts, "--model", "tiny:llama", "--device", device]
    assert_refused(run_harts(*words), "device is", device)


def test_the_device_auto_is_the_cpu_where_there_is_no_gpu(
    run_harts: Run, rollouts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    words = ["verify", rollouts, "--model", "tiny:llama", "--device", "auto", "--json"]
    assert run_harts(*words).code == 0


def test_a_stray_token_id_is_refused_before_a_tiny_model_fills_the_memory(
    run_harts: Run, tmp_path: Path
) -> None:
    rows = [{"input_ids": [1, 2, 300_000_000], "loss_mask": [0, 1, 1]}]
    path = write_rows(tmp_path / "stray.jsonl", rows)
    outcome = run_harts("verify", path, "--model", "tiny:llama")
    assert_refused(outcome, "largest token id of the data is 300,000,000", "at most 1,000,000")


@pytest.mark.parametrize("model_type", ["llama", "qwen3_5"])
def test_real_rollouts_pass(run_harts: Run, tiny_tau: Path, model_type: str) -> None:
    words = ["verify", tiny_tau, "--model", f"tiny:{model_type}", "--limit", 12, "--json"]
    outcome = run_harts(*words)
    assert outcome.code == 0, outcome


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TINY)
def test_all_real_rollouts_pass_for_every_preset(
    run_harts: Run, tiny_tau: Path, model_type: str
) -> None:
    outcome = run_harts("verify", tiny_tau, "--model", f"tiny:{model_type}", "--json")
    assert outcome.code == 0, outcome
    assert outcome.json["compression"] == pytest.approx(3.772, abs=1e-3)


@pytest.mark.parametrize("model_type", [KDA_MOE, "qwen3_5", "llama"])
def test_bfloat16_is_measured_against_the_expanded_runs_own_error(
    run_harts: Run, rollouts: Path, model_type: str
) -> None:
    words = ["verify", rollouts, "--model", f"tiny:{model_type}", "--dtype", "bfloat16", "--json"]
    outcome = run_harts(*words)
    assert outcome.code == 0, outcome
    result = outcome.json
    assert 1e-4 < result["mean_abs_logprob_diff"] <= result["mean_tolerance"] < result["tolerance"]
    assert 1e-3 < result["rel_all_grads_diff"] <= result["all_grads_tolerance"]
    assert result["gradient_tolerance"] is None


def test_a_tolerance_that_is_given_holds_in_bfloat16_too(run_harts: Run, rollouts: Path) -> None:
    words = ["verify", rollouts, "--model", "tiny:llama", "--dtype", "bfloat16", "--json"]
    outcome = run_harts(*words, "--tolerance", "1e-5")
    assert outcome.code == 1
    assert outcome.json["tolerance"] == 1e-5


@pytest.mark.parametrize("tamper", [neighbouring_row, leaking_siblings, next_target])
def test_a_wrong_view_does_not_pass_in_bfloat16(
    run_harts: Run,
    rollouts: Path,
    monkeypatch: pytest.MonkeyPatch,
    tamper: Callable[[TreeView], TreeView],
) -> None:
    def build(*args: Any, **kwargs: Any) -> TreeView:
        return tamper(build_tree_view(*args, **kwargs))

    monkeypatch.setattr("harts.models.tree_model.build_tree_view", build)
    words = ["verify", rollouts, "--model", "tiny:llama", "--dtype", "bfloat16", "--json"]
    assert run_harts(*words).code == 1


@pytest.mark.parametrize(("factor", "passed"), [(1.001, True), (1.1, False)])
def test_gradients_that_are_ten_percent_off_do_not_pass_in_bfloat16(
    rollouts: Path, monkeypatch: pytest.MonkeyPatch, factor: float, passed: bool
) -> None:
    def attach_wrongly(model: torch.nn.Module) -> Any:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: factor * gradient)
        return attach(model)

    monkeypatch.setattr("harts.train.verification.attach", attach_wrongly)
    model = tiny_model("llama", vocab_size=24).bfloat16()
    assert verify_model(model, read(rollouts)).passed is passed


def with_recorded(path: Path, rollouts: Path, change: float, temperature: float = 1.0) -> Path:
    """The rollouts with the log-probabilities that tiny:llama gives them, times a factor."""
    rows = [json.loads(line) | {"temperature": temperature} for line in rollouts.open()]
    batch = TrajectoryBatch.from_rows(rows)
    found = verify_model(tiny_model("llama", vocab_size=24), batch)
    for row, begin in zip(rows, batch.offsets.tolist(), strict=False):
        values = np.nan_to_num(found.log_probs[begin : begin + len(row["input_ids"])])
        row["rollout_log_probs"] = (change * values).tolist()
    return write_rows(path, rows)


def test_recorded_log_probs_of_the_same_model_and_temperature_pass(
    run_harts: Run, rollouts: Path, tmp_path: Path
) -> None:
    path = with_recorded(tmp_path / "same.jsonl", rollouts, 1.0, temperature=0.7)
    words = ["verify", path, "--model", "tiny:llama", "--rollout-logprobs"]
    outcome = run_harts(*words, "--json")
    assert outcome.code == 0
    recorded = outcome.json["rollout_logprobs"]
    assert recorded["max_abs"] < 1e-5
    assert (recorded["field"], recorded["temperature_field"]) == (
        "rollout_log_probs",
        "temperature",
    )
    assert "rollout_logprobs" not in run_harts(*words[:-1], "--json").json


def test_recorded_log_probs_that_differ_do_not_pass_and_are_explained(
    run_harts: Run, rollouts: Path, tmp_path: Path
) -> None:
    path = with_recorded(tmp_path / "other.jsonl", rollouts, 1 / np.log(2))
    words = ["verify", path, "--model", "tiny:llama", "--rollout-logprobs"]
    outcome = run_harts(*words, "--json")
    assert outcome.code == 1
    assert outcome.json["passed"] is False
    assert outcome.json["max_abs_logprob_diff"] < 1e-5
    text = run_harts(*words)
    assert text.code == 1
    assert "warning       recorded values are 1.44 times the recomputed ones" in text.stdout
    assert "worst         trajectory " in text.stdout
    assert text.stdout.splitlines()[-1] == "passed        NO"
    assert run_harts(*words, "--rollout-tolerance", "9").code == 0


def test_a_file_without_recorded_log_probs_is_refused(run_harts: Run, rollouts: Path) -> None:
    words = ["verify", rollouts, "--model", "tiny:llama", "--rollout-logprobs", "--json"]
    assert_refused(run_harts(*words), "no recorded log-probabilities", "old_log_probs")
