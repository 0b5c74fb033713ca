"""The server audit against a server that is a Markov chain and speculates: an honest one passes,
each dishonest one fails for its reason."""

from __future__ import annotations

import json
import math
import random
import re
import threading
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import httpx
import pytest
import torch

from draftsmith.errors import UserError
from draftsmith.serve.audit.command import audit_server, what_to_ask
from draftsmith.serve.audit.config import AuditConfig
from draftsmith.serve.audit.report import Check, Report
from draftsmith.serve.audit.samples import BONUS, CONTEXT_TOKENS, reported_depths

VOCAB = 40
# Small, so wide as to what may stay unseen.
CONFIG = AuditConfig(
    url="http://chain", samples=600, length=4, contexts=2, concurrency=1, bias=0.35, margin=0.1
)
LIE = 6.0
CONTEXT = 2 * CONTEXT_TOKENS + CONTEXT_TOKENS // 4
# for tests of greedy text: nothing is asked of any depth
GREEDY = replace(CONFIG, k=0, samples=600)


@cache
def table(seed: int) -> torch.Tensor:
    return 1.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))


@dataclass
class ChainServer:
    """An OpenAI-compatible server whose next token depends on the last one, with k drafts a round
    from a table like it."""

    k: int = 2
    lies_from: int | None = None  # the drafted depth from which q is given too sharp
    greedy_slip: int | None = None  # the place of a greedy token that is not the argmax
    names_ids: bool = True
    ours: bool = False  # can be asked not to speculate and for reports of rounds
    counts: bool = True
    echoes: bool = True
    table: torch.Tensor = field(default_factory=lambda: table(0))
    drafts: int = 0
    drafted: int = 0
    accepted: Counter[int] = field(default_factory=Counter)
    known: dict[Any, Any] = field(default_factory=dict)

    def handle(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            own = {"owned_by": "draftsmith", "max_draft_depth": self.k} if self.ours else {}
            return httpx.Response(200, json={"data": [{"id": "chain"} | own]})
        if request.url.path == "/metrics":
            return httpx.Response(200, text=self.metrics() if self.counts else "")
        body = json.loads(request.content)
        assert "speculation" not in body or self.ours
        made = [self.choice(body, index) for index in range(body.get("n", 1))]
        return httpx.Response(
            200,
            json={"choices": [choice for choice, _ in made], "metrics": self.reports(body, made)},
        )

    def metrics(self) -> str:
        lines = [
            f"num_drafts_total{{}} {self.drafts}.0",
            f"num_draft_tokens_total{{}} {self.drafted}.0",
        ]
        lines += [
            f'num_accepted_tokens_per_pos_total{{position="{at}"}} {self.accepted[at]}.0'
            for at in range(self.k)
        ]
        return "".join(f"vllm:spec_decode_{line}\n" for line in lines)

    def reports(self, body: dict, made: list) -> dict:
        if not body.get("speculation", {}).get("report"):
            return {}
        reports = [
            dict(zip(("per_step_begin", "per_step_drafted", "per_step_committed"), rounds))
            for _, rounds in made
        ]
        return {"speculative_decoding": reports[0]} if len(reports) == 1 else {"choices": reports}

    def choice(self, body: dict, index: int) -> tuple[dict, list[list[int]]]:
        prompt = [0] if isinstance(body["prompt"], str) else body["prompt"]
        chance = random.Random(body.get("seed", 0) * 1000 + index)
        tokens, rounds = self.write(prompt[-1], body, chance)
        shown = [*prompt, *tokens] if body.get("echo") and self.echoes else tokens
        before = [None, *prompt, *tokens][-len(shown) - 1 : -1]
        # Of the context itself, whose distributions nobody looks at, nothing is told: making them
        # takes most of the time.
        begin = CONTEXT if body.get("echo") else 0
        tops = [
            self.top(last, body["logprobs"]) if place >= begin else None
            for place, last in enumerate(before)
        ]
        return {
            "logprobs": {"tokens": [self.name(token) for token in shown], "top_logprobs": tops}
        }, rounds

    def top(self, last: int, count: int) -> dict[str, float]:
        if ("top", last, count) not in self.known:
            ranked = self.table[last].log_softmax(-1).topk(count)
            pairs = zip(ranked.indices.tolist(), ranked.values.tolist())
            self.known["top", last, count] = {self.name(token): value for token, value in pairs}
        return self.known["top", last, count]

    def name(self, token: int) -> str:
        return f"token_id:{token}" if self.names_ids else chr(65 + token)

    def write(
        self, last: int, body: dict, chance: random.Random
    ) -> tuple[list[int], list[list[int]]]:
        """The tokens, and of every round: where it begins, its drafts, its tokens."""
        if body["temperature"] == 0:
            return self.greedily(last, body), [[], [], []]
        k = body.get("speculation", {}).get("k", self.k)
        tokens = chance.choices(range(VOCAB), self.distribution("p", last, body))
        rounds: list[list[int]] = [[], [], []]
        while len(tokens) < body["max_tokens"]:
            offered = min(k, body["max_tokens"] - len(tokens) - 1)
            made = self.round(tokens[-1], offered, body, chance)
            if offered:
                for column, value in zip(rounds, (len(tokens), offered, len(made))):
                    column.append(value)
            tokens += made
        return tokens, rounds

    def greedily(self, last: int, body: dict) -> list[int]:
        tokens = []
        slips = body.get("speculation", {}).get("k") != 0
        for place in range(body["max_tokens"]):
            last = int(
                self.table[last].argsort()[-2 if place == self.greedy_slip and slips else -1]
            )
            tokens.append(last)
        self.drafted += self.k * len(tokens)
        return tokens

    def round(self, last: int, offered: int, body: dict, chance: random.Random) -> list[int]:
        made: list[int] = []
        self.drafts += offered > 0
        self.drafted += offered
        for depth in range(1, offered + 1):
            p, q = self.distribution("p", last, body), self.distribution("q", last, body)
            draft = chance.choices(range(VOCAB), q)[0]
            told = (
                self.distribution("lie", last, body)
                if self.lies_from is not None and depth >= self.lies_from
                else q
            )
            if chance.random() * told[draft] >= p[draft]:
                return [
                    *made,
                    *chance.choices(range(VOCAB), [max(a - b, 0.0) for a, b in zip(p, told)]),
                ]
            made.append(draft)
            self.accepted[depth - 1] += 1
            last = draft
        return [*made, *chance.choices(range(VOCAB), self.distribution("p", last, body))]

    def distribution(self, kind: str, last: int, body: dict) -> list[float]:
        """p, q, or q as verification has it where the server lies."""
        key = (kind, last, body["temperature"], body.get("top_k"))
        if key not in self.known:
            logits = self.table[last] + (0 if kind == "p" else 0.4) * table(1)[last]
            logits = logits / body["temperature"]
            if body.get("top_k"):
                logits = logits.masked_fill(
                    logits < logits.topk(body["top_k"]).values[-1], -math.inf
                )
            self.known[key] = (logits * (LIE if kind == "lie" else 1)).softmax(-1).tolist()
        return self.known[key]


def audit(server: ChainServer, config: AuditConfig = CONFIG) -> Report:
    return audit_server(config, httpx.MockTransport(server.handle))


def broken(report: Report) -> list[str]:
    return [check.name for check in report.checks if not check.passed]


def distribution(report: Report, name: str) -> Any:
    (check,) = [check for check in report.checks if check.name == name]
    return check


WARM: dict[str, Any] = {"temperature": 0.7, "top_k": 10}


@pytest.mark.parametrize(
    "ours, options",
    [(True, {}), *(pytest.param(False, one, marks=pytest.mark.long) for one in ({}, WARM))],
)
def test_an_honest_server_passes(ours: bool, options: dict) -> None:
    report = audit(
        ChainServer(ours=ours), replace(CONFIG, samples=600 if ours else 2600, **options)
    )
    assert report.verdict == "lossless", report.lines()
    names = {check.name for check in report.checks}
    assert ("greedy text against plain decoding, context 1" in names) == ours
    deep = {f"tokens at drafted depth {depth}" for depth in (1, 2)} | {"bonus tokens"}
    assert names >= (deep if ours else {f"control: a bias of 0.35 among {name}" for name in deep})
    assert "control: draft tokens offered meanwhile" in names
    assert all(
        0 < check.evidence["detectable_bias"] < 0.5
        for check in report.checks
        if "bias" in check.said
    )


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_liar_that_tells_no_rounds_is_found_among_all_tokens(depth: int) -> None:
    found = broken(audit(ChainServer(lies_from=depth), replace(CONFIG, samples=2000)))
    assert "tokens after the first" in found and "tokens without drafts" not in found


@pytest.mark.parametrize("length", [1, 4, 7])
def test_any_length_lets_all_depths_be_drafted(length: int) -> None:
    """Few samples of a flat distribution: nothing is known of any depth, and that is said."""
    report = audit(
        ChainServer(ours=True, k=4), replace(CONFIG, length=length, samples=40, contexts=1)
    )
    assert report.verdict == "powerless", report.lines()
    assert (
        distribution(report, "tokens at drafted depth 1").blind
        and "the deepest round offered 4 drafts, k is 4" in report.notes
    )
    assert "--samples " in report.sentence() and "BLIND" in "\n".join(report.lines())


@pytest.mark.long
def test_a_depth_that_no_sampled_text_reaches_gives_no_verdict() -> None:
    """The server drafts two tokens where four are to be audited."""

    class Shallow(ChainServer):
        def round(self, last: int, offered: int, body: dict, chance: random.Random) -> list[int]:
            return super().round(last, min(offered, 2), body, chance)

    server = Shallow(ours=True, k=4)
    report = audit(server)
    assert report.verdict == "powerless"
    unseen = {check.name for check in report.checks if check.blind}
    assert "tokens at drafted depth 4" in unseen and "tokens at drafted depth 1" not in unseen
    assert (
        "too few tokens at drafted depth 4; give a smaller --k, here --k 2, or" in report.sentence()
    )


def test_a_server_that_tells_nothing_is_audited_once_k_is_stated() -> None:
    report = audit(ChainServer(counts=False), replace(CONFIG, samples=60, contexts=1))
    assert report.verdict == "powerless" and "give --k, 0 if it drafts none" in report.sentence()
    assert any("not known" in line for line in report.notes)
    assert audit(ChainServer(counts=False, k=0), replace(CONFIG, k=0)).verdict == "lossless"


def test_a_server_without_logprobs_of_prompts_is_asked_prefix_by_prefix() -> None:
    config = replace(CONFIG, samples=64, contexts=1, bias=0.6)
    with_echo, without = (
        audit(ChainServer(ours=True, echoes=echoes), config) for echoes in (True, False)
    )
    name = "tokens at drafted depth 2"
    assert distribution(with_echo, name).evidence["log_evidence"] == pytest.approx(
        distribution(without, name).evidence["log_evidence"]
    )


@dataclass
class CrowdedServer(ChainServer):
    """Six requests sent from other threads than the audit's own overlap. Beside one whose prompt is
    longer than `limit`, shorter ones get another token at place 3."""

    limit: int | None = None
    of: str = "all"  # "penalised": those with penalties alone
    lengths: list[int] = field(default_factory=list)
    most: int = 0
    lock: Any = field(default_factory=threading.Lock)
    own: threading.Thread = field(default_factory=threading.current_thread)
    crowd: threading.Barrier = field(default_factory=lambda: threading.Barrier(6, timeout=60.0))

    def handle(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content or "{}")
        if not isinstance(body.get("prompt"), list) or body.get("max_tokens", 1) == 1:
            return super().handle(request)
        is_alone = threading.current_thread() is self.own
        with self.lock:
            self.lengths.append(len(body["prompt"]))
        if not is_alone:
            self.crowd.wait()  # until all have arrived
        with self.lock:
            self.most = max(self.most, len(self.lengths))
            long = self.limit is not None and max(self.lengths) > self.limit
            touched = self.of == "all" or body.get("presence_penalty", 0) > 0
            wrong = long and touched and len(body["prompt"]) <= self.limit
            self.greedy_slip = 3 if wrong else None
            answer = super().handle(request)
            self.greedy_slip = None
        if not is_alone:
            self.crowd.wait()  # until all are answered
        with self.lock:
            self.lengths.remove(len(body["prompt"]))
        return answer


def test_requests_in_flight_at_once_are_answered_as_alone() -> None:
    server = CrowdedServer()
    report = audit(server, replace(GREEDY, temperature=0.0))
    assert report.verdict == "lossless" and server.most == 6
    beside = [check.name for check in report.checks if "beside others" in check.name]
    assert beside == [
        f"greedy text beside others, {length} tokens of context{penalised}"
        for length in (512, CONTEXT, 8)
        for penalised in ("", " with penalties")
    ]


@pytest.mark.parametrize(
    "of, lengths", [("all", (CONTEXT, CONTEXT, 8, 8)), ("penalised", (CONTEXT, 8))]
)
def test_a_server_that_looks_at_its_longest_request_is_found(
    of: str, lengths: tuple[int, ...]
) -> None:
    """Each request alone is answered rightly, so nothing else finds it."""
    report = audit(CrowdedServer(limit=100, of=of), replace(GREEDY, temperature=0.0))
    assert report.verdict == "lossy"
    names = broken(report)
    assert [int(re.findall(r"(\d+) tokens of context", name)[0]) for name in names] == list(lengths)
    assert of == "all" or all("with penalties" in name for name in names)
    # A fork within the margin is noise.
    wide = audit(CrowdedServer(limit=100, of=of), replace(GREEDY, temperature=0.0, margin=100.0))
    assert not [name for name in broken(wide) if "beside others" in name]


@pytest.mark.parametrize("slip, verdict", [(None, "lossless"), (5, "lossy")])
def test_temperature_0_audits_greedy_text_alone(
    slip: int | None, verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report = audit(ChainServer(greedy_slip=slip), replace(CONFIG, temperature=0.0))
    assert report.verdict == verdict
    assert all("greedy" in check.name or check.kind == "control" for check in report.checks)
    if slip is not None:
        assert broken(report) == ["greedy identity, context 0", "greedy identity, context 1"]
        (divergence,) = report.checks[0].evidence["divergences"]
        assert divergence["place"] == slip and 0.1 < divergence["margin"] < 0.5
    # What a slow server is waited for.
    lines = capsys.readouterr().err.splitlines()
    first, *others = (line for line in lines if "draftsmith: " in line)
    assert first.endswith("for contexts, 2 in all") and len(others) == CONFIG.contexts
    *_, last = (line for line in lines if "6 greedy texts behind up to 512" in line)
    assert "12/12 answers" in last


def test_tokens_that_rounding_to_bfloat16_swaps_are_no_finding() -> None:
    slipping = replace(CONFIG, temperature=0.0, margin=AuditConfig.margin)
    found = audit(ChainServer(greedy_slip=5), slipping)
    assert broken(found) == ["greedy identity, context 1"], "the other two are 0.12 apart"


def test_answers_without_drafts_give_no_verdict() -> None:
    """A server whose controller never drafted has shown nothing, however right its answers are."""
    report = audit(ChainServer(ours=True, k=0), replace(CONFIG, samples=60, contexts=1))
    assert report.verdict == "powerless" and "draft tokens offered" in report.sentence()


# Compared with plain decoding


def test_a_server_with_a_switch_is_compared_with_itself() -> None:
    """Ours can be told not to speculate; one that then writes other greedy text is lossy, whatever
    its logprobs say."""
    slipping = audit(ChainServer(ours=True, greedy_slip=5), replace(CONFIG, temperature=0.0))
    assert "greedy text against plain decoding, context 0" in broken(slipping)
    (check,) = [
        check
        for check in slipping.checks
        if check.name == "greedy text against plain decoding, context 0"
    ]
    (found,) = check.evidence["divergences"]
    assert found["place"] == 5
    assert check.said == (
        "the texts differ from token 6 of 32 on, by two tokens "
        f"{found['margin']:.3g} apart in logprob, beyond rounding (0.1)"
    )


TWO_SAMPLES = replace(CONFIG, temperature=0.4, top_k=30, contexts=1, samples=3000, length=2)


@pytest.mark.parametrize("lies_from", [None, 2])
def test_distributions_that_logprobs_do_not_tell_are_compared_by_samples(
    lies_from: int | None,
) -> None:
    report = audit(ChainServer(lies_from=lies_from, ours=True), TWO_SAMPLES)
    assert report.verdict == ("lossless" if lies_from is None else "lossy"), report.lines()
    assert (f"tokens at drafted depth {lies_from}, against plain samples" in broken(report)) == (
        lies_from is not None
    )
    assert "tokens without drafts, against plain samples" not in broken(report)
    assert any("no bias is planted at single depths" in line for line in report.notes)


@pytest.mark.long
@pytest.mark.parametrize("lies_from", [1, 2])
def test_a_server_that_tells_no_rounds_is_not_cleared_by_samples_that_hide_a_depth(
    lies_from: int | None,
) -> None:
    config, server = (
        replace(TWO_SAMPLES, compare_url="http://plain"),
        ChainServer(lies_from=lies_from),
    )
    report = audit_server(
        config, httpx.MockTransport(server.handle), httpx.MockTransport(ChainServer(k=0).handle)
    )
    assert report.verdict == ("lossy" if lies_from == 1 else report.verdict) != "lossless", (
        report.lines()
    )
    assert "tokens without drafts, against plain samples" not in broken(report)


def test_a_server_without_token_ids_is_refused() -> None:
    with pytest.raises(UserError, match="return_tokens_as_token_ids"):
        audit(ChainServer(names_ids=False))


def test_a_filtered_distribution_needs_enough_logprobs() -> None:
    with pytest.raises(UserError, match="top_k up to 20"):
        audit(ChainServer(), AuditConfig(url="http://chain", temperature=0.5))


def test_a_refusal_is_passed_on() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "chain"}]})
        return httpx.Response(400, json={"error": {"message": "no seed here"}})

    with pytest.raises(UserError, match="400: no seed here"):
        audit_server(CONFIG, httpx.MockTransport(refuse))


