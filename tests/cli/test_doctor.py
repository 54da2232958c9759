"""`harts doctor`: honest about what is there, and how a model would run."""

from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from harts.models.presets import tiny_model
from tests.cli.conftest import Run, assert_refused
from tests.families import needs_ling


def capabilities(result: dict) -> dict[str, dict]:
    return {entry["name"]: entry for entry in result["capabilities"]}


def test_versions_and_capabilities_are_json(run_harts: Run) -> None:
    outcome = run_harts("doctor", "--json")
    assert outcome.code == 0
    result = outcome.json
    assert result["versions"]["torch"] == version("torch")
    assert result["model"] is None
    assert len(result["devices"]) == torch.cuda.device_count()
    assert capabilities(result)["train on CPU"]["usable"]


def test_kernels_say_what_keeps_them_from_running(run_harts: Run) -> None:
    found = capabilities(run_harts("doctor", "--json").json)
    for name in ("linear-attention scan kernels", "FlashAttention-4"):
        if torch.cuda.is_available():
            assert found[name]["usable"] or "pip install" in found[name]["detail"]
        else:
            assert not found[name]["usable"]
            assert "CUDA" in found[name]["detail"]


def test_a_missing_package_is_named_with_its_extra(
    run_harts: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harts.cli.doctor._version", lambda package: None)
    result = run_harts("doctor", "--json").json
    found = capabilities(result)
    assert result["versions"]["pyarrow"] is None
    assert found["read Parquet"]["detail"] == "pyarrow is missing; pip install 'harts[data]'"
    for name in ("train on CPU", "train on GPU", "model families"):
        assert not found[name]["usable"]
    assert found["read JSON lines"]["usable"]
    assert "not installed" in run_harts("doctor").stdout


@needs_ling
def test_layers_of_a_model_are_grouped(run_harts: Run) -> None:
    outcome = run_harts("doctor", "--model", "tiny:bailing_hybrid")
    assert outcome.code == 0
    assert "3 x BailingHybridDeltaAttention -> tree linear attention" in outcome.stdout
    assert "1 x BailingHybridAttention -> tree attention" in outcome.stdout
    model = run_harts("doctor", "--model", "tiny:bailing_hybrid", "--json").json["model"]
    assert model["name"] == "tiny:bailing_hybrid"
    assert {"count": 3, "kind": "BailingHybridTopkRouter"}.items() <= model["layers"][1].items()


def test_a_folder_needs_no_weights(run_harts: Run, tmp_path: Path) -> None:
    tiny_model("olmo_hybrid", vocab_size=16).config.save_pretrained(tmp_path)
    outcome = run_harts("doctor", "--model", tmp_path)
    assert outcome.code == 0
    assert "3 x OlmoHybridGatedDeltaNet -> tree linear attention" in outcome.stdout


def test_a_sliding_window_is_refused_with_its_reason(run_harts: Run, tmp_path: Path) -> None:
    tiny_model("mistral", vocab_size=16, sliding_window=8).config.save_pretrained(tmp_path)
    assert_refused(run_harts("doctor", "--model", tmp_path, "--json"), "mistral", "sliding")


def test_guards_are_listed_and_hold(run_harts: Run) -> None:
    outcome = run_harts("doctor", "--model", "tiny:qwen3_5", "--json")
    assert outcome.code == 0
    guards = {guard["name"]: guard["status"] for guard in outcome.json["guards"]}
    assert guards["no leak: recurrence"] == guards["no leak: convolution"] == "passed"
    assert guards["every mixer knows the tree"] == "passed"
    assert outcome.json["model"]["kernels"]["device"] in ("cpu", "cuda")
    assert not outcome.stderr
    without = run_harts("doctor", "--json").json["guards"]
    assert {guard["name"] for guard in without} < set(guards)


def test_a_guard_that_fails_is_exit_code_1(run_harts: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    outcome = run_harts("doctor")
    assert outcome.code == 1
    line = next(x for x in outcome.stdout.splitlines() if "parallelism of the launcher" in x)
    assert "NO   PARALLELISM_CONFIG_CP_SIZE is 2" in line


def test_kernels_of_this_machine_are_named(run_harts: Run) -> None:
    text = run_harts("doctor", "--model", "tiny:llama").stdout
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert f"kernels on {device}" in text
