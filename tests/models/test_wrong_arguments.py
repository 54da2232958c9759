"""What a Python caller may hand over by mistake is refused in one line that says what to give."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import harts
from harts.errors import ConfigError, PlanError
from harts.models.presets import tiny_model

ROWS = [{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}]


def refusal(kind: type[harts.HartsError], call: Any) -> str:
    with pytest.raises(kind) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ("ok.jsonl", "the path 'ok.jsonl'; read it first: harts.plan_step(harts.read('ok.jsonl')"),
        (Path("ok.jsonl"), "the path 'ok.jsonl'; read it first"),
        (ROWS, "is a list; give harts.TrajectoryBatch.from_rows(rows)"),
        (None, "is a NoneType; give a TrajectoryBatch, from harts.read(path)"),
    ],
    ids=["str", "Path", "rows", "None"],
)
def test_plan_step_wants_a_batch(given: Any, advice: str) -> None:
    assert advice in refusal(PlanError, lambda: harts.plan_step(given, capacity=64))


@pytest.mark.parametrize("method", ["log_probs", "view"])
@pytest.mark.parametrize("given", ["batch", "plan", "microbatches"])
def test_a_model_wants_one_microbatch(method: str, given: str) -> None:
    batch = harts.TrajectoryBatch.from_rows(ROWS)
    plan = harts.plan_step(batch)
    model = harts.attach(tiny_model("llama", vocab_size=8))
    argument: Any = {"batch": batch, "plan": plan, "microbatches": plan.microbatches()}[given]
    message = refusal(ConfigError, lambda: getattr(model, method)(argument))
    assert f"microbatch is a {type(argument).__name__}; " in message
    assert ".microbatches(): model.log_probs(mb)" in message


@pytest.mark.parametrize(
    ("part", "name", "choices"),
    [
        ("attention", "fa3", "'views', 'reference', 'flex', 'fa4'"),
        ("linear_attention", "Scan", "'reference', 'rounds', 'scan'"),
        ("convolution", None, "'reference', 'fused'"),
        ("log_probs", "eager", "'reference', 'fused'"),
        ("token_wise", "reference", "'eager', 'fused'"),
        ("experts", "fused", "'eager', 'grouped', 'gathered'"),
        ("deterministic", "no", "False, True"),
        ("deterministic", 1, "False, True"),
    ],
)
def test_kernels_without_such_a_name_are_refused(part: str, name: Any, choices: str) -> None:
    known: Any = harts.Kernels()
    for make in (lambda: harts.Kernels(**{part: name}), lambda: known_with(known, part, name)):
        message = refusal(ConfigError, make)
        assert f"{part} is {name!r}; choose one of " in message
        assert sorted(choices.split(", ")) == sorted(message.split("one of ")[1].split(", "))


def known_with(kernels: Any, part: str, name: Any) -> Any:
    return dataclasses.replace(kernels, **{part: name})


def test_attach_wants_kernels_and_leaves_the_model_unchanged() -> None:
    model: Any = tiny_model("llama", vocab_size=8)
    before = model.config._attn_implementation
    wrong: Any = "fa4"
    message = refusal(ConfigError, lambda: harts.attach(model, kernels=wrong))
    assert "kernels is a str; give harts.Kernels(...)" in message
    with pytest.raises(TypeError, match="attention"):
        harts.attach(model, attention="fa3")
    assert model.config._attn_implementation == before
