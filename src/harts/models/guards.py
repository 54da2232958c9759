"""Checks for what went wrong elsewhere when packed or shared rows met hybrid models.

Each says in one line whether it holds here. `environment_guards` look at versions and settings,
`model_guards` at one model and, for leaks and loading, at a tiny random one of its family.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from harts.models.full_attention import IMPLEMENTATION
from harts.models.leaks import ALL_PARTS, find_leak, three_level_tree
from harts.models.presets import tiny_model
from harts.models.tree_model import TreeModel, attach

Status = Literal["passed", "failed", "not applicable"]

FLA_VERSION = (0, 6, 0)
_FLA_PACKAGES = ("fla-core", "flash-linear-attention")
_BROKEN_CUDNN_SDPA = "2.13"
_PARALLEL_SETTINGS = {
    "context_parallel_size": "context parallelism",
    "cp_size": "context parallelism",
    "sequence_parallel": "sequence parallelism",
    "sequence_parallel_size": "sequence parallelism",
    "sp_size": "sequence parallelism",
    "ulysses_sequence_parallel_size": "Ulysses sequence parallelism",
}
_PARALLEL_VARIABLES = {
    "PARALLELISM_CONFIG_CP_SIZE": "context parallelism (accelerate)",
    "PARALLELISM_CONFIG_SP_SIZE": "sequence parallelism (accelerate)",
}
_MTP_SETTINGS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")


@dataclass(frozen=True, kw_only=True)
class Guard:
    """One check. detail: one line, what was found, and what to do where it failed."""

    name: str
    status: Status
    detail: str


def environment_guards(variables: Mapping[str, str] = os.environ) -> tuple[Guard, ...]:
    """Checks that need no model: versions, backends, parallelism asked for by a launcher."""
    return (
        _fla_version(),
        _gdn_backward(),
        _cudnn_attention(),
        _launcher_parallelism(variables),
    )


def model_guards(tree_model: TreeModel) -> tuple[Guard, ...]:
    """Checks of an attached model, whose weights may be missing (see `load_skeleton`).

    Leaks and loading are tried on a tiny random model of the same family, on the CPU with the
    reference implementations; `harts verify --device cuda` compares the fast ones. About 1 s.
    """
    model: Any = tree_model.model
    config = model.config
    tiny = tiny_model(config.model_type, vocab_size=16)
    return (
        _all_mixers_replaced(tree_model),
        *_leaks(attach(tiny)),
        _loading(config),
        _multi_token_prediction(model),
        _sliding_window(model),
        _model_parallelism(config),
    )


def _fla_version() -> Guard:
    name = "fla version"
    for package in _FLA_PACKAGES:
        try:
            found = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        if _numbers(found) == FLA_VERSION:
            return Guard(name=name, status="passed", detail=f"{package} {found}")
        why = (
            "versions before 0.6.0 leak future tokens through safe_gate"
            if _numbers(found) < FLA_VERSION
            else "harts' kernels are fitted to 0.6.0"
        )
        detail = f"{package} is {found}: {why}; pip install fla-core==0.6.0"
        return Guard(name=name, status="failed", detail=detail)
    return Guard(name=name, status="not applicable", detail="fla is not installed")


def _gdn_backward() -> Guard:
    """The tree runs GDN through the KDA kernels; fla's own serve the unmodified model."""
    name = "GDN backward on Hopper"
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return Guard(name=name, status="not applicable", detail="there is no Hopper GPU")
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        return Guard(name=name, status="not applicable", detail="triton is not installed")
    detail = f"triton {triton}; the tree runs GDN through the KDA kernels"
    if _numbers(triton) < (3, 7, 1):
        detail += ", which fla's own kernel (the unmodified model) refuses below 3.7.1"
    return Guard(name=name, status="passed", detail=detail)


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version such as 0.6.0.dev1 or 0.6.0+cu12, which count as 0.6.0."""
    numbers = []
    for part in version.partition("+")[0].split(".")[:3]:
        digits = "".join(letter for letter in part if letter.isdigit())
        if not part[:1].isdigit():
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _cudnn_attention() -> Guard:
    """Tree attention never calls SDPA; the unmodified model of `harts verify` does."""
    name = "cuDNN SDPA with masks"
    if not torch.cuda.is_available():
        return Guard(name=name, status="not applicable", detail="there is no CUDA device")
    version = torch.__version__
    if not version.startswith(_BROKEN_CUDNN_SDPA):
        return Guard(name=name, status="passed", detail=f"torch {version} is not known for it")
    if not torch.backends.cuda.cudnn_sdp_enabled():
        return Guard(name=name, status="passed", detail="cuDNN SDPA is switched off")
    detail = (
        f"torch {version} may give NaN gradients for padded batches of the unmodified model (tree "
        "attention does not use it); call torch.backends.cuda.enable_cudnn_sdp(False)"
    )
    return Guard(name=name, status="failed", detail=detail)


def _launcher_parallelism(variables: Mapping[str, str]) -> Guard:
    name = "parallelism of the launcher"
    for variable, what in _PARALLEL_VARIABLES.items():
        if variables.get(variable, "1").strip() not in ("", "0", "1"):
            detail = (
                f"{variable} is {variables[variable]}: {what} would cut trajectories without "
                "handing linear attention its state, and no one notices; set it to 1"
            )
            return Guard(name=name, status="failed", detail=detail)
    return Guard(name=name, status="passed", detail="no context or sequence parallelism")


def _all_mixers_replaced(tree_model: TreeModel) -> Guard:
    """A token mixer that ignores the tree would let branches see each other."""
    name = "every mixer knows the tree"
    model: Any = tree_model.model
    family = tree_model.family
    unpatched = [
        f"{path} ({type(module).__name__})"
        for path, module in model.named_modules()
        if type(module) in family.linear_mixers
    ]
    chosen = model.config._attn_implementation
    if chosen != IMPLEMENTATION and family.attention:
        unpatched.append(f"attention ({chosen})")
    if unpatched:
        detail = f"{unpatched[0]} would run without the tree; attach the model again"
        return Guard(name=name, status="failed", detail=detail)
    kinds = [finding.treatment for finding in tree_model.findings]
    linear, full = kinds.count("tree linear attention"), kinds.count("tree attention")
    detail = f"{linear} linear and {full} full attention layers"
    return Guard(name=name, status="passed", detail=detail)


def _leaks(tree_model: TreeModel) -> Iterator[Guard]:
    """Recurrence, convolution and attention, each alone; reference implementations."""
    microbatch = three_level_tree()
    for part in ALL_PARTS:
        name = f"no leak: {part}"
        if part != "attention" and not tree_model.family.linear_mixers:
            yield Guard(name=name, status="not applicable", detail="no linear attention")
            continue
        leak = find_leak(part, tree_model, microbatch)
        if leak is None:
            detail = "changing one row moves no sibling by one bit (3 levels, one-token leaf)"
            yield Guard(name=name, status="passed", detail=detail)
        elif not leak.amount:
            detail = f"{leak.changed} does not depend on itself; report this"
            yield Guard(name=name, status="failed", detail=detail)
        else:
            detail = (
                f"changing {leak.changed} moves {leak.moved} by {leak.amount:.2g}; do not train, "
                "report this"
            )
            yield Guard(name=name, status="failed", detail=detail)


def _loading(config: Any) -> Guard:
    """Some checkpoints store convolutions by stream, to be joined while loading.

    transformers shards them first where it is told to load sharded, and mixes them up silently.
    """
    name = "loading keeps every weight"
    saved = tiny_model(config.model_type, vocab_size=16)
    with tempfile.TemporaryDirectory() as folder:
        saved.save_pretrained(folder)
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    restored = loaded.state_dict()
    for key, value in saved.state_dict().items():
        if key not in restored or not torch.equal(value, restored[key]):
            detail = f"{key} changes when saved and loaded; install another transformers"
            return Guard(name=name, status="failed", detail=detail)
    if not any(isinstance(module, nn.Conv1d) for module in saved.modules()):
        return Guard(name=name, status="passed", detail="saved and loaded bit for bit")
    if getattr(config, "distributed_config", None):
        detail = (
            "distributed_config would load sharded, which may mix up joined convolutions; load "
            "whole, then shard (fully_shard)"
        )
        return Guard(name=name, status="failed", detail=detail)
    detail = "saved and loaded bit for bit; on several GPUs load whole, then shard"
    return Guard(name=name, status="passed", detail=detail)


def _multi_token_prediction(model: Any) -> Guard:
    """A model whose own MTP loss is on is refused before this, see the families' `refuse`."""
    name = "multi-token prediction"
    config = model.config
    layers = {key: getattr(config, key, 0) for key in _MTP_SETTINGS}
    present = [key for key, number in layers.items() if number]
    if not present:
        return Guard(name=name, status="not applicable", detail="the model has none")
    if any("mtp" in path or "nextn" in path for path, _ in model.named_modules()):
        detail = f"{present[0]} is {layers[present[0]]}: its layers would read across branches"
        return Guard(name=name, status="failed", detail=f"{detail}; set it to 0")
    detail = f"{present[0]} is {layers[present[0]]}; its layers are not built and no loss uses them"
    return Guard(name=name, status="passed", detail=detail)


def _sliding_window(model: nn.Module) -> Guard:
    name = "sliding window"
    for path, module in model.named_modules():
        window = getattr(module, "sliding_window", None)
        if window is not None:
            detail = (
                f"{path} sees {window} tokens, tree attention all ancestors; switch the window "
                "off if no trajectory is longer, else the model is not supported"
            )
            return Guard(name=name, status="failed", detail=detail)
    return Guard(name=name, status="passed", detail="no layer has one")


def _model_parallelism(config: Any) -> Guard:
    name = "parallelism of the model"
    for key, what in _PARALLEL_SETTINGS.items():
        value = getattr(config, key, None)
        if value is True or (isinstance(value, int) and value > 1):
            detail = f"{key} is {value}: {what} is not supported; set it to 1 (or false)"
            return Guard(name=name, status="failed", detail=detail)
    return Guard(name=name, status="passed", detail="no context or sequence parallelism asked for")
