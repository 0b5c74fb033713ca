"""A draft is never asked beyond its own positions: requests go on without it, and are as greedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftsmith.drafters.interface import DraftInputs, Proposal, UnrollBatch
from draftsmith.drafters.lm.draft_lm import DraftLm
from draftsmith.drafters.options import OPTIONS, DraftLmOptions
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.speculate import speculate
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.sampling.params import SamplingParams
from tests.integration.served import make_drafter

POSITIONS, NUM_NEW = 40, 40
PROMPTS = [[5, 9, 13, 200, 31], list(range(20, 56)), list(range(100, 145))]
CONFIG = EngineConfig(compile="off", k=4, max_batch=4, num_blocks=64, block_size=8)
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)


def short_draft(family: str, target: Target) -> Any:
    """A new draft that says it was made for `POSITIONS` tokens."""
    options = DraftLmOptions(hidden_size=16) if family == "draft-lm" else OPTIONS[family]()
    drafter = FAMILIES[family].create(options, target, seed=1)
    config = drafter.lm.config if family == "draft-lm" else drafter.config
    config.max_position_embeddings = POSITIONS
    return drafter.to(device=target.device, dtype=target.dtype).eval()


def watched(drafter: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The longest text, drafted tokens included, of each proposal."""
    longest: list[int] = []
    propose = drafter.propose

    def spy(inputs: DraftInputs) -> Proposal:
        ends = inputs.starts + inputs.lengths + inputs.num_draft
        longest.append(int(ends.max()))
        return propose(inputs)

    monkeypatch.setattr(drafter, "propose", spy)
    return longest


@pytest.mark.parametrize("family", ["eagle3", "draft-lm", "dflash"])
def test_a_draft_with_fewer_positions_than_the_target(target_folder, monkeypatch, caplog, family):
    target = Target.load(target_folder, dtype=torch.float32)
    plain = build_engine(target, None, CONFIG).generate(PROMPTS, GREEDY)
    drafter = short_draft(family, target)
    longest = watched(drafter, monkeypatch)
    engine = build_engine(target, drafter, CONFIG)
    assert f"the draft has {POSITIONS} positions" in caplog.text
    answers = engine.generate(PROMPTS, GREEDY)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]
    assert longest and max(longest) == POSITIONS
    assert sum(answers[0].speculation.offered) > 0 and not answers[2].speculation.offered
    assert not any(engine.stats.fallbacks.values())
    longest.clear()
    batch = speculate(
        drafter, target, PROMPTS, k=4, temperature=0.0, seeds=[0, 1, 2], max_new_tokens=NUM_NEW
    )
    assert [text.tokens[text.num_prompt :] for text in batch.texts] == [
        answer.tokens for answer in plain
    ]
    assert longest and max(longest) == POSITIONS


def test_a_draft_lm_is_not_trained_beyond_its_positions(target_folder):
    target = Target.load(target_folder, dtype=torch.float32)
    drafter: DraftLm = short_draft("draft-lm", target)
    ids = torch.arange(POSITIONS + 1)[None]

    def unroll(segments: torch.Tensor | None) -> None:
        next(
            drafter.unroll(
                UnrollBatch(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    taps=None,
                    num_steps=1,
                    segments=segments,
                )
            )
        )

    unroll((ids > 20).long())  # two texts in a row, neither of which is too long
    with pytest.raises(UserError, match="a text of 41 tokens is longer than the 40 positions"):
        unroll(None)


def test_texts_end_at_the_models_last_position_and_at_their_length(target):
    drafter = make_drafter("draft-lm", target, target_layers=(0, 1, 2))
    long = [3 + place % 285 for place in range(target.max_positions - 3)]
    played = speculate(
        drafter, target, [long, [5, 6]], k=8, temperature=1.0, seeds=[1, 2], max_new_tokens=5
    )
    assert len(played.texts[0].tokens) <= target.max_positions and len(played.texts[1].tokens) <= 7
    assert all(
        sum(one.committed for one in text.rounds) == len(text.tokens) - text.num_prompt
        for text in played.texts
    )


def test_a_prompt_without_tokens_is_refused(target):
    drafter = make_drafter("draft-lm", target)
    with pytest.raises(ValueError, match="without tokens"):
        speculate(drafter, target, [[]], k=2, temperature=0.0, seeds=[0], max_new_tokens=4)
