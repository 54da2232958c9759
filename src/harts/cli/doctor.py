"""`harts doctor`: what this installation can do, what is missing, and what would go wrong."""

from __future__ import annotations

import argparse
import platform
from collections import Counter
from dataclasses import asdict, dataclass
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

import harts
from harts.cli.output import Rows, print_result, stdout_kept_for_results
from harts.errors import ConfigError, HartsError

if TYPE_CHECKING:
    from harts.models.guards import Guard
    from harts.models.tree_model import TreeModel

_PACKAGES = (
    "torch",
    "transformers",
    "numpy",
    "triton",
    "fla-core",
    "flash-attn-4",
    "numba",
    "pyarrow",
    "orjson",
    "zstandard",
    "pydantic",
    "peft",
    "safetensors",
    "tokenizers",
    "accelerate",
    "einops",
    "quack-kernels",
    "ortools",
)

_KERNELS = {
    "linear-attention scan kernels": "harts.ops.linear_attention.scan",
    "FlashAttention-4": "harts.ops.attention.fa4_b36",
    "experts that gather their rows": "harts.ops.moe.quack065",
    "grouped experts": "harts.ops.moe.experts",
    "fused convolution, norms and log-probs": "harts.ops.norm.kernels",
}


_GUARD_MARKS = {"passed": "ok ", "failed": "NO ", "not applicable": "-  "}


@dataclass(frozen=True)
class Capability:
    """One thing harts can do here or not. detail: how, or why not and what to do."""

    name: str
    usable: bool
    detail: str


