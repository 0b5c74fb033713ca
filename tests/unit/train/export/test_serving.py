"""Commands that serve an export."""

from __future__ import annotations

from draftsmith.train.export.serving import vllm_command


def test_a_folder_of_both_models_is_served_with_the_tokenizer_of_the_target() -> None:
    command = vllm_command("mtp", "org/target", "out", 3, stitched=True)
    assert command.startswith("vllm serve out --tokenizer org/target --speculative-config '{")
    spaced = vllm_command("mtp", "my target", "out", 3, stitched=True)
    assert "--tokenizer 'my target' --speculative-config '{" in spaced
    assert "--tokenizer" not in vllm_command("mtp", "org/target", "out", 3)
