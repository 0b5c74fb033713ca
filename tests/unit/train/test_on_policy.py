"""Texts of draft and target: each position is what verification said of it, batches get their
share, only the draft learns."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from draftsmith.drafters.interface import TextBatch
from draftsmith.drafters.options import OPTIONS, DraftLmOptions
from draftsmith.drafters.registry import FAMILIES
from draftsmith.drafters.speculate import SpeculatedText, speculate
from draftsmith.drafters.target.target import Target
from draftsmith.errors import UserError
from draftsmith.train import resolve
from draftsmith.train.config import OnPolicyConfig, TrainConfig
from draftsmith.train.data.dataset import TokenSequence
from draftsmith.train.data.roles import Role, RoleWeights, padded_rows, roles_of
from draftsmith.train.on_policy import OnPolicy, prefix, rows_of
from draftsmith.train.trainer import is_of_data
from tests.unrolled import unroll_batch

ALIKE = RoleWeights(accepted=1.0, first_rejected=1.0, bonus=1.0, later_rejected=1.0)


def new_draft(family: str, target: Target, layers: tuple[int, ...] = (0, 1, 2)) -> torch.nn.Module:
    options = DraftLmOptions(target_layers=layers) if family == "draft-lm" else OPTIONS[family]()
    return (
        FAMILIES[family]
        .create(
            options, target, seed=0, token_counts=torch.ones(target.vocab_size, dtype=torch.int64)
        )
        .eval()
    )


def random_text(
    count: int, *, length: int = 20, prompt: int = 4, seed: int = 0
) -> list[TokenSequence]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 288, (count, length), generator=generator)
    return [
        TokenSequence(f"{row}", ids[row], torch.arange(length) >= prompt) for row in range(count)
    ]


def written(
    target: Target, drafter: torch.nn.Module, count: int = 12, k: int = 4
) -> list[SpeculatedText]:
    prompts = [sequence.input_ids[:5].tolist() for sequence in random_text(count)]
    return speculate(
        drafter, target, prompts, k=k, temperature=1.0, seeds=range(count), max_new_tokens=24
    ).texts


def of_text(text: SpeculatedText) -> np.ndarray:
    roles = [Role.CONTEXT] * text.num_prompt
    for done in text.rounds:
        roles += roles_of(len(done.drafted), done.accepted, done.committed)
    return np.array(roles)


def drafts_that_fell(texts: list[SpeculatedText]) -> list[tuple[int, int, int]]:
    """(row, position, drafted token) of every first rejection that is part of its text."""
    return [
        (row, done.start + done.accepted, done.drafted[done.accepted])
        for row, text in enumerate(texts)
        for done in text.rounds
        if done.accepted < len(done.drafted) and done.committed > done.accepted
    ]


@torch.no_grad()
def distributions(
    drafter: torch.nn.Module, target: Target, texts: list[SpeculatedText]
) -> tuple[torch.Tensor, torch.Tensor]:
    """p and q [B, L, V] of the token at each position, as training takes them."""
    batch = padded_rows(
        [rows_of(text, ALIKE, 0, random.Random(0))[0] for text in texts], target.device
    )
    unroll = unroll_batch(drafter, target, batch.input_ids, 1, batch.attention_mask)
    (step,) = drafter.unroll(unroll)
    _, hidden = target.states(batch.input_ids, batch.attention_mask, ())
    p, q = target.head(hidden).softmax(-1), (step.hidden @ drafter.head_weight().T).softmax(-1)
    return p.roll(1, dims=1), q.roll(1, dims=1)


def test_a_token_that_fell_was_likelier_to_the_draft_than_to_the_target(target):
    """u q(x) >= p(x) says p(x) < q(x), at the position that is trained. OSD's released code reads
    the distribution one position on, where it says nothing: the negative control."""
    drafter = new_draft("draft-lm", target)
    texts = written(target, drafter)
    p, q = distributions(drafter, target, texts)
    fell = drafts_that_fell(texts)
    assert len(fell) > 20
    roles = [of_text(text) for text in texts]
    assert all(roles[row][position] == Role.FIRST_REJECTED for row, position, _ in fell)
    assert all(p[row, position, token] < q[row, position, token] for row, position, token in fell)
    inside = [
        (row, position + 1, token)
        for row, position, token in fell
        if position + 1 < len(texts[row].tokens)
    ]
    assert not all(
        p[row, position, token] < q[row, position, token] for row, position, token in inside
    )


def test_rows_are_the_text_and_the_rest_of_what_fell(target):
    texts = written(target, new_draft("draft-lm", target))
    weights = RoleWeights(accepted=1.0, first_rejected=2.0, bonus=3.0, later_rejected=0.5)
    seen = 0
    for text in texts:
        first, *branches = rows_of(text, weights, 99, random.Random(0))
        assert first.tokens == text.tokens
        assert (
            not first.weights[: text.num_prompt].any()
            and (first.weights[text.num_prompt :] > 0).all()
        )
        rejected = [done for done in text.rounds if done.accepted + 1 < len(done.drafted)]
        assert len(branches) == len(rejected)
        for done in rejected:
            (row,) = [
                row for row in branches if row.tokens == text.tokens[: done.start] + done.drafted
            ]
            behind = done.start + done.accepted + 1
            assert (
                not row.weights[:behind].any()
                and (row.weights[behind:] == 0.5).all()
                and len(row.weights) > behind
            )
            seen += 1
        assert len(rows_of(text, weights, 1, random.Random(0))) == 1 + min(1, len(rejected))
    assert seen > 10


def test_long_drafts_train_every_token_that_the_draft_wrote(target):
    """One round as long as the answer: text and branch together hold each drafted position once, as
    DistillSpec trains them."""
    texts = written(target, new_draft("draft-lm", target), count=6, k=24)
    for text in texts:
        done = text.rounds[0]
        alone = text._replace(tokens=text.tokens[: done.start + done.committed], rounds=[done])
        rows = rows_of(alone, ALIKE, 99, random.Random(0))
        assert sum(int((row.weights > 0).sum()) for row in rows) == max(
            len(done.drafted), done.committed
        )


def inputs(count: int, length: int = 20) -> TextBatch:
    sequences = random_text(count, length=length, seed=5)
    ids = torch.stack([sequence.input_ids for sequence in sequences])
    return TextBatch(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        weights=torch.stack([sequence.loss_mask for sequence in sequences]).float(),
        token_index=torch.zeros_like(ids),
    )


def on_policy(target: Target, **changes: object) -> OnPolicy:
    config = OnPolicyConfig(**{"share": 0.5, "refresh": 3, "tokens": 8, **changes})
    return OnPolicy(
        config, target, random_text(10), batch_size=4, passes=2, seed=0, rank=0, max_length=64
    )


def test_a_batch_gets_its_share_and_metrics_of_text_do_not_count_it(target):
    mixer, batch = on_policy(target, later_rejected=0.0), inputs(4)
    drafter = new_draft("draft-lm", target)
    for mixed in mixer.mix([batch, inputs(4)], step=0, drafter=lambda: drafter):
        shape = mixed.input_ids.shape
        tensors = [value for value in vars(mixed).values() if value is not None]
        assert shape[0] == 4 and len(tensors) == 4
        assert all(value.shape == shape for value in tensors)
        kept, added = slice(0, 2), slice(2, 4)
        weights = {tuple(ids.tolist()): one for ids, one in zip(batch.input_ids, batch.weights)}
        for ids, found in zip(mixed.input_ids[kept], mixed.weights[kept]):
            expected = torch.zeros_like(found)
            expected[:20] = weights[tuple(ids[:20].tolist())]
            assert torch.equal(found, expected)
        assert is_of_data(mixed)[kept].any(dim=1).all()
        assert not is_of_data(mixed)[added].any() and (mixed.token_index[added] == -1).all()
        assert (mixed.weights[added] > 0).any(dim=1).all()
        assert not mixed.weights[mixed.attention_mask == 0].any()
    theirs = {tuple(row.tolist()) for row in batch.input_ids}
    first = mixer.mix(
        [batch], step=1, drafter=lambda: pytest.fail("texts are written every third step")
    )[0]
    assert all(tuple(row.tolist())[:20] in theirs for row in first.input_ids[:2])


def test_texts_are_a_function_of_seed_step_and_draft(target):
    drafter, other = new_draft("draft-lm", target), new_draft("draft-lm", target, (0,))
    batches = [inputs(4), inputs(4)]

    def rows(draft: torch.nn.Module, step: int) -> list[torch.Tensor]:
        return [
            mixed.input_ids
            for mixed in on_policy(target).mix(batches, step=step, drafter=lambda: draft)
        ]

    def same(one: list[torch.Tensor], another: list[torch.Tensor]) -> bool:
        return all(torch.equal(a, b) for a, b in zip(one, another))

    assert same(rows(drafter, 3), rows(drafter, 3))
    assert not same(rows(drafter, 3), rows(drafter, 6)) and not same(
        rows(drafter, 3), rows(other, 3)
    )


def test_a_prefix_ends_where_the_answer_goes_on():
    sequence = TokenSequence("x", torch.arange(100, 130), torch.arange(30) >= 6)
    lengths = {len(prefix(sequence, 10, random.Random(seed))) for seed in range(200)}
    assert lengths == set(range(6, 21))
    assert {len(prefix(sequence, 99, random.Random(seed))) for seed in range(20)} == {6}
    assert prefix(sequence, 99, random.Random(0)) == list(range(100, 106))


def test_what_is_written_while_training_has_no_stored_likeliest_tokens():
    config = TrainConfig(
        family="eagle3",
        target="t",
        data="d",
        out="o",
        teacher="stored",
        on_policy=OnPolicyConfig(share=0.5),
    )
    with pytest.raises(UserError, match="teacher live"):
        resolve.check_stored_sparse(config)
