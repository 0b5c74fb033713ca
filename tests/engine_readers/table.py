"""Table of readers: one for every layout but those of `tests/unit/train/export/test_proof.py`'s
`READ_BY_ITSELF`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftsmith.files import read_json
from draftsmith.train.export.serving import DRAFT, ENGINE_ARGUMENTS, VERSION
from tests.engine_readers import llamacpp, plain, sglang, vllm, vllm_speculators
from tests.engine_readers.understood import Reader, Understood

READERS: dict[tuple[str, str], Reader] = {
    ("eagle3", "sglang"): sglang.read_eagle3,
    ("eagle3", "gguf"): llamacpp.read_eagle3,
    ("draft-lm", "vllm"): plain.read_model,
    ("draft-lm", "sglang"): plain.read_model,
    ("draft-lm", "hf"): plain.read_model,
    ("draft-lm", "gguf"): llamacpp.read_draft_lm,
    ("eagle1", "sglang"): sglang.read_eagle1,
    ("medusa", "hf"): plain.read_medusa,
    ("mlp", "hf"): plain.read_mlp,
    ("dflash", "vllm"): vllm.read_dflash,
    ("dflash", "sglang"): sglang.read_dflash,
    ("dflash", "gguf"): llamacpp.read_dflash,
    ("dflash", "speculators"): vllm_speculators.read_dflash,
    ("dspark", "vllm"): vllm.read_dspark,
    ("dspark", "sglang"): sglang.read_dspark,
    ("dspark", "gguf"): llamacpp.read_dspark,
    ("dspark", "speculators"): vllm_speculators.read_dspark,
}


def in_repository(read_vllm: Reader) -> Reader:
    """Triton's vLLM backend reads the draft that its repository holds."""

    def read(folder: Path, target_config: dict[str, Any]) -> Understood | Path:
        return read_vllm(draft_folder(folder), target_config)

    return read


READERS |= {
    (family, "triton"): in_repository(read)
    for (family, engine), read in READERS.items()
    if engine == "vllm"
}


def draft_folder(repository: Path) -> Path:
    """The draft of a repository written here, which its `model.json` names."""
    (found,) = repository.glob(f"*/{VERSION}/{ENGINE_ARGUMENTS}")
    arguments = read_json(found, "engine arguments")
    named = Path(arguments["speculative_config"].get("model", arguments["model"]))
    assert named == (found.parent / DRAFT).resolve()
    return named
