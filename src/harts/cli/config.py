"""A TOML file and dotted overrides become RunOptions; anything unknown or lossy is an error."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import typing
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from harts.errors import ConfigError
from harts.train.options import OBJECTIVES, ObjectiveOptions, RunOptions

_SECTIONS = {f.name: f.type for f in dataclasses.fields(RunOptions)}


def read_config(path: str, overrides: list[str]) -> RunOptions:
    """Parse CONFIG.toml and `section.key=value` overrides; ConfigError in one line."""
    try:
        with Path(path).open("rb") as file:
            table = tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give a TOML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); give a TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}; mend it there") from None
    where: dict[str, str] = {}
    for override in overrides:
        _apply(table, override, where)
    return _build(table, path, where)


def _apply(table: dict[str, Any], override: str, where: dict[str, str]) -> None:
    key, equals, text = override.partition("=")
    section, dot, name = key.partition(".")
    if not (equals and dot and section and name):
        raise ConfigError(f"override {override!r} is not of the form section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    entries = table.setdefault(section, {})
    if not isinstance(entries, dict):
        raise ConfigError(f"{section} is {entries!r}; it must be a section")
    entries[name] = value
    where[key] = f"override {override!r}"


def _build(table: dict[str, Any], path: str, where: dict[str, str]) -> RunOptions:
    """Unknown keys first, over all sections; then types; then the sections' own checks."""
    hints = typing.get_type_hints(RunOptions)
    known = {name: _keys_of(hints[name], table.get(name, {})) for name in _SECTIONS}
    for section, entries in table.items():
        if section not in known:
            place = next((p for key, p in where.items() if key.startswith(f"{section}.")), path)
            raise ConfigError(f"{place}: section {section!r} is unknown{_hint(section, known)}")
        if not isinstance(entries, dict):
            raise ConfigError(f"{path}: {section} is {entries!r}; it must be a section")
        for key in entries:
            if key not in known[section]:
                place = where.get(f"{section}.{key}", path)
                raise ConfigError(
                    f"{place}: {section}.{key} is unknown{_hint(key, known[section])}"
                )
    sections = {}
    for section, hint in hints.items():
        entries = table.get(section, {})
        for required in dataclasses.fields(hint):
            missing = required.name not in entries
            if missing and required.default is required.default_factory is dataclasses.MISSING:
                raise ConfigError(f"{path}: {section}.{required.name} is missing; it must be given")
        converted = {
            key: _convert(
                value, known[section][key], where.get(f"{section}.{key}", path), f"{section}.{key}"
            )
            for key, value in entries.items()
        }
        sections[section] = _make(hint, converted, entries)
    return RunOptions(**sections)


def _keys_of(section: type, entries: Any) -> dict[str, Any]:
    """Keys of a section and their types; an objective brings its own options."""
    keys = typing.get_type_hints(section)
    if section is ObjectiveOptions:
        keys.pop("options")
        name = entries.get("name", "grpo") if isinstance(entries, dict) else "grpo"
        own = OBJECTIVES.get(name) if isinstance(name, str) else None
        if own is not None:
            hints = typing.get_type_hints(own)
            keys |= {f.name: hints[f.name] for f in dataclasses.fields(own)}
    return keys


def _make(section: type, values: dict[str, Any], entries: dict[str, Any]) -> Any:
    if section is not ObjectiveOptions:
        return section(**values)
    own = OBJECTIVES[values.get("name", "grpo")]
    names = {f.name for f in dataclasses.fields(own)}
    options = own(**{k: v for k, v in values.items() if k in names})
    return ObjectiveOptions(options=options, **{k: v for k, v in values.items() if k not in names})


def _convert(value: Any, hint: Any, place: str, key: str) -> Any:
    """The value under a type, exactly (1 is a float, 1.5 and true are no integers)."""
    if isinstance(value, list):
        value = tuple(value)
    try:
        return TypeAdapter(hint).validate_python(value, strict=True)
    except ValidationError as error:
        want = error.errors()[0]["msg"].replace("Input should be", "it must be")
        raise ConfigError(f"{place}: {key} is {value!r}; {want}") from None


def _hint(name: str, known: typing.Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(known)}"
