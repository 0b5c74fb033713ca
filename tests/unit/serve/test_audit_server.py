"""The server audit against a server that is a Markov chain: an honest one passes, each dishonest one fails for its reason."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field, replace

import httpx
import pytest
import torch

from draftsmith.errors import UserError
from draftsmith.serve.audit_config import AuditConfig
from draftsmith.serve.audit_law import CoarseLaw
from draftsmith.serve.audit_report import Report
from draftsmith.serve.audit_server import audit_server

VOCAB = 40
CONFIG = AuditConfig(url="http://chain", samples=2000, contexts=2, concurrency=1)


@dataclass
class ChainServer:
    """An OpenAI-compatible server whose next token depends on the last one."""

    drops_residual: bool = False
    greedy_slip: int | None = None  # the place of a greedy token that is not the argmax
    names_ids: bool = True
    drafted: int = 0
    counts_drafts: bool = True
    switches: bool = False  # can be told not to speculate, and is right then
    table: torch.Tensor = field(
        default_factory=lambda: 1.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))
    )

    def handle(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            owner = {"owned_by": "draftsmith"} if self.switches else {}
            return httpx.Response(200, json={"data": [{"id": "chain"} | owner]})
        if request.url.path == "/metrics":
            text = f'vllm:spec_decode_num_draft_tokens_total{{a="b"}} {self.drafted}.0\n' if self.counts_drafts else ""
            return httpx.Response(200, text=text)
        body = json.loads(request.content)
        assert "speculation" not in body or self.switches
        return httpx.Response(200, json={"choices": [self.choice(body, index) for index in range(body.get("n", 1))]})

    def choice(self, body: dict, index: int) -> dict:
        last = 0 if isinstance(body["prompt"], str) else body["prompt"][-1]
        chance = random.Random(body.get("seed", 0) * 1000 + index)
        names, tops = [], []
        for place in range(body["max_tokens"]):
            logprobs = self.table[last].log_softmax(-1)
            last = self.next(logprobs, body, place, chance)
            names.append(self.name(last))
            ranked = logprobs.topk(body["logprobs"])
            tops.append({self.name(i): value for i, value in zip(ranked.indices.tolist(), ranked.values.tolist())})
        self.drafted += body["max_tokens"] - 1
        return {"logprobs": {"tokens": names, "top_logprobs": tops}}

    def name(self, token: int) -> str:
        return f"token_id:{token}" if self.names_ids else chr(65 + token)

    def next(self, logprobs: torch.Tensor, body: dict, place: int, chance: random.Random) -> int:
        speculates = "speculation" not in body
        if body["temperature"] == 0:
            return int(logprobs.argsort()[-2 if place == self.greedy_slip and speculates else -1])
        logits = logprobs / body["temperature"]
        if body.get("top_k"):
            logits = logits.masked_fill(logits < logits.topk(body["top_k"]).values[-1], -math.inf)
        p = logits.softmax(-1)
        if self.drops_residual and speculates and place > 0:
            kept = torch.minimum(p, p.roll(1))
            p = kept + (1 - kept.sum()) * p
        return chance.choices(range(VOCAB), p.tolist())[0]


def audit(server: ChainServer, config: AuditConfig = CONFIG) -> Report:
    return audit_server(config, httpx.MockTransport(server.handle))


def broken(report: Report) -> list[str]:
    return [check.name for check in report.checks if not check.passed]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 10}])
def test_an_honest_server_passes(options: dict) -> None:
    report = audit(ChainServer(), AuditConfig(url="http://chain", samples=2000, contexts=2, concurrency=1, **options))
    assert report.verdict == "lossless", report.lines()
    controls = {check.name for check in report.checks if check.kind == "control"}
    assert len(controls) == 3 and "control: draft tokens offered meanwhile" in controls


def test_a_biased_server_fails_where_speculation_begins() -> None:
    report = audit(ChainServer(drops_residual=True), AuditConfig(url="http://chain", samples=4000, contexts=2, concurrency=1))
    assert report.verdict == "lossy"
    assert "token 2 given its prefix, counts" in broken(report)
    assert "token 1 given its prefix, counts" not in broken(report), "the first token comes from the prefill"


def test_a_greedy_slip_is_a_divergence_with_its_margin() -> None:
    report = audit(ChainServer(greedy_slip=5))
    assert broken(report) == ["greedy identity, context 0", "greedy identity, context 1"]
    (divergence,) = report.checks[0].evidence["divergences"]
    assert divergence["place"] == 5 and divergence["margin"] > 0.1


def test_a_slip_within_the_margin_is_noise() -> None:
    slips = [check.evidence["divergences"][0]["margin"] for check in audit(ChainServer(greedy_slip=5)).checks[:2]]
    report = audit(ChainServer(greedy_slip=5), replace(CONFIG, margin=max(slips) + 0.01))
    assert report.verdict == "lossless"
    (control,) = [check for check in report.checks if check.name == "control: second likeliest token"]
    assert 0 < control.evidence["seen"] < control.evidence["places"] == 64
    blind = audit(ChainServer(greedy_slip=5), replace(CONFIG, margin=100.0))
    assert blind.verdict == "powerless", "no slip at all would be seen"


@pytest.mark.parametrize("slip, verdict", [(None, "lossless"), (5, "lossy")])
def test_temperature_0_audits_greedy_text_alone(slip: int | None, verdict: str) -> None:
    report = audit(ChainServer(greedy_slip=slip), replace(CONFIG, temperature=0.0))
    assert report.verdict == verdict
    assert all("greedy" in check.name or check.kind == "control" for check in report.checks)


def test_a_server_that_counts_no_drafts_is_noted() -> None:
    assert any("not known" in line for line in audit(ChainServer(counts_drafts=False)).notes)


def test_answers_without_drafts_give_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server whose controller never drafted has shown nothing, however right its answers are."""
    monkeypatch.setattr(ChainServer, "drafted", property(lambda self: 10**9, lambda self, value: None), raising=False)
    report = audit(ChainServer())
    assert report.verdict == "powerless" and "draft tokens offered" in report.sentence()


