"""Likeliest tokens out of `prompt_logprobs`, in the form in which vLLM gives them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import httpx
import pytest
import torch

from draftsmith.drafters.remote import completions, connection
from draftsmith.drafters.remote.completions import PromptLogprobs
from draftsmith.drafters.remote.connection import Connection, Refused
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.kernels.sampling.top_tokens import TopProbs, top_probs
from tests.vllm_stand_in import StandIn


def connected(answers: Callable[[httpx.Request], httpx.Response]) -> Connection:
    return Connection("http://vllm", transport=httpx.MockTransport(answers), wait_s=0.0)


def test_they_are_those_of_the_targets_logits(tiny_target: Callable[..., str]) -> None:
    target = Target.load(tiny_target("llama"))
    ids = torch.randint(3, 288, (2, 9), generator=torch.Generator().manual_seed(0))
    segments = torch.tensor([[0] * 4 + [1] * 5, [0] * 7 + [-1] * 2])
    mask = (segments >= 0).long()
    logprobs = PromptLogprobs(connected(StandIn(target)), target.vocab_size)
    for packed in (None, segments):
        found = logprobs.likeliest(ids, mask, packed, 5)
        _, hidden = target.states(ids, mask, (), packed)
        wanted = top_probs(target.head(hidden)[mask.bool()], 5)
        ends = [8, 15] if packed is None else [3, 8, 15]
        inner = [at for at in range(16) if at not in ends]
        assert torch.equal(found.ids[inner], wanted.ids[inner])
        for ours, theirs in zip(found[1:], wanted[1:], strict=True):
            torch.testing.assert_close(ours[inner], theirs[inner], rtol=1e-4, atol=1e-5)
        assert (found.tail[ends] == 1).all()


def test_texts_that_were_asked_for_ahead_are_taken_once(tiny_target: Callable[..., str]) -> None:
    stand_in = StandIn(Target.load(tiny_target("llama")))
    logprobs = PromptLogprobs(connected(stand_in), 288)
    ids = torch.tensor([[5, 6, 7], [8, 9, 0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    wanted = logprobs.likeliest(ids, mask, None, 4)
    logprobs.expect(ids, mask, (), None, top=4)
    few = logprobs.likeliest(ids, mask, None, 3)  # not what was asked for
    found = logprobs.likeliest(ids, mask, None, 4)
    assert sorted(stand_in.asked) == [[5, 6, 7]] * 3 + [[8, 9]] * 3
    assert few.ids.shape[1] == 3
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    logprobs.likeliest(ids, mask, None, 4)
    assert len(stand_in.asked) == 8
    logprobs.expect(ids + 300, mask, (), None, top=4)
    with pytest.raises(IndexError):
        logprobs.likeliest(ids + 300, mask, None, 4)


class Failing(StandIn):
    """Answers completions with `status` while there is one."""

    status: int | None = None

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.status is None or request.url.path == "/v1/models":
            return super().__call__(request)
        return httpx.Response(self.status, json={"error": {"message": "EngineCore died"}})


def answer(logprobs: PromptLogprobs, ids: torch.Tensor) -> TopProbs:
    """Likeliest tokens by a server that must not refuse."""
    try:
        return logprobs.likeliest(ids, torch.ones_like(ids), None, 4)
    except UserError as error:
        pytest.fail(str(error))


def test_a_server_whose_engine_ended_is_waited_for(
    tiny_target: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = Failing(Target.load(tiny_target("llama")))
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        stand_in.status = None

    monkeypatch.setattr(connection.time, "sleep", pause)
    logprobs = PromptLogprobs(
        Connection("http://vllm", transport=httpx.MockTransport(stand_in), wait_s=5.0), 288
    )
    ids = torch.tensor([[5, 6, 7]])
    wanted = logprobs.likeliest(ids, torch.ones_like(ids), None, 4)
    stand_in.status = 500
    found = answer(logprobs, ids)
    assert pauses == [connection.FIRST_PAUSE_S]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_batch_that_failed_ahead_is_asked_for_again(tiny_target: Callable[..., str]) -> None:
    stand_in = Failing(Target.load(tiny_target("llama")))
    logprobs = PromptLogprobs(connected(stand_in), 288)
    ids = torch.tensor([[5, 6, 7]])
    mask = torch.ones_like(ids)
    stand_in.status = 500
    logprobs.expect(ids, mask, (), None, top=4)
    says = (
        r"does not answer \(EngineCore died\); start it, then the same command again, which goes on"
    )
    with pytest.raises(UserError, match=says) as lost:
        logprobs.likeliest(ids, mask, None, 4)
    assert "--max-logprobs" not in str(lost.value)
    stand_in.status = None
    assert answer(logprobs, ids).ids.shape == (3, 4)


def test_options_of_vllm_are_named_for_bad_requests_alone(tiny_target: Callable[..., str]) -> None:
    stand_in = Failing(Target.load(tiny_target("llama")))
    logprobs = PromptLogprobs(connected(stand_in), 288)
    ids = torch.tensor([[5, 6, 7]])
    for status, is_named in ((400, True), (404, False), (422, False)):
        stand_in.status = status
        with pytest.raises(UserError, match="refuses: EngineCore died") as refused:
            logprobs.likeliest(ids, torch.ones_like(ids), None, 4)
        assert ("--max-logprobs" in str(refused.value)) is is_named
        assert isinstance(refused.value, Refused) is not is_named


def test_texts_of_a_batch_share_few_threads_and_keep_their_order(
    tiny_target: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = StandIn(Target.load(tiny_target("llama")))
    logprobs = PromptLogprobs(connected(stand_in), 288)
    ids = torch.arange(3, 3 + 7 * 4).view(7, 4)
    single = [logprobs.likeliest(row[None], torch.ones(1, 4).long(), None, 4) for row in ids]
    started: list[object] = []
    begin = completions.in_background

    def counted(ask: Callable[[], Any]) -> Future[Any]:
        started.append(ask)
        return begin(ask)

    monkeypatch.setattr(completions, "AT_ONCE", 3)
    monkeypatch.setattr(completions, "in_background", counted)
    found = logprobs.likeliest(ids, torch.ones_like(ids), None, 4)
    assert len(started) == 3
    for part, parts in zip(found, zip(*single, strict=True), strict=True):
        assert torch.equal(part, torch.cat(parts))


def test_other_answers_are_refused_in_a_sentence(tiny_target: Callable[..., str]) -> None:
    target = Target.load(tiny_target("llama"))
    ids = torch.tensor([[5, 6, 7]])
    few = PromptLogprobs(connected(StandIn(target, most=2)), target.vocab_size)
    with pytest.raises(UserError, match="fewer than 5 prompt_logprobs"):
        few.likeliest(ids, torch.ones_like(ids), None, 5)
    low = PromptLogprobs(connected(StandIn(target, max_logprobs=4)), target.vocab_size)
    with pytest.raises(UserError, match=r"refuses: Requested .* of 5.*; start vLLM with .* 5 or"):
        low.likeliest(ids, torch.ones_like(ids), None, 5)
    small = PromptLogprobs(connected(StandIn(target)), 10)
    with pytest.raises(UserError, match=r"knows a token .* and the target has 10"):
        small.likeliest(ids, torch.ones_like(ids), None, 5)

    def plain(request: httpx.Request) -> httpx.Response:
        listed = {"data": [{"id": "served"}], "choices": [{"text": "x"}]}
        return httpx.Response(200, json=listed)

    with pytest.raises(UserError, match="gives neither states nor prompt_logprobs"):
        PromptLogprobs(connected(plain), 288).likeliest(ids, torch.ones_like(ids), None, 5)
    with pytest.raises(UserError, match="lists no model"):
        PromptLogprobs(connected(lambda request: httpx.Response(200, json={})), 288)
