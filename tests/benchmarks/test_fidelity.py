"""The fidelity benchmark on a tiny model: the code path of the GPU run, and its measures."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import harts
from harts.models.load import load_model
from tests.families import KDA_MOE

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import fidelity
import fidelity_table
from fidelity_table import markdown
from fidelity_views import expanded, forked_batch, piece_of, rows_of, whole_tree

VOCABULARY = 97


def _model(dtype: str = "float32") -> harts.TreeModel:
    return harts.attach(
        load_model(f"tiny:{KDA_MOE}", vocab_size=VOCABULARY, dtype=dtype, seed=1).train()
    )


@cache
def _metrics() -> dict[str, Any]:
    batch = forked_batch(330, VOCABULARY, depth=1)
    return fidelity.measure(_model(), batch, capacity=330, samples=16)


def _record() -> dict[str, Any]:
    return {"case": "tiny", "metrics": json.loads(json.dumps(_metrics()))}


@pytest.mark.parametrize("mode", ["free", "forced"])
def test_the_tree_is_as_near_to_the_reference_as_single_precision_allows(mode: str) -> None:
    runs = _metrics()[mode]["runs"]
    assert set(runs) == {
        "rerun",
        "reordered",
        "other attention",
        "alone",
        "tree",
        "no replay",
    }
    for name, run in runs.items():
        assert 0 <= run["all"]["sym_kl"] < 1e-8, name
        assert run["all"]["max_log_prob"] < 1e-3, name
        assert run["all"]["cosine"] == pytest.approx(1, abs=1e-8), name
        assert run["loss_difference"] < 1e-5, name
        assert len(run["fork"]) == len(run["chain"]) == 2
    assert runs["rerun"]["all"]["max_log_prob"] == 0
    assert runs["no replay"]["all"]["mean_log_prob"] > 0


@pytest.mark.parametrize("mode", ["free", "forced"])
def test_bits_stay_where_they_must(mode: str) -> None:
    found = _metrics()[mode]
    assert found["rerun_has_same_bits"]
    assert found["steps"]["same_bits"] == dict.fromkeys(found["steps"]["same_bits"], True)
    assert found["steps"]["gradients"]["tree"]["max"] < 1e-4
    assert found["steps"]["gradients"]["rerun"]["max"] == 0


def test_distributions_have_the_entropy_of_a_language_model() -> None:
    # the normal approximation is for large vocabularies
    assert 1.5 < _metrics()["free"]["entropy"] < 4


def test_the_tables_show_every_run_and_depth() -> None:
    text = markdown(_record())
    for words in (
        "| no replay |",
        "chain depth 1",
        "Equation 25",
        "Routes imposed",
        "the same bits",
    ):
        assert words in text
    assert "other bits" not in text
    widths = {
        line.count("|")
        for table in text.split("\n\n")
        for line in table.splitlines()
        if table.startswith("| run | all")
    }
    assert len(widths) == 1


def test_runs_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (fidelity, fidelity_table):
        monkeypatch.setattr(module, "MODES", {"free": "free routes"})
    skip = ("alone", "reordered", "other attention", "no replay")
    batch = forked_batch(330, VOCABULARY, depth=1)
    metrics = fidelity.measure(_model(), batch, capacity=330, samples=4, skip=skip)
    assert set(metrics["free"]["runs"]) == {"rerun", "tree"}
    assert "| tree |" in markdown({"case": "tiny", "metrics": metrics})


def _piece_and_rows(model: harts.TreeModel) -> tuple[Any, Any]:
    batch = forked_batch(330, VOCABULARY, depth=1)
    tree = whole_tree(batch)
    rows = rows_of(tree, samples=8, seed=0)
    return [piece_of(tree, model.view(tree), rows)], rows


def test_imposing_a_runs_own_routes_changes_no_bit() -> None:
    model = _model()
    side, rows = _piece_and_rows(model)
    free = fidelity._run(model, side, rows, None)
    again = fidelity._run(model, side, rows, free.routes)
    assert len(free.routes) == len(model.routers) > 0
    assert free.same_bits(again)


def test_imposed_routes_are_taken_and_what_the_router_wanted_is_noted() -> None:
    model = _model()
    side, rows = _piece_and_rows(model)
    free = fidelity._run(model, side, rows, None)
    first = next(iter(free.routes))
    other = {name: indices.roll(1, 0) for name, indices in free.routes.items()}
    forced = fidelity._run(model, side, rows, other)
    assert torch.equal(forced.routes[first], free.routes[first])  # its input is unchanged
    assert not torch.allclose(forced.log_probs, free.log_probs, atol=1e-3)
    assert not any(router._forward_hooks for router in model.routers.values())


def test_rows_of_all_trajectories_take_the_route_of_the_first_one() -> None:
    model = _model()
    batch = forked_batch(330, VOCABULARY, depth=1)
    tree = whole_tree(batch)
    rows = rows_of(tree, samples=8, seed=0)
    members = expanded(batch, np.arange(len(batch)), 1)
    side = [piece_of(mb, model.view(mb), rows) for mb in members]
    of_tree, _ = _piece_and_rows(model)
    imposed = fidelity._run(model, of_tree, rows, None).routes
    rolled = {name: indices.roll(3, 0) for name, indices in imposed.items()}
    one = fidelity._run(model, of_tree, rows, rolled)
    many = fidelity._run(model, side, rows, rolled)
    assert (one.log_probs - many.log_probs).abs().max() < 1e-3


def test_distances_are_those_of_the_equations() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(11, 5, generator=generator, dtype=torch.float64)
    ours, theirs = torch.randn(2, 300, 5, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 11, (300,), generator=generator)
    found = fidelity.distances(ours, theirs, targets, weight)
    for row in (0, 127, 128, 299):
        x, a = (weight @ h[row] for h in (ours, theirs))
        p, q = x.exp() / x.exp().sum(), a.exp() / a.exp().sum()
        kl = ((p * (p / q).log()).sum() + (q * (q / p).log()).sum()) / 2
        nll = (p[targets[row]].log() - q[targets[row]].log()).abs()
        cosine = x @ a / (x.norm() * a.norm())
        assert float(found["sym_kl"][row]) == pytest.approx(float(kl))
        assert float(found["delta_nll"][row]) == pytest.approx(float(nll))
        assert float(found["cosine"][row]) == pytest.approx(float(cosine))
