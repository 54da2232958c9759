"""The trainer: the step equals the expanded step, and a killed run resumes bit for bit."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import harts
from harts.data.synthetic import SyntheticOptions, generate
from harts.errors import CheckpointError, ConfigError, DataError, HartsError, TrainingError
from harts.train import checkpoint as checkpoints
from harts.train.log import RunLog
from harts.train.mixed_precision import MixedPrecisionOptimizer
from harts.train.run_folder import StopSignal, alone_in
from harts.train.sampling import GroupSampler, unshared, with_advantages
from harts.train.trainer import train
from tests.train.conftest import equal_bits, read_metrics, saved_weights, write_config

TOKENS = Path(__file__).parents[3] / "shared" / "rollouts" / "tokens"


def test_every_step_equals_the_expanded_step(tmp_path: Path, rollouts: Path) -> None:
    tree_dir, expanded_dir = tmp_path / "tree", tmp_path / "expanded"
    tree_dir.mkdir(), expanded_dir.mkdir()
    bonus = "objective.entropy_coefficient=0.1"  # without it the on-policy loss is a constant
    train(write_config(tree_dir, rollouts, bonus))
    train(write_config(expanded_dir, rollouts, bonus, "plan.sharing=expanded"))
    for tree, expanded in zip(read_metrics(tree_dir), read_metrics(expanded_dir), strict=True):
        assert tree["policy_loss"] == pytest.approx(expanded["policy_loss"], abs=1e-5)
        assert tree["log_prob"] == pytest.approx(expanded["log_prob"], abs=1e-5)
        assert tree["grad_norm"] == pytest.approx(expanded["grad_norm"], rel=1e-3)
        assert tree["rows_saved"] > 0 == expanded["rows_saved"]


def test_recomputation_gives_the_same_run_bit_for_bit(tmp_path: Path, rollouts: Path) -> None:
    kept, recomputed = tmp_path / "kept", tmp_path / "recomputed"
    kept.mkdir(), recomputed.mkdir()
    train(write_config(kept, rollouts))
    train(write_config(recomputed, rollouts, "train.recompute=full"))
    assert equal_bits(saved_weights(kept / "run", 4), saved_weights(recomputed / "run", 4))


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, rollouts: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir(), cut.mkdir()
    train(write_config(whole, rollouts))
    train(write_config(cut, rollouts, "train.steps=2"))
    # what a kill leaves behind: a half-written checkpoint and lines after the last whole one
    partial = cut / "run" / "checkpoints" / ".step-000004.partial"
    partial.mkdir()
    (partial / "position.json").write_text("{")
    with (cut / "run" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "loss": 9.0}) + "\n" + '{"step": 4, "lo')
    train(write_config(cut, rollouts), resume=True)
    assert equal_bits(saved_weights(whole / "run", 4), saved_weights(cut / "run", 4))
    lines = read_metrics(cut)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["loss"] for line in lines] == [line["loss"] for line in read_metrics(whole)]


def test_a_run_killed_by_a_signal_resumes_from_its_last_complete_checkpoint(
    tmp_path: Path, rollouts: Path
) -> None:
    write_config(tmp_path, rollouts)
    command = [sys.executable, "-m", "harts.cli.main", "train", str(tmp_path / "run.toml")]
    long_run = [*command, "train.steps=500", "output.checkpoint_every=1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        long_run, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step") and " 3/500 " in line:
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stderr.close()
    found = checkpoints.latest_checkpoint(tmp_path / "run")
    assert found is not None and found.step >= 2
    stop = found.step + 1
    train(write_config(tmp_path, rollouts, f"train.steps={stop}"), resume=True)
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, stop + 1))


def test_old_checkpoints_are_dropped_and_the_newest_kept(tmp_path: Path, rollouts: Path) -> None:
    train(write_config(tmp_path, rollouts, "output.checkpoint_every=1", "output.keep=2"))
    names = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-000003", "step-000004"]


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path, rollouts: Path) -> None:
    train(write_config(tmp_path, rollouts, "train.steps=1"))
    with pytest.raises(ConfigError, match="holds a run of 1 steps; go on with --resume"):
        train(write_config(tmp_path, rollouts))


def test_resuming_with_another_configuration_is_refused(tmp_path: Path, rollouts: Path) -> None:
    train(write_config(tmp_path, rollouts, "train.steps=1"))
    with pytest.raises(CheckpointError, match=r"train.learning_rate is 0.5, the run in .* 0.001"):
        train(write_config(tmp_path, rollouts, "train.learning_rate=0.5"), resume=True)


def test_expert_biases_move_by_the_rate(tmp_path: Path, rollouts: Path) -> None:
    train(write_config(tmp_path, rollouts, "train.steps=1"))
    biases = {k: v for k, v in saved_weights(tmp_path / "run", 1).items() if "correction_bias" in k}
    assert len(biases) == 3
    for bias in biases.values():
        moved = bias[bias != 0].abs()
        assert len(moved) and torch.equal(moved, torch.full_like(moved, 0.01))


def test_selective_recomputation_warns_of_attention_that_it_cannot_keep(
    tmp_path: Path, rollouts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = harts.Kernels(attention="reference")
    monkeypatch.setattr("harts.train.trainer.attach", partial(harts.attach, kernels=kernels))
    options = write_config(tmp_path, rollouts, "train.steps=1", "train.recompute=selective")
    with pytest.warns(UserWarning, match="cannot keep attention 'reference' and recomputes it"):
        train(options)


def test_what_the_first_step_would_refuse_is_refused_before_anything_is_written(
    tmp_path: Path, rollouts: Path
) -> None:
    bare = tmp_path / "bare.jsonl"
    bare.write_text('{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "reward": 1.0}\n')
    for file, override, message in (
        (rollouts, "plan.capacity=5", r"more than the capacity 5 .*; raise the capacity"),
        (bare, "objective.advantages=field", "'grpo' needs the field 'advantages'; fields present"),
    ):
        with pytest.raises(HartsError, match=message):
            train(write_config(tmp_path, file, override))
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lerning_rate=1", "train.lerning_rate is unknown; did you mean learning_rate?"),
        (
            "trian.steps=1",
            "override 'trian.steps=1': section 'trian' is unknown; did you mean train?",
        ),
        ("train.steps=1.5", "train.steps is 1.5; it must be a valid integer"),
        ("train.steps=true", "train.steps is True; it must be a valid integer"),
        ("train.recompute=half", "train.recompute is 'half'; it must be 'none', 'selective' or"),
        ("train.recompute_layers=2", "train.recompute_layers is 2 with train.recompute='none'"),
        ("train.device=gpu", "train.device is 'gpu'; it must be 'auto', 'cpu' or 'cuda'"),
        ("model.dtype=float16", "model.dtype is 'float16'; it must be 'float32', 'float64' or"),
        ("train.betas=[0.9]", "train.betas is (0.9,);"),
        ("objective.clip_hgih=1", "objective.clip_hgih is unknown; did you mean clip_high?"),
        ("objective.name=groop", "objective.name is 'groop'; it must be 'grpo'"),
        ("objective.clip_low=-1", "clip_low is -1.0; give a value from 0 to 1"),
        ("train.steps", "override 'train.steps' is not of the form section.key=value"),
        ("train.steps=0", "train.steps is 0; give at least 1"),
        ("plan.capacity=0", "plan.capacity is 0; give at least 1"),
        ("train.max_grad_norm=0", "train.max_grad_norm is 0.0; give more than 0, or inf"),
        ("train.max_grad_norm=-1", "train.max_grad_norm is -1.0; give more than 0, or inf"),
        ("train.learning_rate=nan", "train.learning_rate is nan; give 0 or more"),
        ("train.weight_decay=-1", "train.weight_decay is -1.0; give 0 or more"),
        ("train.warmup_steps=-2", "train.warmup_steps is -2; give 0 or more"),
        ("train.epsilon=0", "train.epsilon is 0.0; give more than 0"),
        ("train.betas=[0.9, 1.0]", "train.betas is [0.9, 1.0]; give two from 0 to below 1"),
    ],
)
def test_a_wrong_option_is_one_line(
    tmp_path: Path, rollouts: Path, override: str, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        write_config(tmp_path, rollouts, override)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.groups_per_step=9"], "data.groups_per_step is 9, the rollouts have 3 groups"),
        (["model.path=tiny:llama"], "objective.load_balancing is set, but tiny:llama has no MoE"),
        (
            ["model.path=tiny:qwen3_next"],
            "expert_bias_rate is set, but the routers of tiny:qwen3_next have no expert bias",
        ),
    ],
)
def test_an_option_that_does_not_fit_is_refused_before_anything_is_written(
    tmp_path: Path, rollouts: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        train(write_config(tmp_path, rollouts, *overrides))
    assert message in str(error.value)
    assert not (tmp_path / "run").exists()


def test_unknown_keys_are_reported_before_wrong_values(tmp_path: Path, rollouts: Path) -> None:
    with pytest.raises(ConfigError, match=r"output\.folder is unknown"):
        write_config(tmp_path, rollouts, "train.steps=x", "output.folder=y")


def test_steps_take_whole_groups_and_every_epoch_sees_each_once() -> None:
    batch = generate(SyntheticOptions(tasks=4, rollouts=2, turns=2))
    sampler = GroupSampler(batch, groups_per_step=2, seed=3)
    first, second = (set(sampler.step(n).trajectory_fields["group_id"].tolist()) for n in (0, 1))
    assert len(first) == len(second) == 2 and not first & second
    again = GroupSampler(batch, groups_per_step=2, seed=3)
    assert set(again.step(1).trajectory_fields["group_id"].tolist()) == second


def test_the_expanded_baseline_shares_no_row() -> None:
    batch = generate(SyntheticOptions(tasks=2, rollouts=2, turns=2))
    plan = harts.plan_step(unshared(batch))
    assert plan.compact_tokens == plan.raw_tokens == plan.trie_tokens


def test_advantages_from_rewards_replace_those_of_the_data() -> None:
    batch = generate(SyntheticOptions(tasks=2, rollouts=3, turns=2))
    made = with_advantages(batch, "group")
    assert "advantages" in made.trajectory_fields
    assert "advantages" not in made.position_fields


@pytest.mark.slow
@pytest.mark.skipif(not TOKENS.exists(), reason="shared rollouts are not beside the repository")
def test_real_rollouts_train_as_their_expanded_run(tmp_path: Path) -> None:
    data = TOKENS / "tau_airline_step_plain.jsonl.xz"
    losses = []
    for sharing in ("tree", "expanded"):
        folder = tmp_path / sharing
        folder.mkdir()
        train(
            write_config(
                folder,
                data,
                "data.groups_per_step=1",
                "objective.advantages=field",
                "plan.capacity=65536",
                "train.steps=2",
                "objective.entropy_coefficient=0.01",
                f"plan.sharing={sharing}",
            )
        )
        losses.append([[line["policy_loss"], line["log_prob"]] for line in read_metrics(folder)])
    for tree, expanded in zip(*losses, strict=True):
        assert tree == pytest.approx(expanded, abs=1e-5)


def with_edited_lines(rollouts: Path, file: Path, edit: Any) -> Path:
    """A copy of the rollouts, every row through `edit(index, row)`."""
    rows = [json.loads(line) for line in rollouts.read_text().splitlines()]
    file.write_text("".join(json.dumps(edit(i, row)) + "\n" for i, row in enumerate(rows)))
    return file


def test_groups_without_a_scored_token_and_dropped_trajectories_do_not_stop_a_run(
    tmp_path: Path, rollouts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = harts.read(rollouts)
    groups = batch.trajectory_fields["group_id"].tolist()

    def edit(index: int, row: dict[str, Any]) -> dict[str, Any]:
        if row["group_id"] == groups[0]:
            row["loss_mask"] = [0] * len(row["loss_mask"])
        return row

    file = with_edited_lines(rollouts, tmp_path / "edited.jsonl", edit)
    lengths = batch.lengths[[group != groups[0] for group in groups]]
    overrides = (
        f"data.path={file}",
        "data.groups_per_step=1",
        f"plan.capacity={int(lengths.max()) - 1}",
        "plan.over_capacity=drop",
        "train.steps=3",
    )
    train(write_config(tmp_path, rollouts, *overrides))
    assert all(line["log_prob"] < 0 for line in read_metrics(tmp_path))
    said = capsys.readouterr().err
    assert "left out: 1 groups that score no token" in said
    assert "longer than the capacity" in said


def test_rollouts_that_score_nothing_are_refused_before_anything_is_written(
    tmp_path: Path, rollouts: Path
) -> None:
    def edit(index: int, row: dict[str, Any]) -> dict[str, Any]:
        return row | {"loss_mask": [0] * len(row["loss_mask"])}

    file = with_edited_lines(rollouts, tmp_path / "edited.jsonl", edit)
    with pytest.raises(DataError, match="scores a token; set loss_mask"):
        train(write_config(tmp_path, rollouts, f"data.path={file}"))
    assert not (tmp_path / "run").exists()


def test_a_step_that_is_not_finite_updates_nothing_and_keeps_the_checkpoints(
    tmp_path: Path, rollouts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = "output.checkpoint_every=1"
    train(write_config(tmp_path, rollouts, "train.steps=2", every))
    before = saved_weights(tmp_path / "run", 2)
    clip = MixedPrecisionOptimizer.clip_gradients
    monkeypatch.setattr(
        MixedPrecisionOptimizer, "clip_gradients", lambda self, norm: clip(self, norm) * math.nan
    )
    with pytest.raises(TrainingError, match=r"step 3: loss is .*, the gradients' norm nan"):
        train(write_config(tmp_path, rollouts, every), resume=True)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]
    names = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-000001", "step-000002"]
    assert equal_bits(before, saved_weights(tmp_path / "run", 2))


@contextmanager
def handled_by(handler: Any) -> Iterator[None]:
    """SIGINT, which is ignored where a script runs the suite in the background."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_ignored_signal_stays_ignored() -> None:
    with handled_by(signal.SIG_IGN):
        with StopSignal() as stop:
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            signal.raise_signal(signal.SIGINT)
        assert not stop.received
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_after_the_step_with_a_checkpoint(
    tmp_path: Path, rollouts: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    write_step = RunLog.step

    def step(self: RunLog, metrics: dict[str, Any]) -> None:
        write_step(self, metrics)
        if metrics["step"] == 1:
            signal.raise_signal(number)

    with monkeypatch.context() as patch, handled_by(signal.default_int_handler):
        patch.setattr(RunLog, "step", step)
        with pytest.raises(KeyboardInterrupt):
            train(write_config(tmp_path, rollouts))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]
    train(write_config(tmp_path, rollouts), resume=True)
    whole = tmp_path / "whole"
    whole.mkdir()
    train(write_config(whole, rollouts))
    assert equal_bits(saved_weights(tmp_path / "run", 4), saved_weights(whole / "run", 4))


