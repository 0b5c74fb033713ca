"""Likeliest tokens out of `prompt_logprobs`, in the form in which vLLM gives them."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
import torch

from draftsmith.drafters.remote.completions import PromptLogprobs
from draftsmith.drafters.remote.connection import Connection
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.kernels.sampling.top_tokens import top_probs
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
