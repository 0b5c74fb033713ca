"""Offline alpha and tau against rounds that are counted token by token;
`tests/integration/test_one_acceptance.py` holds them against the engine's."""

from __future__ import annotations

import pytest
import torch

from draftsmith.drafters.interface import UnrollBatch
from draftsmith.drafters.target.target import Target
from draftsmith.train.data.dataset import TokenSequence
from draftsmith.train.evaluate.teacher_forced import (
    Counts,
    DocumentCounts,
    DraftRule,
    Evaluation,
    count_documents,
    merge_documents,
    summarise,
)

PROMPT = [17, 40, 200, 11]


def sequence(target: Target, answer: list[int], name: str = "a") -> TokenSequence:
    ids = torch.tensor(PROMPT + answer)
    return TokenSequence(name, ids, torch.arange(len(ids)) >= len(PROMPT))


def evaluated(drafter, target: Target, answer: list[int], temperature: float, k: int) -> Evaluation:
    rule = DraftRule(temperature, k)
    return summarise(count_documents(drafter, target, [sequence(target, answer)], rule), rule)


def draft_distribution(drafter, tokens: list[int], depth: int, temperature: float) -> torch.Tensor:
    """What `TableDrafter` would draft at `depth` after `tokens`, whose last is the anchor of the
    round."""
    ids = torch.tensor([tokens + [0] * (depth + 2)])
    batch = UnrollBatch(
        input_ids=ids, attention_mask=torch.ones_like(ids), taps=None, num_steps=depth + 1
    )
    step = list(drafter.unroll(batch))[depth]
    hidden = step.hidden[0, len(tokens) - 2 + depth]
    return (hidden @ drafter.head_weight().T / temperature).double().softmax(-1)


def test_greedy_alpha_is_the_share_of_agreements(target, table_drafter):
    answer = target.answer([PROMPT], max_new_tokens=12, ignore_eos=True)[0]
    drafter = table_drafter(288)
    evaluation = evaluated(drafter, target, answer, 0.0, 2)
    tokens, position, rounds, agreed, offered = PROMPT + answer, len(PROMPT), 0, [0, 0], [0, 0]
    while position < len(tokens):
        rounds += 1
        kept = 0
        while kept < 2 and position + kept < len(tokens):
            offered[kept] += 1
            drafted = int(draft_distribution(drafter, tokens[:position], kept, 1.0).argmax())
            if drafted != tokens[position + kept]:
                break
            agreed[kept] += 1
            kept += 1
        position += kept + 1
    assert evaluation.rounds == pytest.approx(rounds)
    assert evaluation.tau.value == pytest.approx(12 / rounds)
    for estimate, kept, tried in zip(evaluation.alpha, agreed, offered):
        assert (estimate is None) == (tried == 0)
        assert estimate is None or estimate.value == pytest.approx(kept / tried)
    assert evaluation.unlikely == 0.0


def test_text_that_is_not_greedy_is_counted(target, table_drafter):
    answer = target.answer([PROMPT], max_new_tokens=12, ignore_eos=True)[0]
    answer[5] = (answer[5] + 1) % 288
    evaluation = evaluated(table_drafter(288), target, answer, 0.0, 2)
    assert evaluation.unlikely >= 1 / 12


def test_the_target_itself_is_accepted_always(target):
    class Oracle:
        taps = ()
        vocab_map = None

        def head_weight(self) -> torch.Tensor:
            return target.model.get_output_embeddings().weight

        def unroll(self, batch):
            from draftsmith.drafters.interface import UnrolledStep

            _, hidden = target.states(batch.input_ids, batch.attention_mask, ())
            yield UnrolledStep(hidden=hidden, valid=batch.attention_mask.bool(), offset=1)

    answer = target.answer([PROMPT], max_new_tokens=12, temperature=1.0, ignore_eos=True)[0]
    evaluation = evaluated(Oracle(), target, answer, 1.0, 3)
    assert evaluation.rounds == pytest.approx(3.0, abs=1e-4)
    assert evaluation.tau_by_k == pytest.approx([2.0, 3.0, 4.0], abs=1e-3)
    assert [round(estimate.value, 4) for estimate in evaluation.alpha] == [1.0, 1.0, 1.0]


def test_a_draft_vocabulary_is_spread_over_the_targets(target, table_drafter):
    drafter = table_drafter(288)
    kept = torch.arange(0, 288, 2)
    drafter.vocab_map = kept
    drafter.head = torch.nn.Parameter(drafter.head[kept].detach())
    odd = [token | 1 for token in range(20, 32)]
    evaluation = evaluated(drafter, target, odd, 1.0, 2)
    assert evaluation.tau.value == pytest.approx(1.0)


def test_documents_are_resampled_whole():
    def count(name: str, tokens: int, rounds: float) -> DocumentCounts:
        whole = Counts(rounds, tokens, [rounds], [rounds / 2])
        return DocumentCounts(name, tokens, 0, [rounds], {0: whole})

    merged = merge_documents([count("a", 10, 5.0), count("b", 10, 10.0), count("a", 20, 5.0)])
    assert [(entry.name, entry.tokens, entry.rounds_by_k) for entry in merged] == [
        ("a", 30, [10.0]),
        ("b", 10, [10.0]),
    ]
    summary = summarise(merged, DraftRule(1.0, 1))
    assert summary.tau.value == 2.0
    # Two documents: a resample is one, the other, or both.
    assert summary.tau.low == pytest.approx(1.0) and summary.tau.high == pytest.approx(3.0)