def run(args: argparse.Namespace) -> int:
    """Print versions, devices, capabilities, guards and, with --model, the audit of that model.

    Exit code 1 where a guard failed.
    """
    with stdout_kept_for_results():
        versions = {name: _version(name) for name in _PACKAGES}
        devices, device_problem = _cuda_devices()
        capabilities = _capabilities(versions, devices, device_problem)
        model, guards = _examined(args.model, versions)
    result = {
        "harts": harts.__version__,
        "python": platform.python_version(),
        "versions": versions,
        "devices": devices,
        "capabilities": [asdict(capability) for capability in capabilities],
        "model": model,
        "guards": [asdict(guard) for guard in guards],
    }
    print_result(result, _rows(result), as_json=args.json)
    return 1 if any(guard.status == "failed" for guard in guards) else 0


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cuda_devices() -> tuple[list[str], str]:
    """Names of the CUDA devices, and why there are none."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return [], f"torch does not import ({error}); install it again"
    if torch.version.cuda is None:
        return [], "this torch is built without CUDA; install a CUDA build of torch"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return names, "" if names else "torch sees no CUDA device; check nvidia-smi and the driver"


def _capabilities(
    versions: dict[str, str | None], devices: list[str], device_problem: str
) -> list[Capability]:
    def needs(name: str, package: str, extra: str, detail: str) -> Capability:
        if versions[package] is None:
            return Capability(name, False, f"{package} is missing; pip install 'harts[{extra}]'")
        return Capability(name, True, detail)

    hf = needs("train on CPU", "transformers", "hf", "reference implementations, float32, float64")
    on_gpu = Capability("train on GPU", False, device_problem or hf.detail)
    if devices and hf.usable:
        on_gpu = Capability("train on GPU", True, "fast kernels in bfloat16, else the reference")
    return [
        Capability("read JSON lines", True, "also .gz and .xz"),
        needs("read JSON lines faster", "orjson", "data", "orjson"),
        needs("read .zst", "zstandard", "data", "zstandard"),
        needs("read Parquet", "pyarrow", "data", "pyarrow"),
        Capability("plan", True, "numpy"),
        needs("plan large steps faster", "numba", "plan", "numba; the same plans"),
        needs("compare with OR-Tools plans", "ortools", "bench", "ortools, from a source checkout"),
        needs("show text with a tokenizer.json", "tokenizers", "hf", "tokenizers"),
        _families(hf),
        hf,
        on_gpu,
        needs("LoRA", "peft", "dev", "peft; leave lm_head out of the targets"),
        needs("harts train", "pydantic", "cli", "pydantic"),
        *(_kernels(name, module, device_problem) for name, module in _KERNELS.items()),
    ]


def _kernels(name: str, module: str, device_problem: str) -> Capability:
    """Whether fast kernels could run here: there is a GPU, and their packages import."""
    if device_problem:
        return Capability(name, False, device_problem)
    try:
        import_module(module)
    except HartsError as error:
        return Capability(name, False, str(error))
    return Capability(name, True, "used for bfloat16 models on the GPU")


def _families(hf: Capability) -> Capability:
    """Which supported model types the installed transformers knows."""
    name = "model families"
    if not hf.usable:
        return Capability(name, False, hf.detail)
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        from harts.models.families import SUPPORTED
    except (ImportError, OSError) as error:
        return Capability(name, False, f"transformers does not import ({error})")
    lacking = [model_type for model_type in SUPPORTED if model_type not in CONFIG_MAPPING]
    present = ", ".join(model_type for model_type in SUPPORTED if model_type in CONFIG_MAPPING)
    if lacking:
        advice = f"without {', '.join(lacking)}: pip install 'transformers>=5.20'"
        return Capability(name, True, f"{present}; {advice}")
    return Capability(name, True, present)


def _examined(
    spec: str | None, versions: dict[str, str | None]
) -> tuple[dict[str, Any] | None, list[Guard]]:
    """The model as a dict of its layers and kernels, and all guards that apply.

    Raises UnsupportedModelError with the refusal.
    """
    if versions["torch"] is None or versions["transformers"] is None:
        if spec is not None:
            raise ConfigError(f"{spec}: models need transformers; pip install 'harts[hf]'")
        return None, []
    try:
        from transformers.utils import logging

        from harts.models.guards import environment_guards, model_guards
    except (ImportError, OSError):
        if spec is not None:
            raise
        return None, []  # the capabilities say what does not import
    guards = list(environment_guards())
    if spec is None:
        return None, guards
    from harts.models.load import load_skeleton
    from harts.models.tree_model import attach

    logging.disable_progress_bar()  # tiny models are saved and loaded on the way
    tree_model = attach(load_skeleton(spec))
    groups = Counter((finding.kind, finding.treatment) for finding in tree_model.findings)
    layers = [
        {"count": count, "kind": kind, "treatment": treatment}
        for (kind, treatment), count in groups.items()
    ]
    model = {"name": spec, "layers": layers, "kernels": _kernels_here(tree_model)}
    return model, guards + list(model_guards(tree_model))


def _kernels_here(tree_model: TreeModel) -> dict[str, Any]:
    """What `attach` would choose for the model in bfloat16 on this machine's first device."""
    import torch

    from harts.models.kernels import kernels_for

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = kernels_for(device, torch.bfloat16)
    problem = None
    try:
        chosen.check(has_experts=tree_model.family.has_experts(tree_model.model))
    except HartsError as error:
        problem = str(error)
    return {"device": device.type} | asdict(chosen) | {"problem": problem}


def _rows(result: dict[str, Any]) -> Rows:
    versions = {"harts": result["harts"], "python": result["python"]} | result["versions"]
    rows = [(name, version or "not installed") for name, version in versions.items()]
    rows.append(("CUDA devices", ", ".join(result["devices"]) or "none"))
    rows.append(("", ""))
    for capability in result["capabilities"]:
        mark = "yes" if capability["usable"] else "no "
        rows.append((capability["name"], f"{mark}  {capability['detail']}"))
    if result["guards"]:
        rows.append(("", ""))
        rows += [
            (guard["name"], f"{_GUARD_MARKS[guard['status']]}  {guard['detail']}")
            for guard in result["guards"]
        ]
    if result["model"] is not None:
        rows.append(("", ""))
        rows += _model_rows(result["model"])
    return rows


def _model_rows(model: dict[str, Any]) -> Rows:
    rows = [
        (model["name"], f"{layer['count']} x {layer['kind']} -> {layer['treatment']}")
        for layer in model["layers"]
    ]
    kernels = dict(model["kernels"])
    device, problem = kernels.pop("device"), kernels.pop("problem")
    del kernels["deterministic"]
    chosen = ", ".join(f"{part.replace('_', ' ')} {impl}" for part, impl in kernels.items())
    rows.append((f"kernels on {device}", chosen))
    if problem:
        rows.append(("", f"not usable: {problem}"))
    return rows
