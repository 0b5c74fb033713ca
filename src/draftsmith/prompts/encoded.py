"""Text of a file that may be compressed, in the Unicode encoding that its first bytes name."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from draftsmith.errors import UserError

LONGEST_MAGIC = 6


def _zstd(file: Any, mode: str) -> Any:
    import pyarrow as pa

    return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(file, mode=mode[0]), "zstd"))


# First bytes of a file -> what opens it.
COMPRESSED: dict[bytes, Callable[..., Any]] = {
    b"\x1f\x8b": gzip.open,
    b"(\xb5/\xfd": _zstd,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
}
SUFFIXES = frozenset((".gz", ".zst", ".zstd", ".bz2", ".xz"))
PACKED = {b"PK\x03\x04": "a zip archive", b"7z\xbc\xaf": "a 7z archive", b"Rar!": "a rar archive"}


@contextmanager
def open_text(path: Path, *, newline: str | None = None) -> Iterator[TextIO]:
    """Text of the file, unpacked while it is read. A byte that is not UTF-8 becomes half of a
    character, so that the row that has it can be named.

    Raises:
        UserError: the file cannot be read or unpacked, or ends too early.
    """
    try:
        with open(path, "rb") as file:
            begin = file.peek(LONGEST_MAGIC)
            for magic, kind in PACKED.items():
                if begin.startswith(magic):
                    raise UserError(f"{str(path)!r} is {kind}; unpack it and give the file in it")
            unpack = next(
                (one for magic, one in COMPRESSED.items() if begin.startswith(magic)), None
            )
            data = file if unpack is None else io.BufferedReader(unpack(file, "rb"))
            encoding = json.detect_encoding(data.peek(4)[:4])
            errors = "surrogateescape" if encoding.startswith("utf-8") else "strict"
            with io.TextIOWrapper(data, encoding, errors, newline) as text:
                yield text
    except UnicodeDecodeError as error:
        raise UserError(
            f"{str(path)!r} is no {error.encoding} text ({error.reason}); save it as UTF-8"
        ) from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        reason = str(error).strip() or type(error).__name__
        raise UserError(f"{str(path)!r} cannot be read ({reason}); mend or replace it") from error


def check_characters(value: Any, where: str) -> None:
    """Raises a `UserError` for text with half of a character: a byte of another encoding, or an
    escape without its other half."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        half = ord(error.object[error.start])
        if 0xDC80 <= half <= 0xDCFF:
            raise UserError(
                f"{where} holds the byte 0x{half - 0xDC00:02x}, which is not UTF-8; save the file "
                "as UTF-8, from Latin-1 by iconv -f LATIN1 -t UTF-8"
            ) from error
        raise UserError(
            f"{where} holds \\u{half:04x}, half of a character; mend or delete it"
        ) from error
