"""The live view of text: whose it is, what became of each token, and that it stays small."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from draftsmith.drafters.target.target import Target
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.dashboard.live_text import KEPT, TextView, pieces
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import Engine
from draftsmith.serve.requests.request import Request, RequestOptions
from draftsmith.serve.sampling.params import SamplingParams
from tests.tokenizer_kinds import ALL

PROMPT = [40, 41, 42, 43]


@pytest.fixture
def engine(target: Target, fixed_drafter: Callable) -> Engine:
    return build_engine(
        target, fixed_drafter(sharpness=0.5), EngineConfig(k=3, max_batch=4, compile="off")
    )


def served(engine: Engine, **options: object) -> Request:
    request = engine.submit(
        PROMPT,
        SamplingParams(max_tokens=24, seed=3, ignore_eos=True),
        options=RequestOptions(**options),
    )
    while not request.finished:
        engine.step()
    return request


def test_what_is_shown_joins_to_the_answer_and_counts_agree(engine: Engine, target: Target) -> None:
    view = TextView()
    engine.observe_rounds(view.add_round)
    request = served(engine, request_class="code")
    shown = view.after(0)
    assert [token for one in shown for token in (*one.accepted, *one.own)] == request.output
    assert {one.request_class for one in shown} == {"code"} and {one.request for one in shown} == {
        request.id
    }
    assert sum(len(one.accepted) for one in shown) == engine.stats.num_accepted_tokens > 0
    # A draft is accepted, rejected, or trimmed by the end of the answer.
    kept = sum(engine.stats.acceptance.accepted)
    assert sum(len(one.rejected) for one in shown) == engine.stats.num_draft_tokens - kept > 0
    tokenizer = target.tokenizer()
    text = "".join(
        one["accepted"] + one["target"] for one in (pieces(one, tokenizer) for one in shown)
    )
    # Random weights write broken characters, which a round's end may cut.
    assert "".join(filter(str.isascii, text)) == "".join(
        filter(str.isascii, tokenizer.decode(request.output))
    )


def test_a_request_that_keeps_out_of_learning_is_never_shown(engine: Engine) -> None:
    view = TextView()
    engine.observe_rounds(view.add_round)
    served(engine, learn=False)
    assert view.after(0) == []
    served(engine)
    assert view.after(0)


def test_only_new_rounds_are_told_and_old_ones_are_forgotten(engine: Engine) -> None:
    view = TextView()
    request = served(engine)
    for _ in range(KEPT + 10):
        view.add_round(request, [1, 2], 1, request.output[-2:])
    shown = view.after(0)
    assert len(shown) == KEPT and shown[-1].number == KEPT + 10
    assert [one.number for one in view.after(KEPT + 8)] == [KEPT + 9, KEPT + 10]


def test_a_character_of_several_tokens_is_whole_inside_its_text(target: Target) -> None:
    tokenizer = target.tokenizer()
    tokens = tokenizer("x\u00e9")["input_ids"]
    assert len(tokens) == 3, "an accented letter is two bytes and so two tokens here"
    view = TextView()
    request = Request(
        id="r",
        tokens=list(tokens),
        num_prompt=1,
        params=SamplingParams(),
        seed=0,
        k=2,
        max_tokens=4,
    )
    view.add_round(request, list(tokens[1:]), 2, list(tokens[1:]))
    assert pieces(view.after(0)[0], tokenizer)["accepted"] == "\u00e9"
    # Drafted by half and completed by the target.
    view.add_round(request, list(tokens[1:2]), 1, list(tokens[1:]))
    shown = pieces(view.after(1)[0], tokenizer)
    assert (shown["accepted"], shown["target"]) == ("", "\u00e9")


@pytest.mark.parametrize("kind", sorted(ALL))
def test_rounds_join_to_the_text_whatever_the_tokenizer(kind: str) -> None:
    tokenizer, view = ALL[kind], TextView()
    text = "a a dim x END" if kind in ("metaspace", "wordpiece", "suffix") else "a 😀😀😀😀 日é x"
    if kind in ("metaspace", "wordpiece", "suffix"):
        tokens = list(range(1, len(tokenizer))) * 3
    else:
        tokens = tokenizer(f"{text} {text}", add_special_tokens=False)["input_ids"]
    for at in range(1, len(tokens), 3):
        request = Request(
            id="r", tokens=tokens[: at + 3], num_prompt=1, params=SamplingParams(), seed=0, k=2,
            max_tokens=99,
        )  # fmt: skip
        view.add_round(request, [*tokens[at : at + 2], 5], 2, tokens[at : at + 3])
    shown = [pieces(one, tokenizer) for one in view.after(0)]
    told = "".join(one["accepted"] + one["target"] for one in shown)
    assert tokenizer.decode(tokens[:1]) + told == tokenizer.decode(tokens)
