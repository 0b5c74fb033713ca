"""Older attention classes, biases and scales by position and counted positions: each served with the text of the
model alone, and none of them without its patch."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from packaging.version import Version

from draftsmith.drafters.quirks import patches
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.kernels.attention.paged import PagedPass
from tests.target_kinds import build, outcome_of

PATCHED = (
    "bart", "blenderbot", "blenderbot-small", "bloom", "codegen", "falcon", "gpt_neo",
    "gpt_neox_japanese", "gptj", "llama4_text", "marian", "mbart", "megatron-bert", "mpt", "pegasus", "plbart",
    "rembert",
)  # fmt: skip
# Refused by the probe with transformers 5.16, whose code of them is another; versions between that
# and 5.23 were not run.
NEWER = ("megatron-bert", "rembert")
IS_OLD = Version(transformers.__version__) < Version("5.23")
# Served by the interface, though their decoder layers keep the context to themselves.
UNPASSED = ("nemotron", "stablelm")


@pytest.mark.parametrize("kind", (*PATCHED, *UNPASSED))
def test_greedy_text_is_that_of_the_model_alone(kind):
    if IS_OLD and kind in NEWER:
        pytest.skip(f"transformers {transformers.__version__} has older code of it")
    assert outcome_of(kind).is_served


@pytest.mark.parametrize("kind", PATCHED)
def test_control_unpatched_it_is_refused(kind, monkeypatch, tmp_path):
    monkeypatch.setattr(patches, "PATCHES", {})
    build(kind, tmp_path)
    with pytest.raises(UserError, match="cannot be served"):
        Target.load(tmp_path, dtype=torch.float32)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["bloom", "mpt", "gpt_neo", "llama4_text"])
def test_biases_and_windows_reach_as_far_as_the_models(kind, tmp_path):
    """Over a text much longer than a probe's, in pieces, behind another text of the pass."""
    build(kind, tmp_path)
    target = Target.load(tmp_path, dtype=torch.float32)
    ids = torch.randint(96, (2, 90), generator=torch.Generator().manual_seed(1))
    expected = target.model(ids, use_cache=False).logits
    pool = target.new_pool(24, 8)
    tables = torch.arange(24).view(2, 12)
    pieces = []
    for part in torch.arange(90).split(31):
        lengths = torch.tensor([len(part)] * 2)
        positions = part.repeat(2)
        context = PagedPass(pool, tables, positions, lengths)
        rows = torch.arange(len(positions))
        found = target.forward(ids[:, part].view(1, -1), positions[None], context, rows).logits
        pieces.append(found.view(2, len(part), -1))
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, atol=5e-5, rtol=1e-4)


def test_a_captured_forward_gives_the_same(tmp_path):
    from draftsmith.drafters.compiled.captured import capture_lm

    build("bloom", tmp_path)
    target = Target.load(tmp_path, dtype=torch.float32)
    capture_lm(target)  # compares the two
    assert target.captured


@torch.no_grad()
@pytest.mark.parametrize("kind", ["falcon", "bloom", "gptj", "bart", "zamba2", "llama4_text"])
def test_a_copy_runs_on_its_own_weights(kind, tmp_path):
    build(kind, tmp_path)
    target = Target.load(tmp_path, dtype=torch.float32)
    copied = Target(copy.deepcopy(target.model), "a copy")
    for parameter in copied.model.parameters():
        parameter.mul_(0.5)
    ids = torch.arange(12)[None]
    inputs = ids, torch.ones_like(ids), (), torch.zeros_like(ids)
    halved = copied.states(*inputs)[1]
    for parameter in target.model.parameters():
        parameter.mul_(0.5)
    torch.testing.assert_close(halved, target.states(*inputs)[1])
