"""Older attention classes, biases and scales by position and counted positions: each served with the text of the
model alone, and none of them without its patch."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import pytest
import torch
import transformers
from packaging.version import Version

from draftsmith.drafters.lm.draft_lm import DraftLm
from draftsmith.drafters.options import DraftLmOptions
from draftsmith.drafters.quirks import patches
from draftsmith.drafters.target.target import Target, Ways
from draftsmith.errors import UserError
from draftsmith.kernels.attention.paged import PagedPass
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
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
SKIPS_OLD = pytest.mark.skipif(
    IS_OLD, reason=f"transformers {transformers.__version__} has older code of it"
)


# integration/test_target_kinds.py has the text of every kind; one of each patch is enough here, and
# one served by the interface whose decoder layers keep the context to themselves.
FEW = ("bart", "bloom", "falcon", "gpt_neo", "gptj", "llama4_text", "megatron-bert", "mpt")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[SKIPS_OLD] * (kind in NEWER)) for kind in (*FEW, "nemotron")]
)
def test_greedy_text_is_that_of_the_model_alone(kind):
    assert outcome_of(kind).is_served


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.long] * (kind not in FEW)) for kind in PATCHED]
)
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


# States of recurrent layers: kept from round to round, read piece by piece


@pytest.fixture(scope="module")
def target(tiny_target: Callable[..., str]) -> Target:
    return Target.load(tiny_target("lfm2"))


def test_texts_of_a_packed_row_do_not_share_a_state(target: Target) -> None:
    texts = [torch.arange(3, 12), torch.arange(40, 47)]
    segments = torch.tensor([[0] * 9 + [1] * 7 + [-1] * 2])
    row = torch.cat([*texts, torch.tensor([1, 1])])[None]
    taps, packed = target.states(row, (segments >= 0).long(), (1, 3), segments)
    for text, begin in zip(texts, (0, 9)):
        alone_taps, alone = target.states(text[None], torch.ones(1, len(text)), (1, 3))
        part = slice(begin, begin + len(text))
        torch.testing.assert_close(packed[:, part], alone, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(taps[:, part], alone_taps, atol=1e-5, rtol=1e-4)


def test_what_cannot_be_had_with_a_state_is_refused(
    target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UserError, match="which reads one continuation only; leave tree out"):
        build_engine(target, None, EngineConfig(tree="dynamic"))
    with pytest.raises(UserError, match="recurrent state, which cannot be rolled back"):
        DraftLm.create(DraftLmOptions(init=target.name), target, seed=0)
    with caplog.at_level(logging.INFO, logger="draftsmith.serve.cache.memory"):
        engine = build_engine(target, None, EngineConfig(max_length=64))
    assert engine.scheduler.prefix is None and not target.captured
    assert [record.getMessage()[:21] for record in caplog.records] == ["prefix caching is off"]


@pytest.mark.parametrize(
    ("arch", "ways"),
    [
        ("lfm2", Ways()),
        ("minimax", Ways(padded=False)),
        pytest.param("recurrent_gemma", Ways(False, False), marks=SKIPS_OLD),
    ],
)
def test_answers_are_the_models_own_however_it_generates(
    arch: str, ways: Ways, tiny_target: Callable[..., str]
) -> None:
    target = Target.load(tiny_target(arch))
    assert target._ways == ways
    prompts = [[5, 9, 7, 30, 11], list(range(3, 40)), [4]]
    for prompt, answer in zip(prompts, target.answer(prompts, max_new_tokens=6, ignore_eos=True)):
        tokens = list(prompt)
        for _ in answer:
            _, hidden = target.states(torch.tensor([tokens]), torch.ones(1, len(tokens)), ())
            tokens.append(int(target.head(hidden[0, -1]).argmax()))
        assert answer == tokens[len(prompt) :]
