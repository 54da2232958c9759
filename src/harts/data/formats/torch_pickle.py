"""Files of torch.save without torch: plain containers and tensors as numpy arrays, nothing else.

A pickle can name any function and have it called. This reader resolves a fixed list of names (the
containers and tensor rebuilders below) and refuses every other, so a file can hold data but not
code; it is still a pickle, and `harts.read` opens one only when told to trust it.
"""

import io
import pickle
import zipfile
from _compat_pickle import IMPORT_MAPPING
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from harts.data.compression import Progress, open_for_reading
from harts.data.formats.detect import LEGACY_TORCH_MAGIC, ZIP_MAGIC
from harts.data.values import Array, fail
from harts.errors import HartsError

_STORAGES = {
    "DoubleStorage": "f8",
    "FloatStorage": "f4",
    "HalfStorage": "f2",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "i8",
    "IntStorage": "i4",
    "ShortStorage": "i2",
    "CharStorage": "i1",
    "ByteStorage": "u1",
    "BoolStorage": "?",
}
_Order = Literal["<", ">", "="]
_REFUSED = "only tensors, numpy arrays and plain containers are read"


def load_torch(path: Path, progress: Progress | None = None) -> Any:
    """The object of a .pt file (zip or legacy layout); tensors become arrays, bfloat16 float32.

    Raises DataError for a file that is not whole, and one that names anything but data. O(file).
    """
    with open_for_reading(path, progress) as stream:
        content = stream.read()
    try:
        if content.startswith(ZIP_MAGIC):
            return _load_zip(content, path.name)
        if content.startswith(LEGACY_TORCH_MAGIC):
            return _load_legacy(io.BytesIO(content), path.name)
    except _RefusedError as error:
        fail(path.name, str(error), _REFUSED)
    except HartsError:
        raise
    except (
        pickle.UnpicklingError,
        zipfile.BadZipFile,
        EOFError,
        KeyError,
        IndexError,
        ValueError,
        TypeError,
        AttributeError,
        NotImplementedError,
        RecursionError,
        UnicodeDecodeError,
        MemoryError,
        OverflowError,
    ) as error:
        problem = f"not a whole file of torch.save ({type(error).__name__}: {error})"
        fail(path.name, problem, "copy or write it again")
    fail(path.name, "not a file of torch.save", "say what it is with format")


class _RefusedError(Exception):
    """A name in the pickle that is not on the list."""


class _Storage:
    """One flat buffer; `values` is filled before or after the pickle is read, by the layout."""

    def __init__(self, kind: str, values: Array) -> None:
        self.is_bfloat16 = kind == "bfloat16"
        self.values = values


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: IO[bytes], storage: Callable[[Any], Any]) -> None:
        super().__init__(stream, encoding="utf-8")
        self._storage = storage

    def find_class(self, module: str, name: str) -> Any:
        module = IMPORT_MAPPING.get(module, module)  # torch.save writes the names of Python 2
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        known = _ALLOWED.get((module, name))
        if known is None:
            raise _RefusedError(f"the pickle names {module}.{name}")
        return known

    def persistent_load(self, pid: Any) -> Any:
        return self._storage(pid)


def _rebuild_tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> Array:
    """A tensor as a view of its storage (legacy files fill the storage later)."""
    if not isinstance(storage, _Storage):
        raise ValueError("a tensor without a storage")
    last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if size else offset
    is_empty = any(n == 0 for n in size)
    if min((offset, *size, *stride)) < 0 or (not is_empty and last >= storage.values.size):
        raise ValueError("a tensor beyond its storage")
    base = storage.values[offset:]
    strides = tuple(s * base.itemsize for s in stride)
    view = np.lib.stride_tricks.as_strided(base, tuple(size), strides, writeable=False)
    if storage.is_bfloat16:  # the upper half of a float32
        return (view.astype(np.uint32) << 16).view(np.float32)
    return view


