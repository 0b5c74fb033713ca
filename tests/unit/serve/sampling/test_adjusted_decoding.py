"""Speculation under penalties, bans and biases; its distribution is that of
`tests/integration/test_served_distribution.py`."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.interface import ServingDrafter
from draftsmith.drafters.options import Eagle3Options
from draftsmith.drafters.target.target import Target
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.sampling.grammar import Grammar
from draftsmith.serve.sampling.params import SamplingParams
from tests.stand_in_drafts import near

PROMPTS = [[5, 6, 7], [30, 31, 30, 31, 30]]


@pytest.fixture(scope="module")
def drafters(target: Target) -> dict[str, ServingDrafter]:
    """One that applies adjustments, one that does so over a part of the vocabulary."""
    counts = torch.arange(target.vocab_size)
    pruned = Eagle3.create(Eagle3Options(draft_vocab_size=100), target, seed=1, token_counts=counts)
    assert pruned.vocab_map is not None
    return {"draft-lm": near(target), "pruned": pruned.eval()}


def test_drafts_that_know_what_is_asked_are_kept_more_often(
    target: Target, drafters: dict[str, ServingDrafter]
) -> None:
    class Deaf:
        """The same draft, told of nothing."""

        def __init__(self, drafter: ServingDrafter):
            self.family, self.taps, self.new_pool = drafter.family, drafter.taps, drafter.new_pool
            self.cached_after, self.drafter = drafter.cached_after, drafter

        def propose(self, inputs):
            return self.drafter.propose(replace(inputs, adjust=None))

    few = tuple(range(40, 72))
    params = SamplingParams(
        temperature=1.0, seed=3, max_tokens=24, allowed_token_ids=few, frequency_penalty=1.0
    )
    kept = []
    for drafter in (drafters["draft-lm"], Deaf(drafters["draft-lm"])):
        engine = build_engine(target, drafter, EngineConfig(k=4, max_batch=8, max_length=64))
        engine.generate([[5 + n, 6, 7] for n in range(8)], params, text=False)
        kept.append(engine.stats.num_accepted_tokens / engine.stats.num_draft_tokens)
    assert kept[0] > kept[1] + 0.2, kept


def test_a_row_draws_the_same_tokens_beside_a_neighbour_with_penalties(
    target: Target, drafters: dict[str, ServingDrafter]
) -> None:
    plain = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
    for name in ("draft-lm", "pruned"):
        texts = []
        for neighbour in (plain, replace(plain, presence_penalty=1.0, bad_words=((7,),))):
            engine = build_engine(
                target, drafters[name], EngineConfig(k=4, max_batch=8, max_length=64)
            )
            requests = [engine.submit([5, 6, 7], plain), engine.submit([9, 9], neighbour)]
            while engine.scheduler.busy:
                engine.step()
            texts.append(requests[0].output)
        assert texts[0] == texts[1], name


def test_a_draft_without_a_token_that_may_come_is_no_failure(
    target: Target, drafters: dict[str, ServingDrafter]
) -> None:
    known = set(drafters["pruned"].vocab_map.tolist())
    foreign = tuple(token for token in range(target.vocab_size) if token not in known)
    for temperature in (0.0, 1.0):
        engine = build_engine(
            target, drafters["pruned"], EngineConfig(k=4, max_batch=8, max_length=64)
        )
        params = SamplingParams(
            temperature=temperature, max_tokens=10, allowed_token_ids=foreign, ignore_eos=True
        )
        done = engine.generate(PROMPTS, params, text=False)
        assert all(set(one.tokens) <= set(foreign) and len(one.tokens) == 10 for one in done)
        assert not engine.stats.fallbacks
        assert engine.stats.num_drafts > 0


def test_a_preempted_request_goes_on_with_what_it_had_counted_and_matched(
    target: Target, drafters: dict[str, ServingDrafter]
) -> None:
    asked = [
        SamplingParams(
            temperature=1.0,
            seed=1,
            max_tokens=24,
            ignore_eos=True,
            frequency_penalty=1.5,
            bad_words=((40, 41),),
        ),
        SamplingParams(
            temperature=1.0, seed=2, max_tokens=24, grammar=Grammar.regex("([a-f]{3} ){4}[0-9]{6}")
        ),
    ]
    texts = []
    for num_blocks in (15, 80):
        engine = build_engine(
            target,
            drafters["draft-lm"],
            EngineConfig(k=3, max_batch=4, max_length=48, block_size=4, num_blocks=num_blocks),
        )
        requests = [engine.submit(prompt, params) for params in asked for prompt in PROMPTS]
        while engine.scheduler.busy:
            engine.step()
        texts.append([request.output for request in requests])
        assert any(request.num_preemptions for request in requests) == (num_blocks == 15)
        assert all(re.fullmatch("([a-f]{3} ){4}[0-9]{6}", request.text) for request in requests[2:])
    assert texts[0] == texts[1]
