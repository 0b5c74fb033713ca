"""What fails for one request ends that request with one sentence; the others of its round and the
engine go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from draftsmith.drafters.target.target import Target
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.engine.loop import MOST_FAILURES, EngineLoop
from draftsmith.serve.http.errors import failure
from draftsmith.serve.requests.request import FinishReason, Request, Update
from draftsmith.serve.sampling.grammar import Grammar
from draftsmith.serve.sampling.params import SamplingParams
from draftsmith.serve.sampling.state import is_own
from tests.conftest import Records
from tests.stand_in_drafts import Knowing, Offering
from tests.waiting import wait_until

PROMPTS = [[5, 60, 7, 200, 9, 33], [9, 9, 41, 8]]
PARAMS = SamplingParams(temperature=1.0, seed=7, max_tokens=14, ignore_eos=True)
REPEATS = MOST_FAILURES + 2


class Failing:
    """Raises from its call number `after` on, and does what `usual` does until then."""

    def __init__(self, usual: Callable[..., Any], after: int):
        self.usual, self.left = usual, after

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise OverflowError("out of range integral type conversion attempted")
        return self.usual(*given, **named)


def text_stream(engine: EngineCore, request: Request, after: int) -> None:
    assert request.text_stream is not None
    request.text_stream.push = Failing(request.text_stream.push, after)


def finishing_text(engine: EngineCore, request: Request, after: int) -> None:
    assert request.text_stream is not None
    request.text_stream.finish = Failing(request.text_stream.finish, 0)


def matcher(method: str) -> Callable[[EngineCore, Request, int], None]:
    def plant(engine: EngineCore, request: Request, after: int) -> None:
        assert request.sampling_state is not None and request.sampling_state.matcher is not None
        own = request.sampling_state.matcher
        setattr(own, method, Failing(getattr(own, method), after))

    return plant


def engines_own(
    owner: Callable[[EngineCore], Any],
    method: str,
    of: Callable[..., Request],
    *,
    at_once: bool = False,
) -> Callable[[EngineCore, Request, int], None]:
    """A part of the engine that raises for this request alone."""

    def plant(engine: EngineCore, request: Request, after: int) -> None:
        usual = getattr(owner(engine), method)
        failing = Failing(usual, 0 if at_once else after)

        def chosen(*given: Any, **named: Any) -> Any:
            return (failing if of(*given) is request else usual)(*given, **named)

        setattr(owner(engine), method, chosen)

    return plant


def first(request: Request, *_: Any) -> Request:
    return request


PLANTED: dict[str, Callable[[EngineCore, Request, int], None]] = {
    "text": text_stream,
    "the rest of the text": finishing_text,
    "grammar's mask": matcher("masks"),
    "grammar's end": matcher("tokens_until_end"),
    "grammar's commit": matcher("commit"),
    "records": engines_own(lambda engine: engine.recorder, "round", lambda row, *_: row.request),
    "the last record": engines_own(lambda engine: engine.recorder, "finish", first, at_once=True),
    "prefix cache": engines_own(lambda engine: engine.scheduler.prefix, "store", first),
    "draft cache": engines_own(
        lambda engine: engine.proposer, "advance", lambda row, *_: row.request
    ),
}


def drawn(
    target: Target, drafter: object, sink: Records, plant: Callable | None, *, overlaps: bool
) -> tuple[Request, list[Request]]:
    """A request in which `plant` makes something raise, and two beside it."""
    engine = build_engine(
        target, drafter, EngineConfig(k=3, block_size=4, compile="off", seed=7), sink=sink
    )
    engine.committer.overlaps = overlaps
    # Without a seed of its own, or it would not be recorded.
    bad = replace(PARAMS, seed=None, grammar=Grammar.regex("[ab]{20,40}"), ignore_eos=False)
    told: list[Update] = []
    request = engine.submit(PROMPTS[0], bad, lambda _, update: told.append(update))
    others = [
        engine.submit(prompt, replace(PARAMS, seed=seed, logprobs=2))
        for seed, prompt in enumerate(PROMPTS)
    ]
    if plant is not None:
        plant(engine, request, 2)
    while engine.busy:
        engine.step()
    assert engine.scheduler.blocks.usage == 0.0
    assert [update.finish_reason for update in told if update.finish_reason] == [
        request.finish_reason
    ]
    assert told[-1].finish_reason is not None
    return request, others


@pytest.fixture(scope="module")
def no_eos(target: Target) -> Iterator[Target]:
    """Without a token of its own for the end a grammar is asked for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "eos_token_ids", ())
        yield target


@pytest.fixture(scope="module")
def undisturbed(no_eos: Target, fixed_drafter: Callable) -> tuple[Request, list[Request]]:
    return drawn(no_eos, fixed_drafter(), Records(), None, overlaps=False)


# Updates are made while the next pass runs, or at once.
@pytest.mark.parametrize(
    "what, overlaps",
    [(what, index % 2 == 0) for index, what in enumerate(PLANTED)] + [("text", False)],
)
def test_what_raises_for_one_request_ends_it_alone(
    what: str,
    overlaps: bool,
    no_eos: Target,
    fixed_drafter: Callable,
    undisturbed: tuple[Request, list[Request]],
) -> None:
    whole, neighbours = undisturbed
    assert whole.finish_reason is FinishReason.LENGTH
    request, others = drawn(no_eos, fixed_drafter(), Records(), PLANTED[what], overlaps=overlaps)
    assert request.finish_reason is FinishReason.ERROR
    assert whole.output[: request.num_output] == request.output
    refusal = failure(request)
    assert refusal is not None and "\n" not in str(refusal)
    if "grammar's" in what and "end" not in what:
        assert refusal.status == 400 and "OverflowError" in str(refusal)
    for one, other in zip(others, neighbours, strict=True):
        assert (one.output, one.text, one.finish_reason) == (
            other.output,
            other.text,
            FinishReason.LENGTH,
        )


