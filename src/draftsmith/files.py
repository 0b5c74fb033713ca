"""Atomic files and folders: every durable file of the project is written beside its path, synced
and renamed."""

from __future__ import annotations

import base64
import dataclasses
import errno
import fcntl
import functools
import hashlib
import html
import importlib.util
import itertools
import json
import math
import os
import platform
import re
import shutil
import tempfile
import time
import types
import typing
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError, first_line

Signature = list[tuple[str, int, int]]
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Temporary files that killed writers leave.
LEFTOVER_AGE_S = 3600.0  # of those in a folder of several writers
LEFTOVER = re.compile(r"\..+\.[0-9a-f]{8}\.(tmp|old)")


def cache_folder() -> Path:
    """Folder of the user for what can be made or fetched again: `draftsmith` in `XDG_CACHE_HOME`,
    else in `~/.cache`."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftsmith"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def is_full(error: BaseException) -> bool:
    """True of an error of a disk without room, in whatever class a library raises it."""
    return any(os.strerror(number) in str(error) for number in FULL)


@contextmanager
def named(path: str | Path) -> Iterator[None]:
    """Gives the error of a full disk the name of the file, which writes leave out."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not is_full(error) or getattr(error, "filename", None) is not None:
            raise
        reason = getattr(error, "strerror", None) or first_line(error)
        number = getattr(error, "errno", None) or errno.ENOSPC
        raise OSError(number, reason, str(path)) from error


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yields a temporary path in the same folder; on success it is synced and renamed to `path`, on
    failure removed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with named(path):
            yield temporary
            with open(temporary, "rb") as handle:
                os.fsync(handle.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Yields a temporary folder that becomes `path` by one rename; an existing `path` is replaced
    only at the end. Its files can be read as the folder can, which some libraries prevent."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    temporary.mkdir()
    try:
        with named(path):
            yield temporary
            for file in temporary.rglob("*"):
                if file.is_file():
                    file.chmod(temporary.stat().st_mode & 0o666)
                    with open(file, "rb") as handle:
                        os.fsync(handle.fileno())
        if path.exists():
            old = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.old")
            os.replace(path, old)
            os.replace(temporary, path)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Lets one process at a time write `path`; the others wait."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f".{path.name}.lock"), "w") as handle:
        with suppress(OSError):  # of a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def sweep(folder: str | Path, *, older_than_s: float | None = None) -> None:
    """Removes the temporary files of killed writers; for the folder's only writer, or of an age at
    which no other one is still at them."""
    folder = Path(folder)
    for entry in folder.iterdir() if folder.is_dir() else ():
        if not LEFTOVER.fullmatch(entry.name):
            continue
        with suppress(FileNotFoundError):
            if older_than_s is not None and time.time() - entry.stat().st_mtime <= older_than_s:
                continue
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink()


def plain(value: Any) -> Any:
    """NaN becomes null and infinity text: JSON has neither, and other readers are to parse it."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else repr(value)
    return value


def restored(wanted: Any, value: Any) -> Any:
    """Value of the annotated type from what `asdict` and JSON leave of it: dataclasses, named
    tuples, lists, mappings and optional values of these. Raises `KeyError`, `TypeError` or
    `ValueError` for another form."""
    origin, inner = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (typing.Union, types.UnionType):
        return None if value is None else restored(inner[0], value)
    forms: dict[Any, Any] = {list: (list, tuple), tuple: (list, tuple), dict: Mapping}
    if origin in forms and not isinstance(value, forms[origin]):
        raise TypeError(f"{str(value)[:60]!r} is no {origin.__name__}")
    if origin in (list, tuple):
        return origin(restored(inner[0], one) for one in value)
    if origin is dict:
        return {restored(inner[0], key): restored(inner[1], one) for key, one in value.items()}
    if wanted is int and isinstance(value, str):  # a key of JSON
        return int(value)
    is_named = hasattr(wanted, "_fields")
    if not (is_named or dataclasses.is_dataclass(wanted)) or isinstance(value, wanted):
        return value
    kinds = hints_of(wanted)
    values = value if isinstance(value, Mapping) else dict(zip(kinds, value, strict=True))
    return wanted(**{name: restored(kinds[name], one) for name, one in values.items()})


def as_values(value: Any) -> Any:
    """The inverse of `restored`: dataclasses and named tuples, however deep, by their fields."""
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {key: as_values(one) for key, one in value.items()}
    return [as_values(one) for one in value] if isinstance(value, list | tuple) else value


@functools.cache
def hints_of(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def check_file(path: str | Path | None, option: str) -> None:
    """Raises a `UserError` where no file can be written to `path`, before hours go into it."""
    if path is None:
        return
    path = Path(path)
    above = next(one for one in path.absolute().parents if one.exists())
    if path.is_dir() or not above.is_dir():
        what = "a folder" if path.is_dir() else f"below the file {str(above)!r}"
        raise UserError(f"option {option!r} is {str(path)!r}, {what}; give the path of a file")


def page_of(path: str | Path) -> Path:
    """Path of the page to a result: `.html` in place of `.json`, else behind the whole name."""
    return Path(f"{str(path).removesuffix('.json')}.html")


def check_result(path: str | Path | None, option: str) -> None:
    """Checks `path` as `check_file` does, and its page; a result is no page itself."""
    if str(path).endswith(".html"):
        raise UserError(
            f"option {option!r} is {str(path)!r}, the page that is written beside the result; give "
            "a name that ends in .json"
        )
    check_file(path, option)


def write_text(path: str | Path, text: str) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def files_in(folder: Path) -> dict[str, Path]:
    """Files below a folder, by their names in it, in order."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in paths}


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while chunk := handle.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table that reads well as plain text, too; every row has as many cells as the
    head."""
    every = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in (head, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*every, strict=True)]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths)] for row in every]
    lines.insert(1, ["-" * width for width in widths])
    return [f"| {' | '.join(line)} |" for line in lines]


def with_interval(value: float, low: float, high: float, *, digits: int = 2) -> str:
    """`2.31 [2.20, 2.42]`, and the value alone where the digits show no width: a single sample has
    no interval."""
    first, last = (f"{bound:.{digits}f}" for bound in (low, high))
    return f"{value:.{digits}f}" + (f" [{first}, {last}]" if first != last else "")


STYLE = (
    "body { font: 15px/1.5 system-ui, sans-serif; max-width: 75em; margin: 2em auto }"
    " table { border-collapse: collapse } tr:first-child { font-weight: bold }"
    " td { padding: .2em .8em; border-bottom: 1px solid #ccc }"
    " pre { overflow-x: auto; background: #f5f5f5; padding: .6em } img { max-width: 100% }"
)
# Of Linux: the processor, and each device of NVIDIA's driver.
HARDWARE = ("proc/cpuinfo", "proc/driver/nvidia/gpus/*/information")


# A PNG file, or a function that draws one.
Picture = Path | Callable[[Path], object]


def write_page(
    path: str | Path, title: str, command: str, text: str, pictures: Iterable[Picture] = ()
) -> None:
    """Writes an HTML page that needs no other file: `command`, the machine, `pictures` that exist
    or can be drawn, and `text`, whose tables and headings in Markdown become those of the page."""
    body = [
        f"<h1>{html.escape(title)}</h1>\n<pre>{html.escape(command)}</pre>",
        f"<p>{html.escape(machine())}</p>",
        *(f'<img alt="" src="data:image/png;base64,{one}">' for one in _encoded(pictures)),
        *_blocks(text),
    ]
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    write_text(path, "\n".join(["<!doctype html>", head, *body]) + "\n")


def _encoded(pictures: Iterable[Picture]) -> Iterator[str]:
    has_library = importlib.util.find_spec("matplotlib") is not None
    for picture in pictures:
        with tempfile.TemporaryDirectory() as folder:
            file = picture if isinstance(picture, Path) else Path(folder) / "picture.png"
            if not isinstance(picture, Path) and has_library:
                picture(file)
            if file.is_file():
                yield base64.b64encode(file.read_bytes()).decode()


@contextmanager
def drawn(path: str | Path, columns: int, **options: Any) -> Iterator[Any]:
    """Axes beside each other, which are drawn into a PNG at the end. The library is imported here,
    because what is not drawn need not wait for it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, columns, **options)
    yield axes
    figure.tight_layout()
    figure.savefig(path, dpi=110, format="png")
    pyplot.close(figure)


