"""The trainer: the step equals the expanded step, and a killed run resumes bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import harts
from harts.data.synthetic import SyntheticOptions, generate
from harts.errors import CheckpointError, ConfigError, HartsError
from harts.train import checkpoint as checkpoints
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
        (rollouts, "plan.capacity=5", "more than the capacity 5; raise the capacity"),
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
