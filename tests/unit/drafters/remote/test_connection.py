"""A server that is away is waited for; what it refuses is said at once."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest
import torch
from safetensors.torch import save

from draftsmith.drafters.remote import connection
from draftsmith.drafters.remote.connection import Connection, NoStates
from draftsmith.drafters.remote.messages import REVISION_HEADER, Texts
from draftsmith.errors import UserError

BUSY = 503
TEXTS = Texts(ids=torch.tensor([5, 6, 7]), lengths=torch.tensor([3]), width=3, taps=(1,))


class Server:
    """Answers in order; the last one again and again."""

    def __init__(self, *answers: httpx.Response | Exception):
        self.answers, self.asked = list(answers), 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        answer = self.answers[min(self.asked, len(self.answers) - 1)]
        self.asked += 1
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses in place of sleeping, on a clock of their own."""
    made: list[float] = []
    monkeypatch.setattr(connection.time, "sleep", made.append)
    monkeypatch.setattr(connection.time, "monotonic", lambda: sum(made))
    return made


def connected(server: Server) -> Connection:
    return Connection("http://host:1/v1/", transport=httpx.MockTransport(server))


def error(status: int, message: str) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": message}})


def test_a_server_that_comes_back_is_asked_again(pauses: list[float]) -> None:
    away = [httpx.ConnectError("refused"), error(BUSY, "starting"), httpx.ReadTimeout("late")]
    server = Server(*away, httpx.Response(200, json={"format": 1}))
    assert connected(server).description() == {"format": 1}
    assert pauses == [0.5, 1.0, 2.0]


def test_an_internal_error_is_waited_for_from_servers_of_completions_alone(
    pauses: list[float],
) -> None:
    answers = error(500, "EngineCore died"), httpx.Response(200, json={"data": []})
    assert connected(Server(*answers)).json("GET", "/v1/models") == {"data": []}
    assert pauses == [0.5]
    with pytest.raises(UserError, match="refuses: EngineCore died"):
        connected(Server(*answers)).states(TEXTS)
    assert pauses == [0.5]


def test_a_server_lost_in_a_long_pass_is_waited_for_from_then_on(
    pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[float] = []

    class Lost(Server):
        def __call__(self, request: httpx.Request) -> httpx.Response:
            taken.append(0.0 if taken else 2 * connection.WAIT_S)
            return super().__call__(request)

    monkeypatch.setattr(connection.time, "monotonic", lambda: sum(pauses) + sum(taken))
    server = Lost(httpx.ReadTimeout("late"), httpx.Response(200, json={"format": 1}))
    assert connected(server).description() == {"format": 1}
    assert pauses == [0.5]


def test_a_server_that_stays_away_is_given_up_in_a_sentence(pauses: list[float]) -> None:
    with pytest.raises(UserError, match=r"http://host:1 does not answer \(refused\); start it"):
        connected(Server(httpx.ConnectError("refused"))).description()
    assert 100 < sum(pauses) <= connection.WAIT_S


@pytest.mark.parametrize(
    "answer, says",
    [
        (error(401, "key"), "asks for another API key; set DRAFTSMITH_API_KEY"),
        (error(404, "Not Found"), r"gives no states of its target \(Not Found\)"),
        (error(400, "ids are outside"), "refuses: ids are outside"),
        (httpx.Response(500), "refuses: status 500"),
        (httpx.Response(200, text="hello"), "its answer is no JSON"),
    ],
)
def test_what_waiting_does_not_mend_is_said_at_once(
    answer: httpx.Response, says: str, pauses: list[float]
) -> None:
    with pytest.raises(UserError, match=says):
        connected(Server(answer)).description()
    assert not pauses


def test_damaged_tensors_and_other_weights_are_refused() -> None:
    headers = {REVISION_HEADER: "new"}
    server = connected(Server(httpx.Response(200, content=b"{", headers=headers)))
    for ask in (server.weights, lambda: server.states(TEXTS), lambda: server.json("GET", "/")):
        with pytest.raises(UserError, match="gives an answer of another form") as refused:
            ask()
        assert not isinstance(refused.value, NoStates)
    server.revision = "old"
    with pytest.raises(UserError, match=r"other weights .* \(revision new, then old\)"):
        server.weights()


ANSWER = {"taps": torch.ones(3, 4), "hidden": torch.ones(3, 4)}
TOP = {"top_ids": torch.ones(3, 2).int(), "top_logprobs": torch.ones(3, 2), "tail": torch.ones(3)}


@pytest.mark.parametrize(
    "texts, answer",
    [
        (TEXTS, {"hidden": ANSWER["hidden"]}),
        (TEXTS, ANSWER | {"hidden": torch.ones(2, 4)}),
        (TEXTS, ANSWER | {"hidden": torch.ones(3, 5)}),
        (TEXTS, ANSWER | {"taps": torch.ones(3, 8)}),
        (TEXTS, ANSWER | {"more": torch.ones(3, 4)}),
        (TEXTS, TOP),
        (replace(TEXTS, taps=(), top=2), ANSWER),
        (replace(TEXTS, taps=(), top=2), TOP | {"tail": torch.ones(3, 1)}),
        (replace(TEXTS, taps=(), top=2), TOP | {"top_ids": torch.ones(3).int()}),
    ],
)
def test_states_of_another_shape_are_refused(texts: Texts, answer: dict[str, torch.Tensor]) -> None:
    server = connected(Server(httpx.Response(200, content=save(answer))))
    server.hidden_size = 4
    with pytest.raises(UserError, match="gives an answer of another form"):
        server.states(texts)
    right = TOP if texts.top else ANSWER
    server = connected(Server(httpx.Response(200, content=save(right))))
    server.hidden_size = 4
    assert server.states(texts)._asdict().keys() >= right.keys()


@pytest.mark.parametrize(
    "url, says",
    [
        ("ftp://host", r"target server ftp://host does not answer \(.*protocol"),
        ("host", r"target server host does not answer \(.*protocol"),
        ("http://host:port", r"option 'target_server' is 'http://host:port', no URL \(.*port"),
        ("", r"target server  does not answer \(.*protocol"),
    ],
)
def test_what_is_no_url_is_refused_at_once(url: str, says: str, pauses: list[float]) -> None:
    with pytest.raises(UserError, match=says):
        Connection(url).description()
    assert not pauses
