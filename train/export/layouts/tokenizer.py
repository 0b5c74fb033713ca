"""The target's tokenizer files, carried along by layouts that serve by themselves."""

from __future__ import annotations

import shutil
from pathlib import Path

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


def copy_tokenizer(target: Path, out: Path) -> list[str]:
    """The target's tokenizer, so that the folder serves and loads by itself. Returns the names copied."""
    names = [name for name in TOKENIZER_FILES if (target / name).is_file()]
    for name in names:
        shutil.copyfile(target / name, out / name)
    return names
