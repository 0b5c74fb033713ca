"""Names and folders of adapters in options. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith.errors import UserError


def named_folders(entries: Sequence[str]) -> dict[str, str]:
    """`["sql=path"]` -> `{"sql": "path"}`. Raises `UserError` for an entry of another form."""
    found: dict[str, str] = {}
    for entry in entries:
        name, separator, folder = entry.partition("=")
        if not (separator and name.strip() and folder.strip()):
            raise UserError(
                f"lora is {entry!r}; give NAME=FOLDER, for example sql=runs/sql-adapter"
            )
        if name in found:
            raise UserError(f"lora names {name!r} twice; give each adapter a name of its own")
        found[name] = folder
    return found