def bars(values: Sequence[float], bounds: Sequence[tuple[float, float]]) -> list[list[float]]:
    """Lengths of the error bars, below and above each value."""
    below = [max(0.0, value - low) for value, (low, _) in zip(values, bounds)]
    return [below, [max(0.0, high - value) for value, (_, high) in zip(values, bounds)]]


def _kind(line: str) -> str:
    return line[:1] if line.startswith(("|", "#")) else ""


def _blocks(text: str) -> Iterator[str]:
    for kind, lines in itertools.groupby(text.split("\n"), _kind):
        if kind == "|":
            cells = [re.split(r"(?<!\\) *\| *", html.escape(line))[1:-1] for line in lines]
            del cells[1:2]  # the line below the head
            rows = ["<td>".join(["<tr>", *row]) for row in cells]
            yield "<table>" + "\n".join(rows).replace("\\|", "|") + "</table>"
        elif kind == "#":
            yield from (f"<h2>{html.escape(line.lstrip('# '))}</h2>" for line in lines)
        elif block := "\n".join(lines).strip():
            yield f"<pre>{html.escape(block)}</pre>"


def machine() -> str:
    """Name of the processor and of NVIDIA devices, and the number of cores."""
    names: list[str] = []
    for path in (one for pattern in HARDWARE for one in sorted(Path("/").glob(pattern))):
        with suppress(OSError):
            names += re.findall(r"^(?:model name\s*|Model): *\s*(.+)", path.read_text(), re.M)[:1]
    return f"{', '.join(names) or platform.machine()}, {os.cpu_count()} cores"


def write_json(path: str | Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, sort_keys=False, ensure_ascii=False) + "\n")


def read_json(path: str | Path, what: str = "file") -> dict[str, Any]:
    """The parsed file, an object; a missing or broken one, or another value, is a `UserError` that
    calls it `what`."""
    path = Path(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{what} {str(path)!r} does not exist; check the path") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(
            f"{what} {str(path)!r} is not valid JSON ({error}); restore or regenerate it"
        ) from error
    if not isinstance(value, dict):
        raise UserError(
            f"{what} {str(path)!r} holds {str(value)[:40]!r} instead of a JSON object; restore or "
            "regenerate it"
        )
    return value


def signature(folder: str | Path, pattern: str) -> Signature:
    """Names, sizes and change times of the files that match, so that changed content is noticed
    without reading it; empty where there is no such folder. Links to nothing, and files that go
    meanwhile, are none."""
    states = []
    for path in sorted(Path(folder).glob(pattern)):
        with suppress(FileNotFoundError):
            states.append((path, path.stat()))
    # Not the time of modification, which a copy may bring along.
    return [(str(path), state.st_size, state.st_ctime_ns) for path, state in states]
