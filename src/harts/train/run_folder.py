"""The folder of a run: one run at a time writes there, and a signal ends it after a whole step."""

from __future__ import annotations

import fcntl
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from harts.errors import ConfigError


@contextmanager
def alone_in(run_dir: Path) -> Iterator[None]:
    """Make the folder and hold it; ConfigError where another run has it, or it is a file.

    The lock goes with the process, however that ends; its file stays.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"output.dir {run_dir} is a file; give a folder") from None
    with (run_dir / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"output.dir {run_dir} is in use by a run that has not ended; choose another folder"
            ) from None
        yield


class StopSignal:
    """Whether SIGINT or SIGTERM came: the step that runs is finished, and a checkpoint written.

    A second one ends the process at once. Outside the main thread signals are left alone, and one
    that is ignored (SIGINT in a script's background) stays so.
    """

    def __init__(self) -> None:
        self.received = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        self._restore()

    def _restore(self) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, handler)
