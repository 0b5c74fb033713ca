"""Options of `draftsmith export`. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from draftsmith.config import AT_LEAST_1, option
from draftsmith.drafters.config import TRUST_HELP

LAYOUTS = ("vllm", "sglang", "speculators", "hf", "triton", "gguf", "openvino")


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    draft: str = option(help="the draft checkpoint, a folder or a Hub id", positional=True)
    to: str = option(help="whose layout to write", choices=LAYOUTS)
    out: str = option(help="folder to write; replaced whole if it is an earlier export")
    target: str | None = option(
        None, "folder or Hub id of the target [default: the one the draft was trained for]"
    )
    trust_remote_code: bool = option(False, TRUST_HELP)
    with_target: bool = option(
        False, "write the target beside the draft, where the layout holds targets (gguf, openvino)"
    )
    speculative_tokens: int = option(
        3, "draft length k that the export recommends to the engine", limits=AT_LEAST_1
    )
    push: str | None = option(None, "upload the export to this Hub repository, user/repo")
    private: bool = option(False, "make the Hub repository private when --push creates it")
