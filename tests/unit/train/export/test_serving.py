"""Commands that serve an export."""

from __future__ import annotations

import shlex

import pytest

from draftsmith.train.export.model_card import commands
from draftsmith.train.export.serving import vllm_command


def test_a_folder_of_both_models_is_served_with_the_tokenizer_of_the_target() -> None:
    command = vllm_command("mtp", "org/target", "out", 3, stitched=True)
    assert command.startswith("vllm serve out --tokenizer org/target --speculative-config '{")
    spaced = vllm_command("mtp", "my target", "out", 3, stitched=True)
    assert "--tokenizer 'my target' --speculative-config '{" in spaced
    assert "--tokenizer" not in vllm_command("mtp", "org/target", "out", 3)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "hf", "speculators", "gguf"])
def test_names_are_words_of_the_commands_whatever_is_in_them(engine: str) -> None:
    draft = "my draft; x"
    shown = [words for title, words in commands("eagle3", engine, draft, "a target", 3)]
    for words in map(shlex.split, shown):
        assert any(draft in word for word in words)
        assert "a target" in words or engine in ("speculators", "gguf")


def test_both_files_of_llama_cpp_are_named_in_the_folder_of_the_export() -> None:
    ((_, command),) = commands("eagle3", "gguf", "out", "org/target", 3)
    assert command.startswith("llama-server -m out/target.gguf -md out/draft.gguf --spec-type ")