# Compared with plain decoding


def test_a_server_with_a_switch_is_compared_with_itself() -> None:
    """Ours can be told not to speculate; one that then writes other greedy text is lossy, whatever its logprobs say."""
    honest = audit(ChainServer(switches=True))
    assert honest.verdict == "lossless", honest.lines()
    assert "greedy text against plain decoding, context 1" in {check.name for check in honest.checks}
    slipping = audit(ChainServer(switches=True, greedy_slip=5))
    assert "greedy text against plain decoding, context 0" in broken(slipping)
    (check,) = [check for check in slipping.checks if check.name == "greedy text against plain decoding, context 0"]
    assert check.evidence["divergences"][0]["place"] == 5 and "forks at token 6 of 32" in check.said


def test_another_server_can_be_the_witness() -> None:
    """Here the audited server's own logprobs would clear it: the model it serves is another one."""
    swapped = ChainServer(table=ChainServer().table.roll(1, dims=1))
    assert audit(swapped).verdict == "lossless"
    config = replace(CONFIG, compare_url="http://plain")
    report = audit_server(config, httpx.MockTransport(swapped.handle), httpx.MockTransport(ChainServer().handle))
    assert report.verdict == "lossy" and "token 1 given its prefix, counts" in broken(report)
    same = audit_server(config, httpx.MockTransport(ChainServer().handle), httpx.MockTransport(ChainServer().handle))
    assert same.verdict == "lossless", same.lines()


@pytest.mark.parametrize("switches", [True, False])
@pytest.mark.parametrize("drops_residual", [True, False])
def test_laws_that_logprobs_do_not_tell_are_compared_by_samples(switches: bool, drops_residual: bool) -> None:
    server = ChainServer(drops_residual=drops_residual, switches=switches)
    config = replace(CONFIG, temperature=0.8, top_k=30, contexts=1, samples=4000)
    config = config if switches else replace(config, compare_url="http://plain")
    report = audit_server(config, httpx.MockTransport(server.handle), httpx.MockTransport(ChainServer().handle))
    assert report.verdict == ("lossy" if drops_residual else "lossless"), report.lines()
    assert ("token 2 given its prefix, against plain samples" in broken(report)) == drops_residual
    assert "token 1 given its prefix, against plain samples" not in broken(report)


def test_a_server_without_token_ids_is_refused() -> None:
    with pytest.raises(UserError, match="return_tokens_as_token_ids"):
        audit(ChainServer(names_ids=False))


def test_a_filtered_law_needs_enough_logprobs() -> None:
    with pytest.raises(UserError, match="top_k up to 20"):
        audit(ChainServer(), AuditConfig(url="http://chain", temperature=0.5))


def test_a_refusal_is_passed_on() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "chain"}]})
        return httpx.Response(400, json={"error": {"message": "no seed here"}})

    with pytest.raises(UserError, match="400: no seed here"):
        audit_server(CONFIG, httpx.MockTransport(refuse))


@pytest.mark.parametrize("answer", [{"json": {"error": {"message": "engine is dead"}}}, {"text": "engine is dead"}])
def test_an_answer_that_is_no_completion_is_told(answer: dict) -> None:
    """As of a proxy that says 200 whatever happened behind it."""

    def broken(request: httpx.Request) -> httpx.Response:
        return ChainServer().handle(request) if request.url.path == "/v1/models" else httpx.Response(200, **answer)

    with pytest.raises(UserError, match=r"no completion \(engine is dead\)"):
        audit_server(CONFIG, httpx.MockTransport(broken))


def test_transforms_cover_the_law() -> None:
    law = CoarseLaw([7, 3], [0.5, 0.3], 0.5)
    assert law.transform(7, 0.5) == 0.25
    assert law.transform(3, 0.0) == 0.5
    assert law.transform(99, 0.5) == pytest.approx(0.9)
    whole = CoarseLaw([7, 3], [0.5, 0.5], 0.0)
    assert whole.transform(99, 0.5) is None
    warmer = law.tempered(2.0)
    assert sum(warmer.probs) + warmer.tail == pytest.approx(1) and warmer.probs[0] < 0.5