def _rebuild_parameter(data: Any, *_: Any) -> Any:
    return data


def _latin1_bytes(text: Any, encoding: Any) -> bytes:
    """How pickles before protocol 3 hold bytes, such as those of a numpy array."""
    if not isinstance(text, str) or encoding != "latin1":
        raise ValueError("bytes in another encoding than latin1")
    return text.encode("latin1")


def _numpy_globals() -> dict[tuple[str, str], Any]:
    from numpy._core import multiarray as core  # the names that pickles of arrays hold

    functions: dict[tuple[str, str], Any] = {
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }
    for package in ("numpy.core", "numpy._core"):
        functions[f"{package}.multiarray", "_reconstruct"] = core._reconstruct
        functions[f"{package}.multiarray", "scalar"] = core.scalar
    return functions


_ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("_codecs", "encode"): _latin1_bytes,
    ("builtins", "bytes"): bytes,
    ("builtins", "set"): set,
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch", "Size"): tuple,
    **_numpy_globals(),
}


def _load_zip(content: bytes, name: str) -> Any:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = archive.namelist()
        pickled = next((m for m in members if m.endswith("data.pkl")), None)
        if pickled is None:
            raise zipfile.BadZipFile("no data.pkl inside")
        folder = pickled[: -len("data.pkl")]
        order: _Order = "<"
        if f"{folder}byteorder" in members:
            order = ">" if archive.read(f"{folder}byteorder") == b"big" else "<"
        cache: dict[str, _Storage] = {}

        def storage(pid: Any) -> _Storage:
            _, kind, key, _, numel = _checked(pid)[:5]
            if key not in cache:
                raw = np.frombuffer(archive.read(f"{folder}data/{key}"), _dtype(kind, order))
                if raw.size < numel:
                    raise ValueError("a storage is cut short")
                cache[key] = _Storage(kind, raw.astype(raw.dtype.newbyteorder("="), copy=False))
            return cache[key]

        with archive.open(pickled) as stream:
            return _Unpickler(io.BytesIO(stream.read()), storage).load()


def _load_legacy(stream: io.BytesIO, name: str) -> Any:
    """Four pickles (magic, protocol, system, object), the storage keys, then the raw storages."""
    cache: dict[str, _Storage] = {}

    def storage(pid: Any) -> _Storage:
        checked = _checked(pid)
        _, kind, key, _, numel = checked[:5]
        if kind == "bfloat16" or (len(checked) > 5 and checked[5] is not None):
            fail(name, "a legacy file with bfloat16 or views", "save it again with a newer torch")
        if key not in cache:
            if numel > len(stream.getbuffer()):
                raise ValueError("a storage is longer than the file")
            cache[key] = _Storage(kind, np.zeros(numel, _dtype(kind, "=")))
        return cache[key]

    for _ in range(2):
        _Unpickler(stream, storage).load()
    system = _Unpickler(stream, storage).load()
    order: _Order = (
        "<" if not isinstance(system, dict) or system.get("little_endian", True) else ">"
    )
    loaded = _Unpickler(stream, storage).load()
    for key in _Unpickler(stream, storage).load():
        values = cache[key].values
        count = int(np.frombuffer(stream.read(8), f"{order}i8")[0])
        if count != values.size:
            raise ValueError("a storage has another length than the pickle says")
        raw = np.frombuffer(stream.read(count * values.itemsize), values.dtype.newbyteorder(order))
        values[:] = raw
    return loaded


def _checked(pid: Any) -> Any:
    is_storage = isinstance(pid, tuple) and len(pid) >= 5 and pid[0] == "storage"
    if not is_storage or pid[1] not in _STORAGES.values() or not isinstance(pid[4], int):
        raise ValueError("a storage of an unknown kind")
    return pid


def _dtype(kind: str, order: _Order) -> Any:
    return np.dtype("u2" if kind == "bfloat16" else kind).newbyteorder(order)
