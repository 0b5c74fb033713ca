"""A published version in the layouts of engines, by the writers of `draftsmith export`.

An engine's own environment cannot run them: it pins another transformers.
"""

from __future__ import annotations

import contextlib
import io
import shutil
from collections.abc import Sequence
from pathlib import Path

from draftsmith.errors import UserError
from draftsmith.files import sweep

# Beside the versions: a folder that is no version, so that no server and no learner looks into it.
WORK = "fleet"


class LayoutWriter:
    """Writer of engine layouts below `ROOT/fleet`, each whole or absent. What a kill left whole is
    used again.

    Args:
        target: folder or Hub id; by default the one that the draft names.
    """

    def __init__(
        self,
        root: Path,
        layouts: Sequence[str],
        *,
        target: str | None = None,
        trust_remote_code: bool = False,
    ):
        self.work, self.layouts = root / WORK, tuple(layouts)
        self.target, self.trust_remote_code = target, trust_remote_code

    def write(self, folder: Path) -> dict[str, Path]:
        """Folder by layout of the version in `folder`."""
        written = {}
        for layout in self.layouts:
            out = self.work / folder.name / layout
            if not out.is_dir():
                sweep(out.parent)
                self._export(folder, layout, out)
            written[layout] = out
        return written

    def _export(self, folder: Path, layout: str, out: Path) -> None:
        # Loads torch and transformers: not before the first layout.
        from draftsmith.train.export.command import open_source, run
        from draftsmith.train.export.config import ExportConfig
        from draftsmith.train.export.layouts.serving import VLLM_SPECULATORS
        from draftsmith.train.export.layouts.table import WRITERS

        config = ExportConfig(
            draft=str(folder),
            to=layout,
            out=str(out),
            target=self.target,
            trust_remote_code=self.trust_remote_code,
        )
        source = open_source(config)
        if source.is_stitched:
            raise UserError(
                f"a draft in layout {layout!r} that is a part of its target's checkpoint cannot be "
                f"swapped while serving; publish {str(folder)!r} without --layouts {layout}"
            )
        is_written = layout in WRITERS.get(source.family, {})
        if layout == "speculators" and is_written and source.family not in VLLM_SPECULATORS:
            raise UserError(
                f"{str(folder)!r} is a draft of family {source.family!r}, which engines cannot "
                f"read in layout {layout!r}; publish it with --layouts vllm"
            )
        out.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.redirect_stdout(io.StringIO()):  # its lines are for a person at a terminal
            run(config)

    def clear(self, folder: Path) -> None:
        shutil.rmtree(self.work / folder.name, ignore_errors=True)
