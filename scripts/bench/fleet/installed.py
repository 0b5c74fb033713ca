"""The plugin in vLLM's environment without an installation: this tree and a folder with entry
points on its import path."""

from __future__ import annotations

import re
from pathlib import Path

from scripts.paths import ROOT


def entry_points(folder: Path) -> Path:
    """Entry points as an installed draftsmith has them, from pyproject.toml."""
    sections = re.findall(
        r'^\[project\.entry-points\."(.*?)"\]\n((?:[^\[\n].*\n)+)',
        (ROOT / "pyproject.toml").read_text(),
        re.MULTILINE,
    )
    info = folder / "draftsmith-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: draftsmith\nVersion: 0\n")
    lines = [f"[{group}]\n{body.replace(chr(34), '')}" for group, body in sections]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder


def variables(folder: Path, path: str = "") -> dict[str, str]:
    """Environment of a vLLM that has the plugin; `folder` is written, and `path` is imported from
    too."""
    entries = [str(ROOT / "src"), str(entry_points(folder)), path]
    return {"VLLM_PLUGINS": "draftsmith", "PYTHONPATH": ":".join(filter(None, entries))}
