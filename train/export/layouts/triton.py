"""A model repository for NVIDIA Triton's vLLM backend, around the draft in vLLM's layout.

    OUT/MODEL/config.pbtxt            which backend, and that it streams
    OUT/MODEL/1/model.json            vLLM's engine arguments: the target and its draft
    OUT/MODEL/1/draft/                the draft; an MTP module comes within its target here

The backend hands `model.json` to vLLM as it is, so paths in it are those of the machine that
serves.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftsmith.files import write_json, write_text
from draftsmith.train.export.layouts.serving import vllm_options
from draftsmith.train.export.layouts.source import ExportSource

ENGINE_ARGUMENTS, DRAFT, VERSION = "model.json", "draft", "1"
# Inputs and outputs are left to the backend, which completes them for its version.
CONFIG = """\
name: "{name}"
backend: "vllm"
# vLLM batches by itself, streams by itself, and chooses its devices by itself.
max_batch_size: 0
model_transaction_policy {{
  decoupled: true
}}
instance_group [
  {{
    count: 1
    kind: KIND_MODEL
  }}
]
"""


def in_repository(
    write_vllm: Callable[[ExportSource, Path], None],
) -> Callable[[ExportSource, Path], None]:
    """A writer of the repository from the writer of vLLM's layout."""

    def write(source: ExportSource, out: Path) -> None:
        name = model_name(source.target_name)
        draft = Path(name, VERSION, DRAFT)
        (out / draft).mkdir(parents=True)
        write_vllm(source, out / draft)
        write_text(out / name / "config.pbtxt", CONFIG.format(name=name))
        write_json(
            out / name / VERSION / ENGINE_ARGUMENTS,
            engine_arguments(source, source.out.resolve() / draft),
        )

    return write


def engine_arguments(source: ExportSource, draft: Path) -> dict[str, Any]:
    target = (
        str(Path(source.target_name).resolve())
        if Path(source.target_name).is_dir()
        else source.target_name
    )
    return vllm_options(
        source.family,
        target,
        str(draft),
        source.num_speculative_tokens,
        stitched=source.is_stitched,
    )


def model_name(target_name: str) -> str:
    """The last part of the target's name, in letters that a folder and a URL both take."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", target_name.rstrip("/").split("/")[-1])
