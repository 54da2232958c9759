"""What an adapter checks of the library it was written for, once, when it is imported.

Libraries of kernels move their internals with every release; a wrong one may train wrongly.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from harts.errors import ConfigError


@dataclass(frozen=True)
class PinnedLibrary:
    """One release of a package. needed_by begins each message, install ends it."""

    package: str
    release: str
    needed_by: str
    install: str

    def check_release(self) -> None:
        """Raise ConfigError unless this very release is installed."""
        try:
            found = metadata.version(self.package)
        except metadata.PackageNotFoundError:
            found = "none"
        if found != self.release:
            raise ConfigError(
                f"{self.needed_by} needs {self.package} {self.release}, found {found}; "
                f"{self.install}"
            )

    def not_importable(self, error: ImportError) -> ConfigError:
        """The error to raise where the release is there but what is used of it is not."""
        return ConfigError(
            f"{self.needed_by}: {self.package} {self.release} cannot be imported ({error}); "
            f"{self.install}"
        )

    def check_parameters(self, uses: Iterable[tuple[Callable[..., Any], set[str]]]) -> None:
        """Raise ConfigError where a function takes fewer parameters than are used of it."""
        for function, names in uses:
            self.check_names(function.__name__, names, set(inspect.signature(function).parameters))

    def check_names(self, what: str, used: set[str], known: set[str]) -> None:
        """Raise ConfigError where something lacks names that are used of it."""
        missing = ", ".join(sorted(used - known))
        if missing:
            raise ConfigError(
                f"{self.needed_by}: {what} of {self.package} {self.release} has no {missing}; "
                f"reinstall it: {self.install}"
            )
