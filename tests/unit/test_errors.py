"""Words of other libraries' errors."""

from __future__ import annotations

import pytest

from draftsmith.errors import first_line


@pytest.mark.parametrize("said, line", [
    ("one.\ntwo", "one"),
    ("\n one \r\ntwo", "one"),
    ("one\u2028two", "one\u2028two"),
    ("", "OSError"),
    (" \n", "OSError"),
])  # fmt: skip
def test_an_error_is_told_by_its_first_line_or_its_type(said: str, line: str) -> None:
    assert first_line(OSError(said)) == line
