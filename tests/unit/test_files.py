"""Small JSON files that are no objects."""

from __future__ import annotations

import base64
import errno
import os
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from draftsmith.errors import UserError
from draftsmith.files import (
    atomic_folder,
    atomic_path,
    check_result,
    is_full,
    markdown_table,
    page_of,
    read_json,
    restored,
    write_page,
    write_text,
)
from draftsmith.train.reporting import append_line
from tests.conftest import small_files


@pytest.mark.parametrize("text", ["[1, 2]", "7", "null", '"run"'])
def test_json_that_is_no_object_is_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(
        UserError, match=r"record of the run .* instead of a JSON object; "
    ) as error:
        read_json(path, "record of the run")
    assert str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("write", [write_text, lambda path, text: append_line(path, {text: text})])
def test_the_error_of_a_full_disk_names_the_file(tmp_path: Path, write: Any) -> None:
    path = tmp_path / "run.json"
    with small_files(8), pytest.raises(OSError, match="File too large") as error:
        write(path, "x" * 99)
    assert is_full(error.value) and error.value.filename == str(path)


def test_other_errors_keep_their_words(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError) as error, atomic_path(tmp_path / "a"):
        raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")
    assert error.value.filename is None and not is_full(error.value)


@pytest.mark.parametrize(
    ("wanted", "value"),
    [(dict[str, int], []), (list[str], "abc"), (tuple[int], 3), (list[int], {})],
)
def test_a_saved_value_of_another_form_is_a_type_error(wanted: Any, value: Any) -> None:
    with pytest.raises(TypeError, match=" is no "):
        restored(wanted, value)
    assert restored(list[int] | None, None) is None and restored(list[int], (1, 2)) == [1, 2]


class Tags(HTMLParser):
    """Cells of tables by row, and all else by tag."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.texts: dict[str, list[str]] = defaultdict(list)
        self.pictures: list[str] = []
        self.last = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.last = tag
        if tag == "tr":
            self.rows.append([])
        if tag == "img":
            self.pictures.append(str(dict(attrs)["src"]))

    def handle_endtag(self, tag: str) -> None:
        self.last = ""

    def handle_data(self, data: str) -> None:
        if self.last == "td":
            self.rows[-1].append(data.strip())
        else:
            self.texts[self.last].append(data)


def test_a_page_holds_command_machine_tables_and_pictures_and_needs_no_other_file(
    tmp_path: Path,
) -> None:
    picture = tmp_path / "curves.png"
    picture.write_bytes(b"\x89PNG 1")
    table = markdown_table(["a | b", "c"], [["<x>", "-"], ["-", "-"]])
    text = "\n".join(["", "## Figures", "", *table, "", "one", "  two"])
    drawn = [picture, tmp_path / "none.png", lambda path: path.write_bytes(b"\x89PNG 2")]
    write_page(tmp_path / "page.html", "R & D", "draftsmith run '<r>'", text, drawn)
    found = Tags((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert found.texts["h1"] == ["R & D"] and found.texts["h2"] == ["Figures"]
    assert found.texts["pre"] == ["draftsmith run '<r>'", "one\n  two"]
    assert found.texts["p"][0].endswith(f", {os.cpu_count()} cores")
    assert found.rows == [["a | b", "c"], ["<x>", "-"], ["-", "-"]]
    head = "data:image/png;base64,"
    assert all(one.startswith(head) for one in found.pictures)
    decoded = [base64.b64decode(one.removeprefix(head)) for one in found.pictures]
    assert decoded == [b"\x89PNG 1", b"\x89PNG 2"]


def test_the_page_of_a_result_is_no_other_results_and_never_the_result() -> None:
    names = ["a.json", "tau-0.5", "tau-0.7", "runs/v1.2/b"]
    assert [str(page_of(name)) for name in names] == [
        "a.html", "tau-0.5.html", "tau-0.7.html", "runs/v1.2/b.html",
    ]  # fmt: skip
    check_result(None, "out")
    with pytest.raises(UserError, match=r"'a.html', the page .*; give a name that ends in .json$"):
        check_result("a.html", "out")


def test_weights_in_a_folder_can_be_read_like_any_file(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "out") as folder:
        save_file({"weight": np.zeros(2)}, folder / "model.safetensors")
    (tmp_path / "any").touch()
    modes = {path.stat().st_mode for path in (tmp_path / "any", *(tmp_path / "out").iterdir())}
    assert len(modes) == 1
