"""What a run says: one JSON line a step in a file, one aligned line on the console."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from harts.errors import ConfigError
from harts.plan.microbatch import MicroBatch


class RunLog:
    """metrics.jsonl of a run, and its console.

    On resume, lines of steps after the checkpoint are dropped: they will be done again.
    """

    def __init__(
        self, run_dir: Path, *, total_steps: int, first_step: int, console: TextIO | None = None
    ) -> None:
        self._console = console or sys.stderr
        self._total, self._started, self._first = total_steps, time.perf_counter(), first_step
        self._step = first_step
        self.path = run_dir / "metrics.jsonl"
        kept = [line for line in metrics_lines(self.path) if line["step"] <= first_step]
        beside = self.path.with_suffix(".partial")
        beside.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(beside, self.path)

    def note(self, text: str) -> None:
        """A line for the person at the console."""
        print(text, file=self._console, flush=True)

    def progress(self, microbatches: Iterable[MicroBatch], total: int) -> Iterator[MicroBatch]:
        """Show which microbatch of the step runs, on terminals only."""
        shown = self._console.isatty()
        for index, microbatch in enumerate(microbatches):
            if shown:
                text = f"step {self._step + 1}: microbatch {index + 1} of {total}"
                print(f"\r{text}\x1b[K", end="", file=self._console, flush=True)
            yield microbatch
        if shown:
            print("\r\x1b[K", end="", file=self._console, flush=True)

    def step(self, metrics: dict[str, Any]) -> None:
        """Append one step and print its line."""
        with self.path.open("a") as file:
            file.write(json.dumps(metrics) + "\n")
        self._step = metrics["step"]
        done = self._step - self._first
        elapsed = time.perf_counter() - self._started
        left = elapsed / done * (self._total - self._step)
        width = len(str(self._total))
        self.note(
            f"step {self._step:>{width}}/{self._total} {_bar(self._step / self._total)} "
            f"loss {metrics['loss']:+.6f}  log-prob {metrics['log_prob']:+.5f}  "
            f"grad {metrics['grad_norm']:.3e}  "
            f"rows {metrics['compact_tokens']:,} of {metrics['raw_tokens']:,} "
            f"({metrics['compression']:.2f}x, {metrics['rows_saved']:,} saved)  "
            f"{metrics['raw_tokens_per_second']:,.0f} tok/s  {metrics['seconds']:.2f} s  "
            f"{metrics['peak_memory_gib']:.2f} GiB  "
            f"left {_clock(left)}"
        )


def metrics_lines(path: Path) -> list[dict[str, Any]]:
    """Complete lines of a metrics file; a last line that was cut short is left out.

    ConfigError for a file of something else.
    """
    if not path.exists():
        return []
    complete = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    try:
        lines = [json.loads(line) for line in complete]
        if all(isinstance(line["step"], int) for line in lines):
            return lines
    except (ValueError, KeyError, TypeError):
        pass
    raise ConfigError(f"{path} holds no metrics of a run; choose another output.dir")


def _bar(share: float, width: int = 10) -> str:
    filled = round(share * width)
    return "[" + "#" * filled + "." * (width - filled) + "]"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"
