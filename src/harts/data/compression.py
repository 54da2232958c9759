"""Byte streams of plain and compressed files, by suffix; every way to fail is one DataError."""

import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import IO, Any, BinaryIO, cast

from harts.errors import DataError

COMPRESSED_SUFFIXES = (".gz", ".xz", ".zst")

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all) of a file as it lies on disk, compressed or not."""

_BUFFER = 1 << 20

_BROKEN = (gzip.BadGzipFile, zlib.error, lzma.LZMAError)


@contextmanager
def open_for_reading(path: Path, progress: Progress | None = None) -> Iterator[IO[bytes]]:
    """A buffered stream of the decompressed bytes, to be read inside the `with`.

    progress: called about once a megabyte of the file. Raises DataError for a missing file, a
    directory, a file that may not be read, and an archive that is broken or cut short (on reading,
    when the decompressor finds out).
    """
    broken: tuple[type[Exception], ...] = (*_BROKEN, *_zstd_errors(path))
    try:
        with _buffered(path, progress) as raw, _decompressor(path, raw) as stream:
            yield stream
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; check the path") from None
    except IsADirectoryError:
        raise DataError(f"{path}: is a directory; give one file") from None
    except EOFError:
        raise DataError(f"{path}: the archive is cut short; copy or write it again") from None
    except broken as error:
        problem = f"{path}: not a whole {path.suffix} archive ({_one_line(error)})"
        raise DataError(f"{problem}; copy it again or rename it") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({_one_line(error)}); check it") from None


@contextmanager
def compressor(path: Path, raw: BinaryIO) -> Iterator[IO[bytes]]:
    """A stream into `raw`, compressed as the suffix of `path` says; the same bytes each time."""
    if path.suffix == ".gz":
        with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0, compresslevel=6) as stream:
            yield cast(IO[bytes], stream)
    elif path.suffix == ".xz":
        with lzma.LZMAFile(raw, "wb", preset=6) as stream_xz:
            yield stream_xz
    elif path.suffix == ".zst":
        writer = _zstandard(path).ZstdCompressor(level=6).stream_writer(raw, closefd=False)
        with writer as stream_zst:
            yield stream_zst
    else:
        yield raw


def _buffered(path: Path, progress: Progress | None) -> BinaryIO:
    return cast(BinaryIO, io.BufferedReader(_CountedFile(path, progress), _BUFFER))


class _CountedFile(io.FileIO):
    """A file that says how far it has been read."""

    def __init__(self, path: Path, progress: Progress | None) -> None:
        super().__init__(path)
        self._progress = progress
        self._done, self._size = 0, path.stat().st_size

    def readinto(self, buffer: Any) -> int | None:
        taken = super().readinto(buffer)
        if self._progress is not None and taken:
            self._done += taken
            self._progress(self._done, self._size)
        return taken


def _decompressor(path: Path, raw: BinaryIO) -> IO[bytes]:
    if path.suffix == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw, mode="rb"), _BUFFER)
    if path.suffix == ".xz":
        return io.BufferedReader(lzma.LZMAFile(raw), _BUFFER)
    if path.suffix == ".zst":
        return io.BufferedReader(_ZstdStream(raw, _zstandard(path)), 1 << 18)
    return raw


class _ZstdStream(io.RawIOBase):
    """Frames of a .zst file in a row. zstandard's own reader takes a cut frame for the end."""

    def __init__(self, raw: BinaryIO, zstandard: ModuleType) -> None:
        self._raw = raw
        self._new_frame = zstandard.ZstdDecompressor().decompressobj
        self._frame = None
        self._pending = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer)  # type: ignore[arg-type]  # typeshed names no buffer type in 3.11
        while not self._pending:
            compressed = self._raw.read(1 << 17)
            if not compressed:
                if self._frame is not None:
                    raise EOFError
                return 0
            self._pending = self._decompress(compressed)
        taken, self._pending = self._pending[: len(view)], self._pending[len(view) :]
        view[: len(taken)] = taken
        return len(taken)

    def _decompress(self, compressed: bytes) -> bytes:
        out = []
        while compressed:
            frame = self._frame or self._new_frame()
            out.append(frame.decompress(compressed))
            compressed = frame.unused_data if frame.eof else b""
            self._frame = None if frame.eof else frame
        return b"".join(out)


def _zstandard(path: Path) -> ModuleType:
    try:
        import zstandard
    except ImportError:
        problem = f"{path}: .zst needs the package zstandard"
        raise DataError(f"{problem}; pip install 'harts[data]'") from None
    return zstandard


def _zstd_errors(path: Path) -> tuple[type[Exception], ...]:
    return (_zstandard(path).ZstdError,) if path.suffix == ".zst" else ()


def _one_line(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()) or type(error).__name__
