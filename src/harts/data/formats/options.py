"""What a reader may be told beyond the path: one frozen object that every reader takes."""

from dataclasses import dataclass
from typing import Any, Literal

from harts.data.compression import Progress

Sampling = Literal["step", "tree-step"]


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Options of `harts.read` that reach the readers; `harts.read` says what each means."""

    trust: bool = False
    tokenizer: Any = None
    chat_template: str | None = None
    sampling: Sampling | None = None
    progress: Progress | None = None
