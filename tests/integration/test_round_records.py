"""What the sink is told about every round."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from draftsmith.distill.buffer.record_table import from_table, to_table
from draftsmith.distill.buffer.traffic import OpenRequests, Role
from draftsmith.distill.gate.logged import positions_of
from draftsmith.drafters.heads.eagle3 import Eagle3
from draftsmith.drafters.interface import DraftInputs, Proposal
from draftsmith.drafters.options import Eagle3Options
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.text.suffix import Suffix
from draftsmith.kernels.acceptance import AcceptanceCounts
from draftsmith.record import RoundRecord
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.engine.engine import EngineCore
from draftsmith.serve.requests.request import Request, RequestOptions
from draftsmith.serve.sampling.params import SamplingParams
from tests.round_records import Distribution, each

PROMPTS = [[5, 60, 7, 200, 9, 33], [9, 8, 7, 9, 8], [100, 4, 100, 4, 100, 4, 77]]


def eagle3(target: Target) -> Eagle3:
    return Eagle3.create(Eagle3Options(), target, seed=0).eval()


def serve(engine: EngineCore, params: list[SamplingParams], **options: object) -> list[Request]:
    requests = [
        engine.submit(prompt, p, options=RequestOptions(**options))
        for prompt, p in zip(PROMPTS, params)
    ]
    while engine.busy:
        engine.step()
    return requests


def params(temperature: float, **options: object) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=20, ignore_eos=True, **options)


def test_contexts_and_commits_join_to_the_text_of_every_request(
    target: Target, records: list[RoundRecord]
) -> None:
    config = EngineConfig(seed=1, k=3, max_batch=2)
    engine = build_engine(target, eagle3(target), config, sink=records, draft_version="7")
    requests = serve(engine, [params(0.0), params(1.0), params(0.8, k=0)], request_class="code")
    texts = []
    for rounds in OpenRequests(records).records.values():
        assert [record.round for record in rounds] == list(range(len(rounds)))
        text: list[int] = []
        for record in rounds:
            text += record.context
            assert record.position == len(text)
            text += record.committed
        texts.append(text)
    assert sorted(texts) == sorted(request.tokens for request in requests)
    drafted = [record for record in records if record.drafted]
    assert {record.draft_version for record in drafted} == {"7"}
    assert {record.request_class for record in records} == {"code"}
    # A request without speculation is one record: its text, and nothing about drafts.
    silent = [record for record in records if record.temperature == 0.8]
    assert len(silent) == 1 and not silent[0].drafted and silent[0].draft_version == ""


def dense(distribution: Distribution, vocab_size: int) -> torch.Tensor:
    probs = torch.zeros(vocab_size, dtype=torch.float64)
    probs[distribution.ids] = torch.tensor(distribution.logprobs, dtype=torch.float64).exp()
    return probs


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_p_is_the_targets_unprocessed_distribution_and_q_the_distribution_drafted_from(
    temperature: float, target: Target, records: list[RoundRecord]
) -> None:
    distributions = []
    drafter = eagle3(target)

    class Listening:
        family, taps, new_pool, cached_after = (
            drafter.family, drafter.taps, drafter.new_pool, drafter.cached_after,
        )  # fmt: skip

        def propose(self, inputs: DraftInputs) -> Proposal:
            proposal = drafter.propose(inputs)
            distributions.append(proposal)
            return proposal

    engine = build_engine(target, Listening(), EngineConfig(seed=1, k=3), sink=records)
    serve(engine, [params(temperature, top_k=40)])
    assert sum(bool(record.drafted) for record in records) == len(distributions) > 3
    text: list[int] = []
    rounds = iter(distributions)
    for record in records:
        text += record.context
        assert len(record.p) == len(record.drafted) == len(record.q)
        if record.drafted:
            proposal = next(rounds)
            tokens = torch.tensor([text + record.drafted])
            _, hidden = target.states(tokens, torch.ones_like(tokens), ())
            logits = target.head(hidden[0, len(text) - 1 : -1]).double()
            for depth, (own_p, own_q) in enumerate(zip(each(record.p), each(record.q))):
                p = torch.softmax(logits[depth], -1)
                told = dense(own_p, target.vocab_size)
                assert len(own_p.ids) == 64
                torch.testing.assert_close(told[own_p.ids], p[own_p.ids], atol=1e-5, rtol=1e-4)
                assert float(told.sum()) + own_p.tail == pytest.approx(1, abs=1e-5)
                if temperature not in (0.0, 1.0):
                    norm = torch.logsumexp(torch.log_softmax(logits[depth], -1) / temperature, -1)
                    assert own_p.log_norm == pytest.approx(float(norm), abs=1e-4)
                else:
                    assert own_p.log_norm == 0.0
                q = torch.nn.functional.one_hot(
                    proposal.tokens[0, depth], target.vocab_size
                ).double()
                if proposal.logits is not None:
                    q = torch.softmax(proposal.logits[0, depth].double(), -1)
                torch.testing.assert_close(dense(own_q, target.vocab_size), q, atol=1e-5, rtol=1e-4)
                assert all(math.isfinite(value) for value in own_q.logprobs)
        text += record.committed


def test_accepted_counts_and_the_emitted_token_fit_the_text(
    target: Target, records: list[RoundRecord]
) -> None:
    engine = build_engine(target, Suffix(), EngineConfig(seed=1, k=4), sink=records)
    requests = serve(engine, [params(0.0), params(0.0), params(0.0)])
    counts = AcceptanceCounts()
    for record in (record for record in records if record.drafted):
        whole = [*record.drafted[: record.accepted], record.emitted]
        assert record.committed == whole[: len(record.committed)]
        told = [(one.ids, one.logprobs, one.tail) for one in each(record.q)]
        assert told == [([t], [0.0], 0.0) for t in record.drafted]
        counts.add([len(record.drafted)], [record.accepted], [len(record.committed)])
    assert counts.offered == engine.stats.acceptance.offered
    assert counts.accepted == engine.stats.acceptance.accepted
    assert counts.tau == engine.stats.acceptance.tau
    assert sum(request.speculation.num_committed for request in requests) == 60


def test_a_request_may_stay_out_of_the_buffer(target: Target, records: list[RoundRecord]) -> None:
    engine = build_engine(target, eagle3(target), EngineConfig(seed=1, k=3), sink=records)
    serve(engine, [params(0.0), params(0.0), params(0.0)], learn=False)
    assert records == [] and engine.stats.num_drafts > 0


def test_the_header_keeps_a_request_out_of_the_buffer(
    target: Target, live_server: Callable, records: list[RoundRecord]
) -> None:
    server = live_server(target, Suffix(), EngineConfig(seed=1, k=3), sink=records)
    body = {"model": "tiny", "prompt": [7, 8, 7, 8, 7], "max_tokens": 8, "ignore_eos": True}
    server.http.post("/v1/completions", json=body, headers={"x-draftsmith-learn": "off"})
    assert records == []
    server.http.post("/v1/completions", json=body)
    assert records


def test_a_sink_that_fails_stops_nothing_but_recording(
    target: Target, records: list[RoundRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(record: RoundRecord) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(records, "put", put)
    engine = build_engine(target, Suffix(), EngineConfig(seed=1, k=3), sink=records)
    requests = serve(engine, [params(0.0), params(0.0), params(0.0)])
    assert all(request.num_output == 20 for request in requests)


def test_rounds_under_penalties_are_text_without_distributions_so_that_nobody_scores_them(
    target: Target, records: list[RoundRecord]
) -> None:
    """What was accepted under a penalty says nothing about the distributions that the record's
    sampling fields describe."""
    engine = build_engine(
        target, eagle3(target), EngineConfig(seed=1, k=3, max_batch=4), sink=records
    )
    asked = [params(1.0, frequency_penalty=1.0), params(1.0), params(0.0, bad_words=((7,),))]
    requests = serve(engine, asked)
    texts = OpenRequests(from_table(to_table(records))).take(idle_s=0.0)
    found = {
        tuple(text.tokens): len(positions_of(text, 0, max_depth=3, max_length=256))
        for text in texts
    }
    scored = [found[tuple(request.tokens)] for request in requests]
    assert scored[0] == scored[2] == 0 < scored[1]
    assert all(Role.FIRST_REJECTED in text.roles for text in texts)
    assert [text.is_scorable for text in texts] == [found[tuple(text.tokens)] > 0 for text in texts]
