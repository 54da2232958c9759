"""Guards hold for every family as it is, and fail where what they look for is there."""

from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaAttention

from harts.models import guards, leaks
from harts.models.guards import Guard, environment_guards, model_guards
from harts.models.leaks import ALL_PARTS, find_leak, three_level_tree
from harts.models.presets import tiny_model
from harts.models.tree_model import TreeModel, attach
from harts.views.tree import TreeView, build_tree_view
from tests.families import FAMILIES, KDA_MOE

HYBRIDS = [name for name in FAMILIES if name not in ("qwen3", "llama", "mistral")]


def attached(model_type: str, **changes: Any) -> TreeModel:
    return attach(tiny_model(model_type, vocab_size=16, **changes))


def by_name(found: tuple[Guard, ...]) -> dict[str, Guard]:
    assert len({guard.name for guard in found}) == len(found)
    for guard in found:
        assert "\n" not in guard.detail
    return {guard.name: guard for guard in found}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_no_guard_fails_for_a_family_as_it_is(model_type: str) -> None:
    found = by_name(model_guards(attached(model_type)))
    assert not [guard for guard in found.values() if guard.status == "failed"]
    hybrid = "passed" if model_type in HYBRIDS else "not applicable"
    assert found["no leak: recurrence"].status == hybrid
    assert found["no leak: convolution"].status == hybrid
    assert found["no leak: attention"].status == "passed"
    assert found["loading keeps every weight"].status == "passed"


def conv_reads_its_neighbour(view: TreeView) -> TreeView:
    """Every row's window is the rows before it in the packed layout, whoever they belong to."""
    (width, conv), *_ = view.conv.items()
    packed = conv.window.shape[0]
    near = torch.arange(packed)[:, None] + torch.arange(1 - width, 1)
    window = near.clamp(min=-1).to(conv.window.dtype)
    source = torch.arange(-(width - 1), packed).clamp(min=-1)
    extended = replace(conv.extended, source=source, own=torch.arange(packed) + width - 1)
    return replace(view, conv={width: replace(conv, window=window, extended=extended)})


def state_of_another_chain(view: TreeView) -> TreeView:
    """The last chunk starts from another first-level chunk (another tree) than its own."""
    linear = view.linear
    assert linear.level_ptr[1] >= 2, "there is one tree only"
    wrong = linear.start_state.clone()
    wrong[-1] = 2 if int(wrong[-1]) == 1 else 1  # 0 is the zero state
    return replace(view, linear=replace(linear, start_state=wrong))


def siblings_in_sight(view: TreeView) -> TreeView:
    end = torch.full_like(view.attention.end, view.num_rows)
    return replace(view, attention=replace(view.attention, end=end))


TAMPERED: dict[str, Callable[[TreeView], TreeView]] = {
    "convolution": conv_reads_its_neighbour,
    "recurrence": state_of_another_chain,
    "attention": siblings_in_sight,
}


@pytest.mark.parametrize("leaking", TAMPERED)
@pytest.mark.parametrize("part", ALL_PARTS)
def test_a_leak_is_found_in_the_part_that_leaks_alone(
    part: str, leaking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*args: Any, **kwargs: Any) -> TreeView:
        return TAMPERED[leaking](build_tree_view(*args, **kwargs))

    monkeypatch.setattr("harts.models.tree_model.build_tree_view", build)
    leak = find_leak(part, attached("qwen3_next"), three_level_tree())
    assert (leak is not None) == (part == leaking)
    if leak is not None:
        assert leak.part == part
        assert leak.amount > 0
        assert "of trajectory" in leak.changed


def test_a_leak_into_the_very_next_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def probe(rows_CD: torch.Tensor) -> torch.Tensor:
        return torch.cat([rows_CD[:1], rows_CD[1:] + rows_CD[:-1]])

    monkeypatch.setitem(leaks._PROBES, "attention", lambda *_: (probe, 4))
    leak = find_leak("attention", attached("llama"), three_level_tree())
    assert leak is not None
    assert leak.amount == pytest.approx(1, abs=1e-5)


def test_a_part_that_ignores_its_own_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(leaks._PROBES, "attention", lambda *_: (torch.zeros_like, 4))
    leak = find_leak("attention", attached("llama"), three_level_tree())
    assert leak is not None
    assert leak.amount == 0


def test_the_probed_tree_has_the_shapes_that_went_wrong() -> None:
    microbatch = three_level_tree()
    lengths = microbatch.forest.length.tolist()
    assert 1 in lengths
    assert microbatch.calls.num_rounds > 1
    starts = [sequence.start % 64 for sequence in microbatch.calls.sequences]
    assert 0 in starts[1:]
    assert any(starts)
    assert sum(microbatch.forest.parent < 0) == 2


