"""GGUF files for llama.cpp: what is written, what is refused, and the target beside the draft."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftsmith.drafters.target.target import Target
from draftsmith.drafters.weights import read_weights
from draftsmith.errors import UserError
from draftsmith.files import read_json, write_json
from draftsmith.train.config import ExportConfig
from draftsmith.train.export.start import run

pytest.importorskip("gguf", reason="the extra [gguf] is not installed")

from draftsmith.train.export.gguf import (
    CONTROL,
    DRAFT,
    NORMAL,
    TARGET,
    UNUSED,
    Gguf,
    file_type,
    vocabulary,
    write_gguf,
)
from tests.engine_readers import llamacpp
from tests.engine_readers.llamacpp import read_gguf
from tests.unit.train.export import conftest
from tests.unit.train.export.conftest import saved

EAGLE3: dict[str, Any] = {"draft_vocab_size": 100, "taps": (1, 2, 3)}


@pytest.fixture
def made(target: Target, tmp_path: Path) -> Callable[..., Path]:
    return lambda family, **options: saved(family, target, tmp_path / "draft", noise=0.0, **options)


export = partial(conftest.export, to="gguf")


def test_an_eagle3_head_keeps_types_and_gets_absolute_ids(made: Callable[..., Path]) -> None:
    draft = made("eagle3", **EAGLE3)
    content = read_gguf(export(draft) / DRAFT)
    assert content.arch == "eagle3" and content.values["target_layers"] == [1, 2, 3]
    offsets = read_weights(draft)["d2t"]
    assert content.tensors["d2t"].tolist() == (torch.arange(100) + offsets).tolist()
    assert content.values["tokenizer.ggml.pre"] == "gpt-2"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"norm_output": True}, "draft.norm_output=false"),
        ({"fc_norm": True}, "draft.fc_norm=false"),
        ({"taps": (1, 3)}, "exactly 3"),
    ],
)
def test_heads_that_llama_cpp_would_read_as_others_are_refused(
    options: dict[str, Any], reason: str, made: Callable[..., Path]
) -> None:
    draft = made("eagle3", **EAGLE3 | options)
    with pytest.raises(UserError, match=reason):
        export(draft)


def test_a_qwen3_target_beside_a_draft_has_its_own_tensors(
    tiny_target: Callable[..., str], tmp_path: Path
) -> None:
    """Which transformers does not read: its heads are wider than its states."""
    target = Target.load(tiny_target("qwen3"), dtype=torch.float32)
    draft = saved("draft-lm", target, tmp_path / "draft", noise=0.0, target_layers=(0, 3))
    content = read_gguf(export(draft, with_target=True) / TARGET)
    config = llamacpp.own_config(content)
    assert content.arch == "qwen3" and config["head_dim"] == target.config.head_dim
    found = llamacpp.own_names(content.tensors, config, turned=False)
    own = {name.removeprefix("model."): one for name, one in target.model.state_dict().items()}
    assert found.keys() == own.keys() - {"lm_head.weight"}  # its embedding
    assert all(torch.equal(found[name].float(), own[name]) for name in found)


def test_scaled_frequencies_go_into_a_tensor(made: Callable[..., Path]) -> None:
    draft = made("draft-lm", num_layers=1)
    config = read_json(draft / "config.json")
    scaled = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
    write_json(draft / "config.json", {**config, "rope_parameters": scaled})
    factors = read_gguf(export(draft) / DRAFT).tensors["rope_freqs.weight"]
    plain, turned = (
        LlamaRotaryEmbedding(LlamaConfig(**config | {"rope_parameters": parameters})).inv_freq
        for parameters in ({"rope_type": "default", "rope_theta": 10000.0}, scaled)
    )
    torch.testing.assert_close(factors, plain / turned)
    assert factors[0] == pytest.approx(1.0) and factors[-1] == pytest.approx(8.0)
    write_json(
        draft / "config.json", {**config, "rope_parameters": {**scaled, "rope_type": "yarn"}}
    )
    with pytest.raises(UserError, match="rotary embeddings of type 'yarn'"):
        export(draft)


def test_other_kinds_of_models_are_refused(tiny_target: Callable[..., str], tmp_path: Path) -> None:
    target = Target.load(tiny_target("gpt2"), dtype=torch.float32)
    draft = saved("draft-lm", target, tmp_path / "draft", target_layers=(0,))
    with pytest.raises(UserError, match="of kind 'gpt2', and draftsmith writes llama, mistral"):
        export(draft)


def test_with_target_is_refused_where_engines_read_the_target_itself(tmp_path: Path) -> None:
    config = ExportConfig(draft="d", to="vllm", out=str(tmp_path / "out"), with_target=True)
    with pytest.raises(UserError, match="--with-target is for gguf"):
        run(config)


def test_half_precision_stays_and_vectors_are_float32(tmp_path: Path) -> None:
    matrix = torch.randn(4, 8).to(torch.bfloat16)
    content = Gguf("llama", {"block_count": 1}, {"a": matrix, "b": torch.ones(3).half()})
    write_gguf(tmp_path / "file.gguf", content, name="x")
    read = read_gguf(tmp_path / "file.gguf")
    assert torch.equal(read.tensors["a"], matrix) and file_type({"a": matrix}) == 32
    assert read.tensors["b"].dtype == torch.float32


class TestVocabulary:
    def test_special_and_missing_tokens_are_marked(self, tiny_target: Callable[..., str]) -> None:
        folder = Path(tiny_target("llama"))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        found = vocabulary(folder, 291, trust_remote_code=False)
        tokens, kinds = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
        assert tokens[:288] == tokenizer.convert_ids_to_tokens(range(288))
        assert tokens[290] == "[PAD290]" and kinds[288:] == [UNUSED] * 3
        assert kinds[0] == CONTROL and kinds[200] == NORMAL
        assert found["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id
        assert found["tokenizer.ggml.add_bos_token"] is False
        merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
        assert [tuple(merge.split(" ")) for merge in found["tokenizer.ggml.merges"]] == [
            tuple(merge) for merge in merges
        ]

    @pytest.mark.parametrize(
        ("pattern", "rule"),
        [
            (
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
                "qwen2",
            ),
            (
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
                "llama-bpe",
            ),
            (r"\p{L}+", None),
        ],
    )
    def test_the_rule_of_splitting_is_found_by_its_pattern(
        self, pattern: str, rule: str | None, tmp_path: Path
    ) -> None:
        tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
        if rule is None:
            with pytest.raises(UserError, match="no byte-level BPE that draftsmith writes"):
                vocabulary(tmp_path, 2, trust_remote_code=False)
        else:
            found = vocabulary(tmp_path, 2, trust_remote_code=False)
            assert found["tokenizer.ggml.pre"] == rule
