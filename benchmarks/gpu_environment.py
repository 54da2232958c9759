"""What a GPU measurement depends on, and fewer autotuning choices for a short one."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from results_file import environment


def gpu_environment() -> dict[str, Any]:
    """Device and versions of everything that makes kernels."""
    import triton

    found = {}
    for package in ("fla-core", "flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    gpu = {"device": torch.cuda.get_device_name(), "triton": triton.__version__}
    return environment() | gpu | found


def limit_autotuning(most: int) -> None:
    """Let each of fla's kernels choose among few configurations: compiling all takes minutes."""
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.__init__

    def limited(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if len(self.configs) > most:
            self.configs = self.configs[:: -(-len(self.configs) // most)]

    Autotuner.__init__ = limited
