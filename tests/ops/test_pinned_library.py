"""What is checked of a library of kernels before it is used."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from harts.errors import ConfigError
from harts.ops.pinned_library import PinnedLibrary


def library(release: str, package: str = "pytest") -> PinnedLibrary:
    return PinnedLibrary(package, release, "an operator", f"pip install {package}=={release}")


def refusal(call: object, *args: object) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*args)  # type: ignore[operator]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_release_must_be_the_very_one() -> None:
    library(version("pytest")).check_release()
    assert refusal(library("0.0.1").check_release) == (
        f"an operator needs pytest 0.0.1, found {version('pytest')}; pip install pytest==0.0.1"
    )
    assert "needs no-such-package 1, found none; pip install no-such-package==1" in refusal(
        library("1", "no-such-package").check_release
    )


def test_parameters_in_use_must_be_there() -> None:
    def function(q: int, *, scale: float) -> None: ...

    checked = library("0.0.1")
    checked.check_parameters([(function, {"q"}), (function, {"scale", "q"})])
    assert refusal(checked.check_parameters, [(function, {"q", "mask", "bias"})]) == (
        "an operator: function of pytest 0.0.1 has no bias, mask; reinstall it: "
        "pip install pytest==0.0.1"
    )


def test_what_cannot_be_imported_says_why_and_what_to_install() -> None:
    error = library("0.0.1").not_importable(ImportError("no module named q"))
    assert str(error) == (
        "an operator: pytest 0.0.1 cannot be imported (no module named q); "
        "pip install pytest==0.0.1"
    )
