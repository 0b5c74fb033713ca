"""Table of layouts: the writer of each family for each engine, or the reason why there is none.
Torch-free: a writer is named by its module in this chapter, which is imported when it writes."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.errors import UserError

if TYPE_CHECKING:
    from draftsmith.train.export.source import ExportSource

# The families that become part of their target's checkpoint; for others its configuration and
# tokenizer are enough.
STITCHED = ("mtp",)
# The families whose export needs some of the target's weights.
NEED_TARGET_WEIGHTS = (*STITCHED, "medusa")
# The pairs that need some likewise: the graph of a head holds the target's embeddings, and the
# speculators library takes them for those of the draft.
TAKE_EMBEDDINGS = (("eagle3", "openvino"), ("eagle1", "speculators"))
# Writers of the target beside the draft.
TARGET_WRITERS = {"gguf": "gguf:write_target", "openvino": "openvino:write_target"}

SPECULATORS = "speculators:write_speculators"
BLOCKS = {
    "vllm": "portable:write_block",
    "sglang": "portable:write_block",
    "speculators": SPECULATORS,
    "gguf": "gguf:write_block",
}
WRITERS: dict[str, dict[str, str]] = {
    "eagle3": {
        "vllm": "portable:write_eagle3",
        "sglang": "portable:write_sglang_eagle3",
        "speculators": SPECULATORS,
        "gguf": "gguf:write_eagle3",
        "openvino": "openvino:write_eagle3",
    },
    "p-eagle": {"vllm": "portable:write_eagle3", "speculators": SPECULATORS},
    "draft-lm": {
        "vllm": "portable:write_plain",
        "sglang": "portable:write_sglang",
        "hf": "portable:write_plain",
        "gguf": "gguf:write_lm",
        "openvino": "openvino:write_lm",
    },
    "mtp": {
        "vllm": "mtp:write_mtp",
        "sglang": "mtp:write_sglang",
        "speculators": "speculators:write_mtp",
    },
    "eagle1": {
        "vllm": "portable:write_vllm_eagle1",
        "sglang": "portable:write_sglang_eagle1",
        "speculators": SPECULATORS,
    },
    "medusa": {"vllm": "portable:write_vllm_medusa", "hf": "portable:write_medusa"},
    "mlp": {"hf": "portable:write_ibm"},
    "dflash": {**BLOCKS},
    "dspark": {**BLOCKS},
}
ENGINES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "hf": "transformers",
    "speculators": "the speculators library",
    "gguf": "llama.cpp",
    "openvino": "OpenVINO GenAI",
}
# Why there is no writer, where the engine does draft with heads of the kind, or draftsmith could.
REASONS: dict[tuple[str, str], str] = {
    (
        "p-eagle",
        "sglang",
    ): "SGLang does not read P-EAGLE's mask_hidden and would draft one token after another",
    ("mtp", "hf"): "transformers drafts one token with an MTP module, and none with MiMo's",
    ("p-eagle", "gguf"): "llama.cpp drafts one token after another with an EAGLE-3 head",
    ("mtp", "gguf"): "llama.cpp reads MTP modules only as layers of the targets that bring them",
    ("p-eagle", "openvino"): "OpenVINO GenAI drafts one token after another with an EAGLE-3 head",
    ("mtp", "openvino"): "OpenVINO GenAI drafts with MTP modules of Gemma 4 alone",
    ("dflash", "openvino"): "draftsmith does not write DFlash to OpenVINO",
}


def needs_target_weights(family: str, engine: str) -> bool:
    return family in NEED_TARGET_WEIGHTS or (family, engine) in TAKE_EMBEDDINGS


def writer(name: str) -> Callable[[ExportSource, Path], None]:
    module, _, function = name.partition(":")
    return getattr(import_module(f"draftsmith.train.export.{module}"), function)


def writer_name(family: str, engine: str) -> str:
    if family not in WRITERS:
        raise UserError(
            f"a draft of family {family!r} has no weights to export; exportable are "
            f"{', '.join(WRITERS)}"
        )
    engines = WRITERS[family]
    if engine not in engines:
        reason = REASONS.get((family, engine), f"{ENGINES[engine]} does not draft with {family}")
        raise UserError(f"{reason}; export this draft --to {' or '.join(engines)}")
    return engines[engine]