def test_a_folder_is_one_runs(tmp_path: Path, rollouts: Path) -> None:
    options = write_config(tmp_path, rollouts, "train.steps=1")
    in_use = pytest.raises(ConfigError, match="is in use by a run that has not ended")
    with alone_in(tmp_path / "run"), in_use:
        train(options)
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert not metrics.exists()
    metrics.write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match="holds the metrics of 1 steps without a checkpoint"):
        train(options)
    metrics.write_text('{"loss": 1}\n')
    with pytest.raises(ConfigError, match="holds no metrics of a run"):
        train(options)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file; give a folder"):
        train(write_config(tmp_path, rollouts, f"output.dir={tmp_path / 'file'}"))


def test_resuming_says_where_it_starts(
    tmp_path: Path, rollouts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = write_config(tmp_path, rollouts, "train.steps=1")
    first = train(options, resume=True)
    assert "no checkpoint in" in capsys.readouterr().err
    assert train(options, resume=True) == first
    assert "already has 1 steps: nothing to do" in capsys.readouterr().err


def test_an_optimizer_file_that_was_cut_is_one_line(tmp_path: Path, rollouts: Path) -> None:
    train(write_config(tmp_path, rollouts, "train.steps=1"))
    file = tmp_path / "run" / "checkpoints" / "step-000001" / "optimizer.pt"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"optimizer.pt cannot be read .*; delete"):
        train(write_config(tmp_path, rollouts), resume=True)
