"""Table of readers: one for every layout but those of `tests/unit/train/export/test_proof.py`'s
`READ_BY_ITSELF`."""

from __future__ import annotations

from tests.engine_readers import llamacpp, plain, sglang, vllm, vllm_speculators
from tests.engine_readers.understood import Reader

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
