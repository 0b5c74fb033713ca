"""`/v1/speculation/{answer}`: the drafting of a running answer is read, stopped and resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.options import Eagle3Options
from draftsmith.drafters.target.target import Target
from draftsmith.serve.config import EngineConfig

PROMPT, REPORT = [5, 60, 7, 200, 9, 33], {"report": True}
KEY, OTHER = ({"authorization": f"Bearer {key}"} for key in ("first", "second"))


@pytest.fixture(scope="module")
def server(target: Target, live_server: Callable) -> Any:
    drafter = Eagle3.create(Eagle3Options(), target, seed=1).eval()
    keys = ("first", "second")
    config = EngineConfig(k=3, compile="off")
    return live_server(target, drafter, config, api_key=keys).slow(0.02)


def test_drafting_of_a_running_answer_stops_and_resumes(server: Any, target: Target) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 60, "temperature": 0, "stream": True}
    options = {"n": 2, "ignore_eos": True, "return_token_ids": True, "speculation": REPORT}
    chunks: list[dict[str, Any]] = []
    states: list[list[dict[str, Any]]] = []

    def ask(**change: int) -> None:
        path = f"/v1/speculation/{chunks[0]['id']}"
        method = "POST" if change else "GET"
        answer = server.http.request(method, path, json=change or None, headers=KEY)
        assert answer.status_code == 200 and answer.json()["id"] == chunks[0]["id"]
        states.append(answer.json()["choices"])

    with server.http.stream("POST", "/v1/completions", json=body | options, headers=KEY) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunks.append(json.loads(line.removeprefix("data: ")))
            if len(chunks) in (2, 12, 22):
                ask(**{2: {"k": 0}, 12: {}, 22: {"k": 2}}[len(chunks)])
                refused = server.http.get(f"/v1/speculation/{chunks[0]['id']}", headers=OTHER)
                assert refused.status_code == 404, "another client's"
    told = [[each["drafting"] for each in state] for state in states]
    assert told == [["off", "off"], ["off", "off"], ["on", "on"]]
    assert states[0][0]["num_draft_tokens"] == states[1][0]["num_draft_tokens"]
    assert states[1][0]["num_target_passes"] > states[0][0]["num_target_passes"]
    report = chunks[-1]["metrics"]["choices"][0]
    assert 2 in report["per_step_drafted"][1:] and report["num_target_passes"] > 20
    texts: dict[int, list[int]] = {0: [], 1: []}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        texts[choice["index"]] += choice["token_ids"]
    alone = target.answer([PROMPT], max_new_tokens=60, ignore_eos=True)[0]
    assert texts == {0: alone, 1: alone}
    gone = server.http.post(f"/v1/speculation/{chunks[0]['id']}", json={"k": 0}, headers=KEY)
    assert gone.status_code == 404 and gone.json()["error"]["code"] == "not_running"


@pytest.mark.parametrize("body", [{}, {"k": -1}, {"k": 65}, {"k": 1, "depth": 2}, {"k": None}])
def test_a_wrong_change_is_refused(body: dict[str, Any], server: Any) -> None:
    refused = server.http.post("/v1/speculation/cmpl-a", json=body, headers=KEY)
    assert refused.status_code == 400 and refused.json()["error"]["param"] in ("k", "depth")


def test_a_key_is_asked_for_and_states_are_counted(server: Any) -> None:
    assert server.http.get("/v1/speculation/cmpl-a").status_code == 401
    paths = server.http.get("/openapi.json").json()["paths"]["/v1/speculation/{answer}"]
    assert all(
        set(one["responses"]) == {"200", "400", "401", "404", "503"} for one in paths.values()
    )
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 30, "temperature": 0}
    body |= {"ignore_eos": True, "speculation": REPORT}
    answer = server.http.post("/v1/completions", json=body, headers=KEY)
    report = answer.json()["metrics"]["speculative_decoding"]
    assert report["num_target_passes"] > 0
    assert server.metric("draftsmith_requests_drafting", state="on") == 0


def test_k_needs_a_drafter(target: Target, live_server: Callable) -> None:
    server = live_server(target, None, EngineConfig()).slow(0.02)
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 20, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()  # kept: an iterator that ends early ends the answer
        first = next(line for line in lines if line.startswith("data: {"))
        answer = json.loads(first.removeprefix("data: "))["id"]
        refused = server.http.post(f"/v1/speculation/{answer}", json={"k": 1})
        assert refused.status_code == 400 and "no drafter" in refused.json()["error"]["message"]
        assert server.http.post(f"/v1/speculation/{answer}", json={"k": 0}).status_code == 200


def test_a_wrong_method_names_all_that_are_allowed(server: Any) -> None:
    refused = server.http.options("/v1/speculation/cmpl-a", headers=KEY)
    assert (refused.status_code, refused.headers["Allow"]) == (405, "GET, POST")
