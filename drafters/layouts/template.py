"""A target with another template for its chats, as a folder that every command and engine reads."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from draftsmith.drafters.layouts.gguf import model_folder
from draftsmith.drafters.layouts.hub import snapshot
from draftsmith.errors import UserError, first_line
from draftsmith.files import cache_folder, write_text

NAME = "chat_template.jinja"  # that transformers prefers to one within tokenizer_config.json
TEMPLATES = (NAME, "additional_chat_templates")


def with_template(target: str, template: str) -> Path:
    """Folder in the user's cache with links to the target's files and a copy of the file
    `template`; the same for the same files. Raises `UserError`."""
    try:
        text = Path(template).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(
            f"chat template {template!r} cannot be read ({first_line(error)}); give a file of Jinja"
        ) from error
    named = Path(model_folder(target))
    own = (named if named.is_dir() else snapshot(target, "model")).resolve()
    files = sorted(path for path in own.iterdir() if path.name not in TEMPLATES)
    state = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    digest = hashlib.sha256(repr((own, state, text)).encode()).hexdigest()[:12]
    folder = cache_folder() / "templates" / f"{own.name}-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    for path in files:
        with suppress(FileExistsError):
            (folder / path.name).symlink_to(path)
    write_text(folder / NAME, text)
    return folder
