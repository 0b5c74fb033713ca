"""Draft LM exports load by themselves, and what an engine would refuse is refused here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.drafters import checkpoint
from draftsmith.drafters.lm.draft_lm import DraftLm
from draftsmith.drafters.options import DraftLmOptions
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.files import read_json, write_json
from draftsmith.train.config import ExportConfig
from draftsmith.train.export.command import run

IDS = torch.randint(2, 288, (1, 9), generator=torch.Generator().manual_seed(1))


def trained(folder: Path, target: Target, options: DraftLmOptions) -> DraftLm:
    drafter = DraftLm.create(options, target, seed=0)
    generator = torch.Generator().manual_seed(2)
    for parameter in drafter.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    checkpoint.save(drafter, folder, target)
    return drafter


@pytest.mark.parametrize("engine", ["vllm", "sglang", "hf"])
def test_the_folder_is_a_model_of_its_own(
    tmp_path: Path, tiny_target: Callable[..., str], engine: str
) -> None:
    target = Target.load(tiny_target("llama"))
    drafter = trained(tmp_path / "draft", target, DraftLmOptions(num_layers=1))
    assert (
        run(ExportConfig(draft=str(tmp_path / "draft"), to=engine, out=str(tmp_path / "out"))) == 0
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(
            loaded(input_ids=IDS).logits, drafter.model(input_ids=IDS).logits, rtol=1e-5, atol=1e-5
        )
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab()
        == target.tokenizer().get_vocab()
    )
    assert "attn_implementation" not in json.dumps(read_json(tmp_path / "out" / "config.json")), (
        "other programs know no such name"
    )


def test_transformers_drafts_with_it(tmp_path: Path, tiny_target: Callable[..., str]) -> None:
    target = AutoModelForCausalLM.from_pretrained(tiny_target("llama"))
    options = DraftLmOptions(init=tiny_target("llama"))
    trained(tmp_path / "draft", Target.load(tiny_target("llama")), options)
    run(ExportConfig(draft=str(tmp_path / "draft"), to="hf", out=str(tmp_path / "out")))
    assistant = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
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
        run(ExportConfig(draft=str(tmp_path / "draft"), to="vllm", out=str(tmp_path / "out")))
