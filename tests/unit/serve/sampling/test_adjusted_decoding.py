"""Speculation under penalties, bans and biases: greedy text as of plain decoding, and of a loop
over transformers' processors."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import NoRepeatNGramLogitsProcessor

from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.interface import ServingDrafter
from draftsmith.drafters.options import Eagle3Options
from draftsmith.drafters.target.target import Target
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.requests.request import FinishReason
from draftsmith.serve.sampling.grammar import Grammar
from draftsmith.serve.sampling.params import SamplingParams
from tests.stand_in_drafts import near

PROMPTS = [[5, 6, 7], [30, 31, 30, 31, 30]]
LENGTH = 10


@pytest.fixture(scope="module")
def drafters(target: Target, fixed_drafter: Callable) -> dict[str, ServingDrafter | None]:
    """One that hears of no adjustment, one that applies them, one that does so over a part of the
    vocabulary."""
    counts = torch.arange(target.vocab_size)
    pruned = Eagle3.create(Eagle3Options(draft_vocab_size=100), target, seed=1, token_counts=counts)
    assert pruned.vocab_map is not None
    return {
        "none": None,
        "fixed": fixed_drafter(),
        "draft-lm": near(target),
        "pruned": pruned.eval(),
    }


@pytest.fixture(scope="module")
def engines(target: Target, drafters: dict[str, ServingDrafter | None]) -> dict[str, EngineCore]:
    config = EngineConfig(k=4, max_batch=4, max_length=64)
    return {
        name: build_engine(target, drafter, config if drafter is not None else replace(config, k=0))
        for name, drafter in drafters.items()
    }


@pytest.fixture(scope="module")
def likely(target: Target) -> list[int]:
    """Tokens that greedy texts of the prompts really hold: what is asked of others
    changes nothing."""
    engine = build_engine(target, None, EngineConfig(k=0, max_length=64))
    done = engine.generate(
        PROMPTS, SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    )
    return sorted({token for one in done for token in one.tokens} - set(target.eos_token_ids))


@st.composite
def asked(draw: st.DrawFn, likely: list[int], vocab_size: int) -> SamplingParams:
    tokens = st.sampled_from(likely)
    words = draw(
        st.lists(st.lists(tokens, min_size=1, max_size=2).map(tuple), max_size=4, unique=True)
    )
    biases = draw(
        st.dictionaries(tokens | st.just(0), st.sampled_from([-6.0, 4.0, 11.0]), max_size=3)
    )
    allowed = draw(st.sampled_from([None, tuple(likely), (*range(0, vocab_size, 2), 0)]))
    return SamplingParams(
        temperature=0,
        max_tokens=LENGTH,
        repetition_penalty=draw(st.sampled_from([1.0, 0.8, 1.6])),
        presence_penalty=draw(st.sampled_from([0.0, 1.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.9, -0.5])),
        logit_bias=tuple(biases.items()),
        bad_words=tuple(words),
        allowed_token_ids=None if allowed is None else tuple(dict.fromkeys(allowed)),
        min_tokens=draw(st.integers(0, 5)),
        stop_token_ids=tuple(draw(st.lists(tokens, max_size=1))),
        logits_processors=draw(st.sampled_from([(), (NoRepeatNGramLogitsProcessor(2),)])),
    )


def plain_loop(
    target: Target, params: SamplingParams, prompt: list[int], adjusted: Callable
) -> list[int] | None:
    """The reference: one whole forward a token. None where nothing is left to choose."""
    text = list(prompt)
    ends = {*target.eos_token_ids, *params.stop_token_ids}
    while len(text) - len(prompt) < LENGTH and (len(text) == len(prompt) or text[-1] not in ends):
        _, hidden = target.states(torch.tensor([text]), torch.ones(1, len(text)), ())
        scores = adjusted(
            params, text, len(prompt), target.eos_token_ids, target.head(hidden[0, -1]).float()
        )
        if not bool((scores > -torch.inf).any()):
            return None
        text.append(int(scores.argmax()))
    return text[len(prompt) :]


@pytest.mark.long
@settings(max_examples=20, deadline=None)
@given(st.data())
def test_greedy_text_is_that_of_the_plain_loop_whatever_is_asked_and_drafted(
    target: Target,
    engines: dict[str, EngineCore],
    likely: list[int],
    adjusted: Callable,
    data: st.DataObject,
) -> None:
    params = data.draw(asked(likely, target.vocab_size))
    expected = [plain_loop(target, params, prompt, adjusted) for prompt in PROMPTS]
    for name, engine in engines.items():
        done = engine.generate(PROMPTS, params, text=False)
        for one, text in zip(done, expected):
            if text is None:
                assert one.finish_reason is FinishReason.ERROR, name
            else:
                assert one.tokens == text, name
        assert not engine.stats.fallbacks, name


def test_drafts_that_know_what_is_asked_are_kept_more_often(
    target: Target, drafters: dict[str, ServingDrafter | None]
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
        temperature=1.0, seed=3, max_tokens=40, allowed_token_ids=few, frequency_penalty=1.0
    )
    kept = []
    for drafter in (drafters["draft-lm"], Deaf(drafters["draft-lm"])):
        engine = build_engine(target, drafter, EngineConfig(k=4, max_batch=8, max_length=64))
        engine.generate([[5 + n, 6, 7] for n in range(8)], params, text=False)
        kept.append(engine.stats.num_accepted_tokens / engine.stats.num_draft_tokens)
    assert kept[0] > kept[1] + 0.2, kept


def test_a_row_draws_the_same_tokens_beside_a_neighbour_with_penalties(
    target: Target, drafters: dict[str, ServingDrafter | None]
) -> None:
    plain = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)
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
    target: Target, drafters: dict[str, ServingDrafter | None]
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
    target: Target, drafters: dict[str, ServingDrafter | None]
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
