"""`draftsmith top`: a running server in the terminal, drawn again in place; piped, one line per
refresh."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftsmith.client import API_KEY_HELP, base_of, bearer
from draftsmith.config import SECONDS, option
from draftsmith.errors import UserError

if TYPE_CHECKING:
    import httpx

Data = dict[str, Any]
STYLES = {"alarm": "\x1b[31m", "live": "\x1b[1m"}  # by the mark of a fact or row
HOME, LINE_END, REST, CLEAR, PLAIN = "\x1b[H", "\x1b[K\n", "\x1b[J", "\x1b[2J", "\x1b[0m"
# eighths of a character, from low to full
BLOCKS = "".join(chr(code) for code in range(0x2581, 0x2589))


@dataclass(frozen=True, kw_only=True)
class TopConfig:
    url: str = option("http://127.0.0.1:8000", "a running draftsmith server")
    api_key: str | None = option(None, API_KEY_HELP)
    every_s: float = option(2.0, "seconds between two refreshes", limits=SECONDS)


def run(config: TopConfig) -> int:
    import httpx  # not for the options

    with httpx.Client(
        base_url=base_of(config.url), headers=bearer(config.api_key), timeout=10
    ) as http:
        draws = sys.stdout.isatty()
        data = ask(http, config.url)
        print(CLEAR if draws else "", end="")
        trouble = ""
        try:
            while True:
                sys.stdout.write(screen(data, trouble) if draws else f"{one_line(data)}\n")
                sys.stdout.flush()
                time.sleep(config.every_s)
                try:
                    data, trouble = ask(http, config.url), ""
                except UserError as error:
                    if not draws:
                        raise
                    trouble = str(error)
        except KeyboardInterrupt:
            return 0


def ask(http: httpx.Client, url: str) -> Data:
    import httpx

    try:
        response = http.get("/dashboard/data")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UserError(
            f"{url} does not answer ({error}); check the URL and that draftsmith serve is running"
        ) from error
    if response.status_code == 401:
        raise UserError(f"{url} asks for an API key; give --api-key")
    try:
        if response.status_code == 200:
            return response.json()
    except ValueError:
        pass
    raise UserError(
        f"{url} answers {response.status_code} without figures to /dashboard/data; give the URL "
        "of a draftsmith server"
    )


def one_line(data: Data) -> str:
    """Line of one refresh, for a pipe or a log."""
    clock = time.strftime("%H:%M:%S", time.localtime(data["time_s"]))
    return printable(f"{clock} {data['model']}: {', '.join(map(' '.join, pairs(data)))}")


def pairs(data: Data) -> list[tuple[str, str]]:
    return [(label, text) for label, text, _ in data["facts"]]


def screen(data: Data, trouble: str = "") -> str:
    """Text of one screen. Lines are cut to fit: one that wrapped would shift all below it."""
    width, height = shutil.get_terminal_size()
    drawn = [
        f"{STYLES.get(mark, '')}{printable(text)[:width]}{PLAIN if mark else ''}"
        for mark, text in lines(data, trouble, width)
    ]
    shown = HOME + LINE_END.join(drawn[: height - 1]) + LINE_END + REST
    encoding = sys.stdout.encoding or "ascii"
    return shown.encode(encoding, "replace").decode(encoding)


def lines(data: Data, trouble: str, width: int) -> Iterator[tuple[str, str]]:
    """Mark and text of each line."""
    if trouble:
        yield "alarm", trouble
    yield "live", f"draftsmith  {data['model']}   (Ctrl-C ends)"
    line = sparkline([one["tau"] for one in data["points"]], width - 24)
    for label, text, mark in data["facts"]:
        yield mark, f"{label:12}{text}{f'  {line}' if label == 'tau' else ''}"
    for table in data["tables"]:
        yield "", ""
        yield "live", table["title"]
        rows = [table["head"], *(row["cells"] for row in table["rows"])]
        widths = [max(map(len, column)) for column in zip(*rows)]
        marks = ["", *(row["mark"] for row in table["rows"])]
        for mark, cells in zip(marks, rows):
            padded = (cell.ljust(wide) for cell, wide in zip(cells, widths))
            yield mark, "  ".join(padded).rstrip()


def printable(text: str) -> str:
    """Replace control characters: names and reasons come from clients and files."""
    return "".join(character if character.isprintable() else "?" for character in text)


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Latest values that fit, one character per value; a blank where there is none."""
    shown = values[-width:] if width > 0 else []
    known = [value for value in shown if value is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        " " if value is None else BLOCKS[round((value - low) * scale)] for value in shown
    )
