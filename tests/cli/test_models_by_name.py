"""`--model`: a local folder or tiny:<model_type>, and everything that can be wrong with one."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from harts.errors import ConfigError
from harts.models.load import load_model, load_skeleton
from harts.models.presets import tiny_model
from tests.cli.conftest import Run, assert_refused


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder of a tiny Llama with 24 tokens."""
    path = tmp_path / "llama"
    tiny_model("llama", vocab_size=24, seed=5).save_pretrained(path)
    return path


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_verifies_with_its_own_weights(
    run_harts: Run, rollouts: Path, folder: Path
) -> None:
    outcome = run_harts("verify", rollouts, "--model", folder, "--json")
    assert outcome.code == 0, outcome
    loaded = load_model(str(folder), vocab_size=24)
    expected = tiny_model("llama", vocab_size=24, seed=5).state_dict()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_a_preset_has_the_vocabulary_seed_and_dtype_asked_for() -> None:
    model = load_model("tiny:qwen3", vocab_size=37, seed=1, dtype="float64")
    other = load_model("tiny:qwen3", vocab_size=37, seed=2, dtype=torch.float64)
    assert model.get_input_embeddings().num_embeddings == 37
    assert model.dtype == torch.float64
    assert not torch.equal(model.lm_head.weight, other.lm_head.weight)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="dtype is 'float8'; use one of float32"):
        load_model("tiny:llama", vocab_size=8, dtype="float8")


def test_a_skeleton_has_no_weights(folder: Path) -> None:
    assert all(p.device.type == "meta" for p in load_skeleton(str(folder)).parameters())


@pytest.mark.parametrize("command", ["verify", "doctor"])
class TestRefusals:
    """Every wrong model is one line, whichever command is given it."""

    @pytest.fixture
    def words(self, command: str, rollouts: Path) -> list[object]:
        return ["verify", rollouts, "--json"] if command == "verify" else ["doctor", "--json"]

    def test_an_unknown_preset(self, run_harts: Run, words: list[object]) -> None:
        outcome = run_harts(*words, "--model", "tiny:gpt2")
        assert_refused(outcome, "tiny:gpt2", "tiny:llama")

    def test_a_missing_folder(self, run_harts: Run, words: list[object], tmp_path: Path) -> None:
        path = tmp_path / "absent"
        assert_refused(run_harts(*words, "--model", path), path, "no such folder")

    def test_a_hub_name(self, run_harts: Run, words: list[object]) -> None:
        outcome = run_harts(*words, "--model", "Qwen/Qwen3-8B")
        assert_refused(outcome, "Qwen/Qwen3-8B", "downloads nothing")

    def test_a_file(self, run_harts: Run, words: list[object], folder: Path) -> None:
        path = folder / "model.safetensors"
        assert_refused(run_harts(*words, "--model", path), path, "is a file")

    def test_no_config(self, run_harts: Run, words: list[object], tmp_path: Path) -> None:
        assert_refused(run_harts(*words, "--model", tmp_path), tmp_path, "no config.json")

    def test_a_broken_config(self, run_harts: Run, words: list[object], folder: Path) -> None:
        (folder / "config.json").write_text("{")
        assert_refused(run_harts(*words, "--model", folder), folder / "config.json")

    def test_a_config_without_a_type(
        self, run_harts: Run, words: list[object], folder: Path
    ) -> None:
        (folder / "config.json").write_text("{}")
        assert_refused(run_harts(*words, "--model", folder), "model_type")

    def test_a_config_with_wrong_values(
        self, run_harts: Run, words: list[object], folder: Path
    ) -> None:
        edit_config(folder, hidden_size="wide")
        assert_refused(run_harts(*words, "--model", folder), "llama")

    def test_an_unsupported_type(self, run_harts: Run, words: list[object], folder: Path) -> None:
        edit_config(folder, model_type="mamba")
        outcome = run_harts(*words, "--model", folder)
        assert_refused(outcome, "'mamba' is not supported", "bailing_hybrid")

    def test_an_option_that_a_tree_cannot_follow(
        self, run_harts: Run, words: list[object], folder: Path
    ) -> None:
        edit_config(folder, attention_dropout=0.1)
        assert_refused(run_harts(*words, "--model", folder), "attention_dropout is 0.1")

    def test_without_transformers(
        self, run_harts: Run, words: list[object], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "transformers", None)
        outcome = run_harts(*words, "--model", "tiny:llama")
        assert_refused(outcome, "transformers", "pip install 'harts[hf]'")


def test_a_vocabulary_that_is_too_small_names_both_numbers(
    run_harts: Run, rollouts: Path, tmp_path: Path
) -> None:
    tiny_model("llama", vocab_size=23).save_pretrained(tmp_path / "small")
    outcome = run_harts("verify", rollouts, "--model", tmp_path / "small")
    assert_refused(outcome, "largest token id of the data is 23", "has 23 tokens")


def test_missing_weights_are_refused(run_harts: Run, rollouts: Path, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert_refused(run_harts("verify", rollouts, "--model", folder), folder, "weights")


def test_weights_cut_short_are_refused(run_harts: Run, rollouts: Path, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    assert_refused(run_harts("verify", rollouts, "--model", folder), folder, "weights")


def test_a_parameter_without_weights_is_named(run_harts: Run, rollouts: Path, folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    outcome = run_harts("verify", rollouts, "--model", folder)
    assert outcome.code == 2
    assert outcome.stdout == ""
    assert "model.layers.2.mlp.up_proj.weight; copy" in outcome.stderr.splitlines()[-1]


def test_weights_of_another_shape_are_refused(run_harts: Run, rollouts: Path, folder: Path) -> None:
    edit_config(folder, intermediate_size=96)
    outcome = run_harts("verify", rollouts, "--model", folder)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert outcome.stderr.splitlines()[-1].startswith(f"harts: error: model {folder}: the weights")