@pytest.mark.parametrize(
    "answer", [{"json": {"error": {"message": "engine is dead"}}}, {"text": "engine is dead"}, {}]
)
def test_an_answer_that_is_no_completion_is_told(answer: dict) -> None:
    """As of a proxy that says 200 whatever happened behind it; {}: one that comes too late."""

    def broken(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return ChainServer().handle(request)
        if answer:
            return httpx.Response(200, **answer)
        raise httpx.ReadTimeout("timed out")

    with pytest.raises(UserError, match=r"no completion \(engine is dead\)|; raise timeout_s$"):
        audit_server(CONFIG, httpx.MockTransport(broken))


# Its parts


def unseen(count: int, bias: float) -> Check:
    return Check(
        name="",
        kind="check",
        passed=True,
        said="",
        evidence={"num_samples": count, "detectable_bias": bias},
    )


@pytest.mark.parametrize(
    "found, asked",
    [
        (
            {2: unseen(500, 0.24), 3: unseen(200, 0.4)},
            "a bias of 0.2 would not be detected; give --samples 10000",
        ),
        (
            {3: unseen(70, 1.0), 4: unseen(7, 1.0)},
            "too few tokens at drafted depth 4; give a smaller --k, here --k 2",
        ),
        (
            {4: unseen(70, 1.0), BONUS: unseen(0, 1.0)},
            "too few bonus tokens; give a smaller --k, here --k 3 and --samples",
        ),
        (
            {2: unseen(3, 1.0)},
            "too few tokens at drafted depth 2; lower --temperature with --top-k",
        ),
    ],
)
def test_what_is_asked_for_is_one_sentence(found: dict[int, Check], asked: str) -> None:
    assert what_to_ask(AuditConfig(k=4, samples=2000), found).startswith(asked)
    assert what_to_ask(AuditConfig(k=4), {}) == ""


def test_depths_are_those_at_which_tokens_were_decided() -> None:
    """The prefill's token; a round of 3 drafts that kept 1; one without drafts; one that kept both
    of 2, cut at the end."""
    report = {"per_step_begin": [1, 4], "per_step_drafted": [3, 2], "per_step_committed": [2, 3]}
    assert reported_depths(report, 6) == [0, 1, 2, 0, 1, 2]
    assert reported_depths(report, 7) == [0, 1, 2, 0, 1, 2, BONUS]
    assert reported_depths(report, 7, k=2) == [0, 1, 2, 0, 1, 2, BONUS], (
        "a tree of 3 tokens, of which 2 may be kept"
    )
    with pytest.raises(UserError, match="lacks its rounds"):
        reported_depths({"per_step_begin": [1]}, 3)


def test_a_suite_is_audited_behind_its_chats(tmp_path: Any) -> None:
    """Contexts are spread over the tasks, and begin with the chat by the server's own template."""
    path = tmp_path / "suite.jsonl"
    path.write_text("\n".join(json.dumps({"turns": [f"{n}", "more"]}) for n in range(10)))
    config = replace(GREEDY, temperature=0.0, suite=str(path), contexts=2)
    server, prompts, chats = ChainServer(ours=True), [], []

    def handle(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content or "{}")
        if request.url.path == "/tokenize":
            chats.append(body["messages"])
            return httpx.Response(200, json={"tokens": [1, 2, int(body["messages"][0]["content"])]})
        if "prompt" in body:
            prompts.append(body["prompt"])
        return server.handle(request)

    report = audit_server(config, httpx.MockTransport(handle))
    assert report.verdict == "lossless", report.lines()
    assert chats == [[{"role": "user", "content": "0"}], [{"role": "user", "content": "5"}]]
    assert {tuple(prompt[:3]) for prompt in prompts} == {(1, 2, 0), (1, 2, 5)}
    assert len(prompts[2]) == 3 + CONTEXT

    with pytest.raises(UserError, match="makes no token ids of a chat at /tokenize"):
        audit_server(config, httpx.MockTransport(lambda request: httpx.Response(404)
                     if request.url.path == "/tokenize" else server.handle(request)))  # fmt: skip
