"""Trees in the engine: rounds shared with other requests, records, counts and refusals. Their text
is a case of `test_served_text.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from draftsmith.drafters.interface import DraftInputs, Proposal, ServingDrafter
from draftsmith.drafters.target.target import Target
from draftsmith.drafters.tree_shape import TreeShape
from draftsmith.record import RoundRecord
from draftsmith.serve.config import EngineConfig
from draftsmith.serve.engine.build import build_engine
from draftsmith.serve.sampling.params import SamplingParams
from tests.integration.served import (
    GREEDY,
    TreeOracle,
    assert_same,
    finish,
    make_drafter,
    plain_greedy,
    prompts,
)
from tests.round_records import each

TREES = ["dynamic:nodes=12,depth=4,width=3", "sampled:3x2x1"]
MIXED = "+".join(TREES)


def make(family: str, target: Target) -> ServingDrafter:
    options = {"draft_vocab_size": 200} if family == "eagle3" else {}
    return make_drafter(family, target, **options)


def test_rows_of_all_kinds_share_a_round(load: Callable[[str], Target]) -> None:
    """k is the most nodes of a request's tree: none, one, a few, more than there are. Some answers
    are a token or two long."""
    target = load("llama")
    batch = prompts(6)
    expected = plain_greedy(target, batch, 24)
    oracle = TreeOracle(
        make("eagle3", target), [prompt + tokens for prompt, (tokens, _) in zip(batch, expected)]
    )
    for tree in TREES:
        engine = build_engine(target, oracle, EngineConfig(tree=tree, max_round_tokens=23))
        ks, lengths = (0, 1, 3, 60, None, None), (24, 24, 24, 24, 1, 2)
        requests = [
            engine.submit(prompt, replace(GREEDY, k=k, max_tokens=length))
            for prompt, k, length in zip(batch, ks, lengths)
        ]
        finish(engine)
        for request, (tokens, margins), length in zip(requests, expected, lengths):
            assert_same(request.output, (tokens[:length], margins[:length]))
        offered = [request.speculation.offered for request in requests]
        assert not offered[0] and set(offered[1]) == {1}
        assert max(offered[2]) <= 3 < max(offered[3]) + 1
        assert not offered[4] and set(offered[5]) <= {1}


def test_what_is_told_of_a_token_does_not_depend_on_trees(load: Callable[[str], Target]) -> None:
    """Log-probabilities, penalties along each path, stop tokens."""
    target = load("llama")
    batch = prompts(4)
    params = replace(GREEDY, logprobs=3, repetition_penalty=1.3, bad_words=((7,), (9, 11)))
    plain = build_engine(target, None, EngineConfig()).generate(batch, params)
    known = [prompt + completion.tokens for prompt, completion in zip(batch, plain)]
    for tree in TREES:
        found = build_engine(
            target, TreeOracle(make("mtp", target), known), EngineConfig(tree=tree)
        ).generate(batch, params)
        for one, other in zip(plain, found):
            assert one.tokens == other.tokens and max(other.speculation.accepted) > 1
            for a, b in zip(one.logprobs, other.logprobs, strict=True):
                assert a.token == b.token and a.logprob == pytest.approx(b.logprob, abs=1e-4)
                assert [token for token, _ in a.top] == [token for token, _ in b.top]
        stop = plain[0].tokens[5]
        stopping = replace(params, stop_token_ids=(stop,))
        engine = build_engine(
            target, TreeOracle(make("mtp", target), known), EngineConfig(tree=tree)
        )
        until = plain[0].tokens[: plain[0].tokens.index(stop) + 1]
        assert engine.generate(batch[:1], stopping)[0].tokens == until


@pytest.mark.parametrize("tree, temperature", [(TREES[0], 1.0), (TREES[1], 1.0)])
def test_records_tell_the_kept_path_and_the_first_rejected(
    tree: str,
    temperature: float,
    load: Callable[[str], Target],
    records: list[RoundRecord],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = load("llama")
    drafter = make("eagle3", target)
    grow, grown = drafter.propose_tree, dict[tuple[int, ...], tuple[Proposal, int]]()

    def noted(inputs: DraftInputs, shape: TreeShape) -> Proposal:
        proposal = grow(inputs, shape)
        rows = enumerate(map(tuple, inputs.histories))
        grown.update({history: (proposal, row) for row, history in rows})
        return proposal

    monkeypatch.setattr(drafter, "propose_tree", noted)
    engine = build_engine(target, drafter, EngineConfig(tree=tree, seed=5), sink=records)
    batch = prompts(4)
    completions = engine.generate(
        batch, SamplingParams(temperature=temperature, max_tokens=20, ignore_eos=True)
    )
    texts: dict[str, list[int]] = {}
    drafted = [record for record in records if record.drafted]
    for record in records:
        texts.setdefault(record.request, []).extend(record.context + record.committed)
    assert sorted(texts.values()) == sorted(
        prompt + completion.tokens for prompt, completion in zip(batch, completions)
    )
    assert drafted and all(len(record.drafted) - record.accepted in (0, 1) for record in drafted)
    for record in drafted:
        assert record.drafted[: record.accepted] == record.committed[: record.accepted]
        assert len(record.p) == len(record.q) == len(record.drafted)
        text, node = texts[record.request], -1
        proposal, row = grown[tuple(text[: record.position])]
        for step, token in enumerate(record.drafted):
            ids = torch.tensor([text[: record.position] + record.drafted[:step]])
            _, hidden = target.states(ids, torch.ones_like(ids), ())
            distribution = torch.log_softmax(target.head(hidden[0, -1]).float(), -1)
            p, q_logged = each(record.p)[step], each(record.q)[step]
            told = dict(zip(p.ids, p.logprobs))
            assert told[int(distribution.argmax())] == pytest.approx(
                float(distribution.max()), abs=1e-3
            )
            if tree.startswith("dynamic"):
                assert q_logged.ids == [token] and q_logged.logprobs == [0.0]
            else:
                assert len(q_logged.ids) == 64
                q = proposal.logits[proposal.q_rows[row, node + 1]].log_softmax(-1)
                own = q[q_logged.ids].tolist()
                assert q_logged.logprobs == pytest.approx(own, abs=1e-4)
                children = (proposal.parents[row] == node) & (proposal.tokens[row] == token)
                node = int(children.nonzero()[0])


def test_counts_go_by_depth(load: Callable[[str], Target]) -> None:
    target = load("llama")
    engine = build_engine(target, make("eagle3", target), EngineConfig(tree="sampled:3x2x1"))
    engine.generate(prompts(3), SamplingParams(max_tokens=30, ignore_eos=True, seed=1))
    stats = engine.stats
    assert set(stats.offered) == {0, 1, 2} and stats.num_draft_tokens == sum(stats.offered.values())
    assert stats.num_tree_nodes > 4 * stats.num_drafts
    assert all(stats.accepted[depth] <= stats.offered[depth] for depth in stats.offered)


def test_broken_weights_cost_only_speed(load: Callable[[str], Target]) -> None:
    target = load("llama")
    drafter = make("mtp", target)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.fill_(torch.nan)
    engine = build_engine(target, drafter, EngineConfig(tree=MIXED))
    requests = [
        engine.submit(prompt, replace(GREEDY, temperature=temperature, max_tokens=12, seed=3))
        for prompt in prompts(3)
        for temperature in (0.0, 1.0)
    ]
    finish(engine)
    assert engine.stats.fallbacks["nan"] > 0 and engine.stats.num_accepted_tokens == 0
    assert all(len(request.output) == 12 for request in requests)
    for request, right in zip(requests[::2], plain_greedy(target, prompts(3), 12)):
        assert_same(request.output, right)
