"""The device of a run, and what it measures: elapsed time and peak memory."""

from __future__ import annotations

import resource
import sys
import time
from typing import Any, Literal

import torch

from harts.errors import ConfigError

_GIB = 1 << 30


def choose_device(name: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """The current CUDA device for "cuda", and for "auto" where there is one; ConfigError if not."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "train.device is 'cuda', but torch sees no CUDA device; "
            "use 'cpu' or 'auto' (harts doctor says more)"
        )
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def describe_device(device: torch.device) -> str:
    """Its name for a person."""
    if device.type != "cuda":
        return str(device)
    return f"{device} ({torch.cuda.get_device_name(device)})"


class Stopwatch:
    """Seconds from construction to `stop` on the device's own clock, without waiting for it.

    On CUDA these are events in the current stream; reading `seconds` waits for the second one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks = [self._mark()]

    def stop(self) -> None:
        """Mark the end."""
        self._marks.append(self._mark())

    @property
    def seconds(self) -> float:
        """Between construction and `stop`."""
        begin, end = self._marks
        if self._device.type != "cuda":
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def wait_for(device: torch.device) -> None:
    """Return when all that was given to the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def restart_peak_memory(device: torch.device) -> None:
    """Forget CUDA's peak so far; the peak of a process cannot be forgotten."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_gib(device: torch.device) -> float:
    """CUDA: most bytes of tensors since the restart. CPU: most resident bytes of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _GIB
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / _GIB
