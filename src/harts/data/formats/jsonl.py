"""JSON lines: one object a line, one trajectory an object.

An object whose token ids are a list of lists is a whole batch in columns (SkyRL's
GeneratorOutput): each of its lists has one entry a trajectory.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

from harts.data.aliases import PROMPT_NAMES
from harts.data.compression import open_for_reading
from harts.data.values import fail

Parse = Callable[[str], Any]

_NOT_JSON = ("NaN", "Infinity", "-Infinity")


def read_jsonl(
    path: Path, *, parser: Literal["orjson", "json"] | None = None
) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield (row, "name:line") for every line that is not blank, lines from 1.

    parser: None takes orjson where it is installed (about three times faster, same rows). Raises
    DataError with file and line for anything that is not one JSON object in UTF-8.
    """
    parse = _parser(parser)
    with open_for_reading(path) as stream:
        for number, line in enumerate(stream, 1):
            source = f"{path.name}:{number}"
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            row = _parse_line(line, source, parse)
            if row is None:
                continue
            if any(_is_list_of_lists(row.get(name)) for name in PROMPT_NAMES):
                yield from _rows_of_columns(row, source)
            else:
                yield row, source


def _parser(parser: Literal["orjson", "json"] | None) -> Parse:
    if parser != "json":
        try:
            import orjson

            return orjson.loads
        except ImportError:
            if parser == "orjson":
                raise
    return _standard_parser


def _standard_parser(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise _NotANumberError(name)


class _NotANumberError(ValueError):
    """NaN or an infinity as a literal, which json accepts and JSON does not have."""


def _parse_line(line: bytes, source: str, parse: Parse) -> dict[str, Any] | None:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        advice = "write the file as UTF-8 JSON lines"
        fail(source, f"byte {error.start + 1} of the line is not UTF-8", advice)
    if not text.strip():
        return None
    try:
        row = parse(text)
        if isinstance(row, dict) and _may_be_rounded(row):
            row = _standard_parser(text)
    except (ValueError, RecursionError) as error:
        _fail_to_parse(text, source, error)
    if not isinstance(row, dict):
        kind = {list: "an array", str: "a string", type(None): "null"}.get(type(row), "a value")
        fail(source, f"the line is {kind}, not an object", "write one JSON object a line")
    return row


def _fail_to_parse(text: str, source: str, error: Exception) -> NoReturn:
    advice = "write one JSON object a line"
    if isinstance(error, _NotANumberError):
        fail(source, f"the line holds {error}", "use finite numbers or null")
    if not isinstance(error, json.JSONDecodeError):
        fail(source, f"broken JSON ({error})", advice)
    constant = next((c for c in _NOT_JSON if text.startswith(c, error.pos)), None)
    if constant is not None:
        fail(source, f"the line holds {constant}", "use finite numbers or null")
    fail(source, f"broken JSON at column {error.pos + 1} ({error.msg})", advice)


def _may_be_rounded(row: dict[str, Any]) -> bool:
    """orjson reads whole numbers of more than 64 bits as floats; json keeps them whole.

    Looks at scalars and into dicts; lists at the top are long and their entries checked later.
    """
    pending = [value for value in row.values() if not isinstance(value, list)]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)
        elif type(value) is float and abs(value) >= 2.0**63:
            return True
    return False


def _is_list_of_lists(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], list)


def _rows_of_columns(
    columns: dict[str, Any], source: str
) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Lists are split, one entry a trajectory; anything else belongs to every trajectory."""
    prompt_name = next(name for name in PROMPT_NAMES if _is_list_of_lists(columns.get(name)))
    num_rows = len(columns[prompt_name])
    for name, values in columns.items():
        if isinstance(values, list) and len(values) != num_rows:
            problem = f"{name} has {len(values)} entries, {prompt_name} {num_rows}"
            fail(source, problem, "give one entry a trajectory in every list")
    for index in range(num_rows):
        row = {k: v[index] if isinstance(v, list) else v for k, v in columns.items()}
        yield row, f"{source}[{index}]"
