"""JSON objects of a file, one a line or the whole file one document, with the place of each."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np

from harts.data.compression import Progress, open_for_reading
from harts.data.values import EXACT_IN_FLOAT64, fail

Parse = Callable[[str], Any]
Parser = Literal["orjson", "json"] | None

_LONG = 256
"""Shorter lists are not worth a look."""

_NOT_JSON = ("NaN", "Infinity", "-Infinity")


def read_lines(
    path: Path, *, parser: Parser = None, progress: Progress | None = None, arrays: bool = False
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield (object, "name:line") for every line that is not blank, lines from 1.

    parser: None takes orjson where it is installed (about three times faster, same values).
    arrays: long lists of numbers come as arrays that equal them (a fifth faster for rows of
    tokens). Raises DataError with file and line for anything that is not one JSON object in UTF-8.
    """
    parse = _parser(parser)
    is_begun = False
    with open_for_reading(path, progress) as stream:
        for number, line in enumerate(stream, 1):
            source = f"{path.name}:{number}"
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not is_begun and line.lstrip().startswith(b"["):
                _refuse_array_over_lines(line, stream, path)
            row = _parse_line(line, source, parse)
            if row is not None:
                is_begun = True
                if arrays and b"true" not in line and b"false" not in line:
                    row = {name: _as_array(value) for name, value in row.items()}
                yield row, source


def _refuse_array_over_lines(first: bytes, rest: Iterable[bytes], path: Path) -> None:
    """Raise if the file is one array that begins on this line and ends on the last one."""
    last = b""
    for line in rest:
        last = line if line.strip() else last
    if last.rstrip().endswith(b"]") and not first.rstrip().endswith(b"]"):
        advice = f"write one object a line (jq -c '.[]' {path.name} does)"
        fail(path.name, "the file is a JSON array, not JSON lines", advice)


def _as_array(value: Any) -> Any:
    """A long list of numbers as the array that equals it; anything else, and doubt, as it is.

    Only for lines without truth values, which numpy would take for numbers: so no look at the type
    of every entry is needed, which costs as much as the conversion.
    """
    if type(value) is not list or len(value) < _LONG or type(value[0]) is list:
        return value
    try:
        array = np.array(value)
    except (ValueError, OverflowError):  # lists of different lengths, numbers beyond 64 bits
        return value
    if array.ndim != 1 or array.dtype not in (np.int64, np.float64):
        return value
    has_doubt = array.dtype == np.float64 and not np.abs(array).max() < EXACT_IN_FLOAT64
    return value if has_doubt else array


def read_documents(
    path: Path, *, progress: Progress | None = None
) -> Iterator[tuple[dict[str, Any], str]]:
    """Like `read_lines`; also a file that is one document (an object or an array of objects).

    The first line decides: a line that opens an object or array without closing it begins a
    document, whose place is "name" or "name[index]".
    """
    with open_for_reading(path) as stream:
        first = next((line for line in stream if line.strip(b"\xef\xbb\xbf \t\r\n")), b"")
    if not _begins_document(first):
        yield from read_lines(path, progress=progress)
        return
    with open_for_reading(path, progress) as stream:
        content = stream.read().removeprefix(b"\xef\xbb\xbf")
    document = _parse_document(content, path.name)
    if isinstance(document, dict):
        yield document, path.name
        return
    for index, entry in enumerate(document):
        if not isinstance(entry, dict):
            fail(f"{path.name}[{index}]", "is not an object", "give an array of JSON objects")
        yield entry, f"{path.name}[{index}]"


def _begins_document(line: bytes) -> bool:
    text = line.strip(b"\xef\xbb\xbf \t\r\n")
    return text.startswith(b"[") or (text.startswith(b"{") and not text.endswith(b"}"))


def _parse_document(content: bytes, source: str) -> Any:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        fail(source, f"byte {error.start + 1} of the file is not UTF-8", "write it as UTF-8")
    try:
        document = _standard_parser(text)
    except (ValueError, RecursionError) as error:
        _fail_to_parse(text, source, error)
    if not isinstance(document, dict | list):
        fail(source, "the file is a value, not an object", "write JSON objects")
    return document


def _parser(parser: Parser) -> Parse:
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
    where = f"column {error.pos + 1}" if error.lineno == 1 else f"line {error.lineno}"
    fail(source, f"broken JSON at {where} ({error.msg})", advice)


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
