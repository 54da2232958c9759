"""Milliseconds on the GPU of several calls that take turns in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch


def alternate(
    sides: Mapping[str, Callable[[], object]], num_samples: int
) -> dict[str, list[float]]:
    """By device events, one sample of each side in turn, after one turn to warm up."""
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(num_samples + 1):
        for name, call in sides.items():
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            call()
            after.record()
            torch.cuda.synchronize()
            if turn:
                samples[name].append(before.elapsed_time(after))
    return samples
