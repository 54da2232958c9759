"""`harts doctor`: what this installation can do, and what is missing for the rest."""

from __future__ import annotations

import argparse
import platform
from collections import Counter
from dataclasses import asdict, dataclass
from importlib import import_module, metadata
from typing import Any

import harts
from harts.cli.output import Rows, print_result, stdout_kept_for_results
from harts.errors import HartsError

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
)

_KERNELS = {
    "linear-attention scan kernels": "harts.ops.linear_attention.scan",
    "FlashAttention-4": "harts.ops.attention.fa4_b36",
    "fused convolution, norms, experts and log-probs": "harts.ops.norm.kernels",
}


@dataclass(frozen=True)
class Capability:
    """One thing harts can do here or not. detail: how, or why not and what to do."""

    name: str
    usable: bool
    detail: str


def run(args: argparse.Namespace) -> int:
    """Print versions, devices, capabilities and, with --model, the audit of that model."""
    with stdout_kept_for_results():
        versions = {name: _version(name) for name in _PACKAGES}
        devices, device_problem = _cuda_devices()
        capabilities = _capabilities(versions, devices, device_problem)
        layers = None if args.model is None else _audited(args.model)
    result = {
        "harts": harts.__version__,
        "python": platform.python_version(),
        "versions": versions,
        "devices": devices,
        "capabilities": [asdict(capability) for capability in capabilities],
        "model": None if layers is None else {"name": args.model, "layers": layers},
    }
    print_result(result, _rows(result), as_json=args.json)
    return 0


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


def _audited(spec: str) -> list[dict[str, Any]]:
    """How the layers of a model run, grouped; raises UnsupportedModelError with the refusal."""
    from harts.models.load import load_skeleton
    from harts.models.tree_model import attach

    findings = attach(load_skeleton(spec)).findings
    groups = Counter((finding.kind, finding.treatment) for finding in findings)
    return [
        {"count": count, "kind": kind, "treatment": treatment}
        for (kind, treatment), count in groups.items()
    ]


def _rows(result: dict[str, Any]) -> Rows:
    versions = {"harts": result["harts"], "python": result["python"]} | result["versions"]
    rows = [(name, version or "not installed") for name, version in versions.items()]
    rows.append(("CUDA devices", ", ".join(result["devices"]) or "none"))
    rows.append(("", ""))
    for capability in result["capabilities"]:
        mark = "yes" if capability["usable"] else "no "
        rows.append((capability["name"], f"{mark}  {capability['detail']}"))
    if result["model"] is not None:
        rows.append(("", ""))
        rows += [
            (result["model"]["name"], f"{layer['count']} x {layer['kind']} -> {layer['treatment']}")
            for layer in result["model"]["layers"]
        ]
    return rows