def test_a_mixer_that_was_put_back_is_named() -> None:
    tree_model = attached(KDA_MOE)
    kinds = {adapter: kind for kind, adapter in tree_model.family.linear_mixers.items()}
    path, layer = next(
        (path, m) for path, m in tree_model.model.named_modules() if type(m) in kinds
    )
    layer.__class__ = kinds[type(layer)]
    guard = by_name(model_guards(tree_model))["every mixer knows the tree"]
    assert guard.status == "failed"
    assert path in guard.detail


def test_an_attention_implementation_that_was_put_back_is_named() -> None:
    tree_model = attached("llama")
    assert any(isinstance(module, LlamaAttention) for module in tree_model.model.modules())
    tree_model.model.set_attn_implementation("sdpa")
    guard = by_name(model_guards(tree_model))["every mixer knows the tree"]
    assert (guard.status, "sdpa" in guard.detail) == ("failed", True)


def test_a_sliding_window_that_a_layer_has_fails() -> None:
    tree_model = attached("llama")
    tree_model.model.model.layers[2].self_attn.sliding_window = 8
    guard = by_name(model_guards(tree_model))["sliding window"]
    assert guard.status == "failed"
    assert "layers.2.self_attn sees 8 tokens" in guard.detail


@pytest.mark.parametrize(
    ("setting", "value"), [("sequence_parallel", True), ("context_parallel_size", 2)]
)
def test_parallelism_that_the_config_asks_for_fails(setting: str, value: object) -> None:
    tree_model = attached("llama")
    setattr(tree_model.model.config, setting, value)
    guard = by_name(model_guards(tree_model))["parallelism of the model"]
    assert guard.status == "failed"
    assert f"{setting} is {value}" in guard.detail


def test_parallelism_that_the_launcher_asks_for_fails() -> None:
    for number, status in (("1", "passed"), ("4", "failed")):
        found = by_name(environment_guards({"PARALLELISM_CONFIG_CP_SIZE": number}))
        assert found["parallelism of the launcher"].status == status


def test_layers_that_predict_further_tokens_fail_only_where_they_exist() -> None:
    tree_model = attached("llama")
    tree_model.model.config.num_nextn_predict_layers = 1
    assert by_name(model_guards(tree_model))["multi-token prediction"].status == "passed"
    tree_model.model.mtp_head = torch.nn.Linear(2, 2)
    assert by_name(model_guards(tree_model))["multi-token prediction"].status == "failed"


def test_sharded_loading_of_joined_convolutions_fails() -> None:
    for model_type, status in ((KDA_MOE, "failed"), ("llama", "passed")):
        tree_model = attached(model_type)
        tree_model.model.config.distributed_config = {"fsdp": 2}
        found = by_name(model_guards(tree_model))["loading keeps every weight"]
        assert found.status == status


def test_a_weight_that_loading_changes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = guards.AutoModelForCausalLM.from_pretrained

    def load(*args: Any, **kwargs: Any) -> Any:
        model = original(*args, **kwargs)
        model.get_parameter("lm_head.weight").data[0, 0] += 1
        return model

    monkeypatch.setattr(guards.AutoModelForCausalLM, "from_pretrained", load)
    found = by_name(model_guards(attached("llama")))["loading keeps every weight"]
    assert (found.status, "lm_head.weight" in found.detail) == ("failed", True)


@pytest.mark.parametrize(
    ("package", "version", "status", "part"),
    [
        ("fla-core", "0.6.0", "passed", "0.6.0"),
        ("fla-core", "0.5.2", "failed", "leak future tokens"),
        ("fla-core", "0.4.2.post1", "failed", "leak future tokens"),
        ("flash-linear-attention", "0.5.1", "failed", "leak future tokens"),
        ("fla-core", "0.10.0", "failed", "fitted to 0.6.0"),
        ("numpy", "2.0", "not applicable", "not installed"),
    ],
)
def test_the_version_of_fla_decides(
    monkeypatch: pytest.MonkeyPatch, package: str, version: str, status: str, part: str
) -> None:
    def installed(name: str) -> str:
        if name != package:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(guards.metadata, "version", installed)
    guard = by_name(environment_guards({}))["fla version"]
    assert guard.status == status
    assert part in guard.detail


@pytest.mark.parametrize(
    ("version", "enabled", "status"),
    [("2.13.0", True, "failed"), ("2.13.0", False, "passed"), ("2.11.0", True, "passed")],
)
def test_cudnn_attention_with_masks_is_looked_at_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, version: str, enabled: bool, status: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: enabled)
    monkeypatch.setattr(torch, "__version__", version)
    assert by_name(environment_guards({}))["cuDNN SDPA with masks"].status == status
