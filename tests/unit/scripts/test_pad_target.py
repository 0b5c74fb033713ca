"""A padded target costs more and computes the same."""

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
from scripts.demo import pad_target

PARAMETERS = 200_000


@pytest.fixture(scope="module")
def padded(tiny_target, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("padded") / "target"
    pad_target.make(Path(tiny_target("llama")), out, PARAMETERS)
    return out


def test_the_padded_target_is_as_large_as_asked_and_says_what_it_is(padded, tiny_target):
    source, target = Target.load(tiny_target("llama")), Target.load(padded)
    size = sum(weight.numel() for weight in target.model.parameters())
    assert abs(size - PARAMETERS) < 0.1 * PARAMETERS
    assert target.revision != source.revision and target.same_as == source.revision
    record = json.loads((padded / "config.json").read_text())["padded"]
    assert record["parameters"] == size


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


def test_its_logits_are_the_sources(tiny_target):
    source = load_model(tiny_target("llama"), trust_remote_code=False, dtype=torch.float32)
    padded, ids = pad_target.pad(source, PARAMETERS), torch.arange(40)[None]
    torch.testing.assert_close(padded(ids).logits, source(ids).logits, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        padded.model.layers[2].mlp.down_proj.weight[3, -1] = 0.5
    assert (padded(ids).logits - source(ids).logits).abs().max() > 1e-3


def test_a_target_that_is_large_already_is_refused(tiny_target):
    source = load_model(tiny_target("llama"), trust_remote_code=False)
    with pytest.raises(ValueError, match="not below 1,000"):
        pad_target.pad(source, 1000)


def test_sizes_are_read_with_their_unit():
    assert [pad_target.number(text) for text in ("100M", "0.4b", "64")] == [10**8, 4 * 10**8, 64]
