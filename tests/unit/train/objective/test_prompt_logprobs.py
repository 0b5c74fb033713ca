"""Likeliest tokens out of `prompt_logprobs`, in the form in which vLLM gives them."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
import torch

from draftsmith.drafters.interface import TextBatch
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.kernels.sampling.top_tokens import TopProbs, top_probs
from draftsmith.train.objective import prompt_logprobs
from draftsmith.train.objective.prompt_logprobs import AWAY, PatientServer, PromptLogprobs, Refused
from tests.vllm_stand_in import StandIn

VOCAB = 288
IDS = torch.tensor([[5, 6, 7]])


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses in place of sleeping, on a clock of their own."""
    made: list[float] = []
    monkeypatch.setattr(prompt_logprobs.time, "sleep", made.append)
    monkeypatch.setattr(prompt_logprobs.time, "monotonic", lambda: sum(made))
    return made


Answers = Callable[[httpx.Request], httpx.Response]


def source(answers: Answers, top: int = 4, vocab_size: int = VOCAB) -> PromptLogprobs:
    server = PatientServer("http://vllm", "target_server", transport=httpx.MockTransport(answers))
    return PromptLogprobs(server, vocab_size, top)


def batch(ids: torch.Tensor, segments: torch.Tensor | None = None) -> TextBatch:
    mask = torch.ones_like(ids) if segments is None else (segments >= 0).long()
    return TextBatch(
        input_ids=ids, attention_mask=mask, segments=segments, weights=torch.ones(ids.shape)
    )


def read(logprobs: PromptLogprobs, text: TextBatch) -> TopProbs:
    """The likeliest tokens after each token that is no padding."""
    rows, columns = text.attention_mask.bool().nonzero(as_tuple=True)
    found = logprobs.read(text, ()).distributions(rows, columns + 1)
    assert isinstance(found, TopProbs)
    return found


def test_they_are_those_of_the_targets_logits(target: Target) -> None:
    ids = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    segments = torch.tensor([[0] * 4 + [1] * 5, [0] * 7 + [-1] * 2])
    logprobs = source(StandIn(target), 5)
    for text in (batch(ids), batch(ids, segments)):
        found, mask = read(logprobs, text), text.attention_mask
        _, hidden = target.states(ids, mask, (), text.segments)
        wanted = top_probs(target.head(hidden)[mask.bool()], 5)
        ends = [8, 17] if text.segments is None else [3, 8, 15]
        inner = [at for at in range(len(found.ids)) if at not in ends]
        assert torch.equal(found.ids[inner], wanted.ids[inner])
        for ours, theirs in zip(found[1:], wanted[1:], strict=True):
            torch.testing.assert_close(ours[inner], theirs[inner], rtol=1e-4, atol=1e-5)
        assert (found.tail[ends] == 1).all()


class Failing(StandIn):
    """Answers completions with `status` while there is one."""

    status: int | None = None

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.status is None or request.url.path == "/v1/models":
            return super().__call__(request)
        return httpx.Response(self.status, json={"error": {"message": "EngineCore died"}})


@pytest.mark.parametrize("status", AWAY)
def test_a_server_that_comes_back_is_asked_again(
    target: Target,
    pauses: list[float],
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stand_in = Failing(target)
    logprobs = source(stand_in)
    wanted = read(logprobs, batch(IDS))

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        stand_in.status = None if len(pauses) == 3 else status

    monkeypatch.setattr(prompt_logprobs.time, "sleep", pause)
    stand_in.status = status
    found = read(logprobs, batch(IDS))
    assert pauses == [0.5, 1.0, 2.0]
    said = f"server http://vllm does not answer (status {status}: EngineCore died)"
    assert caplog.messages == [f"{said}; waiting for it, 120 s at most"]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_server_lost_in_a_long_pass_is_waited_for_from_then_on(
    pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[float] = []

    def lost(request: httpx.Request) -> httpx.Response:
        taken.append(0.0 if taken else 2 * prompt_logprobs.WAIT_S)
        if len(taken) == 1:
            raise httpx.ReadTimeout("late")
        return httpx.Response(200, json={"data": [{"id": "served"}]})

    monkeypatch.setattr(prompt_logprobs.time, "monotonic", lambda: sum(pauses) + sum(taken))
    assert source(lost).model == "served" and pauses == [0.5]


def test_a_batch_that_failed_is_asked_for_again(target: Target, pauses: list[float]) -> None:
    stand_in = Failing(target)
    logprobs = source(stand_in)
    stand_in.status = 500
    says = r"answer \(status 500: EngineCore died\); start it, then the same command again, which goes on"
    with pytest.raises(UserError, match=says) as gone:
        read(logprobs, batch(IDS))
    assert "--max-logprobs" not in str(gone.value)
    assert 100 < sum(pauses) <= prompt_logprobs.WAIT_S
    stand_in.status = None
    assert read(logprobs, batch(IDS)).ids.shape == (3, 4)


def test_options_of_vllm_are_named_for_bad_requests_alone(
    target: Target, pauses: list[float]
) -> None:
    stand_in = Failing(target)
    logprobs = source(stand_in)
    for status, is_named in ((400, True), (404, False), (422, False)):
        stand_in.status = status
        with pytest.raises(
            UserError, match=f"refuses: status {status}: EngineCore died"
        ) as refused:
            read(logprobs, batch(IDS))
        assert ("--max-logprobs" in str(refused.value)) is is_named
        assert isinstance(refused.value, Refused) is not is_named
    assert not pauses


def test_other_answers_are_refused_in_a_sentence(target: Target) -> None:
    with pytest.raises(UserError, match="fewer than 5 prompt_logprobs"):
        read(source(StandIn(target, most=2), 5), batch(IDS))
    with pytest.raises(
        UserError, match=r"refuses: status 400: Requested .* of 5.*; start vLLM with .* 5 or"
    ):
        read(source(StandIn(target, max_logprobs=4), 5), batch(IDS))
    with pytest.raises(UserError, match=r"knows a token .* and the target has 10"):
        read(source(StandIn(target), 5, vocab_size=10), batch(IDS))
    listed = {"data": [{"id": "served"}], "choices": [{"text": "x"}]}
    with pytest.raises(UserError, match="gives no prompt_logprobs; give the URL of vLLM"):
        read(source(lambda request: httpx.Response(200, json=listed)), batch(IDS))


@pytest.mark.parametrize(
    "answer, says",
    [
        (httpx.Response(401, json={}), "asks for another API key; set DRAFTSMITH_API_KEY"),
        (httpx.Response(404), "refuses: status 404"),
        (httpx.Response(200, text="hello"), "gives an answer that is no JSON"),
        (httpx.Response(200, json={}), "lists no model"),
    ],
)
def test_what_waiting_does_not_mend_is_said_at_once(
    answer: httpx.Response, says: str, pauses: list[float]
) -> None:
    with pytest.raises(UserError, match=says):
        source(lambda request: answer)
    assert not pauses


@pytest.mark.parametrize("url", ["ftp://host", "host", "localhost:8000", "http://host:port", ""])
def test_what_is_no_url_is_refused_at_once(url: str, pauses: list[float]) -> None:
    with pytest.raises(UserError, match=f"option 'target_server' is '{url}', which names no ser"):
        PatientServer(url, "target_server")
    assert not pauses
