"""Compilation of a C++ source for the processor of this machine, by the compiler of this machine.

A library is compiled once per processor, source and compiler, and kept in the user's cache folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from draftsmith.files import cache_folder
from draftsmith.progress import say

log = logging.getLogger(__name__)

COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    "-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread",
    # Sums in any order, which vectors need; numbers that are not finite keep their meaning.
    "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math",
)  # fmt: skip
HEADERS = tuple(
    Path(__file__).with_name(name) for name in ("host_lanes.h", "host_numbers.h", "host_threads.h")
)
MOST_S = 120.0
# Types of numbers that functions are compiled for, as their names end.
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
# Types of arguments and results, as signatures have them.
_LETTERS: dict[str, Any] = {
    "p": ctypes.c_void_p, "n": ctypes.c_int64, "i": ctypes.c_int, "b": ctypes.c_bool,
    "f": ctypes.c_float, "d": ctypes.c_double,
}  # fmt: skip


@cache
def compiled(source: Path) -> ctypes.CDLL | None:
    """The library of `source`; None, with a line in the log, where it cannot be made."""
    try:
        return _load(source)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        log.info("%s is not compiled (%s); torch's operations serve", source.name, error)
        return None


@cache
def function_of(
    source: Path, name: str, signature: str, *dtypes: torch.dtype, result: str = ""
) -> Any | None:
    """The function of the library of `source` whose name is `name` and its `dtypes`. A letter of
    `signature` is the type of an argument. None where the library cannot be made, and for a type
    that is none of `DTYPES`."""
    library = compiled(source) if all(dtype in DTYPES for dtype in dtypes) else None
    if library is None:
        return None
    function = library["_".join([name, *(DTYPES[dtype] for dtype in dtypes)])]
    function.argtypes = [_LETTERS[letter] for letter in signature]
    function.restype = _LETTERS.get(result)
    return function


def address_of(tensor: torch.Tensor | None) -> int | None:
    """As a function takes it; the caller keeps the tensor alive."""
    return None if tensor is None else tensor.data_ptr()


def _load(source: Path) -> ctypes.CDLL:
    compiler = compiler_path()
    name = f"{source.stem}-{_digest(source, compiler)}.so"
    try:
        library = cache_folder() / name
        try:
            return ctypes.CDLL(str(library))
        except OSError:  # not there, or damaged
            _compile(compiler, source, library)
            return ctypes.CDLL(str(library))
    except OSError:
        # A home that cannot be written: made for this process alone.
        with tempfile.TemporaryDirectory(prefix="draftsmith-") as folder_name:
            _compile(compiler, source, Path(folder_name, name))
            return ctypes.CDLL(str(Path(folder_name, name)))


def compiler_path() -> str:
    for name in (os.environ.get("CXX", ""), *COMPILERS):
        if name and (found := shutil.which(name)):
            return os.path.realpath(found)
    raise RuntimeError("there is no C++ compiler")


def _digest(source: Path, compiler: str) -> str:
    parts = (compiler, os.stat(compiler).st_mtime_ns, FLAGS, platform.machine(), processor())
    texts = b"".join(path.read_bytes() for path in (source, *HEADERS))
    return hashlib.sha256(texts + repr(parts).encode()).hexdigest()[:16]


def processor() -> str:
    """Model and instruction sets of this processor; a cache may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n")
    except OSError:
        return platform.processor()
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.split("\t")[0] in wanted}))


def _compile(compiler: str, source: Path, library: Path) -> None:
    """Appears by one rename, as another process may compile the same."""
    _tell()
    scratch = library.with_name(f"{library.name}.{os.getpid()}")
    try:
        command = [compiler, *FLAGS, str(source), "-o", str(scratch)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=MOST_S)
        if done.returncode == 0:
            return os.replace(scratch, library)
    finally:
        scratch.unlink(missing_ok=True)
    raise RuntimeError(f"{compiler} says {done.stderr.strip()[:200]!r}")


@cache
def _tell() -> None:
    say("compiling kernels for this processor; they are kept")
