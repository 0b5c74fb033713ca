"""Scores of traffic that engines draft in other ways: each record is judged by its own.

Target and drafts are tables of one token before the next, so that rounds are drawn exactly and
fast.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from draftsmith.distill.buffer.traffic import ServedText, samplers_of
from draftsmith.distill.config import DriftConfig, GateConfig
from draftsmith.distill.gate.drift import Drift
from draftsmith.distill.gate.gate import Decision, decide
from draftsmith.distill.gate.regression import Earlier, Watched, watch
from draftsmith.distill.gate.scoring import Scored, Scorer, score_drafters
from draftsmith.distill.gate.sequential import Evidence, Ledger
from draftsmith.distill.version_lifecycle import describe
from draftsmith.kernels.sampling.filters import SamplingRows, process
from tests.round_records import Distribution, logged, round_record, served_text
from tests.table_target import TableTarget

VOCAB, K, ROUNDS = 32, 3, 10


@dataclass(frozen=True)
class World:
    target: TableTarget
    drafts: dict[str, torch.nn.Module]

    def scorer(self, name: str) -> Scorer:
        return Scorer(self.drafts[name], self.target, max_length=512)


@pytest.fixture
def world(bigram: Callable[..., torch.nn.Module]) -> World:
    generator = torch.Generator().manual_seed(0)
    logits = 2.5 * torch.randn(VOCAB, VOCAB, generator=generator)

    def draft(noise: float) -> torch.nn.Module:
        made = bigram(VOCAB, width=VOCAB)
        with torch.no_grad():
            made.states.weight.copy_(torch.eye(VOCAB))
            made.head.copy_((logits + noise * torch.randn(VOCAB, VOCAB, generator=generator)).T)
        return made

    # the second is a little better than the first, the third much worse
    return World(TableTarget(logits), {"live": draft(1.2), "better": draft(0.4), "bad": draft(4)})


def rows_of(sampler: str, temperature: float, top_k: int) -> SamplingRows:
    if sampler == "greedy":
        return SamplingRows.of([0.0] * VOCAB)
    kept = 0 if sampler == "unfiltered" else top_k
    return SamplingRows.of([temperature] * VOCAB, top_k=[kept] * VOCAB)


def serve(
    world: World,
    draft: str,
    count: int,
    *,
    sampler: str,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    version: str = "2",
    **changes: object,
) -> list[ServedText]:
    """Texts of an engine that verifies by rejection sampling."""
    drawn = np.random.default_rng(seed)
    own = SamplingRows.of([temperature] * VOCAB, top_k=[top_k] * VOCAB)
    p = process(world.target.logits, own).softmax(-1).double().numpy()
    logits = world.drafts[draft].head.detach().T
    q = process(logits, rows_of(sampler, temperature, top_k)).softmax(-1).double().numpy()
    raw = world.target.logits.log_softmax(-1)
    p_logged, q_logged = laws(raw.numpy()), laws(np.log(np.maximum(q, 1e-300)))
    texts = []
    for number in range(count):
        tokens, records = [int(drawn.integers(VOCAB))], []
        for number_of_round in range(ROUNDS):
            proposal, rows, before = [], [], tokens[-1]
            for _ in range(K):
                rows.append(before)
                before = int(drawn.choice(VOCAB, p=q[before] / q[before].sum()))
                proposal.append(before)
            accepted = 0
            while accepted < K:
                row, x = rows[accepted], proposal[accepted]
                if drawn.random() * q[row, x] >= p[row, x]:
                    break
                accepted += 1
            left = p[proposal[-1]]
            if accepted < K:
                left = np.maximum(p[rows[accepted]] - q[rows[accepted]], 0)
            emitted = int(drawn.choice(VOCAB, p=left / left.sum()))
            committed = [*proposal[:accepted], emitted]
            records.append(
                round_record(
                    request=f"{seed}/{number}", round=number_of_round, draft_version=version,
                    temperature=temperature, top_k=top_k,
                    position=len(tokens), context=tokens[:] if number_of_round == 0 else [],
                    drafted=proposal, accepted=accepted, committed=committed,
                    p=logged(*(p_logged[row] for row in rows)),
                    q=logged(*(q_logged[row] for row in rows)), rule="chain", sampler=sampler,
                )
            )  # fmt: skip
            records[-1] = dataclasses.replace(records[-1], **changes)
            tokens += committed
        texts.append(served_text(records))
    return texts


def laws(logprobs: np.ndarray) -> list[Distribution]:
    order = np.argsort(-logprobs, axis=1)
    return [
        Distribution([int(v) for v in ids if row[v] > -600], [float(row[v]) for v in ids if row[v] > -600], 0.0)
        for row, ids in zip(logprobs, order, strict=True)
    ]  # fmt: skip


def named(texts: Sequence[ServedText], sampler: str) -> list[ServedText]:
    """The same texts, whose records name another sampler."""
    return [
        dataclasses.replace(
            text, records=[dataclasses.replace(one, sampler=sampler) for one in text.records]
        )
        for text in texts
    ]


def watched(
    world: World,
    texts: Sequence[ServedText],
    *,
    live: str = "live",
    earlier: str = "bad",
    is_displaced: bool = False,
) -> Watched:
    """Looks as texts come, until there is a reason."""
    config, evidence = GateConfig(), Ledger()
    scorer = world.scorer(live)
    held_to = [Earlier(1, world.scorer(earlier), config.drop, is_displaced)]
    for end in range(config.requests, len(texts) + 1, config.requests):
        window = texts[max(0, end - config.window) : end]
        found = watch(scorer, held_to, window, config, version="2", max_depth=K, evidence=evidence)
        if found.reason:
            break
    return found


SAMPLED = [
    ("probabilistic", {}),
    ("greedy", {}),
    ("greedy", {"top_k": 4}),
    ("unfiltered", {"top_k": 2, "temperature": 1.5}),
]


@pytest.mark.parametrize("sampler, sampling", SAMPLED)
def test_the_score_of_the_served_draft_predicts_its_acceptance(
    world: World, sampler: str, sampling: dict[str, float]
) -> None:
    texts = serve(world, "live", 60, sampler=sampler, **sampling)

    def scored(texts: Sequence[ServedText]) -> list[Scored]:
        return score_drafters(
            [world.drafts["live"]], world.target, texts, max_depth=K, max_length=512
        )[0]

    found = scored(texts)
    kept, alpha = (
        np.concatenate([getattr(one, name) for one in found]) for name in ("kept", "alpha")
    )
    error = 4 * np.sqrt(np.mean(alpha * (1 - alpha)) / len(alpha))
    assert len(alpha) > 500 and abs(kept.mean() - alpha.mean()) < error
    # The control: the same records, taken as drafted another way.
    other = "greedy" if sampler == "probabilistic" else "probabilistic"
    wrong = np.concatenate([one.alpha for one in scored(named(texts, other))])
    assert abs(kept.mean() - wrong.mean()) > error


def test_a_good_version_served_greedily_stays_and_a_worse_one_goes_back(world: World) -> None:
    """At temperature 1, as vLLM drafts by default."""
    good = serve(world, "live", 96, sampler="greedy")
    assert not watched(world, good).reason
    # The control: what a score that takes all drafts as drawn makes of the same texts.
    mistaken = watched(world, named(good, "probabilistic"))
    assert "served alpha" in mistaken.reason and mistaken.version == 1
    # Served wrongly: its texts come from another draft than the one that is scored.
    wrong = watched(world, serve(world, "bad", 96, sampler="greedy"))
    assert "served alpha" in wrong.reason and wrong.version == 1
    # Truly worse: served as scored, and an earlier version would be accepted more.
    worse = serve(world, "bad", 96, sampler="greedy")
    found = watched(world, worse, live="bad", earlier="better")
    assert "the alpha of version 1" in found.reason and found.version == 1
    assert found.is_outdone and not wrong.is_outdone


def test_a_version_that_a_rollback_left_is_returned_to_for_its_score_alone(world: World) -> None:
    """It is no ancestor that a version served wrongly would go back to."""
    texts = serve(world, "bad", 96, sampler="greedy")
    wrong = watched(world, texts, is_displaced=True)
    assert "served alpha" in wrong.reason and wrong.version is None
    found = watched(world, texts, live="bad", earlier="better", is_displaced=True)
    assert found.version == 1 and found.is_outdone


def test_mixed_traffic_is_judged_record_by_record(world: World) -> None:
    ways = ("greedy", "probabilistic")
    kinds = [serve(world, "live", 32, sampler=way, seed=at) for at, way in enumerate(ways)]
    texts = [text for several in zip(*kinds, strict=True) for text in several]
    assert samplers_of(texts) == dict.fromkeys(sorted(ways), 320)
    assert not watched(world, texts).reason
    assert watched(world, named(texts, "probabilistic")).reason


@pytest.mark.parametrize(
    "changes", [{"sampler": "tempered"}, {"rule": "synthetic"}, {"draft_version": "1"}]
)
def test_rounds_that_alpha_does_not_predict_are_no_evidence_of_a_fault(
    world: World, changes: dict[str, str]
) -> None:
    """Of a request that another version began, too: its keys and values stay."""
    wrong = serve(world, "bad", 48, sampler="probabilistic")
    changed = [
        dataclasses.replace(
            text, records=[dataclasses.replace(text.records[0], **changes), *text.records[1:]]
        )
        for text in wrong
    ]
    assert "served alpha" in watched(world, wrong).reason
    found = watched(world, changed)
    assert not found.reason and found.served.requests == 0


def test_the_gate_compares_drafts_as_they_are_served(world: World) -> None:
    """A flatter draft of the same argmax: another alpha where it is drawn from, and the same where
    its likeliest token is drafted."""
    flat = copy.deepcopy(world.drafts["live"])
    with torch.no_grad():
        flat.head.mul_(0.5)

    def decision(sampler: str) -> Decision:
        texts = serve(world, "live", 24, sampler=sampler)
        return decide(
            world.scorer("live"), flat, texts, GateConfig(), max_depth=K, evidence=Evidence()
        )

    drawn, greedy = decision("probabilistic"), decision("greedy")
    assert abs(drawn.comparison.gain) > 0.02 and greedy.comparison.gain == 0
    assert greedy.to_dict()["samplers"] == {"greedy": 240}
    assert "(drafts: greedy 100%)" in describe(greedy, None)
    assert "drafts:" not in describe(drawn, None)


def test_drift_keeps_a_level_for_each_way_of_drafting(world: World) -> None:
    """Engines that draft greedily, come into a fleet that draws, are no drift."""
    drift, mistaken = Drift(DriftConfig()), Drift(DriftConfig())
    drawn = serve(world, "live", 70, sampler="probabilistic")
    greedy = serve(world, "live", 70, sampler="greedy", seed=1)
    texts = [*drawn, *greedy]
    for hour, text in enumerate(texts):
        text.records[-1].time_s = 3600.0 * hour
    alarms = [drift.observe(text, "2") for text in texts]
    assert alarms == [None] * len(texts)
    assert any(mistaken.observe(text, "2") for text in named(texts, "probabilistic"))
