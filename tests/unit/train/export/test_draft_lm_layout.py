"""Draft LM exports load by themselves, and what an engine would refuse is refused here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.drafters import checkpoint
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.files import read_json, write_json
from tests.unit.train.export.conftest import export, saved

IDS = torch.randint(2, 288, (1, 9), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("engine", ["vllm", "sglang", "hf"])
def test_the_folder_is_a_model_of_its_own(
    tmp_path: Path, tiny_target: Callable[..., str], engine: str
) -> None:
    target = Target.load(tiny_target("llama"))
    draft = saved("draft-lm", target, tmp_path / "draft", num_layers=1)
    drafter = checkpoint.load(draft, target)
    out = export(draft, engine)
    loaded = AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        torch.testing.assert_close(
            loaded(input_ids=IDS).logits, drafter.model(input_ids=IDS).logits, rtol=1e-5, atol=1e-5
        )
    assert AutoTokenizer.from_pretrained(out).get_vocab() == target.tokenizer().get_vocab()
    assert "attn_implementation" not in json.dumps(read_json(out / "config.json")), (
        "other programs know no such name"
    )


def test_transformers_drafts_with_it(tmp_path: Path, tiny_target: Callable[..., str]) -> None:
    target = AutoModelForCausalLM.from_pretrained(tiny_target("llama"))
    folder = tiny_target("llama")
    draft = saved("draft-lm", Target.load(folder), tmp_path / "draft", init=folder)
    assistant = AutoModelForCausalLM.from_pretrained(export(draft, "hf"))
    plain = target.generate(IDS, max_new_tokens=24, do_sample=False)
    assert torch.equal(
        target.generate(IDS, max_new_tokens=24, do_sample=False, assistant_model=assistant), plain
    )


def test_another_number_of_token_ids_is_refused(
    tmp_path: Path, tiny_target: Callable[..., str]
) -> None:
    AutoModelForCausalLM.from_pretrained(tiny_target("other_vocab")).save_pretrained(
        tmp_path / "draft"
    )
    record = {
        "schema": 1,
        "family": "draft-lm",
        "target": {"name": tiny_target("llama")},
        "evaluation": {},
    }
    write_json(tmp_path / "draft" / "draftsmith.json", record)
    with pytest.raises(UserError, match=r"the draft has 272 token ids and .* has 288"):
        export(tmp_path / "draft", "vllm")
