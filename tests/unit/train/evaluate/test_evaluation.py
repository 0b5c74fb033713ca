"""Offline alpha and tau against speculation really carried out, token by token."""

from __future__ import annotations

from random import Random

import pytest
import torch

from draftsmith.drafters.interface import UnrollBatch
from draftsmith.drafters.target.target import Target
from draftsmith.train.data.dataset import TokenSequence
from draftsmith.train.evaluate.teacher_forced import (
    DocumentCounts,
    evaluate_draft,
    merge_documents,
    summarise,
)

PROMPT = [17, 40, 200, 11]


def sequence(target: Target, answer: list[int], name: str = "a") -> TokenSequence:
    ids = torch.tensor(PROMPT + answer)
    return TokenSequence(name, ids, torch.arange(len(ids)) >= len(PROMPT))


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


class BigramTarget:
    """A target whose distribution depends on the last token only: `logits[v]` follow token v."""

    device = torch.device("cpu")

    def __init__(self, logits: torch.Tensor):
        self.logits = logits
        self.vocab_size = len(logits)

    def states(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, taps: tuple[int, ...]
    ) -> tuple[None, torch.Tensor]:
        return None, self.logits[input_ids]

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def draw(weights: list[float], random: Random) -> int:
    return random.choices(range(len(weights)), weights)[0]


def speculate(
    p: list[list[float]], q: list[list[list[float]]], random: Random, *, num_tokens: int, k: int
) -> int:
    """Rounds of rejection sampling that put `num_tokens` out after token 0. `p[v]` follows v,
    `q[s][v]` drafts at depth s."""
    out, rounds = [0], 0
    while len(out) < 1 + num_tokens:
        rounds += 1
        anchor = out[-1]
        for depth in range(k):
            drafted = draw(q[depth][anchor], random)
            target_distribution = p[out[-1]]
            if random.random() * q[depth][anchor][drafted] < target_distribution[drafted]:
                out.append(drafted)
                continue
            out.append(
                draw(
                    [max(a - b, 0.0) for a, b in zip(target_distribution, q[depth][anchor])], random
                )
            )
            break
        else:
            out.append(draw(p[out[-1]], random))
    return rounds


@pytest.mark.long
@torch.no_grad()
@pytest.mark.parametrize("draft_sampling, runs", [("sampled", 4000), ("greedy", 1500)])
def test_expected_rounds_over_sampled_texts_equal_real_speculation(
    table_drafter, draft_sampling, runs
):
    """E over texts of the exact walk = mean rounds of speculation, both estimated, within five
    standard errors."""
    vocab_size, temperature, k, size = 8, 0.7, 3, 9
    drafter = table_drafter(vocab_size, hidden=4, seed=3)
    target = BigramTarget(
        torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(1))
    )
    p = (target.logits / temperature).softmax(-1).tolist()
    q_logits = drafter.table[:k] @ drafter.head.T
    q = (q_logits / temperature).softmax(-1).tolist()
    if draft_sampling == "greedy":
        q = torch.nn.functional.one_hot(q_logits.argmax(-1), vocab_size).double().tolist()
    random = Random(0)
    real = torch.tensor([float(speculate(p, q, random, num_tokens=size, k=k)) for _ in range(runs)])
    sequences = []
    for number in range(runs):
        # Two tokens before the anchor: a head's deeper steps need them no more than the simulation
        # does.
        tokens = [1, 2, 0]
        while len(tokens) < 3 + size:
            tokens.append(draw(p[tokens[-1]], random))
        sequences.append(
            TokenSequence(f"{number}", torch.tensor(tokens), torch.arange(3 + size) >= 3)
        )
    settings = {
        "temperature": temperature,
        "k": k,
        "batch_size": 500,
        "draft_sampling": draft_sampling,
    }
    offline = evaluate_draft(drafter, target, sequences, **settings)
    # The walk is an expectation, so over texts it spreads less than real rounds do.
    error = 2**0.5 * real.std().item() / runs**0.5
    assert 1.2 < offline.tau.value < k, "the case must have both kept and refused drafts"
    assert abs(real.mean().item() - offline.rounds / runs) < 5 * error
    # Power: a walk whose depths are shifted by one misses by more than that.
    shifted = table_drafter(vocab_size, hidden=4, seed=3)
    shifted.table.copy_(drafter.table.roll(1, dims=0))
    wrong = evaluate_draft(shifted, target, sequences, **settings)
    assert abs(real.mean().item() - wrong.rounds / runs) > 5 * error
    # And so does the walk of drafts that are drawn the other way.
    settings["draft_sampling"] = "greedy" if draft_sampling == "sampled" else "sampled"
    other = evaluate_draft(drafter, target, sequences, **settings)
    assert abs(real.mean().item() - other.rounds / runs) > 5 * error


def test_greedy_alpha_is_the_share_of_agreements(target, table_drafter):
    answer = target.answer([PROMPT], max_new_tokens=12, ignore_eos=True)[0]
    drafter = table_drafter(288)
    evaluation = evaluate_draft(drafter, target, [sequence(target, answer)], temperature=0.0, k=2)
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
    evaluation = evaluate_draft(
        table_drafter(288), target, [sequence(target, answer)], temperature=0.0, k=2
    )
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
    evaluation = evaluate_draft(Oracle(), target, [sequence(target, answer)], temperature=1.0, k=3)
    assert evaluation.rounds == pytest.approx(3.0, abs=1e-4)
    assert evaluation.tau_by_k == pytest.approx([2.0, 3.0, 4.0], abs=1e-3)
    assert [round(estimate.value, 4) for estimate in evaluation.alpha] == [1.0, 1.0, 1.0]


def test_a_draft_vocabulary_is_spread_over_the_targets(target, table_drafter):
    drafter = table_drafter(288)
    kept = torch.arange(0, 288, 2)
    drafter.vocab_map = kept
    drafter.head = torch.nn.Parameter(drafter.head[kept].detach())
    odd = [token | 1 for token in range(20, 32)]
    evaluation = evaluate_draft(drafter, target, [sequence(target, odd)], temperature=1.0, k=2)
    assert evaluation.tau.value == pytest.approx(1.0)


def test_documents_are_resampled_whole():
    def count(name: str, tokens: int, rounds: float) -> DocumentCounts:
        return DocumentCounts(name, tokens, 0, [rounds], [rounds], [rounds / 2])

    merged = merge_documents([count("a", 10, 5.0), count("b", 10, 10.0), count("a", 20, 5.0)])
    assert [(entry.name, entry.tokens, entry.rounds_by_k) for entry in merged] == [
        ("a", 30, [10.0]),
        ("b", 10, [10.0]),
    ]
    summary = summarise(merged, temperature=1.0, k=1, seed=0)
    assert summary.tau.value == 2.0
    # Two documents: a resample is one, the other, or both.
    assert summary.tau.low == pytest.approx(1.0) and summary.tau.high == pytest.approx(3.0)
