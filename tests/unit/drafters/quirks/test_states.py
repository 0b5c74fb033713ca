"""States of recurrent layers: kept from round to round, read piece by piece."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
import transformers
from packaging.version import Version

from draftsmith.drafters.lm.draft_lm import DraftLm
from draftsmith.drafters.options import DraftLmOptions
from draftsmith.drafters.target.target import Target, Ways
from draftsmith.errors import UserError
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine

# The probe refuses it with transformers 5.16; versions between that and 5.23 were not run.
NEWER = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason=f"transformers {transformers.__version__} has older code of it",
)


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
        pytest.param("recurrent_gemma", Ways(False, False), marks=NEWER),
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
