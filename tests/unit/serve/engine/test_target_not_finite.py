"""A target that is not finite behind one token that it never chooses: drafts that offer the token
change no answer.

Seeds draw the same tokens as with a target that is finite there, whatever the rule of verification.
To decide such a round again without drafts would not do: drafts that were drawn would be left out
for what they are, which favours the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from draftsmith.drafters.interface import DraftInputs, Proposal, ServingDrafter
from draftsmith.drafters.target.target import Target
from draftsmith.kernels.sampling.filters import process
from draftsmith.kernels.sampling.random_streams import Purpose, sample
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.requests.request import FinishReason
from draftsmith.serve.sampling.params import SamplingParams
from tests.stand_in_drafts import Offering, Uncached

BAD = 250
PROMPTS = [[5, 60, 7, 200, 9, 33], [9, 9, 41, 8], [77, 12, 5, 8, 30]]
SAMPLED = SamplingParams(temperature=1.0, top_k=6, max_tokens=12, ignore_eos=True)


class Near(Uncached):
    """Draws from the target's own logits with BAD as the likeliest of all, so that good drafts are
    kept and bad ones offered."""

    def __init__(self, sound: Target):
        self.sound, self.offered = sound, 0
        self.known: dict[tuple[int, ...], torch.Tensor] = {}

    def logits(self, texts: list[list[int]]) -> torch.Tensor:
        return torch.stack([self.after(tuple(text)) for text in texts])

    def after(self, text: tuple[int, ...]) -> torch.Tensor:
        if text not in self.known:
            _, hidden = self.sound.states(torch.tensor([text]), torch.ones(1, len(text)), ())
            logits = self.sound.head(hidden[0, -1]).float()
            logits[BAD] = logits.max() - 0.5
            self.known[text] = logits
        return self.known[text]

    def propose(self, inputs: DraftInputs) -> Proposal:
        texts = [list(history) for history in inputs.histories]
        ends = torch.tensor([len(text) for text in texts])
        distributions, tokens = [], []
        for depth in range(int(inputs.num_draft.max())):
            distributions.append(process(self.logits(texts), inputs.sampling))
            tokens.append(sample(distributions[-1], inputs.seeds, ends + depth, Purpose.DRAFT))
            texts = [[*text, token] for text, token in zip(texts, tokens[-1].tolist(), strict=True)]
        drawn = torch.stack(tokens, dim=1)
        self.offered += int((drawn == BAD).sum())
        used = torch.arange(drawn.shape[1]) < inputs.num_draft[:, None]
        return Proposal(
            tokens=torch.where(used, drawn, -1),
            lengths=inputs.num_draft,
            logits=torch.stack(distributions, dim=1),
        )


@pytest.fixture(scope="module")
def targets(tiny_target: Callable[..., str]) -> tuple[Target, Target]:
    """(sound, not finite behind BAD); neither gives BAD a place among its likeliest tokens."""
    pair = []
    for value in (0.5, torch.nan):
        target = Target.load(tiny_target("llama"))
        with torch.no_grad():
            target.model.get_output_embeddings().weight[BAD] = 0.0
            target.model.get_input_embeddings().weight[BAD] = value
        pair.append(target)
    return pair[0], pair[1]


WAYS: dict[str, dict[str, Any]] = {
    "chain": {"k": 3}, "block": {"k": 3, "verification": "block"},
}  # fmt: skip


def answers(
    target: Target, drafter: ServingDrafter | None, way: dict[str, Any], params: SamplingParams
) -> list[list[int]]:
    engine = build_engine(target, drafter, EngineConfig(**way, compile="off", block_size=4))
    requests = [
        engine.submit(prompt, replace(params, seed=seed)) for seed, prompt in enumerate(PROMPTS)
    ]
    while engine.step():
        pass
    assert {request.finish_reason for request in requests} == {FinishReason.LENGTH}, [
        r.error for r in requests
    ]
    assert not engine.stats.fallbacks
    return [request.output for request in requests]


@pytest.fixture(scope="module")
def near(targets: tuple[Target, Target]) -> Near:
    return Near(targets[0])


@pytest.mark.parametrize("way", WAYS)
def test_answers_are_those_of_a_target_that_is_finite_everywhere(
    way: str, targets: tuple[Target, Target], near: Near
) -> None:
    near.offered = 0
    whole, broken = (answers(target, near, WAYS[way], SAMPLED) for target in targets)
    assert whole == broken
    assert near.offered > 5


def test_greedy_answers_are_those_without_drafts(targets: tuple[Target, Target]) -> None:
    greedy = replace(SAMPLED, temperature=0.0)
    offered = answers(targets[1], Offering(BAD), {"k": 3}, greedy)
    assert offered == answers(targets[1], None, {}, greedy)


def test_a_request_whose_own_text_is_not_finite_ends_alone(
    targets: tuple[Target, Target], near: Near
) -> None:
    engine = build_engine(targets[1], near, EngineConfig(k=3, compile="off"))
    lost = engine.submit([5, BAD, 7], SAMPLED)
    others = [
        engine.submit(prompt, replace(SAMPLED, seed=seed)) for seed, prompt in enumerate(PROMPTS)
    ]
    while engine.step():
        pass
    assert lost.finish_reason is FinishReason.ERROR and lost.output == []
    assert [request.output for request in others] == answers(targets[1], near, {"k": 3}, SAMPLED)