def test_what_the_machine_cannot_do_is_nobodys_own(target: Target, fixed_drafter: Callable) -> None:
    engine = build_engine(target, fixed_drafter(), EngineConfig(k=3, compile="off"))
    request = engine.submit(PROMPTS[0], PARAMS)

    def full(tokens: Sequence[int]) -> None:
        raise torch.OutOfMemoryError("the device is full")

    assert request.text_stream is not None
    request.text_stream.push = full
    with pytest.raises(torch.OutOfMemoryError):
        engine.step()
    assert not is_own(MemoryError()) and is_own(ValueError("x"))


def raising(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    if input_ids.shape[1] > 9:
        raise ValueError("no\nscores")
    return scores


def in_vain(target: Target) -> list[SamplingParams]:
    """Requests that cannot be answered, each for another reason."""
    letters = target.tokenizer().convert_tokens_to_ids(["x"])
    impossible = replace(
        PARAMS, ignore_eos=False, grammar=Grammar.regex("[ab]+c"), allowed_token_ids=tuple(letters)
    )
    return [impossible, replace(PARAMS, logits_processors=(raising,))]


@pytest.mark.parametrize("k, with_eos", [(0, True), (3, False)])
def test_requests_in_vain_do_not_stop_the_engine(
    k: int, with_eos: bool, target: Target, fixed_drafter: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Again and again, each time beside an innocent one, which gets what it gets alone."""
    monkeypatch.setattr(target, "eos_token_ids", (0,) if with_eos else ())
    params = replace(PARAMS, k=k)
    alone = build_engine(target, fixed_drafter(), EngineConfig(k=3, compile="off")).generate(
        [PROMPTS[1]], params
    )[0]
    loop = EngineLoop(
        build_engine(target, fixed_drafter(), EngineConfig(k=3, compile="off"))
    ).start()
    try:
        for _ in range(REPEATS):
            told = [(index, []) for index in range(3)]
            asked = [*(replace(one, k=k) for one in in_vain(target)), params]
            requests = [
                loop.submit(PROMPTS[1], one, lambda request, update, own=own: own.append(update))
                for one, (_, own) in zip(asked, told, strict=True)
            ]
            wait_until(lambda asked=requests: all(one.finished for one in asked))
            assert [request.finish_reason for request in requests[:2]] == [FinishReason.ERROR] * 2
            assert (
                "leaves no token at position 4" in requests[0].error
                and "ValueError: no scores" in requests[1].error
            )
            assert (
                requests[2].output == alone.tokens
                and requests[2].finish_reason is FinishReason.LENGTH
            )
            assert loop.healthy and loop.failures == 0
    finally:
        loop.close()


def test_tokens_before_a_position_without_one_are_kept(
    target: Target, fixed_drafter: Callable
) -> None:
    """A draft that is kept in front of such a position is told as plain decoding tells it."""

    def ends(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return (
            torch.full_like(scores, -torch.inf)
            if input_ids.shape[1] >= len(PROMPTS[0]) + 5
            else scores
        )

    params = replace(PARAMS, temperature=0.0, logits_processors=(ends,))
    text = (
        build_engine(target, None, EngineConfig(compile="off"))
        .generate([PROMPTS[0]], replace(params, logits_processors=()))[0]
        .tokens
    )
    outputs = []
    for drafter in (None, Knowing(PROMPTS[0] + text)):
        engine = build_engine(
            target, drafter, EngineConfig(compile="off", **({} if drafter is None else {"k": 3}))
        )
        completion = engine.generate([PROMPTS[0]], params)[0]
        outputs.append((completion.tokens, completion.text))
        assert completion.finish_reason is FinishReason.ERROR
        assert drafter is None or engine.stats.num_accepted_tokens > 2
    assert outputs[0] == outputs[1] and outputs[0][0] == text[:5]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_raises_behind_drafts_that_fall_changes_nothing(
    temperature: float, target: Target
) -> None:
    """Plain decoding never reaches token 7, behind which this processor raises; a draft offers it
    in every round."""
    offered = []

    def picky(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > len(PROMPTS[0]) and int(input_ids[0, -1]) == 7:
            offered.append(input_ids.shape[1])
            raise ValueError("no scores behind 7")
        return scores.index_fill(1, torch.tensor([7]), -torch.inf)

    params = replace(PARAMS, temperature=temperature, logits_processors=(picky,))
    outputs = []
    for drafter, k in ((None, {}), (Offering(7), {"k": 3})):
        engine = build_engine(target, drafter, EngineConfig(compile="off", **k))
        completion = engine.generate([PROMPTS[0]], params)[0]
        assert completion.finish_reason is FinishReason.LENGTH
        outputs.append(completion.tokens)
    assert offered and len(outputs[1]) == PARAMS.max_tokens
    if temperature == 0:
        assert outputs[0] == outputs[1]
