"""A padded target (scripts/pad_target) costs more and computes the same."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from draftsmith.drafters import checkpoint
from draftsmith.drafters.options import Eagle3Options
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.target.load import load_model
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from scripts.demo import pad_target

PARAMETERS = 200_000


@pytest.fixture(scope="module")
def padded(tiny_target, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("padded") / "target"
    pad_target.main([tiny_target("llama"), str(out), "--parameters", str(PARAMETERS)])
    return out


def test_the_padded_target_is_as_large_as_asked_and_says_what_it_is(padded, tiny_target):
    source, target = Target.load(tiny_target("llama")), Target.load(padded)
    size = sum(weight.numel() for weight in target.model.parameters())
    assert abs(size - PARAMETERS) < 0.1 * PARAMETERS
    assert target.revision != source.revision and target.same_as == source.revision
    record = json.loads((padded / "config.json").read_text())["padded"]
    assert record["parameters"] == size and record["source_revision"] == source.revision
    assert f"{size:,} parameters" in (padded / "README.md").read_text()


def test_its_greedy_text_is_the_sources(padded, tiny_target):
    prompts = [[5, 6, 7], [40, 41, 42, 43]]
    source, target = (
        Target.load(folder, dtype=torch.float32) for folder in (tiny_target("llama"), padded)
    )
    assert target.answer(prompts, max_new_tokens=24) == source.answer(prompts, max_new_tokens=24)
    assert target.tokenizer().get_vocab() == source.tokenizer().get_vocab()


def test_a_draft_of_the_source_fits_the_padded_target_without_a_warning(
    padded, tiny_target, tmp_path, caplog
):
    source = Target.load(tiny_target("llama"), dtype=torch.float32)
    draft = FAMILIES["eagle3"].create(Eagle3Options(), source, seed=0)
    checkpoint.save(draft, tmp_path / "draft", source)
    caplog.set_level(logging.WARNING)
    checkpoint.load(tmp_path / "draft", Target.load(padded, dtype=torch.float32))
    assert "other weights" not in caplog.text
    other = Target.load(tiny_target("llama", seed=1), dtype=torch.float32)
    checkpoint.load(tmp_path / "draft", other)
    assert "other weights" in caplog.text


def test_a_unit_that_counts_is_noticed(tiny_target):
    source = load_model(tiny_target("llama"), trust_remote_code=False)
    padded = pad_target.pad(source, PARAMETERS)
    ids = torch.arange(40)[None]
    assert pad_target.check_same(source, padded, ids) < 1e-4
    with torch.no_grad():
        padded.model.layers[2].mlp.down_proj.weight[3, -1] = 0.5
    with pytest.raises(UserError, match="to the bit"):
        pad_target.check_same(source, padded, ids)


@pytest.mark.parametrize(
    ("arch", "size", "message"),
    [("llama", 1000, "at least"), ("qwen3_moe", PARAMETERS, "dense model")],
)
def test_what_cannot_be_padded_is_refused(tiny_target, arch, size, message):
    source = load_model(tiny_target(arch), trust_remote_code=False)
    with pytest.raises(UserError, match=message):
        pad_target.pad(source, size)


def test_sizes_are_read_with_their_unit():
    assert [pad_target.number(text) for text in ("100M", "0.4b", "64")] == [10**8, 4 * 10**8, 64]
